"""The two ways to compute attention, and the module against fairseq's own."""

import pytest
import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rope_fairseq.attention import attend, attention_weights, causal_mask, padding_kind
from rope_fairseq.multihead_attention import PositionedAttention
from rope_fairseq.position import (
    PositionEncoding,
    PositionOptions,
    Side,
    build_position_encoding,
)
from rope_fairseq.precision import train_no_more, train_with
from rope_fairseq.projection import is_plain_linear
from rope_fairseq.rotary import RotarySpec, Rotation
from tests.rotations import rotate

HEADS, DIM = 4, 32
ENCODER = Side(DIM, HEADS, bidirectional=True)


def padding(lengths: list[int], width: int, left: bool = False) -> torch.Tensor:
    mask = torch.arange(width)[None, :] >= torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


def reference(q, k, v, key_padding_mask, causal, bias):
    """softmax(q·kᵀ/√d + bias)·v in float64, one query at a time; rows without a key give 0."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    batch, heads, tgt_len, _ = q.shape
    src_len = k.size(2)
    for b in range(batch):
        for h in range(heads):
            for t in range(tgt_len):
                keys = [
                    s
                    for s in range(src_len)
                    if not (key_padding_mask is not None and key_padding_mask[b, s])
                    and not (causal and s > t + src_len - tgt_len)
                ]
                if keys:
                    scores = k[b, h, keys] @ q[b, h, t] / q.size(-1) ** 0.5
                    if bias is not None:
                        scores = (
                            scores
                            + bias.double().expand(batch, heads, tgt_len, src_len)[b, h, t, keys]
                        )
                    out[b, h, t] = scores.softmax(0) @ v[b, h, keys]
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pads", [None, "right", "left", "one row wholly"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tgt_len", [6, 2])
def test_both_ways_equal_the_definition(causal, pads, with_bias, tgt_len):
    torch.manual_seed(0)
    q = torch.randn(3, 2, tgt_len, 8, requires_grad=True)
    k, v = (torch.randn(3, 2, 6, 8, requires_grad=True) for _ in range(2))
    lengths = {None: None, "right": [6, 4, 3], "left": [6, 4, 3], "one row wholly": [6, 0, 3]}[pads]
    mask = None if lengths is None else padding(lengths, 6, left=pads == "left")
    bias = torch.randn(1, 2, tgt_len, 6) if with_bias else None
    expected = reference(q, k, v, mask, causal, bias)
    fused = attend(q, k, v, key_padding_mask=mask, causal=causal, bias=bias)
    weights = attention_weights(q, k, key_padding_mask=mask, causal=causal, bias=bias)
    # Right-padded causal attention is exact at real queries only: nobody reads the others.
    real = torch.ones(3, tgt_len, dtype=torch.bool)
    if causal and mask is not None and padding_kind(mask) == "right":
        real = ~mask[:, 6 - tgt_len :]
    for out in (fused, torch.matmul(weights, v)):
        difference = (out.double() - expected).abs().amax(dim=(1, 3))
        assert difference[real].max() < 1e-5
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
        assert all(gradient.isfinite().all() for gradient in gradients)
    if mask is not None:
        assert weights.masked_select(mask[:, None, None, :]).eq(0).all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_any_key_give_zero_and_finite_gradients(dropout_p, dtype):
    q, k, v = (torch.randn(2, 2, 5, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True] * 5, [False] * 5])
    fused = attend(q, k, v, key_padding_mask=mask, dropout_p=dropout_p)
    weights = attention_weights(q, k, key_padding_mask=mask)
    explicit = torch.matmul(F.dropout(weights, dropout_p).to(dtype), v)
    for out in (fused, explicit):
        assert out[0].eq(0).all()
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v), retain_graph=True)
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_causal_mask_lines_up_at_the_end():
    assert causal_mask(2, 4, torch.device("cpu")).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
    ]


def test_right_padding_is_told_from_left_and_inner_padding_and_none():
    assert padding_kind(padding([3, 1, 0], 3)) == "right"
    assert padding_kind(padding([3, 1], 3, left=True)) == "other"
    assert padding_kind(torch.tensor([[False, True, False]])) == "other"
    assert padding_kind(padding([3, 3], 3)) == "none"


def make(kind: str, stock: bool, encoding: str = "none", **options):
    """One attention module with fixed weights: ours or fairseq's."""
    kwargs = dict(self_attention=True) if kind != "cross" else dict(encoder_decoder_attention=True)
    torch.manual_seed(3)
    if stock:
        module = MultiheadAttention(DIM, HEADS, **kwargs, **options)
    else:
        position = None
        if kind != "cross":
            position = build_position_encoding(PositionOptions(encoding), ENCODER)
        module = PositionedAttention(
            DIM, HEADS, position=position, causal=kind == "decoder", **kwargs, **options
        )
    return module.eval()


