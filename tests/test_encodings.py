"""Every position encoding in its attention module, against the papers' formulas pair by pair."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rope_fairseq.errors import UserError
from rope_fairseq.multihead_attention import PositionedAttention
from rope_fairseq.position import (
    ABSOLUTE,
    ENCODINGS,
    PositionOptions,
    Side,
    build_position_encoding,
    build_shared,
)
from rope_fairseq.position.alibi import alibi_slopes
from rope_fairseq.position.t5 import relative_buckets
from tests.pairwise import SCORES, Parameters, Setting, bucket, pairwise, slopes

DIM, HEADS = 32, 4
HEAD_DIM = DIM // HEADS
RELATIVE = ("shaw", "transformer-xl", "t5", "tupe", "deberta", "alibi")
#: Clip distances and buckets so small that a dozen tokens reach every case.
OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "shaw": dict(relative_max_distance=3),
    "deberta": dict(relative_max_distance=3),
    "t5": dict(relative_max_distance=6, relative_buckets=8),
    "tupe": dict(relative_max_distance=6, relative_buckets=8),
    "rope": dict(rope_base=50.0),
    "rope half": dict(rope_base=50.0, rope_layout="half"),
}
NAMES = (*RELATIVE, "none", "rope", "rope half")
#: Their cos and sin are float32 whatever the dtype of the module; everything else is as exact as
#: the module.
FROM_TABLES = ("transformer-xl", "rope", "rope half")
SIDES = pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])


def padding(lengths: list[int], width: int, left: bool) -> Tensor:
    """[batch, width], True at padding."""
    mask = torch.arange(width)[None, :] >= torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


def future(length: int) -> Tensor:
    """fairseq's mask of the keys behind each query: [length, length]."""
    return torch.full((length, length), float("-inf")).triu(1)


