"""What must hold for the whole model: every encoding and scaling × precision × encoder, decoder."""

import copy
import io

import pytest
import torch

from rope_fairseq.errors import UserError
from rope_fairseq.position import BOUNDED, ENCODINGS

PAD, EOS = 1, 2
# Distances, buckets and original lengths so small that clipping and scaling act on these sentences.
VARIANTS = [
    {"position_encoding": "rope"},
    {"position_encoding": "rope", "rope_layout": "half"},
    {"position_encoding": "rope", "rope_fraction": 0.5, "rope_base": 100.0},
    {"position_encoding": "rope", "rope_scaling": "linear", "rope_scaling_factor": 2.0},
    {"position_encoding": "rope", "rope_scaling": "ntk", "rope_scaling_factor": 2.0},
    {
        "position_encoding": "rope",
        "rope_scaling": "dynamic",
        "rope_scaling_factor": 2.0,
        "rope_original_max_positions": 4,
        "rope_target_extra": 3,
    },
    {
        "position_encoding": "rope",
        "rope_scaling": "dynamic",
        "rope_fraction": 0.5,
        "rope_layout": "half",
        "rope_original_max_positions": 6,
    },
    {
        "position_encoding": "rope",
        "rope_scaling": "yarn",
        "rope_scaling_factor": 4.0,
        "rope_original_max_positions": 16,
    },
    {"position_encoding": "sinusoidal"},
    {"position_encoding": "learned"},
    {"position_encoding": "shaw", "relative_max_distance": 3},
    {"position_encoding": "transformer-xl"},
    {"position_encoding": "t5", "relative_buckets": 8, "relative_max_distance": 6},
    {"position_encoding": "tupe", "relative_buckets": 8, "relative_max_distance": 6},
    {"position_encoding": "deberta", "relative_max_distance": 4},
    {"position_encoding": "alibi"},
    {"position_encoding": "none"},
    *(
        {**variant, "attention_kind": "linear"}
        for variant in (
            {"position_encoding": "rope"},
            {"position_encoding": "rope", "linear_feature_map": "softmax", "rope_layout": "half"},
            {"position_encoding": "rope", "linear_feature_map": "favor", "rope_fraction": 0.5},
            {
                "position_encoding": "rope",
                "linear_feature_map": "favor",
                "linear_features": 8,
                "rope_scaling": "ntk",
                "rope_scaling_factor": 2.0,
            },
            {
                "position_encoding": "rope",
                "rope_scaling": "dynamic",
                "rope_original_max_positions": 4,
                "rope_target_extra": 3,
            },
            {"position_encoding": "sinusoidal", "linear_feature_map": "favor"},
            {"position_encoding": "learned", "linear_feature_map": "softmax"},
            {"position_encoding": "none"},
        )
    ),
]
IDS = [" ".join(map(str, variant.values())) for variant in VARIANTS]
# Those by which a score depends on the distance of query and key and not on their places.
RELATIVE = ("rope", "shaw", "transformer-xl", "t5", "deberta", "alibi")
every_encoding = pytest.mark.parametrize("options", VARIANTS, ids=IDS)
in_both_precisions = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
on_both_sides = pytest.mark.parametrize("side", ["encoder", "decoder"])
# Absolute; the outputs are of the order of 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.06}


def test_every_encoding_and_scaling_is_held_to_this_file():
    from rope_fairseq.rotary import SCALINGS

    assert {variant["position_encoding"] for variant in VARIANTS} == set(ENCODINGS)
    assert {variant.get("rope_scaling", "none") for variant in VARIANTS} == set(SCALINGS)


def sentences(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 36, (n,), generator=generator) for n in lengths]


def collate(rows, left=False, width=None):
    width = width or max(map(len, rows))
    batch = torch.full((len(rows), width), PAD)
    for row, tokens in zip(batch, rows, strict=True):
        (row[width - len(tokens) :] if left else row[: len(tokens)]).copy_(tokens)
    return batch


def run(model, source, target, src_left=False, tgt_left=False, width=None, side="decoder"):
    """What a side gives for each sentence, padding cut off: the encoder's output [src_len,
    embed_dim], or log-probabilities [tgt_len, vocab]."""
    src = collate(source, src_left, width)
    lengths = torch.tensor([len(s) for s in source])
    if side == "encoder":
        out = model.encoder(src, lengths)["encoder_out"][0].transpose(0, 1)
        rows, left = source, src_left
    else:
        out, _ = model(src, lengths, collate(target, tgt_left, width))
        out = out.float().log_softmax(-1)
        rows, left = target, tgt_left
    return [
        row[len(row) - len(t) :] if left else row[: len(t)]
        for row, t in zip(out, rows, strict=True)
    ]


def assert_equal(actual, expected, tolerance=1e-5):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=tolerance, rtol=0)


