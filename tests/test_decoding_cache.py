"""Caches of incremental decoding, and weights that are kept ready for it."""

import copy
import pickle

import pytest
import torch
from torch import nn

from rope_fairseq.kv_cache import FIRST_CAPACITY, GrowingRows, is_identity, sentences_of
from rope_fairseq.multihead_attention import PositionedAttention
from rope_fairseq.ready_linear import ReadyLinear, make_linears_ready
from tests.conftest import build_small

PAD, EOS = 1, 2


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def encode(model, lengths, seed=0):
    """Encoder output for random sources of these lengths, padded on the left."""
    tokens = torch.full((len(lengths), max(lengths)), PAD)
    numbers = torch.Generator().manual_seed(seed)
    for row, length in enumerate(lengths):
        tokens[row, -length:] = torch.randint(4, 30, (length,), generator=numbers)
    return model.encoder(tokens, torch.tensor(lengths))


def take(encoded, rows):
    """The encoder's output for these rows of the batch."""
    return {
        name: [x.index_select(1 if name == "encoder_out" else 0, rows) for x in values]
        for name, values in encoded.items()
        if name in ("encoder_out", "encoder_padding_mask")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beam", [1, 3])
def test_step_by_step_is_all_at_once_under_any_order(dtype, beam):
    """Hypotheses change places, are doubled and dropped; sentences change places and leave."""
    model = build_small().to(dtype)
    model.decoder.set_beam_size(beam)
    encoded = encode(model, [7, 4, 6, 5])
    source = torch.arange(4).repeat_interleave(beam)  # the sentence of each row
    numbers = torch.Generator().manual_seed(beam)
    tokens = torch.full((4 * beam, 1), EOS)
    state: dict = {}
    for step in range(FIRST_CAPACITY + 3):  # the buffers grow
        given = take(encoded, source)
        features, _ = model.decoder(
            tokens, encoder_out=given, incremental_state=state, features_only=True
        )
        if step % 4 == 0 or step > FIRST_CAPACITY:
            full, _ = model.decoder(tokens, encoder_out=given, features_only=True)
            tolerance = 1e-5 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(features[:, 0], full[:, -1], atol=tolerance, rtol=tolerance)
        sentences = torch.arange(len(tokens) // beam)
        if step % 3 == 1:  # leave as they are
            within = torch.arange(beam).expand(len(sentences), beam)
        else:
            if step % 3 == 2:
                sentences = sentences[torch.randperm(len(sentences), generator=numbers)]
            if step in (5, 20):
                sentences = sentences[:-1]
            within = torch.randint(beam, (len(sentences), beam), generator=numbers)
        order = (sentences[:, None] * beam + within).flatten()
        new = torch.randint(4, 30, (len(order), 1), generator=numbers)
        tokens, source = torch.cat((tokens[order], new), dim=1), source[order]
        model.decoder.reorder_incremental_state_scripting(state, order)


def test_rows_of_several_sentences_may_be_mixed_whatever_the_beam_size():
    model = build_small()
    model.decoder.set_beam_size(2)
    encoded = encode(model, [7, 4])
    source = torch.tensor([0, 0, 1, 1])
    tokens = torch.tensor([[EOS], [EOS], [EOS], [EOS]])
    state: dict = {}
    for order in ([3, 0, 1, 1, 2], [4, 0, 2], [0, 1, 2]):
        given = take(encoded, source)
        features, _ = model.decoder(
            tokens, encoder_out=given, incremental_state=state, features_only=True
        )
        full, _ = model.decoder(tokens, encoder_out=given, features_only=True)
        torch.testing.assert_close(features[:, 0], full[:, -1], atol=1e-5, rtol=1e-5)
        rows = torch.tensor(order)
        tokens = torch.cat((tokens[rows], torch.arange(len(rows))[:, None] + 4), dim=1)
        source = source[rows]
        model.decoder.reorder_incremental_state_scripting(state, rows)


def test_a_beam_size_that_no_longer_holds_shares_no_keys():
    """Prepared for a beam of 2, then searched with another: rows in succession are different
    sentences, also where two of them are equally long."""
    model = build_small()
    expected, _ = model.decoder(torch.full((2, 1), EOS), encoder_out=encode(model, [5, 5]))
    model.decoder.set_beam_size(2)
    found, _ = model.decoder(
        torch.full((2, 1), EOS), encoder_out=encode(model, [5, 5]), incremental_state={}
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_padding_among_the_tokens_so_far_is_never_seen():
    model = build_small()
    encoded = encode(model, [5, 6])
    tokens = torch.tensor([[PAD, PAD, EOS, 7, 8], [EOS, 9, 10, 11, 12]])
    order = torch.tensor([1, 0])
    state: dict = {}
    for step in range(5):
        features, _ = model.decoder(
            tokens[:, : step + 1], encoder_out=encoded, incremental_state=state, features_only=True
        )
        full, _ = model.decoder(tokens[:, : step + 1], encoder_out=encoded, features_only=True)
        real = tokens[:, step] != PAD
        torch.testing.assert_close(features[real, 0], full[real, -1], atol=1e-5, rtol=1e-5)
        tokens, encoded = tokens[order], take(encoded, order)
        model.decoder.reorder_incremental_state_scripting(state, order)


def test_several_positions_at_once_and_then_one_by_one():
    torch.manual_seed(0)
    module = PositionedAttention(16, 2, causal=True, self_attention=True).eval()
    x = torch.randn(6, 3, 16)
    future = torch.full((6, 6), float("-inf")).triu(1)
    expected, _ = module(x, x, x, attn_mask=future, need_weights=False)
    state: dict = {}
    first, _ = module(
        x[:3], None, None, attn_mask=future[:3, :3], incremental_state=state, need_weights=False
    )
    order = torch.tensor([2, 0, 1])
    module.reorder_incremental_state(state, order)
    x, rest = x[:, order], []
    for t in range(3, 6):
        step, _ = module(x[t : t + 1], None, None, incremental_state=state, need_weights=False)
        rest.append(step)
    torch.testing.assert_close(first, expected[:3])
    torch.testing.assert_close(torch.cat(rest), expected[3:, order], atol=1e-5, rtol=1e-5)


def test_nothing_is_copied_where_no_row_moved():
    model = build_small()
    model.decoder.set_beam_size(2)
    encoded = encode(model, [5, 6])
    state: dict = {}
    tokens = torch.full((4, 1), EOS)
    given = take(encoded, torch.tensor([0, 0, 1, 1]))
    model.decoder(tokens, encoder_out=given, incremental_state=state)
    places = cached(state)
    assert len(places) == 2 * 2 * 2  # keys and values of two attentions in two layers
    model.decoder.reorder_incremental_state_scripting(state, torch.arange(4))
    assert cached(state) == places
    model.decoder(tokens.repeat(1, 2), encoder_out=given, incremental_state=state)
    assert cached(state) == places  # the step was written into the same buffers
    model.decoder.reorder_incremental_state_scripting(state, torch.tensor([1, 0, 2, 2]))
    moved = cached(state)
    for name, place in moved.items():
        of_sentence = not name.startswith("rows ")
        assert (place == places[name]) == of_sentence, name


def cached(state):
    return {
        ("rows " if f"{name}_rows" in saved else "") + key + name: saved[name].data_ptr()
        for key, saved in state.items()
        for name in ("prev_key", "prev_value")
    }


def test_gradients_flow_through_the_cache():
    module = PositionedAttention(8, 2, causal=True, self_attention=True)
    x = torch.randn(4, 2, 8)
    with torch.enable_grad():
        state: dict = {}
        total = torch.zeros(())
        for t in range(4):
            out, _ = module(x[t : t + 1], None, None, incremental_state=state, need_weights=False)
            module.reorder_incremental_state(state, torch.tensor([1, 0]))
            total = total + out.pow(2).sum()
        total.backward()
    assert module.k_proj.weight.grad.abs().sum() > 0


def test_growing_rows_are_joined_rows():
    growing, expected = GrowingRows(), torch.empty(5, 2, 0, 3)
    numbers = torch.Generator().manual_seed(0)
    for step in range(3 * FIRST_CAPACITY):
        new = torch.randn(len(expected), 2, 1 + step % 3, 3, generator=numbers)
        expected = torch.cat((expected, new), dim=2)
        assert torch.equal(growing.append(new), expected)
        count = len(expected) - (step % 40 == 39) + 3 * (step == 50)
        order = torch.randint(len(expected), (count,), generator=numbers)
        expected = expected[order]
        assert torch.equal(growing.select(order), expected)


def test_orders():
    assert is_identity(torch.tensor([0, 1, 2]), 3)
    assert not is_identity(torch.tensor([0, 1]), 3)
    assert not is_identity(torch.tensor([0, 2, 1]), 3)
    rows = torch.tensor([5, 4, 0, 1])
    assert sentences_of(rows, 2, 2).tolist() == [2, 0]
    assert sentences_of(rows, 2, 1).tolist() == [2, 2, 0, 0]
    assert sentences_of(torch.tensor([1, 2, 3, 4]), 2, 2).tolist() == [0, 1, 1, 2]  # mixed
    assert sentences_of(torch.tensor([0, 0, 1, 1]), 1, 2).tolist() == [0, 1]  # beams appear


def ready(*sizes, bias=True):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(6, size, bias=bias) for size in sizes))
    make_linears_ready(module)
    assert all(type(layer) is ReadyLinear for layer in module)
    return module


@pytest.mark.parametrize("bias", [True, False])
def test_ready_layers_compute_what_linear_layers_do(bias):
    for layer in ready(3, 70, bias=bias):
        for shape in ((2, 6), (4, 1, 6), (128, 3, 6)):
            x = torch.randn(shape)
            expected = nn.functional.linear(x, layer.weight, layer.bias)
            torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
            moved = x.transpose(0, -2)
            torch.testing.assert_close(layer(moved), expected.transpose(0, -2))
        with torch.enable_grad():
            layer(x).sum().backward()
        assert layer.weight.grad is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.add_(1.0),
        lambda layer: layer.bias.mul_(2.0),
        lambda layer: layer.load_state_dict(nn.Linear(6, 5).state_dict()),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(5, 6))),
        lambda layer: setattr(layer.weight, "data", torch.ones(5, 6)),
        lambda layer: layer.half().float(),
        lambda layer: layer.double(),
        lambda layer: layer.bfloat16(),
    ],
)
def test_ready_weights_are_never_out_of_date(change):
    (layer,) = ready(5)
    layer(torch.randn(2, 6))
    change(layer)
    x = torch.randn(3, 6, dtype=layer.weight.dtype)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)


