"""The rotation, against complex arithmetic in float64 and the paper's own formula.

Scalings are in test_rope_scaling.py.
"""

import copy
import math

import pytest
import torch

from rope_fairseq.rotary import (
    LAYOUTS,
    RotarySpec,
    Rotation,
    convert_layout,
    inverse_frequencies,
    layout_permutation,
    rotate_pairs_,
    rotation_table,
)
from tests.rotations import rotate

CPU = torch.device("cpu")


def reference(x: torch.Tensor, spec: RotarySpec, offset: int = 0) -> torch.Tensor:
    """z_i · exp(i·m·theta_i) one number at a time, in Python's complex arithmetic (float64)."""
    out = x.double().clone()
    half = spec.dim // 2
    for m in range(x.size(0)):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if spec.layout == "interleaved" else (i, i + half)
            angle = (m + offset) * spec.base ** (-2 * i / spec.dim)
            turn = complex(math.cos(angle), math.sin(angle))
            rows = x[m].reshape(-1, x.size(-1)).double()
            turned = [complex(row[a], row[b]) * turn for row in rows]
            flat = out[m].view(-1, x.size(-1))
            flat[:, a] = torch.tensor([z.real for z in turned])
            flat[:, b] = torch.tensor([z.imag for z in turned])
    return out


def test_frequencies_are_the_papers():
    theta = inverse_frequencies(RotarySpec(8, 10000.0))
    expected = [10000.0 ** (-2 * (i - 1) / 8) for i in range(1, 5)]
    assert theta.dtype == torch.float64
    assert theta.tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim, head_dim", [(8, 8), (4, 8), (2, 2), (6, 10)])
@pytest.mark.parametrize("offset", [0, 1, 777])
def test_rotation_equals_complex_arithmetic(layout, dim, head_dim, offset):
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3, head_dim, dtype=torch.float64)
    spec = RotarySpec(dim, 100.0, layout)
    # float64 input: what is left is the float32 rounding of cos and sin.
    torch.testing.assert_close(
        rotate(x, spec, offset), reference(x, spec, offset), atol=5e-7, rtol=0
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim, head_dim", [(8, 8), (4, 8), (6, 10), (4, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_in_place_on_a_part_of_memory_is_the_same_and_leaves_the_rest(layout, dim, head_dim, dtype):
    torch.manual_seed(0)
    block = torch.randn(2, 5, 3, 4, head_dim).to(dtype)  # [batch, seq_len, parts, heads, head_dim]
    before = block.clone()
    spec = RotarySpec(dim, 100.0, layout)
    turn = Rotation(rotation_table(spec, 5, CPU)[:, None, None], layout)
    rotate_pairs_(block[:, :, :2], turn)
    expected = rotate(before[:, :, :2].transpose(0, 1), spec).transpose(0, 1)
    torch.testing.assert_close(block[:, :, :2], expected)
    assert torch.equal(block[:, :, 2], before[:, :, 2])
    assert not torch.equal(block[:, :, :2], before[:, :, :2])
    rotate_pairs_(block[:, :, :2], turn.transpose())
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(block, before, atol=tolerance, rtol=0)


def test_interleaved_is_the_papers_equation_34():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3, dtype=torch.float64)
    out = rotate(x, RotarySpec(4, 10000.0))[2]
    m, theta = 2, [1.0, 0.01]
    cos = [math.cos(m * t) for t in (theta[0], theta[0], theta[1], theta[1])]
    sin = [math.sin(m * t) for t in (theta[0], theta[0], theta[1], theta[1])]
    swapped = [-2.0, 1.0, -4.0, 3.0]
    expected = [v * c + w * s for v, c, w, s in zip(x[2].tolist(), cos, swapped, sin, strict=True)]
    assert out.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_position_zero_is_the_identity_and_norms_are_kept(layout):
    x = torch.randn(9, 2, 16)
    out = rotate(x, RotarySpec(16, layout=layout))
    assert torch.equal(out[0], x[0])
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_depend_on_the_distance_alone(layout):
    torch.manual_seed(1)
    spec = RotarySpec(16, layout=layout)
    q, k = torch.randn(2, 1, 16, dtype=torch.float64).expand(2, 40, 16)
    scores = rotate(q, spec) @ rotate(k, spec).T
    for distance in (-7, 0, 3, 20):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert scores.diagonal(3)[0] != pytest.approx(scores.diagonal(7)[0].item(), abs=1e-3)
    shifted = rotate(q, spec, 1000) @ rotate(k, spec, 1000).T
    torch.testing.assert_close(shifted, scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_has_the_dtype_of_the_input_and_its_accuracy(dtype):
    x = torch.randn(3, 2, 8).to(dtype)
    spec = RotarySpec(8)
    out = rotate(x, spec, 4000)
    assert out.dtype == dtype
    # Rounded once: half a unit in the last place of the exact result.
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(
        out.double(), reference(x, spec, 4000), atol=tolerance, rtol=tolerance
    )


def test_tables_are_float32_and_accurate_at_long_positions():
    spec = RotarySpec(64)
    table = rotation_table(spec, 4097, CPU)
    assert table.dtype == torch.float32
    angle = torch.arange(4097, dtype=torch.float64)[:, None] * inverse_frequencies(spec)
    torch.testing.assert_close(table[..., 0].double(), angle.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(table[..., 1].double(), angle.sin(), atol=1e-6, rtol=0)


def test_one_table_is_shared_and_grows():
    spec = RotarySpec(12, 321.0)
    short = rotation_table(spec, 3, CPU)
    same = rotation_table(RotarySpec(12, 321.0, "half"), 5, CPU)
    assert short.data_ptr() == same.data_ptr()
    longer = rotation_table(spec, 5000, CPU)
    assert longer.size(0) == 5000
    assert torch.equal(longer[:3], short)


def test_a_table_first_made_in_inference_mode_serves_training():
    spec = RotarySpec(6, 77.0)
    with torch.inference_mode():
        rotate(torch.randn(4, 6), spec)
    x = torch.randn(4, 6, requires_grad=True)
    rotate(x, spec).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert not rotation_table(spec, 4, CPU).requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_the_inverse_rotation(layout):
    x = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True)
    spec = RotarySpec(6, layout=layout)
    out = rotate(x, spec, 11)
    out.backward(out.detach())
    # R is orthogonal, so Rᵀ(Rx) = x.
    torch.testing.assert_close(x.grad, x.detach(), atol=1e-6, rtol=0)


def test_autocast_leaves_the_rotation_in_float32():
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rotate(x, RotarySpec(8), 4000)
    assert torch.equal(out, rotate(x, RotarySpec(8), 4000))


def test_layouts_are_a_permutation_of_each_other():
    torch.manual_seed(2)
    x = torch.randn(7, 3, 10)
    order = layout_permutation(8, 10, "interleaved", "half")
    back = layout_permutation(8, 10, "half", "interleaved")
    assert order[back].tolist() == list(range(10))
    interleaved = rotate(x, RotarySpec(8, layout="interleaved"))
    half = rotate(x[..., order], RotarySpec(8, layout="half"))
    torch.testing.assert_close(half[..., back], interleaved, atol=1e-6, rtol=0)


@pytest.mark.parametrize("source, target", [("interleaved", "half"), ("half", "interleaved")])
def test_a_converted_model_gives_the_same_output(small, source, target):
    model = small(rope_layout=source, rope_fraction=0.5)
    other = small(rope_layout=target, rope_fraction=0.5, seed=5)
    state = model.state_dict()
    other.load_state_dict(convert_layout(state, dim=4, num_heads=4, source=source, target=target))
    src, prev = torch.randint(4, 36, (2, 9)), torch.randint(4, 36, (2, 7))
    expected, _ = model(src, torch.tensor([9, 9]), prev)
    actual, _ = other(src, torch.tensor([9, 9]), prev)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    other.load_state_dict(state)
    unconverted, _ = other(src, torch.tensor([9, 9]), prev)
    assert (unconverted - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(dim=7), "7: must be even"),
        (dict(dim=0), "0: must be even"),
        (dict(dim=8, base=0.0), "base 0.0"),
        (dict(dim=8, base=-1.0), "base -1.0"),
        (dict(dim=8, base=math.nan), "base nan"),
        (dict(dim=8, base=math.inf), "base inf"),
        (dict(dim=8, layout="pairs"), "interleaved, half"),
        (dict(dim=8, scaling="magic"), "choose from none, linear"),
    ],
)
def test_specs_outside_the_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotarySpec(**arguments)