@every_encoding
@pytest.mark.parametrize(
    "dtype, side, pre_norm",
    [  # each two of them in every combination
        (torch.float32, "encoder", False),
        (torch.float32, "decoder", True),
        (torch.bfloat16, "encoder", True),
        (torch.bfloat16, "decoder", False),
    ],
)
def test_left_right_and_no_padding_agree(small, options, dtype, side, pre_norm):
    model = small(**options, encoder_normalize_before=pre_norm, decoder_normalize_before=pre_norm)
    model.to(dtype)
    source, target = sentences([9, 4, 1]), sentences([7, 8, 2], seed=1)
    pairs = zip(source, target, strict=True)
    alone = [run(model, [s], [t], side=side)[0] for s, t in pairs]
    for src_left in (False, True):
        for tgt_left in (False, True):
            for width in (None, 15):
                batched = run(model, source, target, src_left, tgt_left, width, side)
                assert_equal(batched, alone, TOLERANCE[dtype])


@every_encoding
@in_both_precisions
def test_incremental_decoding_equals_full_decoding_under_reordering(small, options, dtype):
    model = small(**options).to(dtype)
    # Two sentences of two beams each.
    source, beams = collate(sentences([9, 4]), left=True), torch.tensor([0, 0, 1, 1])
    encoder_out = model.encoder(source, torch.tensor([9, 4]))
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, beams)
    target = collate(sentences([12] * 4, seed=1))
    # What beam search does: both beams continue one, beams change places, a sentence ends.
    reorder = {3: [1, 1, 2, 3], 6: [1, 0, 3, 2], 8: [2, 3]}
    state: dict = {}
    prefix = target[:, :1]
    for step in range(12):
        logits, _ = model.decoder(prefix, encoder_out=encoder_out, incremental_state=state)
        full, _ = model.decoder(prefix, encoder_out=encoder_out)
        torch.testing.assert_close(
            *(x[:, -1].float().log_softmax(-1) for x in (logits, full)),
            atol=TOLERANCE[dtype],
            rtol=0,
        )
        if step in reorder:
            order = torch.tensor(reorder[step])
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
            prefix, target = prefix[order], target[order]
        prefix = torch.cat((prefix, target[:, step + 1 : step + 2]), dim=1)


@every_encoding
@in_both_precisions
@on_both_sides
def test_which_inputs_an_output_sees(small, options, dtype, side):
    """In the decoder none behind its own position, in the encoder all."""
    model = small(**options).to(dtype)
    embedded = []
    getattr(model, side).embed_tokens.register_forward_hook(
        lambda module, args, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]
    )
    out = run(model, sentences([6]), sentences([6], seed=1), side=side)[0]
    for t in range(6):
        (gradient,) = torch.autograd.grad(out[t, 5], embedded[-1], retain_graph=True)
        seen = gradient[0].abs().sum(-1)
        end = t + 1 if side == "decoder" else 6
        assert seen[:end].gt(0).all()
        assert seen[end:].eq(0).all()


@pytest.mark.parametrize(
    "options",
    [variant for variant in VARIANTS if variant["position_encoding"] in RELATIVE],
    ids=[name for name in IDS if name.split()[0] in RELATIVE],
)
@in_both_precisions
@on_both_sides
def test_a_shift_of_all_positions_changes_nothing(small, options, dtype, side):
    model = small(**options).to(dtype)
    source, target = sentences([9, 4]), sentences([7, 8], seed=1)
    expected = run(model, source, target, side=side)
    # Padding to the left moves a sentence to later positions.
    shifted = run(model, source, target, True, True, width=300, side=side)
    assert_equal(shifted, expected, {torch.float32: 1e-4, torch.bfloat16: 0.08}[dtype])


@every_encoding
@in_both_precisions
@on_both_sides
def test_a_copy_and_a_reloaded_model_are_the_same_model(small, options, dtype, side):
    model = small(**options).to(dtype)
    source, target = sentences([5, 3]), sentences([4, 6], seed=1)
    expected = run(model, source, target, side=side)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    reloaded = small(**options, seed=9).to(dtype)
    with pytest.raises(AssertionError):
        assert_equal(run(reloaded, source, target, side=side), expected, 0)
    reloaded.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    copied = copy.deepcopy(model)
    with torch.no_grad():  # the copy has parameters of its own, those that layers share too
        for parameter in model.parameters():
            parameter.zero_()
    for other in (copied, reloaded):
        assert_equal(run(other, source, target, side=side), expected, 0)


