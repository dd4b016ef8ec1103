"""RoPE scalings, against their formulas in Python's own float64 and Hugging Face Transformers."""

import cmath
import dataclasses
import math

import pytest
import torch

from rope_fairseq.errors import UserError
from rope_fairseq.position import rope
from rope_fairseq.position.options import PositionOptions
from rope_fairseq.position.rope import RotaryPositionEncoding
from rope_fairseq.rotary import (
    LAYOUTS,
    SCALINGS,
    RotarySpec,
    attention_factor,
    dynamic_table,
    inverse_frequencies,
    rotation_table,
)
from tests.rotations import rotate, table_of
from tests.test_invariants import collate, sentences

CPU = torch.device("cpu")
# Half a unit in the last place of a float32 between 1/2 and 1. Of yarn's cos and sin, which may be
# above 1, it is a quarter.
ROUNDED_ONCE = 2.0**-25 * 1.01

# Each with the length of a sentence; only dynamic looks at it.
SPECS = [
    (RotarySpec(16), 700),
    (RotarySpec(16, scaling="linear", factor=4.0), 700),
    (RotarySpec(16, scaling="ntk", factor=4.0), 700),
    (RotarySpec(4, 500.0, "half", "ntk", 2.5), 700),
    (RotarySpec(16, scaling="dynamic", factor=2.0, original_max_positions=512), 700),
    (RotarySpec(16, scaling="dynamic", factor=2.0, original_max_positions=512), 512),
    (RotarySpec(6, 100.0, "half", "dynamic", 1.0, 10), 11),
    (RotarySpec(16, scaling="yarn", factor=4.0, original_max_positions=512), 700),
    (RotarySpec(64, 500.0, "half", "yarn", 16.0, 2048), 700),
]
every_spec = pytest.mark.parametrize(
    ("spec", "length"), SPECS, ids=[f"{spec.scaling}-{spec.dim}-{n}" for spec, n in SPECS]
)


def scaled_base(spec: RotarySpec, scale: float) -> float:
    return spec.base * scale ** (spec.dim / (spec.dim - 2))


def yarn_share(spec: RotarySpec, i: int) -> float:
    """How far pair i, counted from 0, is interpolated."""

    def pair_that_turns(times: int) -> float:
        wavelength = spec.original_max_positions / times
        return spec.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(spec.base))

    low = max(0, math.floor(pair_that_turns(32)))
    high = min(spec.dim - 1, math.ceil(pair_that_turns(1)))
    assert low < high, "a corner in which we differ"
    return 0.0 if i <= low else 1.0 if i >= high else (i - low) / (high - low)


