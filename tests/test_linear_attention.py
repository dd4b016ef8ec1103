"""Linear attention equals its quadratic formula, pair by pair in float64; extremes stay finite."""

import cmath
import math
from itertools import product

import pytest
import torch

from rope_fairseq import linear_attention
from rope_fairseq.feature_maps import FEATURE_MAPS, build_feature_map
from rope_fairseq.linear_attention import (
    CHUNK,
    SMALLEST_SHARE,
    attend_causally,
    attend_linearly,
)
from rope_fairseq.multihead_linear_attention import LinearSelfAttention
from rope_fairseq.rotary import RotarySpec, Rotation, rotation_table

BATCH, HEADS, HEAD_DIM = 2, 2, 6
every_map = pytest.mark.parametrize("name", FEATURE_MAPS)


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rotation(dim, seq_len, layout="interleaved", offset=0, base=10000.0):
    table = rotation_table(RotarySpec(dim, base), offset + seq_len, torch.device("cpu"))[offset:]
    return Rotation(table[..., None, None, :, :], layout)


def phi(name, q, k, projection=None):
    """Features of one query and one key, lists of floats, by the papers' formulas; those of the
    query up to a factor of its own."""
    if name == "elu":
        return [[x + 1 if x > 0 else math.exp(x) for x in vector] for vector in (q, k)]
    if name == "softmax":
        total = sum(map(math.exp, q))
        return [math.exp(x) / total for x in q], [math.exp(x) for x in k]
    scale = len(q) ** -0.25
    return [
        [
            math.exp(
                scale * sum(w * x for w, x in zip(omega, vector, strict=True))
                - scale**2 * sum(x * x for x in vector) / 2
            )
            / math.sqrt(len(projection))
            for omega in projection
        ]
        for vector in (q, k)
    ]


def formula(name, q, k, v, *, dim, causal, base=10000.0, padding=None, projection=None):
    """Equation 19 of RoFormer for q, k, v [batch, heads, seq_len, head_dim]; the first ``dim``
    features are rotated, two neighbours being one complex number."""
    out = torch.zeros_like(v)
    batch, heads, seq_len, _ = q.shape
    for b, h, m in product(range(batch), range(heads), range(seq_len)):
        numerator, denominator = torch.zeros(v.size(3), dtype=v.dtype), 0.0
        for n in range(m + 1 if causal else seq_len):
            if padding is not None and padding[b, n]:
                continue
            a, c = phi(name, q[b, h, m].tolist(), k[b, h, n].tolist(), projection)
            score = sum(x * y for x, y in zip(a[dim:], c[dim:], strict=True))
            for i in range(0, dim, 2):
                turn = cmath.exp(1j * (m - n) * base ** (-i / dim))
                score += (complex(a[i], a[i + 1]) * turn * complex(c[i], -c[i + 1])).real
            numerator += score * v[b, h, n]
            denominator += sum(x * y for x, y in zip(a, c, strict=True))
        if denominator:
            out[b, h, m] = numerator / denominator
    return out


def attend(name, q, k, v, *, dim=0, causal=False, padding=None, features=None):
    torch.manual_seed(3)
    build = build_feature_map(name, q.size(3), features)
    turn = rotation(dim, q.size(2)) if dim else None
    arguments = dict(rotation=turn, key_padding_mask=padding)
    if causal:
        return attend_causally(build.query(q), build.key(k), v, **arguments)[0], build
    return attend_linearly(build.query(q), build.key(k), v, **arguments), build


