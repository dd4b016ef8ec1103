"""The rotation alone, and what a plain copy of the same bytes takes.

As in the model: queries and keys [sentences, length, 2, heads, head_dim] are turned where they lie,
in a block of memory that holds the values too; the gradient is turned back in the same way.
"""

from collections.abc import Callable

import torch

from benchmarks.shapes import Shape
from rope_fairseq.rotary import RotarySpec, Rotation, rotate_pairs_, rotation_table

REPEATS = 10
OPERATIONS = ("copy of q and k", "rotation of q and k", "rotation back (gradient)")


class Operation:
    """One call does one of ``OPERATIONS`` ``REPEATS`` times."""

    def __init__(self, shape: Shape, device: str, operation: str) -> None:
        size = shape.size
        head_dim = size.embed_dim // size.heads
        sizes = (shape.sentences, shape.length, 3, size.heads, head_dim)
        queries_and_keys = torch.randn(sizes, device=device)[:, :, :2]
        x = queries_and_keys.contiguous()
        other = torch.empty_like(x)
        spec = RotarySpec(head_dim)
        table = rotation_table(spec, shape.length, x.device)[:, None, None]
        rotation = Rotation(table, spec.layout)
        copied, turned, turned_back = OPERATIONS
        calls: dict[str, Callable[[], object]] = {
            copied: lambda: other.copy_(x),
            turned: lambda: rotate_pairs_(queries_and_keys, rotation),
            turned_back: lambda: rotate_pairs_(queries_and_keys, rotation.transpose()),
        }
        self.call = calls[operation]
        self.bytes = x.numel() * x.element_size()

    def run(self) -> None:
        for _ in range(REPEATS):
            self.call()
