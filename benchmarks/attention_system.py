"""One self-attention of one long sentence: calls as in training, and steps of decoding.

The module stands alone, with rotary positions; what its input is does not matter. See lengths.py.
"""

import copy
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import Shape
from rope_fairseq.feature_maps import build_feature_map
from rope_fairseq.memory import M_MMAP_THRESHOLD
from rope_fairseq.multihead_attention import IncrementalState, PositionedAttention
from rope_fairseq.multihead_linear_attention import LinearSelfAttention
from rope_fairseq.position.rope import RotaryPositionEncoding
from rope_fairseq.rotary import RotarySpec

#: Steps of one call of :class:`Decoding`.
STEPS = 16
#: Blocks above so many bytes come from the system and go back to it (see :func:`settle`).
LARGEST_IN_HEAP = 1 << 16


def build(shape: Shape, feature_map: str | None, causal: bool) -> PositionedAttention:
    """Softmax attention, or linear attention with a feature map."""
    torch.manual_seed(1)
    size = shape.size
    head_dim = size.embed_dim // size.heads
    settings: dict[str, Any] = {
        "position": RotaryPositionEncoding(RotarySpec(head_dim)),
        "causal": causal,
        "self_attention": True,
        "dropout": shape.attention_dropout,
    }
    if feature_map is None:
        return PositionedAttention(size.embed_dim, size.heads, **settings)
    features = build_feature_map(feature_map, head_dim)
    return LinearSelfAttention(size.embed_dim, size.heads, feature_map=features, **settings)


def attend(module: PositionedAttention, x: Tensor, state: IncrementalState | None = None) -> Tensor:
    """``x`` [length, sentences, embed_dim] through the module."""
    # Only says that the future is masked: nothing is read of it.
    mask = x.new_empty(0) if module.causal and x.size(0) > 1 else None
    out, _ = module(x, x, x, attn_mask=mask, incremental_state=state, need_weights=False)
    return out


class Training:
    """One call is forward and backward of ``shape.length`` positions, ``calls`` times.

    Args:
        feature_map: of linear attention; None for softmax attention, which is explicit where
            ``shape`` has attention dropout.
    """

    def __init__(
        self,
        shape: Shape,
        device: str,
        feature_map: str | None = None,
        causal: bool = False,
        calls: int = 1,
    ) -> None:
        self.module, self.calls = build(shape, feature_map, causal).to(device), calls
        self.device = device
        self.x, self.gradient = self._tensors(shape)

    def run(self) -> None:
        for _ in range(self.calls):
            self._call(self.x, self.gradient)

    def run_small(self, shape: Shape) -> None:
        """A call of another length, after which the peak of the process is what it holds now."""
        self._call(*self._tensors(shape))
        settle()

    def _tensors(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """The input, and the gradient of the output."""
        sizes = shape.length, shape.sentences, shape.size.embed_dim
        x = torch.randn(sizes, device=self.device, requires_grad=True)
        return x, torch.randn(sizes, device=self.device)

    def _call(self, x: Tensor, gradient: Tensor) -> None:
        attend(self.module, x).backward(gradient)
        for tensor in (x, *self.module.parameters()):
            tensor.grad = None


class Decoding:
    """One call is ``STEPS`` steps of incremental decoding, the first of which is the position
    ``shape.length``; each call starts from the same state.

    Args:
        feature_map: as :class:`Training` has it.
    """

    def __init__(self, shape: Shape, device: str, feature_map: str | None = None) -> None:
        self.module = build(shape, feature_map, causal=True).to(device).eval()
        self.x = torch.randn(1, shape.sentences, shape.size.embed_dim, device=device)
        self.state = fill(self.module, self.x, shape.length - 1)

    def run(self) -> None:
        state = again(self.state)
        with torch.no_grad():
            for _ in range(STEPS):
                attend(self.module, self.x, state)


def fill(module: PositionedAttention, x: Tensor, length: int) -> IncrementalState:
    """The state behind ``length`` positions, all in one call; ``x`` [1, sentences, embed_dim]."""
    state: IncrementalState = {}
    with torch.no_grad():
        if length:
            attend(module, x.expand(length, -1, -1), state)
    return state


def again(state: IncrementalState) -> IncrementalState:
    """A state from which one can go on while ``state`` stays as it is: steps replace what is in it,
    but for the buffers of keys and values, and there they write behind what was there."""
    return {
        key: {name: copy.copy(value) for name, value in saved.items()}
        for key, saved in state.items()
    }


def state_bytes(shape: Shape, feature_map: str | None = None) -> int:
    """Memory of the state after ``shape.length`` steps, room to grow included."""
    decoding = Decoding(shape, "cpu", feature_map)
    with torch.no_grad():
        attend(decoding.module, decoding.x, decoding.state)
    storages = [tensor.untyped_storage() for tensor in tensors(decoding.state)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


def settle() -> None:
    """Forget the peak of this process, and see that the next one shows what is needed from here on.

    Memory that was freed goes back to the system: what the C library keeps would be used again
    without being seen. From here on large blocks go back at once, too, so that the peak is that of
    blocks in use and not of the holes between them.
    """
    gc.collect()
    gc.freeze()  # what is left is there to stay: worker.py, which collects often, need not look
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
    library.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