@every_map
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [0, 4, 6])
def test_the_formula_pair_by_pair(monkeypatch, name, causal, dim):
    monkeypatch.setattr(linear_attention, "CHUNK", 4)  # 11 positions: two whole chunks and a part
    q, k, v = (numbers(BATCH, HEADS, 11, HEAD_DIM, seed=seed) for seed in range(3))
    padding = torch.zeros(BATCH, 11, dtype=torch.bool)
    padding[0, :2] = padding[1, 8:] = True  # row 0: queries that see no key under the causal mask
    features = {"favor": 6}.get(name)
    actual, built = attend(
        name, q, k, v, dim=dim, causal=causal, padding=padding, features=features
    )
    projection = getattr(built, "projection", None)
    projection = None if projection is None else projection.double().tolist()
    expected = formula(
        name, q, k, v, dim=dim, causal=causal, padding=padding, projection=projection
    )
    assert actual.dtype == torch.float64
    # The table of a rotation is float32, and rounded to half a unit in its last place.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 if dim else 1e-11)
    if causal:
        assert actual[0, :, :2].eq(0).all()


@every_map
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(monkeypatch, name, causal):
    monkeypatch.setattr(linear_attention, "CHUNK", 2)
    inputs = [numbers(1, 1, 5, 2, seed=seed).requires_grad_() for seed in range(3)]
    padding = torch.tensor([[True, False, False, False, True]])

    def out(q, k, v):
        return attend(name, q, k, v, dim=2, causal=causal, padding=padding)[0]

    assert torch.autograd.gradcheck(out, inputs)


@every_map
def test_chunks_of_any_size_give_the_same(monkeypatch, name):
    q, k, v = (numbers(1, 2, 70, HEAD_DIM, seed=seed) for seed in range(3))
    expected, _ = attend(name, q, k, v, dim=6, causal=True)
    for chunk in (1, 3, 35, 69, 70, 71):
        monkeypatch.setattr(linear_attention, "CHUNK", chunk)
        actual, _ = attend(name, q, k, v, dim=6, causal=True)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@every_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rotated", [False, True])
def test_long_inputs_in_every_precision(name, dtype, rotated):
    """Against float64 with the same rounded inputs; 20,000 features of size 1 add up to more than
    bfloat16 can count and near what float16 can hold."""
    q, k, v = (numbers(1, 1, 20_000, 8, seed=seed).to(dtype) for seed in range(3))
    dim = 8 if rotated else 0
    for causal in (False, True):
        expected, _ = attend(name, q.double(), k.double(), v.double(), dim=dim, causal=causal)
        actual, _ = attend(name, q, k, v, dim=dim, causal=causal)
        assert actual.dtype == dtype
        step = torch.finfo(dtype).eps
        scale = expected.abs().clamp(min=0.05 if dim else 0.01)
        assert ((actual.double() - expected).abs() / scale).max() < max(step, 2e-4)


EXTREMES = [-1e30, -1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4]


@every_map
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_queries_and_keys_stay_finite(name, rotated, dtype):
    """Features of all sizes, denominators near 0: output and gradients finite, output bounded. (At
    the bound a gradient can be more than float16 holds: then the loss scaler skips the update.)"""
    finite = [x for x in EXTREMES if abs(x) <= torch.finfo(dtype).max]
    for causal, of_query, of_key in product((False, True), finite, finite):
        if name == "favor" and max(abs(of_query), abs(of_key)) > 1e4:
            continue  # its square is no float32
        q, k, v = (numbers(1, 1, 70, 8, seed=seed).to(dtype) for seed in range(3))
        q[..., ::2] = of_query
        k[..., 1::2] = of_key
        for x in (q, k, v):
            x.requires_grad_()
        dim = 8 if rotated else 0
        out, built = attend(name, q, k, v, dim=dim, causal=causal)
        bound = v.abs().max()
        if rotated:
            longest = v.norm(dim=-1).max()
            bound = longest * math.sqrt(built.dim) / SMALLEST_SHARE
        assert out.isfinite().all() and out.abs().max() <= bound * 1.01
        gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
        if dtype != torch.float16:
            assert all(gradient.isfinite().all() for gradient in gradients), (of_query, of_key)