def frequencies(spec: RotarySpec, length: int) -> list[float]:
    found = []
    for i in range(spec.dim // 2):
        base, exponent = spec.base, -2 * i / spec.dim
        if spec.scaling == "linear":
            found.append(base**exponent / spec.factor)
        elif spec.scaling == "yarn":
            share = yarn_share(spec, i)
            found.append((1 - share) * base**exponent + share * base**exponent / spec.factor)
        else:
            if spec.scaling == "ntk":
                base = scaled_base(spec, spec.factor)
            elif spec.scaling == "dynamic" and length > spec.original_max_positions:
                ratio = length / spec.original_max_positions
                base = scaled_base(spec, spec.factor * ratio - (spec.factor - 1))
            found.append(base**exponent)
    return found


def reference_table(spec: RotarySpec, length: int, positions: range) -> torch.Tensor:
    """Multiplied cos and sin [positions, dim/2, 2] in float64."""
    times = 0.1 * math.log(spec.factor) + 1 if spec.scaling == "yarn" else 1.0
    turns = [
        [times * cmath.exp(1j * m * theta) for theta in frequencies(spec, length)]
        for m in positions
    ]
    return torch.tensor([[[z.real, z.imag] for z in row] for row in turns], dtype=torch.float64)


def test_every_scaling_is_held_to_the_formulas():
    assert {spec.scaling for spec, _ in SPECS} == set(SCALINGS)


@every_spec
def test_frequencies_are_the_formulas(spec, length):
    if spec.scaling == "dynamic":
        unscaled = dataclasses.replace(spec, scaling="none")
        assert inverse_frequencies(spec).equal(inverse_frequencies(unscaled))
    else:
        found = inverse_frequencies(spec)
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx(frequencies(spec, length), rel=1e-14)


@every_spec
@pytest.mark.parametrize("first", [0, 1, 690, 99_990])
def test_tables_are_float32_and_accurate_to_the_last_bit(spec, length, first):
    table = table_of(spec, 10, first, length)
    assert table.dtype == torch.float32
    expected = reference_table(spec, length, range(first, first + 10))
    tolerance = ROUNDED_ONCE * (2 if spec.scaling == "yarn" else 1)
    torch.testing.assert_close(table.double(), expected, atol=tolerance, rtol=0)


def test_linear_puts_s_positions_where_one_was():
    table = rotation_table(RotarySpec(8, scaling="linear", factor=4.0), 400, CPU)
    assert table[::4].equal(rotation_table(RotarySpec(8), 100, CPU))


@pytest.mark.parametrize("factor", [1.0, 1.5, 8.0])
@pytest.mark.parametrize("dim", [4, 8, 64])
def test_ntk_leaves_the_highest_frequency_and_divides_the_lowest_by_the_factor(dim, factor):
    plain = inverse_frequencies(RotarySpec(dim)).tolist()
    scaled = inverse_frequencies(RotarySpec(dim, scaling="ntk", factor=factor)).tolist()
    assert scaled[0] == plain[0] == 1
    assert scaled[-1] == pytest.approx(plain[-1] / factor, rel=1e-14)
    divisors = [p / s for p, s in zip(plain, scaled, strict=True)]
    assert divisors == pytest.approx(sorted(divisors))


@pytest.mark.parametrize("original", [256, 1024, 4096])
@pytest.mark.parametrize("dim", [8, 64, 128])
def test_yarn_keeps_pairs_that_turn_often_and_divides_those_that_turn_less_than_once(dim, original):
    plain = inverse_frequencies(RotarySpec(dim))
    spec = RotarySpec(dim, scaling="yarn", factor=8.0, original_max_positions=original)
    kinds = set()
    for theta, scaled in zip(plain.tolist(), inverse_frequencies(spec).tolist(), strict=True):
        turns = original * theta / (2 * math.pi)
        if turns >= 32:
            kinds.add("kept")
            assert scaled == theta
        elif turns <= 1:
            kinds.add("divided")
            assert scaled == theta / 8
        else:
            kinds.add("between")
            assert theta / 8 < scaled < theta
    assert kinds == {"kept", "divided", "between"}


@pytest.mark.parametrize(
    ("base", "original", "kept"), [(10000.0, 3, 1), (10000.0, 6, 1), (1.001, 512, 8)]
)
def test_yarn_with_all_pairs_on_one_side_of_the_mixture(base, original, kept):
    """The ends of the mixture have changed places: a step, whose lower side is kept."""
    spec = RotarySpec(16, base, "interleaved", "yarn", 4.0, original)
    plain = inverse_frequencies(RotarySpec(16, base))
    expected = [*plain[:kept].tolist(), *(plain[kept:] / 4).tolist()]
    assert inverse_frequencies(spec).tolist() == expected


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 1.0), (math.e, 1.1), (math.e**5, 1.5)])
def test_only_yarn_has_an_attention_factor(factor, expected):
    for scaling in SCALINGS:
        spec = RotarySpec(8, 10000.0, "half", scaling, factor, 512)
        assert attention_factor(spec) == pytest.approx(expected if scaling == "yarn" else 1.0)


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn"])
def test_a_factor_of_one_scales_nothing(scaling):
    spec = RotarySpec(16, scaling=scaling, factor=1.0, original_max_positions=512)
    torch.testing.assert_close(
        rotation_table(spec, 600, CPU), rotation_table(RotarySpec(16), 600, CPU), atol=0, rtol=0
    )


@every_spec
def test_scores_depend_on_the_distance_alone(spec, length):
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, spec.dim + 2, dtype=torch.float64).expand(2, 40, spec.dim + 2)
    scores = rotate(q, spec, 0, length) @ rotate(k, spec, 0, length).T
    for distance in (-7, 0, 3, 20):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert abs(scores.diagonal(3)[0] - scores.diagonal(7)[0]) > 1e-3
    for offset in (1, 1000, 50_000):
        shifted = rotate(q, spec, offset, length) @ rotate(k, spec, offset, length).T
        torch.testing.assert_close(shifted, scores, atol=1e-5, rtol=0)