def future(length: int) -> torch.Tensor:
    return torch.full((length, length), float("-inf")).triu(1)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("need", ["nothing", "weights", "head weights"])
def test_without_an_encoding_it_is_fairseqs_attention(kind, left, need):
    ours, stock = make(kind, False), make(kind, True)
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in stock.named_parameters()
    }
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(7, 3, DIM)
    key = torch.randn(7, 3, DIM) if kind == "cross" else x
    mask = padding([7, 5, 2], 7, left)
    arguments = dict(
        key_padding_mask=mask,
        need_weights=need == "weights",
        need_head_weights=need == "head weights",
        attn_mask=future(7) if kind == "decoder" else None,
    )
    if kind == "cross":
        arguments["static_kv"] = True
    out, weights = ours(x, key, key, **arguments)
    expected, expected_weights = stock(x, key, key, **arguments)
    real = ~mask.T if kind != "cross" else torch.ones(7, 3, dtype=torch.bool)
    torch.testing.assert_close(out[real], expected[real], atol=1e-5, rtol=1e-5)
    assert (weights is None) == (need == "nothing")
    if need == "weights" or (need == "head weights" and kind == "cross"):
        rows = real.T if need == "weights" else real.T.expand(HEADS, 3, 7)
        torch.testing.assert_close(weights[rows], expected_weights[rows], atol=1e-5, rtol=1e-5)
    elif need == "head weights":
        # fairseq forgets to ask torch for the heads apart; we give them.
        assert weights.shape == (HEADS, 3, 7, 7)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_queries_and_keys_are_rotated_after_projection_per_head_and_values_are_not(layout):
    options = PositionOptions("rope", rope_base=50.0, rope_layout=layout, rope_fraction=0.5)
    torch.manual_seed(4)
    module = PositionedAttention(
        DIM, HEADS, position=build_position_encoding(options, ENCODER), self_attention=True
    )
    x = torch.randn(6, 2, DIM)
    out, _ = module(x, x, x, need_weights=False)
    split = lambda y: y.view(6, 2, HEADS, DIM // HEADS)  # noqa: E731
    spec = RotarySpec(DIM // HEADS // 2, 50.0, layout)
    q, k, v = (split(p(x)) for p in (module.q_proj, module.k_proj, module.v_proj))
    q, k, v = (y.permute(1, 2, 0, 3) for y in (rotate(q, spec), rotate(k, spec), v))
    expected = reference(q, k, v, None, False, None).permute(2, 0, 1, 3).reshape(6, 2, DIM)
    expected = module.out_proj(expected.float())
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_cross_attention_is_not_rotated():
    with pytest.raises(ValueError, match="self-attention"):
        PositionedAttention(
            DIM,
            HEADS,
            position=build_position_encoding(PositionOptions("rope"), ENCODER),
            encoder_decoder_attention=True,
        )
    assert type(make("cross", False).position) is PositionEncoding


@pytest.mark.parametrize("encoding", ["rope", "none"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_step_by_step_equals_all_at_once(encoding, need_weights):
    module = make("decoder", False, encoding)
    x = torch.randn(8, 3, DIM)
    full, full_weights = module(x, x, x, attn_mask=future(8), need_weights=need_weights)
    state: dict = {}
    for t in range(8):
        step, weights = module(
            x[t : t + 1], None, None, incremental_state=state, need_weights=need_weights
        )
        torch.testing.assert_close(step[0], full[t], atol=1e-5, rtol=1e-5)
        if need_weights:
            torch.testing.assert_close(
                weights[:, 0], full_weights[:, t, : t + 1], atol=1e-5, rtol=1e-5
            )


def test_cached_keys_are_rotated_once():
    module = make("decoder", False, "rope")
    x = torch.randn(5, 2, DIM)
    state: dict = {}
    for t in range(5):
        module(x[t : t + 1], None, None, incremental_state=state, need_weights=False)
    cached = module._get_input_buffer(state)["prev_key"]  # [batch, heads, seq_len, head_dim]
    keys = module.k_proj(x).view(5, 2, HEADS, -1)
    expected = rotate(keys, module.position.spec).permute(1, 2, 0, 3)
    torch.testing.assert_close(cached, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_beams_of_one_sentence_share_its_cross_attention_keys(need_weights):
    ours, beam = make("cross", False), 3
    memory = torch.randn(7, 2, DIM)
    mask = padding([7, 4], 7)
    query = torch.randn(1, 2 * beam, DIM)
    repeated = memory.repeat_interleave(beam, dim=1)
    repeated_mask = mask.repeat_interleave(beam, dim=0)
    arguments = dict(static_kv=True, need_weights=need_weights)
    expected, expected_weights = ours(query, repeated, repeated, repeated_mask, **arguments)
    ours.set_beam_size(beam)
    state: dict = {}
    for _ in range(2):  # the first call projects, the second reads the cache
        out, weights = ours(
            query, repeated, repeated, repeated_mask, incremental_state=state, **arguments
        )
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        if need_weights:
            torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-5)
    assert ours._get_input_buffer(state)["prev_key"].size(0) == 2
    # A training batch after a search has no beams: each sentence keeps its own keys.
    out, _ = ours(query, repeated, repeated, repeated_mask, **arguments)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_projections_are_fused_only_where_nothing_is_lost():
    plain = nn.Linear(4, 4)
    assert is_plain_linear(plain)
    hooked = nn.Linear(4, 4)
    hooked.register_forward_pre_hook(lambda module, args: None)
    assert not is_plain_linear(hooked)
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert not is_plain_linear(parametrized)


def test_quant_noise_keeps_acting():
    module = make("encoder", False, "rope", q_noise=0.5, qn_block_size=8).train()
    x = torch.randn(4, 2, DIM)
    before = module.q_proj.weight.clone()
    module(x, x, x, need_weights=False)
    assert not torch.equal(module.q_proj.weight, before)


def test_dropout_acts_in_training_alone_and_on_both_ways():
    module = make("encoder", False, "rope", dropout=0.5)
    x = torch.randn(6, 2, DIM)
    for need_weights in (False, True):
        module.eval()
        first, _ = module(x, x, x, need_weights=need_weights)
        again, _ = module(x, x, x, need_weights=need_weights)
        assert torch.equal(first, again)
        module.train()
        dropped, _ = module(x, x, x, need_weights=need_weights)
        assert not torch.allclose(first, dropped)


class AddedDistance(PositionEncoding):
    """An encoding that uses all three places of the interface."""

    has_value_term = True

    def rotation(self, seq_len, offset, device, lengths=None):
        # Not a rotation, but as linear: half of each channel.
        return Rotation(torch.tensor([0.5, 0.0]).expand(seq_len, 1, 1, 4, 2), "half")

    def score_bias(self, query, key, key_padding_mask):
        n = torch.arange(key.size(2))[None, :]
        m = n[0, -query.size(2) :, None]
        return -(m - n).abs().float()

    def value_term(self, weights):
        return weights.sum(-1, keepdim=True) * 3.0


def test_the_interface_carries_bias_and_value_terms_in_both_modes():
    torch.manual_seed(5)
    module = PositionedAttention(
        DIM, HEADS, position=AddedDistance(), causal=True, self_attention=True
    ).eval()
    x = torch.randn(6, 2, DIM)
    q, k, v = (
        p(x).view(6, 2, HEADS, -1).permute(1, 2, 0, 3)
        for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    distance = -(torch.arange(6)[:, None] - torch.arange(6)[None, :]).abs().double()
    expected = reference(q * 0.5, k * 0.5, v, None, True, distance) + 3.0
    expected = module.out_proj(expected.float().permute(2, 0, 1, 3).reshape(6, 2, DIM))
    full, _ = module(x, x, x, attn_mask=future(6), need_weights=False)
    torch.testing.assert_close(full, expected, atol=1e-5, rtol=1e-5)
    state: dict = {}
    for t in range(6):
        step, _ = module(x[t : t + 1], None, None, incremental_state=state, need_weights=False)
        torch.testing.assert_close(step[0], expected[t], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        (dict(causal=True), "flash"),
        (dict(causal=True, key_padding_mask=padding([7, 5, 2], 7)), "flash"),
        (dict(key_padding_mask=padding([7, 5, 2], 7)), "flash"),
        (dict(bias=torch.zeros(1, 1, 7, 7)), "flash"),
        # The CPU's fast kernel serves neither of these; both are right, and slower.
        (dict(dropout_p=0.1), "math"),
        (dict(bias=torch.zeros(1, 1, 7, 7, requires_grad=True)), "math"),
    ],
)
def test_which_kernel_runs_on_the_cpu(settings, kernel):
    q, k, v = (torch.randn(3, 2, 7, 8, requires_grad=True) for _ in range(3))
    with torch.profiler.profile() as profile:
        attend(q, k, v, **settings)
    ran = {event.key for event in profile.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in ran) == (kernel == "flash")
    assert ("aten::_scaled_dot_product_attention_math" in ran) == (kernel == "math")


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize(
    ("mask", "causal", "backend"),
    [
        # Right-padded causal targets: the causal mask alone, which flash attention serves.
        (padding([7, 5, 2], 7), True, SDPBackend.FLASH_ATTENTION),
        (None, True, SDPBackend.FLASH_ATTENTION),
        (padding([7, 5, 2], 7), False, SDPBackend.EFFICIENT_ATTENTION),
        (padding([7, 5, 2], 7, left=True), True, SDPBackend.EFFICIENT_ATTENTION),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_fast_kernels_serve_every_mask_on_a_gpu(mask, causal, backend, dtype):
    q, k, v = (torch.randn(3, 2, 7, 64, dtype=dtype, device="cuda") for _ in range(3))
    mask = None if mask is None else mask.cuda()
    with sdpa_kernel([backend]):  # fails where this kernel cannot run
        out = attend(q, k, v, key_padding_mask=mask, causal=causal)
    weights = attention_weights(q, k, key_padding_mask=mask, causal=causal)
    real = torch.ones(3, 7, dtype=torch.bool) if mask is None else ~mask.cpu()
    expected = torch.matmul(weights.to(dtype), v)
    difference = (out - expected).abs().amax(dim=(1, 3)).cpu()
    assert difference[real].max() < 0.02


@gpu
def test_a_step_of_self_attention_does_not_wait_for_the_gpu():
    position = build_position_encoding(PositionOptions("rope"), ENCODER)
    module = PositionedAttention(DIM, HEADS, position=position, self_attention=True).cuda()
    x = torch.randn(6, 2, DIM, device="cuda", requires_grad=True)
    module(x, x, x, need_weights=False)[0].sum().backward()  # makes the table
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x, x, x, need_weights=False)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_in_full_precision_whatever_that_of_other_products(causal, with_bias, padded):
    torch.manual_seed(0)
    shape = (3, HEADS, 9, DIM)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    bias = torch.randn(HEADS, 9, 9, requires_grad=True) if with_bias else None
    wanted = inputs if bias is None else [*inputs, bias]
    options = {"causal": causal, "bias": bias}
    options["key_padding_mask"] = padding([9, 5, 2], 9) if padded else None
    grad = torch.randn(shape)
    results = []
    try:
        for precision in ("highest", "medium"):
            if precision != "highest":
                train_with(precision)
            out = attend(*inputs, **options)
            assert torch.get_float32_matmul_precision() == precision
            # Twice: the graph is kept where the caller keeps it.
            torch.autograd.grad(out, wanted, grad, retain_graph=True)
            results.append([out, *torch.autograd.grad(out, wanted, grad)])
            with torch.no_grad():
                results[-1].append(attend(*inputs, **options))
            assert torch.get_float32_matmul_precision() == precision
    finally:
        train_no_more()
    for exact, mine in zip(*results, strict=True):
        assert torch.equal(exact, mine)


def test_it_can_be_compiled_and_used_beside_torchs_newer_switches_of_precision():
    query = torch.randn(2, HEADS, 5, DIM)
    explained = torch._dynamo.explain(lambda x: attend(x, x, x))(query)
    assert explained.graph_break_count == 0
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    try:
        attend(query, query, query)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