def fill(module: nn.Module, seed: int) -> None:
    """Every parameter random, so that none hides behind a 0 or an identity; projections as large
    as keeps the scale of what they project."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        is_projection = name.endswith(("proj.weight", "projection.weight"))
        scale = parameter.size(-1) ** -0.5 if is_projection else 1.0
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


class Attention:
    """One attention module with an encoding, and what its pairwise reference needs."""

    def __init__(
        self, name: str, causal: bool, num_heads: int = HEADS, max_positions: int = 64
    ) -> None:
        own = OWN_OPTIONS.get(name, {})
        options = PositionOptions(name.split()[0], **own)
        side = Side(
            embed_dim=num_heads * HEAD_DIM,
            num_heads=num_heads,
            bidirectional=not causal,
            max_positions=max_positions,
        )
        self.causal = causal
        self.shared = build_shared(options, side)
        self.encoding = build_position_encoding(options, side, self.shared)
        self.module = PositionedAttention(
            side.embed_dim, num_heads, position=self.encoding, causal=causal, self_attention=True
        ).eval()
        fill(self.module, seed=1)
        if self.shared is not None:
            fill(self.shared, seed=2)
        self.setting = Setting(
            options.encoding,
            num_heads,
            HEAD_DIM,
            causal,
            max_distance=own.get("relative_max_distance", 0),
            buckets=own.get("relative_buckets", 0),
            base=own.get("rope_base", 0.0),
            layout=own.get("rope_layout", "interleaved"),
        )

    def double(self) -> "Attention":
        self.module.double()
        if self.shared is not None:
            self.shared.double()
        return self

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Those of the attention, of the encoding and of what layers share, by their own names."""
        named = {name.removeprefix("position."): p for name, p in self.module.named_parameters()}
        shared = dict(self.shared.named_parameters()) if self.shared is not None else {}
        assert not named.keys() & shared.keys()
        return named | shared

    def for_reference(self) -> Parameters:
        """Copies in float64 with gradients of their own."""
        return {
            name: parameter.detach().double().clone().requires_grad_()
            for name, parameter in self.named_parameters().items()
        }

    def __call__(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output [batch, seq_len, embed_dim]; weights [batch, seq_len, seq_len], or
        [batch, seq_len, num_heads, seq_len] of each head."""
        out, weights = self.module(
            x,
            x,
            x,
            key_padding_mask=key_padding_mask,
            attn_mask=future(x.size(0)).to(x.dtype) if self.causal else None,
            need_weights=need_weights,
            need_head_weights=need_head_weights,
        )
        if need_head_weights:
            weights = weights.permute(1, 2, 0, 3)
        return out.transpose(0, 1), weights


def sentences(width: int, batch: int = 3, embed_dim: int = DIM, seed: int = 3) -> Tensor:
    """[width, batch, embed_dim], float32 values."""
    return torch.randn(width, batch, embed_dim, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: Tensor | None, expected: Tensor, tolerance: float) -> None:
    assert actual is not None
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_there_is_a_formula_for_each_encoding_that_acts_inside_attention():
    assert {*SCORES} == {*ENCODINGS} - {*ABSOLUTE}


# Twelve tokens are longer than every clip and maximal distance above.
@pytest.mark.parametrize(
    ("lengths", "pads"), [([7, 7], "no"), ([12, 8, 3], "right"), ([12, 8, 1], "left")]
)
@SIDES
@pytest.mark.parametrize("name", NAMES)
def test_output_and_weights_equal_the_formula_pair_by_pair(name, causal, lengths, pads):
    attention = Attention(name, causal)
    mask = padding(lengths, max(lengths), pads == "left")
    real = ~mask
    x = sentences(*mask.T.shape)
    with torch.no_grad():
        out, weights = pairwise(attention.setting, attention.for_reference(), x.double(), mask)
        in_float64 = 1e-6 if name in FROM_TABLES else 1e-10
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, in_float64)):
            if dtype == torch.float64:
                attention.double()
            arguments = (x.to(dtype), mask if pads != "no" else None)
            actual, none = attention(*arguments)
            assert none is None
            assert actual.dtype == dtype
            assert_near(actual[real], out, tolerance)
            actual, averaged = attention(*arguments, need_weights=True)
            assert_near(actual[real], out, tolerance)
            assert_near(averaged[real], weights.mean(1), tolerance)
            actual, by_head = attention(*arguments, need_head_weights=True)
            assert_near(actual[real], out, tolerance)
            assert_near(by_head[real], weights, tolerance)


@pytest.mark.parametrize("num_heads", [1, 3, 6])
@SIDES
@pytest.mark.parametrize("name", RELATIVE)
def test_any_number_of_heads(name, causal, num_heads):
    attention = Attention(name, causal, num_heads)
    mask = padding([6], 6, left=False)
    x = sentences(6, 1, num_heads * HEAD_DIM)
    with torch.no_grad():
        out, weights = pairwise(attention.setting, attention.for_reference(), x.double(), mask)
        actual, by_head = attention(x, need_head_weights=True)
    assert_near(actual[0], out, 1e-5)
    assert_near(by_head[0], weights, 1e-5)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@SIDES
@pytest.mark.parametrize("encoding", NAMES)
def test_gradients_equal_those_of_the_formula(encoding, causal, left):
    attention = Attention(encoding, causal).double()
    mask = padding([7, 4], 7, left)
    x = sentences(7, 2).double().requires_grad_()
    towards = sentences(11, 1, seed=4).double()[:, 0]
    reference = attention.for_reference()
    out, _ = pairwise(attention.setting, reference, x, mask)
    names = [*reference]
    expected = torch.autograd.grad(
        (out * towards).sum(), (x, *reference.values()), materialize_grads=True
    )
    for name, gradient in zip(names, expected[1:], strict=True):
        # The same bias of all keys moves no weight where a query reads content alone.
        assert name == "k_proj.bias" or gradient.abs().max() > 1e-4, name
    parameters = [attention.named_parameters()[name] for name in names]
    tolerance = 1e-6 if encoding in FROM_TABLES else 1e-10
    for need_weights in (False, True):
        actual, _ = attention(x, mask, need_weights=need_weights)
        gradients = torch.autograd.grad((actual[~mask] * towards).sum(), (x, *parameters))
        for name, gradient, right in zip(["x", *names], gradients, expected, strict=True):
            torch.testing.assert_close(
                gradient, right, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("steps", [[1] * 9, [4, 3, 1, 1]], ids=["tokens", "pieces"])
@pytest.mark.parametrize("pads", ["no", "right", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_decoding_step_by_step_equals_the_formula(name, pads, steps):
    attention = Attention(name, causal=True)
    mask = padding([9, 9 if pads == "no" else 5], 9, pads == "left")
    x = sentences(9, 2)
    state: dict[str, Any] = {}
    pieces = []
    with torch.no_grad():
        out, _ = pairwise(attention.setting, attention.for_reference(), x.double(), mask)
        for part, part_mask in zip(x.split(steps), mask.split(steps, dim=1), strict=True):
            piece, _ = attention.module(
                part,
                None,
                None,
                key_padding_mask=None if pads == "no" else part_mask,
                incremental_state=state,
                attn_mask=future(len(part)) if len(part) > 1 else None,
                need_weights=False,
            )
            pieces.append(piece)
    assert_near(torch.cat(pieces).transpose(0, 1)[~mask], out, 1e-5)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@SIDES
@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_padding_alone_leaves_all_finite(name, causal, left):
    attention = Attention(name, causal)
    mask = padding([5, 0, 2], 5, left)
    x = sentences(5).requires_grad_()
    for need_weights in (False, True):
        out, _ = attention(x, mask, need_weights=need_weights)
        assert out.isfinite().all()
        parameters = attention.named_parameters().values()
        gradients = torch.autograd.grad(out.square().sum(), (x, *parameters))
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@SIDES
@pytest.mark.parametrize("name", RELATIVE)
def test_what_is_added_to_the_scores_of_far_keys(name, causal, dtype):
    """The last of 300 tokens; angles, slopes or positions in half precision would be far off."""
    attention = Attention(name, causal, max_positions=300)
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, HEADS, 1, HEAD_DIM, generator=generator).to(dtype)
    k = torch.randn(1, HEADS, 300, HEAD_DIM, generator=generator).to(dtype)
    for module in (attention.encoding, attention.shared):
        if module is not None:
            module.to(dtype)
    s, p = attention.setting, attention.for_reference()
    scale = (attention.encoding.terms * HEAD_DIM) ** -0.5
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    with torch.no_grad():
        actual = attention.encoding.score_bias(q, k, None)
        assert actual is not None
        actual = actual.expand(1, HEADS, 1, 300)
        for h in range(HEADS):
            for j in [*range(0, 280, 9), *range(280, 300)]:
                qi, kj = q[0, h, 0].double(), k[0, h, j].double()
                added = SCORES[name](s, p, h, 299, j, qi, kj) - qi @ kj * scale
                assert_near(actual[0, h, 0, j], added, tolerance)


@SIDES
@pytest.mark.parametrize("name", NAMES)
def test_mixed_precision(name, causal):
    attention = Attention(name, causal)
    mask = padding([12, 5], 12, left=True)
    x = sentences(12, 2)
    with torch.no_grad():
        out, _ = pairwise(attention.setting, attention.for_reference(), x.double(), mask)
        for need_weights in (False, True):
            with torch.autocast("cpu", torch.bfloat16):
                actual, _ = attention(x, mask, need_weights=need_weights)
            assert (actual[~mask].double() - out).square().mean() < 1e-3 * out.square().mean()


def test_shaws_values_by_distance_where_queries_are_fewer_than_keys():
    attention = Attention("shaw", causal=True)
    weights = torch.rand(2, HEADS, 3, 8).softmax(-1)
    actual = attention.encoding.value_term(weights)
    table = attention.encoding.value_embedding.double()
    expected = torch.zeros(2, HEADS, 3, HEAD_DIM).double()
    for query in range(3):
        for key in range(8):
            row = max(-3, min(3, key - (5 + query))) + 3
            expected[:, :, query] += weights[:, :, query, key, None].double() * table[row]
    assert_near(actual, expected, 1e-5)


@SIDES
@pytest.mark.parametrize("name", [name for name in RELATIVE if name != "tupe"])
def test_relative_encodings_do_not_know_where_a_sentence_starts(name, causal):
    """Scores of the last tokens, with more and with fewer keys before them. (TUPE's positions are
    absolute.)"""
    attention = Attention(name, causal).double()
    generator = torch.Generator().manual_seed(5)
    q, k = (
        torch.randn(2, HEADS, 9, HEAD_DIM, dtype=torch.float64, generator=generator)
        for _ in range(2)
    )
    with torch.no_grad():
        # An additive constant of a whole row would not change any weight.
        long = attention.encoding.score_bias(q[:, :, 6:], k, None).expand(2, HEADS, 3, 9)
        short = attention.encoding.score_bias(q[:, :, 6:], k[:, :, 4:], None)
        difference = long[..., 4:] - short.expand(2, HEADS, 3, 5)
    assert (difference - difference[..., :1]).abs().max() < 1e-10


#: Of E = embed_dim, H heads, d = E / H, k = the clip distance, B buckets, M positions: how many
#: parameters one side has more than with no encoding, shared by its layers and of each layer.
EXTRA = {
    "shaw": lambda e, h, k, b, m: (0, 2 * (2 * k + 1) * (e // h)),
    "transformer-xl": lambda e, h, k, b, m: (2 * e, e * e),
    "t5": lambda e, h, k, b, m: (b * h, 0),
    "tupe": lambda e, h, k, b, m: (m * e + 2 * e + 2 * e * e + b * h, 0),
    "deberta": lambda e, h, k, b, m: (2 * k * e, 2 * e * e),
    "alibi": lambda e, h, k, b, m: (0, 0),
    "rope": lambda e, h, k, b, m: (0, 0),
    "none": lambda e, h, k, b, m: (0, 0),
}
#: The papers' distances, which are the defaults.
PAPER_DISTANCE = {"shaw": 16, "deberta": 512}


def size(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


@SIDES
@pytest.mark.parametrize("encoding", EXTRA)
def test_number_of_parameters_with_the_default_options(encoding, causal):
    options = PositionOptions(encoding)
    side = Side(embed_dim=24, num_heads=3, bidirectional=not causal, max_positions=50)
    shared = build_shared(options, side)
    own = build_position_encoding(options, side, shared)
    k = PAPER_DISTANCE.get(encoding, 0)
    assert (size(shared), size(own)) == EXTRA[encoding](24, 3, k, 32, 50)
    # Parameters, and nothing else, are in checkpoints.
    for module in (shared, own):
        if module is not None:
            assert {*module.state_dict()} == {name for name, _ in module.named_parameters()}


@SIDES
def test_t5_buckets_are_32_up_to_128_tokens_by_default(causal):
    options = PositionOptions("t5")
    side = Side(embed_dim=DIM, num_heads=HEADS, bidirectional=not causal)
    shared = build_shared(options, side)
    assert shared is not None
    fill(shared, seed=2)
    encoding = build_position_encoding(options, side, shared)
    query, key = torch.zeros(1, HEADS, 1, HEAD_DIM), torch.zeros(1, HEADS, 300, HEAD_DIM)
    bias = encoding.score_bias(query, key, None)
    assert bias is not None
    rows = [bucket(key - 299, not causal, 32, 128) for key in range(300)]
    assert len({*rows}) == (16 if not causal else 32)
    assert torch.equal(bias.reshape(HEADS, 300), shared.bucket_bias[rows].T)


def small_options(encoding: str) -> dict[str, Any]:
    own = OWN_OPTIONS.get(encoding, {})
    return dict(position_encoding=encoding, **own)


@pytest.mark.parametrize("encoding", EXTRA)
def test_a_model_has_the_shared_parameters_once_a_side_and_the_others_in_each_layer(
    encoding, small
):
    sizes = dict(
        encoder_layers=3, decoder_layers=2, max_source_positions=40, max_target_positions=30
    )
    model = small(**small_options(encoding), **sizes)
    plain = small(position_encoding="none", **sizes)
    extra = {
        name: value for name, value in model.state_dict().items() if name not in plain.state_dict()
    }
    assert model.state_dict().keys() >= plain.state_dict().keys()
    own = OWN_OPTIONS.get(encoding, {})
    k, buckets = own.get("relative_max_distance", 0), own.get("relative_buckets", 0)
    for side, layers, positions in (("encoder", 3, 40), ("decoder", 2, 30)):
        shared, own_size = EXTRA[encoding](DIM, HEADS, k, buckets, positions)
        of_side = {name: value for name, value in extra.items() if name.startswith(f"{side}.")}
        by_layer = [
            sum(
                value.numel()
                for name, value in of_side.items()
                if name.startswith(f"{side}.layers.{layer}.self_attn.position.")
            )
            for layer in range(layers)
        ]
        assert by_layer == [own_size] * layers
        rest = {name: value for name, value in of_side.items() if ".layers." not in name}
        assert sum(value.numel() for value in rest.values()) == shared
    assert size(model) - size(plain) == sum(value.numel() for value in extra.values())
    assert {*extra} == {n for n, _ in model.named_parameters()} - {
        n for n, _ in plain.named_parameters()
    }


def tokens(*lengths: int, width: int | None = None, pad: int = 1) -> Tensor:
    """Right-padded sentences of words and the end of sentence: [batch, width]."""
    width = width or max(lengths)
    rows = torch.full((len(lengths), width), pad)
    for row, length in zip(rows, lengths, strict=True):
        row[: length - 1] = 4 + torch.arange(length - 1) % 20
        row[length - 1] = 2
    return rows


def translate(model: nn.Module, length: int = 9) -> Tensor:
    source = tokens(length, length)
    return model(source, torch.tensor([length] * 2), source)[0]


@pytest.mark.parametrize("encoding", ["transformer-xl", "t5", "tupe", "deberta"])
def test_a_copied_model_shares_its_own_parameters_and_not_the_originals(encoding, small):
    model = small(**small_options(encoding))
    fill(model, seed=6)
    plain = dict(small(position_encoding="none").named_parameters())
    with torch.no_grad():
        before = translate(model)
        copied = copy.deepcopy(model)
        assert torch.equal(translate(copied), before)
        for side in ("encoder", "decoder"):
            shared = [
                parameter
                for name, parameter in copied.named_parameters()
                if name.startswith(side) and ".layers." not in name and name not in plain
            ]
            assert shared
            for parameter in shared:
                parameter.zero_()
            assert torch.equal(translate(model), before)
            assert not torch.allclose(translate(copied), before, atol=1e-3)
            copied.load_state_dict(model.state_dict())
            assert torch.equal(translate(copied), before)


@pytest.mark.parametrize("encoding", EXTRA)
def test_all_parameters_of_a_model_are_trained(encoding, small):
    model = small(**small_options(encoding))
    fill(model, seed=7)
    translate(model).square().sum().backward()
    idle = [
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0
    ]
    assert idle == []


@pytest.mark.parametrize("need_weights", [False, True])
@SIDES
def test_tupe_refuses_sentences_longer_than_its_positions(causal, need_weights):
    attention = Attention("tupe", causal, max_positions=5)
    attention(sentences(5, 2), None, need_weights=need_weights)
    option = "--max-target-positions" if causal else "--max-source-positions"
    for mask in (None, padding([6, 3], 6, left=False), padding([6, 3], 6, left=True)):
        with pytest.raises(UserError, match=f"{option} 5") as caught:
            attention(sentences(6, 2), mask, need_weights=need_weights)
        assert "\n" not in str(caught.value)
        assert "6 tokens" in str(caught.value)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@SIDES
def test_tupes_positions_are_for_tokens_and_not_for_padding(causal, left):
    """A batch may be wider than its longest sentence (--required-seq-len-multiple)."""
    attention = Attention("tupe", causal, max_positions=5)
    mask = padding([5, 3], 8, left)
    x = sentences(8, 2)
    with torch.no_grad():
        out, _ = pairwise(attention.setting, attention.for_reference(), x.double(), mask)
        actual, _ = attention(x, mask)
    assert_near(actual[~mask], out, 1e-5)
    with pytest.raises(UserError, match="6 tokens"):
        attention(x, padding([6, 3], 8, left))


def test_tupe_refuses_the_step_after_its_last_position():
    attention = Attention("tupe", causal=True, max_positions=3)
    x, state = sentences(4, 2), {}
    with torch.no_grad():
        for t in range(3):
            attention.module(x[t : t + 1], None, None, incremental_state=state)
        with pytest.raises(UserError, match="--max-target-positions"):
            attention.module(x[3:], None, None, incremental_state=state)


@pytest.mark.parametrize("num_heads", range(1, 21))
def test_alibi_slopes(num_heads):
    actual = alibi_slopes(num_heads)
    assert actual.dtype == torch.float32
    assert actual.tolist() == pytest.approx(slopes(num_heads), rel=1e-6)


@pytest.mark.parametrize("num_heads", range(1, 21))
def test_alibi_slopes_equal_those_of_transformers(num_heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    bias = bloom.build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    torch.testing.assert_close(alibi_slopes(num_heads), bias[:, 0, 1] - bias[:, 0, 0])


BUCKETS = pytest.mark.parametrize(
    ("buckets", "max_distance"), [(32, 128), (8, 20), (10, 20), (16, 1000), (64, 256), (4, 3)]
)
DISTANCES = torch.arange(-1000, 1001)


@BUCKETS
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets(bidirectional, buckets, max_distance):
    actual = relative_buckets(DISTANCES, bidirectional, buckets, max_distance)
    assert actual.dtype == torch.long
    assert actual.tolist() == [
        bucket(distance, bidirectional, buckets, max_distance) for distance in DISTANCES.tolist()
    ]
    assert relative_buckets(DISTANCES.view(3, -1), bidirectional, buckets, max_distance).shape == (
        3,
        667,
    )


@BUCKETS
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_equal_those_of_transformers(bidirectional, buckets, max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    expected = t5.T5Attention._relative_position_bucket(
        DISTANCES, bidirectional, buckets, max_distance
    )
    assert torch.equal(relative_buckets(DISTANCES, bidirectional, buckets, max_distance), expected)


def test_the_scores_keep_their_variance():
    """Each score is a sum of ``terms`` products of independent unit vectors, over √(terms · d)."""
    expected = {"tupe": 2, "deberta": 3}
    for name in NAMES:
        assert Attention(name, causal=False).encoding.terms == expected.get(name, 1), name
