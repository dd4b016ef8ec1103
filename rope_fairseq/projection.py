"""Queries, keys and values in one product, split by head and rotated where they lie.

The gradient is worked out by hand: the transpose of the rotation, then the gradient of one linear
layer. By autograd's own rules each of the three parts would be padded with
zeros to the size of all and added up. No fairseq here.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rope_fairseq.rotary import Rotation, rotate_pairs_


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling ``module`` is F.linear and nothing else: no subclass, hooks (quant-noise
    works through one) or parametrization, which turns the module into a subclass."""
    return type(module) is nn.Linear and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parts: int,
        head_dim: int,
        rotation: Rotation | None,
    ) -> tuple[Tensor, ...]:
        ctx.dtypes = (x.dtype, weight.dtype)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.rotation, ctx.has_bias = rotation, bias is not None
        # [batch, seq_len, parts, num_heads, head_dim]
        out = F.linear(x, weight, bias).unflatten(2, (parts, -1, head_dim))
        if rotation is not None:
            rotate_pairs_(out[:, :, :2], rotation)
        return out.unbind(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        grad = torch.stack(grads, dim=2)
        if ctx.rotation is not None:
            rotate_pairs_(grad[:, :, :2], ctx.rotation.transpose())
        grad = grad.flatten(2).flatten(0, 1).to(weight.dtype)  # [batch·seq_len, out_features]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).view(x.shape).to(x_dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.t() @ x.flatten(0, 1)).to(weight_dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=weight_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def project(
    x: Tensor, layers: Sequence[nn.Linear], head_dim: int, rotation: Rotation | None
) -> tuple[Tensor, ...]:
    """Apply plain linear layers (see :func:`is_plain_linear`) to one input, in one product.

    Args:
        x: [batch, seq_len, in_features].
        layers: of equal size; all with a bias, or none.
        head_dim: channels of a head.
        rotation: turns the outputs of the first two layers, the queries and keys.

    Returns:
        One tensor [batch, seq_len, num_heads, head_dim] for each layer, views of one block of
        memory, in autocast's dtype where autocast is on. They have a first derivative only.
    """
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers]
    weight = weights[0] if len(layers) == 1 else torch.cat(weights)
    bias = biases[0] if len(layers) == 1 or biases[0] is None else torch.cat(biases)
    parts: tuple[Tensor, ...] = _Project.apply(x, weight, bias, len(layers), head_dim, rotation)
    return parts
