"""The mathematics of attention, with and without explicit weights. No fairseq here.

Both functions compute softmax(scale·q·kᵀ + bias)·v under the same masks; a query whose keys are all
masked (not: whose bias is −inf everywhere) gives 0, with finite gradients, in both.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rope_fairseq.precision import full_matmul_precision, products_are_changed
from rope_fairseq.remembered import remembered


def causal_mask(tgt_len: int, src_len: int, device: torch.device) -> Tensor:
    """[tgt_len, src_len], True where query t may see key s: s ≤ t + src_len − tgt_len."""
    allowed = torch.ones(tgt_len, src_len, dtype=torch.bool, device=device)
    return allowed.tril(src_len - tgt_len)


def allowed_keys(
    tgt_len: int, src_len: int, key_padding_mask: Tensor | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Which keys each query may see.

    Args:
        key_padding_mask: [batch, src_len], True at padding.

    Returns:
        Bool tensor broadcastable to [batch, num_heads, tgt_len, src_len], True where allowed, or
        None where everything is.
    """
    allowed = causal_mask(tgt_len, src_len, device) if causal and tgt_len > 1 else None
    if key_padding_mask is not None:
        real = ~key_padding_mask[:, None, None, :]
        allowed = real if allowed is None else real & allowed
    return allowed


def padding_kind(key_padding_mask: Tensor) -> str:
    """Where the padding of a mask [batch, src_len] is: ``none``, ``right`` of all real keys of each
    row, or ``other``."""

    def look() -> str:
        if not key_padding_mask.any():
            return "none"
        right = (key_padding_mask[:, 1:] | ~key_padding_mask[:, :-1]).all()
        return "right" if right else "other"

    return remembered(key_padding_mask, "padding", look)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention by ``scaled_dot_product_attention``, which picks the kernel.

    Args:
        query: [batch, num_heads, tgt_len, head_dim].
        key, value: [batch, num_heads, src_len, head_dim].
        key_padding_mask: [batch, src_len], True at padding.
        causal: query t sees keys up to t + src_len − tgt_len only.
        bias: added to the scaled scores, broadcastable to [batch, num_heads, tgt_len, src_len].
        scale: of the scores; by default 1/√head_dim.
        dropout_p: dropout on the attention weights.

    Returns:
        Tensor [batch, num_heads, tgt_len, head_dim].
    """
    tgt_len, src_len = query.size(2), key.size(2)
    is_step = tgt_len == 1 and dropout_p == 0 and not torch.is_grad_enabled()
    if is_step and query.device.type == "cpu":
        # A step of decoding is too small for the kernel's blocks: it takes twice as long.
        weights = attention_weights(
            query, key, key_padding_mask=key_padding_mask, bias=bias, scale=scale
        )
        return torch.matmul(weights.type_as(value), value)
    if key_padding_mask is not None:
        kind = padding_kind(key_padding_mask)
        # A real query sees no key behind itself, and so no padding to the right: the causal mask
        # alone is exact there, and it keeps the fast kernels. Padding queries are never read.
        if kind == "none" or (kind == "right" and causal):
            key_padding_mask = None
    if causal and key_padding_mask is None and bias is None and tgt_len == src_len:
        return _attend_fused(query, key, value, None, dropout_p, tgt_len > 1, scale)
    mask = allowed_keys(tgt_len, src_len, key_padding_mask, causal, query.device)
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    return _attend_fused(query, key, value, mask, dropout_p, False, scale)


class _AttendInFullPrecision(torch.autograd.Function):
    """``scaled_dot_product_attention`` with :func:`full_matmul_precision`, backward too.

    What backward needs is held until the loss is deleted, not until backward has run. There is no
    second derivative.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.inputs = [
            value.detach().requires_grad_(needed) if isinstance(value, Tensor) else value
            for value, needed in zip(arguments, ctx.needs_input_grad, strict=True)
        ]
        with torch.enable_grad(), full_matmul_precision():
            query, key, value, mask, dropout_p, is_causal, scale = ctx.inputs
            ctx.out = F.scaled_dot_product_attention(
                query, key, value, mask, dropout_p, is_causal, scale=scale
            )
        return ctx.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [value for value, n in zip(ctx.inputs, ctx.needs_input_grad, strict=True) if n]
        with full_matmul_precision():
            # Kept, as the caller may keep the graph around it.
            grads = iter(torch.autograd.grad(ctx.out, wanted, grad, retain_graph=True))
        return tuple(next(grads) if needed else None for needed in ctx.needs_input_grad)


def _attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """``scaled_dot_product_attention``, on a CPU always in full precision: its products there are
    as small as a sentence, and setting up a lower precision takes ten times as long as they do."""
    if query.device.type != "cpu" or not products_are_changed():
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale
        )
    out: Tensor = _AttendInFullPrecision.apply(query, key, value, mask, dropout_p, is_causal, scale)
    return out


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The softmax weights that :func:`attend` keeps to itself, for the same arguments.

    Returns:
        Tensor [batch, num_heads, tgt_len, src_len], float32 (float64 for float64 input).
    """
    scale = query.size(-1) ** -0.5 if scale is None else scale
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if bias is not None:
        scores = scores + bias
    dtype = torch.promote_types(scores.dtype, torch.float32)
    allowed = allowed_keys(query.size(2), key.size(2), key_padding_mask, causal, query.device)
    if allowed is None:
        return torch.softmax(scores, dim=-1, dtype=dtype)
    # The lowest finite number and not −inf: a row without any allowed key stays finite, forward
    # and backward, and the second fill makes it 0.
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, dtype=dtype).masked_fill(~allowed, 0.0)