@pytest.mark.parametrize("change", ["half", "bfloat16", "deepcopy", "state_dict"])
def test_the_model_cannot_spoil_the_table(small, change):
    model = small()
    assert not [name for name in model.state_dict() if "position" in name or "rot" in name]
    if change == "deepcopy":
        copy.deepcopy(model)
    elif change == "state_dict":
        model.load_state_dict(model.state_dict())
    else:
        getattr(model, change)()
    spec = model.encoder.layers[0].self_attn.position.spec
    table = rotation_table(spec, 4097, CPU)
    angle = 4096 * inverse_frequencies(spec)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[4096, :, 0].double(), angle.cos(), atol=1e-6, rtol=0)


def test_hugging_face_roformer_rotates_alike():
    roformer = pytest.importorskip("transformers.models.roformer.modeling_roformer")
    head_dim, length = 16, 40
    positions = roformer.RoFormerSinusoidalPositionalEmbedding(length, head_dim)
    if hasattr(positions, "create_weight"):
        positions.weight.data.copy_(positions.create_weight())
    elif hasattr(positions, "_init_weight"):
        positions._init_weight()
    sinusoidal = positions(torch.Size([1, length]))[None, None]
    q, k = torch.randn(2, 1, 3, length, head_dim)  # [batch, heads, seq_len, head_dim]
    theirs = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings(sinusoidal, q, k)
    for mine, other in zip((q, k), theirs, strict=True):
        rotated = rotate(mine.permute(2, 0, 1, 3), RotarySpec(head_dim)).permute(1, 2, 0, 3)
        torch.testing.assert_close(rotated, other, atol=1e-5, rtol=0)


def test_hugging_face_llama_rotates_alike():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    head_dim, length = 16, 40
    angle = torch.outer(torch.arange(length).double(), inverse_frequencies(RotarySpec(head_dim)))
    cos, sin = (torch.cat((f, f), dim=-1).float()[None] for f in (angle.cos(), angle.sin()))
    q, k = torch.randn(2, 1, 3, length, head_dim)
    theirs = llama.apply_rotary_pos_emb(q, k, cos, sin)
    for mine, other in zip((q, k), theirs, strict=True):
        spec = RotarySpec(head_dim, layout="half")
        rotated = rotate(mine.permute(2, 0, 1, 3), spec).permute(1, 2, 0, 3)
        torch.testing.assert_close(rotated, other, atol=1e-5, rtol=0)