@every_spec
def test_norms_are_kept_and_multiplied_by_yarns_factor(spec, length):
    x = torch.randn(9, 2, spec.dim)
    out = rotate(x, spec, 5, length)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1) * attention_factor(spec))
    first = rotate(x, spec, 0, length)[0]
    torch.testing.assert_close(first, x[0] * attention_factor(spec))


@every_spec
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_a_fraction_only_that_part_is_rotated_and_counts(spec, length, layout):
    """d in the formulas is the number of rotated channels, and the rest is left alone."""
    options = PositionOptions(
        rope_base=spec.base,
        rope_layout=layout,
        rope_fraction=0.5,
        rope_scaling=spec.scaling,
        rope_scaling_factor=None if spec.scaling == "none" else spec.factor,
        rope_original_max_positions=spec.original_max_positions,
    )
    part = options.rotary_spec(2 * spec.dim)
    assert part == dataclasses.replace(spec, layout=layout)
    x = torch.randn(5, 2, 2 * spec.dim)
    out = rotate(x, part, 3, length)
    assert out[..., spec.dim :].equal(x[..., spec.dim :])
    assert out[..., : spec.dim].equal(rotate(x[..., : spec.dim], part, 3, length))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every_spec
def test_output_has_the_dtype_of_the_input_and_its_accuracy(spec, length, dtype):
    x = torch.randn(2, 3, spec.dim).to(dtype)
    out = rotate(x, spec, 4000, length)
    assert out.dtype == dtype
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    exact = rotate(x.double(), spec, 4000, length)
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


# Dynamic: each sentence has its own scale.


def dynamic(factor: float = 2.0, original: int = 8) -> RotarySpec:
    return RotarySpec(8, 100.0, "interleaved", "dynamic", factor, original)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_up_to_the_original_length_dynamic_is_no_scaling_to_the_bit(factor):
    lengths = torch.tensor([1, 7, 8, 9])
    table = dynamic_table(dynamic(factor), lengths, 30, 0)
    unscaled = rotation_table(RotarySpec(8, 100.0), 30, CPU)
    assert [row.equal(unscaled) for row in table] == [True, True, True, False]


def test_a_batch_of_mixed_lengths_is_each_alone():
    lengths = [20, 3, 8, 9, 1000, 1]
    table = dynamic_table(dynamic(), torch.tensor(lengths), 12, 5)
    for row, length in zip(table, lengths, strict=True):
        assert row.equal(dynamic_table(dynamic(), torch.tensor([length]), 12, 5)[0])
        expected = reference_table(dynamic(), length, range(5, 17))
        torch.testing.assert_close(row.double(), expected, atol=ROUNDED_ONCE, rtol=0)


def test_a_short_sentence_after_a_long_one_is_as_before_it():
    before = table_of(dynamic(original=6), 12, 0, length=9)
    table_of(dynamic(original=6), 5000, 0, length=5000)
    assert table_of(dynamic(original=6), 12, 0, length=9).equal(before)