def test_ready_weights_follow_autocast():
    (layer,) = ready(5)
    x = torch.randn(3, 6)
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
        expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer(x), plain)


def test_ready_weights_are_in_no_checkpoint_and_no_copy():
    (layer,) = ready(5)
    x = torch.randn(3, 6)
    expected = layer(x)
    assert set(layer.state_dict()) == {"weight", "bias"}
    # As a process that is started for several devices gets its model.
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.ready is not layer.ready and other.ready._weight is None
        torch.testing.assert_close(other(x), expected)
        other.weight.zero_()
        assert torch.equal(other(x), other.bias.expand(3, 5))
    assert torch.equal(layer(x), expected)


def test_layers_that_do_more_than_a_product_stay_as_they_are():
    hooked = nn.Linear(3, 3)
    hooked.register_forward_pre_hook(lambda module, given: None)
    module = nn.ModuleList([hooked, nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))])
    make_linears_ready(module)
    assert not any(isinstance(layer, ReadyLinear) for layer in module.modules())


def test_a_model_prepared_for_inference_gives_the_same():
    model = build_small(share_all_embeddings=True)
    tokens = torch.tensor([[EOS, 5, 6], [EOS, 7, 8]])
    encoded = encode(model, [4, 6])
    expected, _ = model.decoder(tokens, encoder_out=encoded)
    names = set(model.state_dict())
    model.make_generation_fast_(beamable_mm_beam_size=2)
    found, _ = model.decoder(tokens, encoder_out=encoded)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert set(model.state_dict()) == names
    assert type(model.decoder.output_projection) is ReadyLinear
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight
    assert copy.deepcopy(model).decoder.output_projection.ready._weight is None