@every_encoding
@in_both_precisions
@on_both_sides
def test_activation_checkpointing_gives_the_same_gradients(small, options, dtype, side):
    source, target = sentences([5, 3]), sentences([4, 6], seed=1)
    gradients = []
    for checkpointing in (False, True):
        model = small(**options, checkpoint_activations=checkpointing).to(dtype).train()
        sum(out[:, 7].float().sum() for out in run(model, source, target, side=side)).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        if dtype == torch.float32:
            torch.testing.assert_close(gradients[1][name], gradient, msg=name)
        else:  # without gradients to record, another kernel runs first, which rounds otherwise
            difference = (gradients[1][name] - gradient).float().norm()
            scale = max(g.float().norm() / g.numel() ** 0.5 for g in gradients[0].values())
            noise = 0.01 * scale * gradient.numel() ** 0.5
            assert difference <= 0.1 * gradient.float().norm() + noise, name


@every_encoding
@in_both_precisions
def test_every_parameter_gets_a_gradient(small, options, dtype):
    model = small(**options).to(dtype).train()
    source, target = sentences([5, 3]), sentences([4, 6], seed=1)
    sum(out[:, 7].float().sum() for out in run(model, source, target)).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A constant added to all keys of a query changes no softmax: k_proj.bias has no gradient by
    # nature but that of rounding, except where keys are rotated or multiplied with positions.
    if options["position_encoding"] in ("rope", "deberta"):
        assert missing == []
    assert [n for n in missing if not n.endswith("k_proj.bias")] == []


@every_encoding
@in_both_precisions
def test_four_times_the_trained_length_is_finite_or_refused(small, options, dtype):
    trained = 16
    model = small(**options, max_source_positions=trained, max_target_positions=trained).to(dtype)
    long = sentences([4 * trained])
    # fairseq's data sets and search ask for these limits and refuse longer sentences.
    limit = model.max_positions()
    assert limit == (trained, trained)
    if options["position_encoding"] in BOUNDED:
        # learned is one of fairseq's modules; what it refuses, its search never asks for.
        error = UserError if options["position_encoding"] == "tupe" else IndexError
        with pytest.raises(error):
            run(model, long, long)
        return
    source = collate(long)
    encoder_out = model.encoder(source, torch.tensor([4 * trained]))
    state: dict = {}
    for step in range(4 * trained):
        prefix = source[:, : step + 1]
        logits, _ = model.decoder(prefix, encoder_out=encoder_out, incremental_state=state)
        assert logits.log_softmax(-1).isfinite().all()
    full, _ = model.decoder(source, encoder_out=encoder_out)
    torch.testing.assert_close(logits[:, -1], full[:, -1], atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if e != "none"])
def test_the_order_of_the_words_matters(small, encoding):
    model = small(position_encoding=encoding)
    source, target = sentences([6]), sentences([4], seed=1)
    expected = run(model, source, target)[0]
    swapped = run(model, [source[0][[1, 0, 2, 3, 4, 5]]], target)[0]
    assert (swapped - expected).abs().max() > 1e-3


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_symmetric_alibi_alone_does_not_tell_a_source_from_its_reverse(small, encoding):
    """It knows distances without their direction; ``none`` knows nothing."""
    model = small(position_encoding=encoding)
    source, target = sentences([6]), sentences([4], seed=1)
    expected = run(model, source, target)[0]
    reversed_ = run(model, [source[0].flip(0)], target)[0]
    is_blind = (reversed_ - expected).abs().max() < 1e-5
    assert is_blind == (encoding in ("alibi", "none"))


def test_without_an_encoding_the_encoder_sees_a_bag_of_words(small):
    model = small(position_encoding="none")
    source, target = sentences([6]), sentences([4], seed=1)
    expected = run(model, source, target)
    assert_equal(run(model, [source[0][[3, 1, 5, 0, 2, 4]]], target), expected)


@every_encoding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_full_precision(small, options, dtype):
    source, target = sentences([40]), sentences([40], seed=1)
    model = small(**options)
    expected = run(model, source, target)
    actual = run(model.to(dtype), source, target)
    assert_equal([a.float() for a in actual], expected, 0.15 if dtype == torch.bfloat16 else 0.03)


@every_encoding
def test_autocast_trains(small, options):
    model = small(**options).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(model, sentences([5, 3]), sentences([4, 6], seed=1))
    sum(o[:, 7].float().sum() for o in out).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_attention_weights_are_computed_for_a_reader_only(small):
    model = small()
    src, prev = collate(sentences([5])), collate(sentences([4], seed=1))
    lengths = torch.tensor([5])
    assert model.train()(src, lengths, prev)[1]["attn"] == [None]
    assert model(src, lengths, prev, alignment_layer=0)[1]["attn"][0].shape == (1, 4, 5)
    assert model.eval()(src, lengths, prev)[1]["attn"][0].shape == (1, 4, 5)
    model.make_generation_fast_(need_attn=False)
    assert model(src, lengths, prev)[1]["attn"] == [None]
    model = small()
    model.make_generation_fast_(need_attn=True)
    torch.testing.assert_close(model(src, lengths, prev)[1]["attn"][0].sum(-1), torch.ones(1, 4))
