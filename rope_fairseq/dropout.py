"""Dropout with masks that cost little on a CPU, alone and joined with the residual sum.

``torch.nn.functional.dropout`` draws a number for each element on one thread and keeps the mask in
float32: of a small model's training step an eighth. Here four elements share a draw of 64 bits, and
the mask takes a byte an element.
"""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor

#: A probability is rounded to a multiple of 1 / STEPS; what is kept is scaled by the rounded one.
STEPS = 2**16
#: Below this the rounding could be seen, and torch's own dropout is used.
LEAST = 1e-3


def keep_mask(shape: torch.Size, p: float) -> Tensor:
    """Which elements stay: each is False with probability round(p·STEPS)/STEPS.

    Returns:
        Bool tensor of ``shape`` on the CPU.
    """
    count = shape.numel()
    words = torch.empty((count + 3) // 4, dtype=torch.int64)
    # From the lowest number on and without an upper end: all 64 bits are random.
    words.random_(-(2**63), None)
    draws = words.view(torch.int16)[:count]
    return (draws >= round(p * STEPS) - STEPS // 2).view(shape)


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor | None, x: Tensor, p: float) -> Tensor:
        keep = keep_mask(x.shape, p)
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - round(p * STEPS) / STEPS)
        ctx.dtypes = (None if residual is None else residual.dtype, x.dtype)
        if residual is None:
            return (x * keep.to(x.dtype)).mul_(ctx.scale)
        dtype = torch.promote_types(residual.dtype, x.dtype)
        return torch.addcmul(residual.to(dtype), x.to(dtype), keep.to(dtype), value=ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (keep,) = ctx.saved_tensors
        residual_dtype, dtype = ctx.dtypes
        grad_x = (grad * keep.to(grad.dtype)).mul_(ctx.scale).to(dtype)
        return None if residual_dtype is None else grad.to(residual_dtype), grad_x, None


def dropout(x: Tensor, p: float) -> Tensor:
    """``x`` with each element set to 0 with probability ``p`` and scaled by 1/(1 − p) otherwise.

    Args:
        x: any shape, any floating dtype.
    """
    if x.device.type != "cpu" or not LEAST <= p <= 1 - LEAST:
        return F.dropout(x, p) if p else x
    dropped: Tensor = _AddDropped.apply(None, x, p)
    return dropped


def add_dropped(residual: Tensor, x: Tensor, p: float) -> Tensor:
    """``residual + dropout(x, p)``, both of one shape, in the wider dtype of the two."""
    if x.device.type != "cpu" or not LEAST <= p <= 1 - LEAST:
        return residual + (F.dropout(x, p) if p else x)
    out: Tensor = _AddDropped.apply(residual, x, p)
    return out


class Dropout(FairseqDropout):
    """fairseq's dropout module, which ``--retain-dropout`` knows, with the masks of this file."""

    @classmethod
    def in_place_of(cls, module: FairseqDropout) -> "Dropout":
        return cls(module.p, module.module_name)

    @property
    def active_p(self) -> float:
        """The probability that applies now: 0 in evaluation, unless dropout was to be retained."""
        return float(self.p) if self.training or self.apply_during_inference else 0.0

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        return dropout(x, self.active_p)