def test_an_unbounded_quotient_is_bounded():
    """φ(q) and ϕ(k) all but orthogonal, and turned into each other by the rotation: the quotient
    of equation 19 would be 10¹³ times the value."""
    q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[1e-13, 1.0]])
    q, k = (x.expand(1, 1, 3, 2).contiguous() for x in (q, k))
    v = torch.ones(1, 1, 3, 2)
    turn = rotation(2, 3)
    out, _ = attend_causally(q, k, v, rotation=turn)
    assert out[0, 0, 2].abs().max() == pytest.approx(
        (math.sin(1) + math.sin(2)) / 3 / SMALLEST_SHARE, rel=1e-4
    )
    plain, _ = attend_causally(q, k, v)
    torch.testing.assert_close(plain, v)


def test_above_the_bound_nothing_is_changed():
    """Just above the smallest share the quotient is that of the formula."""
    cosine = 1.01 * SMALLEST_SHARE
    q = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[cosine, math.sqrt(1 - cosine**2)]]]], dtype=torch.float64)
    v = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    out = attend_linearly(q, k, v, rotation=rotation(2, 1))
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_no_key_at_all_gives_zero_and_finite_gradients(name):
    inputs = [numbers(1, 1, 3, 4, seed=seed).requires_grad_() for seed in range(3)]
    for causal in (False, True):
        padding = torch.ones(1, 3, dtype=torch.bool)
        out, _ = attend(name, *inputs, dim=4, causal=causal, padding=padding)
        assert out.eq(0).all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


def module(name="elu", seed=0, **options):
    torch.manual_seed(seed)
    features = build_feature_map(name, 4)
    return LinearSelfAttention(
        8, 2, feature_map=features, self_attention=True, causal=True, **options
    ).eval()


@pytest.mark.parametrize(("name", "length"), [("elu", 4096), ("softmax", 300), ("favor", 300)])
@torch.no_grad()
def test_a_decoding_state_of_constant_size(name, length):
    """Its bytes stay the same over all steps, whose outputs are those of the full pass."""
    attention = module(name)
    x = numbers(length, 3, 8, dtype=torch.float32)
    state, sizes, outputs = {}, set(), []
    for step in range(length):
        out, _ = attention(x[step : step + 1], None, None, None, state, need_weights=False)
        (saved,) = state.values()
        kept = saved["linear_state"]
        sizes.add(sum(t.untyped_storage().nbytes() for t in (kept.values, kept.keys)))
        outputs.append(out)
    assert len(sizes) == 1 and set(saved) == {"linear_state"}
    future = torch.ones(length, length).triu(1)
    full, _ = attention(x, None, None, need_weights=False, attn_mask=future)
    torch.testing.assert_close(torch.cat(outputs), full, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_prefix_of_several_positions_at_once():
    attention = module()
    x = numbers(9, 2, 8, dtype=torch.float32)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, :3] = True
    mask = torch.ones(9, 9).triu(1)
    full, _ = attention(x, None, None, padding, need_weights=False, attn_mask=mask)
    state, parts = {}, []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        # A mask of all positions so far serves as well as one of the new ones.
        given = padding[:, start:end] if start != 4 else padding[:, :end]
        out, _ = attention(x[start:end], None, None, given, state, need_weights=False)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), full)


def test_what_it_cannot_do_is_refused():
    attention, x = module(), numbers(3, 1, 8, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="weights"):
        attention(x, x, x)
    attention.causal = False
    with pytest.raises(NotImplementedError, match="attn_mask"):
        attention(x, x, x, need_weights=False, attn_mask=torch.ones(3, 3))


def test_memory_of_causal_training_is_linear():
    """No tensor that is saved for the gradient grows with the square of the length."""
    sizes = []
    for seq_len in (8 * CHUNK, 16 * CHUNK):
        saved = []

        def pack(tensor, saved=saved):
            saved.append(tensor.numel())
            return tensor

        q, k, v = (
            numbers(1, 1, seq_len, 8, seed=s, dtype=torch.float32).requires_grad_()
            for s in range(3)
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attend("elu", q, k, v, dim=8, causal=True)
        sizes.append(sum(saved))
    assert sizes[1] <= 2 * sizes[0]
