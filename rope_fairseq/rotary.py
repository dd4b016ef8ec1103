"""Rotary position embedding: frequencies, cos/sin tables and the rotation.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv
2104.09864, section 3.2.2, equations 14, 15 and 34. This file knows nothing of fairseq.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = ("interleaved", "half")
SCALINGS = ("none",)


@dataclass(frozen=True)
class RotarySpec:
    """What fixes a rotation; equal specs share one table.

    Attributes:
        dim: number of channels that are rotated, even. With ``dim`` below the head dimension the
            first ``dim`` channels of each head are rotated and the others left alone.
        base: the 10000 of theta_i = base^(-2(i-1)/dim), positive.
        layout: which channels form a pair. ``interleaved`` is the paper's (x1,x2), (x3,x4), …;
            ``half`` is LLaMA's x_i with x_{i+dim/2}. They differ by :func:`layout_permutation`.
        scaling: how the frequencies are changed for longer sequences; ``none``.
    """

    dim: int
    base: float = 10000.0
    layout: str = "interleaved"
    scaling: str = "none"

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"rotated dimension {self.dim}: must be even and positive")
        if not 0 < self.base < float("inf"):
            raise ValueError(f"base {self.base}: must be a positive number")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout}: choose from {', '.join(LAYOUTS)}")
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling {self.scaling}: choose from {', '.join(SCALINGS)}")


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """theta_i = base^(-2(i-1)/dim) for i = 1..dim/2 (equation 15).

    Returns:
        Tensor [dim/2], float64, on the CPU.
    """
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float64, device="cpu") / spec.dim
    return spec.base**-exponent


# One table for each (base, dim, scaling, device), shared by all layers of all models. It lives
# here and not in a module's buffer so that .half(), state_dict() and deepcopy() do not see it.
_TABLES: dict[tuple[float, int, str, torch.device], Tensor] = {}


def rotation_table(spec: RotarySpec, length: int, device: torch.device) -> Tensor:
    """cos(m·theta_i) and sin(m·theta_i) for the positions m = 0..length-1.

    The angles are computed in float64: a float32 angle alone is off by 2e-4 at position 4096.

    Returns:
        Tensor [length, dim/2, 2] (last axis: cos, sin), float32 whatever the model's dtype.
    """
    device = torch.device(device)
    key = (spec.base, spec.dim, spec.scaling, device)
    table = _TABLES.get(key)
    if table is None or table.size(0) < length:
        capacity = max(length, 256 if table is None else 2 * table.size(0))
        # Outside inference mode: a table made inside it could not be used for training later.
        with torch.inference_mode(False), torch.no_grad():
            position = torch.arange(capacity, dtype=torch.float64, device="cpu")
            angle = torch.outer(position, inverse_frequencies(spec))
            table = torch.stack((angle.cos(), angle.sin()), dim=-1).to(torch.float32).to(device)
        _TABLES[key] = table
    return table[:length]


@dataclass(frozen=True)
class Rotation:
    """How far channel pairs are turned, and which channels form a pair.

    Attributes:
        table: cos and sin [..., dim/2, 2], float32, broadcastable against the leading axes of what
            is rotated.
        layout: see :class:`RotarySpec`.
    """

    table: Tensor
    layout: str

    def inverse(self) -> "Rotation":
        """The rotation back; as a rotation is orthogonal, this is its transpose too."""
        cos, sin = self.table.unbind(-1)
        return Rotation(torch.stack((cos, -sin), dim=-1), self.layout)


def rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each channel pair (a, b) of ``x`` into (a·cos − b·sin, a·sin + b·cos) (equation 34).

    Args:
        x: [..., head_dim], any floating dtype.

    Returns:
        Tensor of the shape and dtype of ``x``; only its first ``dim`` channels are changed. The
        arithmetic is done in float32 (float64 for float64 input) and rounded once.
    """
    table, layout = rotation.table, rotation.layout
    dim = 2 * table.size(-2)
    if dim < x.size(-1):
        rotated = rotate_pairs(x[..., :dim], rotation)
        return torch.cat((rotated, x[..., dim:]), dim=-1)
    wide = x if x.dtype == torch.float64 else x.float()
    if layout == "interleaved":
        # The pair (a, b) is the complex number a + ib, and rotating it is one product.
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.view_as_complex(table)).flatten(-2)
    else:
        cos, sin = table.unbind(-1)
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.type_as(x)


def rotate_pairs_(x: Tensor, rotation: Rotation) -> None:
    """:func:`rotate_pairs` in place and without gradient: one pass over memory where ``x`` is
    float32 and interleaved."""
    dim = 2 * rotation.table.size(-2)
    part = x[..., :dim]
    steps = (*part.stride()[:-1], part.storage_offset())
    if (
        rotation.layout == "interleaved"
        and part.dtype == rotation.table.dtype
        and part.stride(-1) == 1
        and not any(step % 2 for step in steps)  # else memory has no complex numbers there
    ):
        pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)))
        pairs.mul_(torch.view_as_complex(rotation.table))
    else:
        part.copy_(rotate_pairs(part, rotation))


def layout_permutation(dim: int, head_dim: int, source: str, target: str) -> Tensor:
    """Channel order that carries one head's projection rows from one layout to the other.

    With ``p = layout_permutation(dim, head_dim, "interleaved", "half")`` a model whose query and
    key projection rows are reordered, ``weight[p]`` head by head, computes under ``half`` exactly
    what the original computes under ``interleaved``.

    Returns:
        LongTensor [head_dim]; channels from ``dim`` on stay where they are.
    """
    for layout in (source, target):
        if layout not in LAYOUTS:
            raise ValueError(f"layout {layout}: choose from {', '.join(LAYOUTS)}")
    order = torch.arange(head_dim)
    if source != target:
        if source == "interleaved":
            order[:dim] = torch.arange(dim).view(-1, 2).t().reshape(-1)
        else:
            order[:dim] = torch.arange(dim).view(2, -1).t().reshape(-1)
    return order


def convert_layout(
    state: dict[str, Tensor], dim: int, num_heads: int, source: str, target: str
) -> dict[str, Tensor]:
    """A state dict whose self-attention queries and keys are in the other layout.

    Args:
        state: parameters with fairseq's names (``….self_attn.q_proj.weight`` [embed_dim,
            embed_dim], ``….self_attn.k_proj.bias`` [embed_dim], …).
        dim: rotated channels of a head.
        num_heads: heads of the self-attention layers, the same in encoder and decoder.

    Returns:
        A new dict; tensors that need no change are shared with ``state``.
    """
    converted = dict(state)
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if kind in ("weight", "bias") and module.endswith(("self_attn.q_proj", "self_attn.k_proj")):
            heads = tensor.view(num_heads, tensor.size(0) // num_heads, *tensor.shape[1:])
            order = layout_permutation(dim, heads.size(1), source, target)
            converted[name] = heads[:, order.to(tensor.device)].reshape(tensor.shape)
    return converted