@every_spec
def test_slices_from_an_offset_are_those_of_the_whole(spec, length):
    whole = table_of(spec, 40, 0, length)
    for offset in (0, 1, 17, 39):
        assert table_of(spec, 40 - offset, offset, length).equal(whole[offset:])
        assert table_of(spec, 1, offset, length).equal(whole[offset : offset + 1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_dynamic_waits_for_nothing_and_is_unscaled_to_the_bit():
    lengths = torch.tensor([1, 8, 9, 700], device="cuda")
    unscaled = rotation_table(RotarySpec(8, 100.0), 700, lengths.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        table = dynamic_table(dynamic(), lengths, 600, 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [row.equal(unscaled[100:]) for row in table] == [True, True, False, False]
    expected = dynamic_table(dynamic(), lengths.cpu(), 600, 100)
    torch.testing.assert_close(table.cpu(), expected, atol=1.2e-7, rtol=0)


def test_dynamic_has_no_table_of_its_own():
    with pytest.raises(ValueError, match="depends on the sentences' lengths"):
        rotation_table(dynamic(), 4, CPU)
    with pytest.raises(ValueError, match="needs the lengths"):
        RotaryPositionEncoding(dynamic()).rotation(4, 0, CPU)


def test_lengths_remember_the_table_of_each_question():
    """Encoder and decoder ask about the same lengths, and so may models of an ensemble."""
    lengths = torch.tensor([9, 30])

    def asked(spec: RotarySpec, extra: int, seq_len: int, offset: int) -> torch.Tensor:
        module = RotaryPositionEncoding(spec, target_extra=extra)
        return module.rotation(seq_len, offset, CPU, lengths).table

    for _ in range(2):
        for spec in (dynamic(), dynamic(factor=3.0), dynamic(original=9)):
            for extra, seq_len, offset in ((0, 30, 0), (5, 30, 0), (5, 1, 29), (5, 29, 1)):
                table = asked(spec, extra, seq_len, offset)
                assert table.shape == (2, seq_len, 1, 1, 4, 2)
                expected = dynamic_table(spec, lengths + extra, seq_len, offset)
                assert table[:, :, 0, 0].equal(expected)
    assert asked(dynamic(), 0, 5, 0).data_ptr() == asked(dynamic(), 0, 5, 0).data_ptr()
    before = asked(dynamic(), 0, 5, 0)
    lengths += 7
    expected = dynamic_table(dynamic(), lengths, 5, 0)
    assert asked(dynamic(), 0, 5, 0)[:, :, 0, 0].equal(expected)
    assert not before[:, :, 0, 0].equal(expected)


@pytest.mark.parametrize("lengths_too", [False, True])
def test_a_table_first_made_in_inference_mode_serves_training(lengths_too):
    spec, lengths = dynamic(original=5), torch.tensor([4, 6])
    module = RotaryPositionEncoding(spec, target_extra=1)
    with torch.inference_mode():
        if lengths_too:
            lengths = lengths.clone()
        assert not module.rotation(6, 0, CPU, lengths).table.requires_grad
    table = module.rotation(6, 0, CPU, lengths).table
    scale = torch.ones(2, requires_grad=True)
    (table * scale).sum().backward()
    assert scale.grad.isfinite().all()


# Tables are shared by equal specs only.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (dict(scaling="linear", factor=2.0), dict(scaling="linear", factor=4.0)),
        (dict(scaling="ntk", factor=2.0), dict(scaling="ntk", factor=4.0)),
        (dict(scaling="linear", factor=2.0), dict(scaling="ntk", factor=2.0)),
        (dict(scaling="linear", factor=2.0), dict()),
        (
            dict(scaling="yarn", factor=2.0, original_max_positions=512),
            dict(scaling="yarn", factor=4.0, original_max_positions=512),
        ),
        (
            dict(scaling="yarn", factor=2.0, original_max_positions=512),
            dict(scaling="yarn", factor=2.0, original_max_positions=2048),
        ),
    ],
    ids=str,
)
def test_specs_that_differ_in_one_number_share_no_table(one, other):
    first, second = RotarySpec(16, 9999.0, **one), RotarySpec(16, 9999.0, **other)
    for spec in (first, second, first, second):
        found = rotation_table(spec, 60, CPU).double()
        expected = reference_table(spec, 60, range(60))
        torch.testing.assert_close(found, expected, atol=2 * ROUNDED_ONCE, rtol=0)
    assert not rotation_table(first, 60, CPU).equal(rotation_table(second, 60, CPU))


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn"])
def test_layouts_share_one_table_which_grows(scaling):
    interleaved, half = (RotarySpec(8, 31.0, name, scaling, 3.0, 99) for name in LAYOUTS)
    short = rotation_table(interleaved, 5, CPU)
    assert rotation_table(half, 7, CPU).data_ptr() == short.data_ptr()
    longer = rotation_table(half, 1000, CPU)
    assert longer[:5].equal(short) and longer.size(0) == 1000


OPTIONS = {
    "none": dict(),
    "linear": dict(rope_scaling_factor=4.0),
    "ntk": dict(rope_scaling_factor=4.0),
    "dynamic": dict(rope_scaling_factor=4.0, rope_original_max_positions=64),
    "yarn": dict(rope_scaling_factor=4.0, rope_original_max_positions=64),
}
every_scaling = pytest.mark.parametrize("scaling", SCALINGS)


@every_scaling
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"])
def test_a_model_in_half_precision_turns_by_float32_tables(small, monkeypatch, scaling, dtype):
    """The tables that reach the attention, at positions that half precision cannot tell apart."""
    seen = []
    rotation = rope.Rotation

    def spy(table: torch.Tensor, layout: str) -> rope.Rotation:
        seen.append(table)
        return rotation(table, layout)

    monkeypatch.setattr(rope, "Rotation", spy)
    model = small(rope_scaling=scaling, **OPTIONS[scaling])
    source = collate(sentences([300]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        (model if dtype == "autocast" else model.to(dtype)).encoder(source, torch.tensor([300]))
    assert len(seen) == 2
    spec = model.encoder.layers[0].self_attn.position.spec
    for table in seen:
        assert table.dtype == torch.float32
        expected = reference_table(spec, 300, range(300))
        found = table.reshape(expected.shape).double()
        torch.testing.assert_close(found, expected, atol=2 * ROUNDED_ONCE, rtol=0)


@every_scaling
def test_the_scaling_is_no_part_of_a_checkpoint_and_changes_what_a_model_says(small, scaling):
    """As --model-overrides does at test time."""
    plain, model = small(), small(rope_scaling=scaling, seed=7, **OPTIONS[scaling])
    model.load_state_dict(plain.state_dict())
    source = collate(sentences([80]))
    found, expected = (
        m.encoder(source, torch.tensor([80]))["encoder_out"][0] for m in (model, plain)
    )
    if scaling == "none":
        assert found.equal(expected)
    else:
        assert (found - expected).abs().max() > 1e-2


DYNAMIC = dict(
    rope_scaling="dynamic",
    rope_base=100.0,
    rope_scaling_factor=2.0,
    rope_original_max_positions=6,
    rope_target_extra=3,
)
# Source lengths: in the encoder scaled, scaled, not; in the decoder, 3 longer, all but the last.
MIXED = [15, 7, 6, 4, 2]


def encoded(model, lengths, left=True, width=None):
    source = collate(sentences(lengths), left, width)
    return model.encoder(source, torch.tensor(lengths))


@torch.no_grad()
def test_dynamic_step_by_step_is_all_at_once(small):
    model = small(**DYNAMIC)
    encoder_out = encoded(model, MIXED)
    target = collate(sentences([25] * 5, seed=1))
    full, _ = model.decoder(target, encoder_out=encoder_out)
    state: dict = {}
    for step in range(25):
        logits, _ = model.decoder(
            target[:, : step + 1], encoder_out=encoder_out, incremental_state=state
        )
        torch.testing.assert_close(logits[:, 0], full[:, step], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("width", [None, 40])
def test_a_dynamic_batch_is_each_sentence_alone(small, left, width):
    """A length is a sentence's own: neither that of the batch nor its width."""
    model = small(**DYNAMIC)
    rows = sentences(MIXED)
    batch = encoded(model, MIXED, left, width)
    target = collate(sentences([9] * 5, seed=1))
    out, _ = model.decoder(target, encoder_out=batch)
    for i, row in enumerate(rows):
        alone = model.encoder(row[None], torch.tensor([len(row)]))
        states = batch["encoder_out"][0][~batch["encoder_padding_mask"][0][i], i]
        torch.testing.assert_close(states, alone["encoder_out"][0][:, 0], atol=1e-5, rtol=0)
        single, _ = model.decoder(target[i : i + 1], encoder_out=alone)
        torch.testing.assert_close(out[i], single[0], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("length", MIXED)
def test_a_dynamic_model_is_one_with_the_base_of_its_length(small, length):
    """The encoder's length is the source's, the decoder's that and rope_target_extra."""
    model = small(**DYNAMIC)

    def with_base_of(total: int):
        scale = 2.0 * max(total, 6) / 6 - 1
        other = small(rope_base=100.0 * scale ** (8 / 6), seed=5)
        other.load_state_dict(model.state_dict())
        return other

    encoder_out = encoded(model, [length])
    expected = encoded(with_base_of(length), [length])["encoder_out"][0]
    torch.testing.assert_close(encoder_out["encoder_out"][0], expected, atol=1e-5, rtol=0)
    target = collate(sentences([20], seed=1))
    out, _ = model.decoder(target, encoder_out=encoder_out)
    same, _ = with_base_of(length + 3).decoder(target, encoder_out=encoder_out)
    torch.testing.assert_close(out, same, atol=1e-5, rtol=0)
    if length > 3:
        other, _ = with_base_of(length).decoder(target, encoder_out=encoder_out)
        assert (out - other).abs().max() > 1e-4


@torch.no_grad()
def test_the_length_of_a_target_does_not_change_a_dynamic_decoder(small):
    model = small(**DYNAMIC)
    encoder_out = encoded(model, MIXED)
    target = collate(sentences([30] * 5, seed=1))
    whole, _ = model.decoder(target, encoder_out=encoder_out)
    for end in (1, 5, 12):
        out, _ = model.decoder(target[:, :end], encoder_out=encoder_out)
        torch.testing.assert_close(out, whole[:, :end], atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_dynamic_model_is_unscaled_up_to_the_original_length(small):
    options = {**DYNAMIC, "rope_original_max_positions": 18}  # 15 and the 3 of a target
    model, plain = small(**options), small(rope_base=100.0)
    target = collate(sentences([9] * 5, seed=1))
    found, expected = (m.decoder(target, encoder_out=encoded(m, MIXED))[0] for m in (model, plain))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


# Against another program.


def hugging_face(spec: RotarySpec, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    pytest.importorskip("transformers", minversion="5")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(
        rope_type=spec.scaling,
        rope_theta=spec.base,
        factor=spec.factor,
        partial_rotary_factor=spec.dim / head_dim,
    )
    if spec.scaling == "yarn":
        parameters["original_max_position_embeddings"] = spec.original_max_positions
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=spec.original_max_positions,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[spec.scaling](config, "cpu", seq_len=length)


@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0])
@pytest.mark.parametrize("original", [7, 64, 201, 512, 4096])
@pytest.mark.parametrize(
    ("dim", "head_dim", "base"),
    [(8, 8, 10000.0), (64, 64, 10000.0), (32, 64, 500.0), (128, 128, 1e6), (4, 8, 10000.0)],
)
@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_hugging_face_scales_alike(scaling, dim, head_dim, base, original, factor):
    spec = RotarySpec(dim, base, "half", scaling, factor, original)
    theirs, times = hugging_face(spec, head_dim, 5000)
    found = inverse_frequencies(spec).float()
    torch.testing.assert_close(found, theirs, rtol=3e-6, atol=0)
    assert attention_factor(spec) == pytest.approx(times)


@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0])
@pytest.mark.parametrize("length", [3, 512, 513, 5000])
@pytest.mark.parametrize(("dim", "head_dim"), [(8, 8), (32, 64), (128, 128)])
def test_hugging_face_scales_a_single_sentence_alike(dim, head_dim, length, factor):
    """Its dynamic scaling takes the longest sentence of a batch: with one sentence, ours."""
    spec = RotarySpec(dim, 10000.0, "half", "dynamic", factor, 512)
    theirs, times = hugging_face(spec, head_dim, length)
    assert times == 1
    table = dynamic_table(spec, torch.tensor([length]), 2, 0)[0, 1].double()
    angle = torch.atan2(table[:, 1], table[:, 0])  # of position 1: the frequency itself
    torch.testing.assert_close(angle.float(), theirs, rtol=3e-6, atol=0)


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(scaling="linear", factor=0.5), "scaling factor 0.5: must be a number of at least 1"),
        (dict(scaling="ntk", factor=0.0), "scaling factor 0.0: "),
        (dict(scaling="yarn", factor=-2.0, original_max_positions=9), "scaling factor -2.0: "),
        (dict(scaling="linear", factor=math.inf), "scaling factor inf: "),
        (dict(scaling="linear", factor=math.nan), "scaling factor nan: "),
        (dict(scaling="dynamic"), "scaling dynamic: needs original_max_positions"),
        (dict(scaling="yarn", factor=2.0), "scaling yarn: needs original_max_positions"),
        (dict(scaling="dynamic", original_max_positions=0), "original_max_positions 0: "),
        (dict(original_max_positions=-5), "original_max_positions -5: must be at least 1"),
        (dict(dim=2, scaling="ntk", factor=2.0), "scaling ntk: needs at least 4 rotated channels"),
        (
            dict(dim=2, scaling="dynamic", original_max_positions=9),
            "scaling dynamic: needs at least 4 rotated channels",
        ),
        (
            dict(base=1.0, scaling="yarn", factor=2.0, original_max_positions=9),
            "base 1.0: must be above 1 with scaling yarn",
        ),
    ],
    ids=str,
)
def test_specs_outside_the_range_are_refused(arguments, message):
    with pytest.raises(ValueError) as caught:
        RotarySpec(**{"dim": 8, **arguments})
    assert str(caught.value).startswith(message)


LONGER = dict(rope_scaling_factor=2.0, rope_original_max_positions=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rope_scaling="magic"), "--rope-scaling magic: choose from none, linear, ntk,"),
        *(
            (dict(rope_scaling=name, rope_scaling_factor=value), f"--rope-scaling-factor {value}: ")
            for name in ("none", "linear", "ntk")
            for value in (0.99, 0.0, -1.0, math.inf, math.nan)
        ),
        *(
            (
                dict(rope_scaling=name, rope_original_max_positions=9),
                f"--rope-scaling {name}: needs --rope-scaling-factor, ",
            )
            for name in ("linear", "ntk", "yarn")
        ),
        *(
            (
                dict(rope_scaling=name, rope_scaling_factor=2.0),
                f"--rope-scaling {name}: needs --rope-original-max-positions, ",
            )
            for name in ("dynamic", "yarn")
        ),
        (
            dict(rope_scaling="dynamic", rope_original_max_positions=0),
            "--rope-original-max-positions 0: must be at least 1",
        ),
        (
            dict(rope_scaling="dynamic", rope_original_max_positions=9, rope_target_extra=-1),
            "--rope-target-extra -1: must be at least 0",
        ),
        (dict(rope_scaling="yarn", rope_base=1.0, **LONGER), "--rope-base 1: must be above 1"),
        (dict(rope_scaling="yarn", rope_base=0.5, **LONGER), "--rope-base 0.5: must be above 1"),
    ],
    ids=str,
)
def test_options_outside_the_range_are_refused_in_one_line(options, message):
    with pytest.raises(UserError) as caught:
        PositionOptions(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scaling", ["ntk", "dynamic"])
def test_two_rotated_channels_are_refused_when_the_model_is_built(small, scaling):
    options = dict(rope_scaling=scaling, rope_fraction=0.25, **LONGER)  # of 8 channels
    with pytest.raises(UserError) as caught:
        small(**options)
    message = str(caught.value)
    assert message.startswith(f"--rope-scaling {scaling}: needs at least 4 rotated channels a head")
    assert "--rope-fraction 0.25" in message and "\n" not in message
    for other in ("linear", "yarn"):
        small(**{**options, "rope_scaling": other})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(), "rope (base 10000, layout interleaved, fraction 1, scaling none)"),
        (
            dict(rope_scaling="linear", rope_scaling_factor=2.0, rope_layout="half"),
            "rope (base 10000, layout half, fraction 1, scaling linear, factor 2)",
        ),
        (
            dict(rope_scaling="ntk", rope_scaling_factor=2.5, rope_base=500.0),
            "rope (base 500, layout interleaved, fraction 1, scaling ntk, factor 2.5)",
        ),
        (
            dict(rope_scaling="dynamic", rope_original_max_positions=99),
            "rope (base 10000, layout interleaved, fraction 1, scaling dynamic, factor 1, "
            "original max positions 99, target length source + 50)",
        ),
        (
            dict(rope_scaling="yarn", rope_fraction=0.5, **LONGER),
            "rope (base 10000, layout interleaved, fraction 0.5, scaling yarn, factor 2, "
            "original max positions 9)",
        ),
        (dict(encoding="none", rope_base=500), "none"),
    ],
    ids=str,
)
def test_the_training_log_says_what_acts(options, text):
    assert PositionOptions(**options).describe() == text
