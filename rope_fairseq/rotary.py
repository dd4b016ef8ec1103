"""Rotary position embedding: frequencies, cos/sin tables and the rotation.

Sources: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv
2104.09864, section 3.2.2, equations 14, 15 and 34. For sentences longer than those trained with:
Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation",
arXiv 2306.15595, and Peng et al., "YaRN: Efficient Context Window Extension of Large Language
Models", arXiv 2309.00071, which has "NTK-aware", "NTK-by-parts" and "Dynamic NTK" interpolation
too. This file knows nothing of fairseq.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = ("interleaved", "half")
SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn")

# YaRN keeps the frequency of pairs that turn more than BETA_FAST times within the length trained
# with, and divides that of pairs that turn less than BETA_SLOW times: the paper's beta and alpha,
# with the values that it gives for LLaMA.
BETA_FAST, BETA_SLOW = 32, 1


@dataclass(frozen=True)
class RotarySpec:
    """What fixes a rotation; equal specs share one table.

    Attributes:
        dim: number of channels that are rotated, even. With ``dim`` below the head dimension the
            first ``dim`` channels of each head are rotated and the others left alone.
        base: the 10000 of theta_i = base^(-2(i-1)/dim), positive; above 1 under ``yarn``.
        layout: which channels form a pair. ``interleaved`` is the paper's (x1,x2), (x3,x4), …;
            ``half`` is LLaMA's x_i with x_{i+dim/2}. They differ by :func:`layout_permutation`.
        scaling: how the frequencies are changed for longer sentences, see
            :func:`inverse_frequencies` and :func:`dynamic_table`.
        factor: how many times longer sentences become, at least 1; without effect under ``none``.
        original_max_positions: the length that the model was trained with; ``dynamic`` and
            ``yarn`` need it.
    """

    dim: int
    base: float = 10000.0
    layout: str = "interleaved"
    scaling: str = "none"
    factor: float = 1.0
    original_max_positions: int | None = None

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"rotated dimension {self.dim}: must be even and positive")
        if not 0 < self.base < float("inf"):
            raise ValueError(f"base {self.base}: must be a positive number")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout}: choose from {', '.join(LAYOUTS)}")
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling {self.scaling}: choose from {', '.join(SCALINGS)}")
        if not 1 <= self.factor < float("inf"):
            raise ValueError(f"scaling factor {self.factor}: must be a number of at least 1")
        original = self.original_max_positions
        if original is None:
            if self.scaling in ("dynamic", "yarn"):
                raise ValueError(f"scaling {self.scaling}: needs original_max_positions")
        elif original < 1:
            raise ValueError(f"original_max_positions {original}: must be at least 1")
        if self.scaling in ("ntk", "dynamic") and self.dim == 2:
            # The base is scaled by a power of dim/(dim - 2).
            raise ValueError(f"scaling {self.scaling}: needs at least 4 rotated channels, not 2")
        if self.scaling == "yarn" and self.base <= 1:
            raise ValueError(f"base {self.base}: must be above 1 with scaling yarn")


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """theta_i = base^(-2(i-1)/dim) for i = 1..dim/2, scaled by s = factor.

    ``linear``: theta_i / s, position interpolation: position m becomes m/s.

    ``ntk``: "NTK-aware" interpolation, the base times s^(dim/(dim-2)). The highest frequency stays
    as it is and the lowest is divided by s.

    ``yarn``: "NTK-by-parts" interpolation: theta_i where a pair turns often within the length
    trained with, theta_i / s where it turns less than once, a mixture in between. Two things are
    as in Hugging Face Transformers and not as in the paper's text, where the mixture is linear in
    a pair's number of turns:

    - it is linear in the pair's index;
    - its two ends are rounded to whole indices, outwards, and the lower end is not below the first
      pair.

    Where all pairs turn less than once (``original_max_positions`` below 2 pi) or all often (a
    base near 1) the two ends may lie outside of the table, cut to it, and have changed places.
    Transformers then keeps what it should divide and divides what it should keep. Here there is a
    step: pairs up to the lower end are kept, the others divided.

    ``dynamic``: unscaled; the scale depends on each sentence, see :func:`dynamic_table`.

    Returns:
        Tensor [dim/2], float64, on the CPU.
    """
    device = torch.device("cpu")
    theta = _unscaled_frequencies(spec, device)
    if spec.scaling == "linear":
        return theta / spec.factor
    if spec.scaling == "ntk":
        return theta * spec.factor ** -_ntk_exponents(spec, device)
    if spec.scaling == "yarn":
        ramp = _yarn_ramp(spec)
        return theta * (1 - ramp) + theta / spec.factor * ramp
    return theta


def _unscaled_frequencies(spec: RotarySpec, device: torch.device) -> Tensor:
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float64, device=device) / spec.dim
    return spec.base**-exponent


def _ntk_exponents(spec: RotarySpec, device: torch.device) -> Tensor:
    """2(i-1)/(dim-2), from 0 to 1 [dim/2].

    base·s^(dim/(dim-2)) to the power of -2(i-1)/dim is theta_i·s^-(2(i-1)/(dim-2)).
    """
    return torch.arange(0, spec.dim, 2, dtype=torch.float64, device=device) / (spec.dim - 2)


def _yarn_ramp(spec: RotarySpec) -> Tensor:
    """How far each pair is interpolated: 0 not at all, 1 wholly [dim/2]."""
    assert spec.original_max_positions is not None

    def index(turns: int) -> float:
        """The pair, counted from 0, that turns so often within the length trained with."""
        assert spec.original_max_positions is not None
        ratio = spec.original_max_positions / (turns * 2 * math.pi)
        return spec.dim * math.log(ratio) / (2 * math.log(spec.base))

    low = max(math.floor(index(BETA_FAST)), 0)
    high = max(min(math.ceil(index(BETA_SLOW)), spec.dim - 1), low)
    pair = torch.arange(spec.dim // 2, dtype=torch.float64, device="cpu")
    # Equal ends are a step between two pairs, as wide as in Transformers.
    return ((pair - low) / (high - low or 0.001)).clamp(0, 1)


def attention_factor(spec: RotarySpec) -> float:
    """What cos and sin are multiplied by: 0.1·ln(s) + 1 for ``yarn``, else 1.

    Queries and keys are both turned, so scores are multiplied by the square: it is 1/t for the
    temperature t of YaRN's softmax, where sqrt(1/t) = 0.1·ln(s) + 1. With ``dim`` below the head
    dimension only the rotated channels' part of a score is multiplied, as in Hugging Face
    Transformers.
    """
    return 0.1 * math.log(spec.factor) + 1 if spec.scaling == "yarn" else 1.0


# One table for each device and all of a spec but its layout, shared by all layers of all models.
# It lives here and not in a module's buffer, where .half(), state_dict() and deepcopy() would see
# it.
_TABLES: dict[tuple[int, float, str, float, int | None, torch.device], Tensor] = {}


def rotation_table(spec: RotarySpec, length: int, device: torch.device) -> Tensor:
    """cos(m·theta_i) and sin(m·theta_i) for the positions m = 0..length-1.

    The angles are computed in float64: a float32 angle alone is off by 2e-4 at position 4096.

    Args:
        spec: any scaling but ``dynamic``, which has no one table: see :func:`dynamic_table`.

    Returns:
        Tensor [length, dim/2, 2] (last axis: cos, sin), float32 whatever the model's dtype; for
        ``yarn`` both are multiplied by :func:`attention_factor`.
    """
    if spec.scaling == "dynamic":
        raise ValueError("scaling dynamic: the table depends on the sentences' lengths")
    device = torch.device(device)
    factor, original = spec.factor, spec.original_max_positions
    key = (spec.dim, spec.base, spec.scaling, factor, original, device)
    table = _TABLES.get(key)
    if table is None or table.size(0) < length:
        capacity = max(length, 256 if table is None else 2 * table.size(0))
        # Outside inference mode: a table made inside it could not be used for training later.
        with torch.inference_mode(False), torch.no_grad():
            position = torch.arange(capacity, dtype=torch.float64, device="cpu")
            angle = torch.outer(position, inverse_frequencies(spec))
            table = _cos_sin(angle, attention_factor(spec)).to(device)
        _TABLES[key] = table
    return table[:length]


def _cos_sin(angle: Tensor, factor: float = 1.0) -> Tensor:
    """factor·cos and factor·sin of float64 angles [...], in float32 [..., 2], rounded once."""
    return (torch.stack((angle.cos(), angle.sin()), dim=-1) * factor).to(torch.float32)


def dynamic_table(spec: RotarySpec, lengths: Tensor, seq_len: int, offset: int) -> Tensor:
    """The table of each sentence of a batch under the scaling ``dynamic``.

    A sentence of length L above L0 = original_max_positions has the base times
    (a·L/L0 - (a-1))^(dim/(dim-2)), a the factor: "Dynamic NTK" interpolation with the formula of
    Hugging Face Transformers, where L is the longest of the batch. In the YaRN paper the scale is
    L/L0, which is a = 1. A sentence of at most L0 tokens has, to the bit, the table of ``none``,
    whatever other sentences are in its batch.

    On a GPU this waits for nothing, but where :func:`rotation_table` has to make or to grow the
    table of ``none``, which is copied there.

    Args:
        lengths: [batch], the length L of each sentence; the table is made on its device.
        seq_len: number of positions.
        offset: the first of them.

    Returns:
        Tensor [batch, seq_len, dim/2, 2] (last axis: cos, sin), float32.
    """
    assert spec.scaling == "dynamic" and spec.original_max_positions is not None
    original, device, end = spec.original_max_positions, lengths.device, offset + seq_len
    unscaled = rotation_table(RotarySpec(spec.dim, spec.base), end, device)[offset:]
    # Outside inference mode: see rotation_table.
    with torch.inference_mode(False), torch.no_grad():
        # [batch, 1], not below 1; the same as a·L/L0 - (a-1), and exact where L is L0
        excess = (lengths.double() - original).clamp(min=0)[:, None]
        scale = 1 + spec.factor * excess / original
        theta = _unscaled_frequencies(spec, device) * scale ** -_ntk_exponents(spec, device)
        position = torch.arange(offset, end, dtype=torch.float64, device=device)
        scaled = _cos_sin(position[:, None] * theta[:, None])
        return torch.where(excess[..., None, None] > 0, scaled, unscaled)


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

    def transpose(self) -> "Rotation":
        """The transpose, by which a gradient goes back through :func:`rotate_pairs`.

        It is the rotation back wherever the table is not scaled; ``yarn`` scales it by f =
        :func:`attention_factor`, so that turning there and back multiplies by f².
        """
        cos, sin = self.table.unbind(-1)
        return Rotation(torch.stack((cos, -sin), dim=-1), self.layout)


def rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each channel pair (a, b) of ``x`` into (a·cos − b·sin, a·sin + b·cos), which is
    RoFormer's equation 34 where the table is not scaled.

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
