"""Rotary position embedding as an encoding of the attention (arXiv 2104.09864)."""

from torch import Tensor

from rope_fairseq.position.base import PositionEncoding
from rope_fairseq.rotary import RotarySpec, rotate


class RotaryPositionEncoding(PositionEncoding):
    """Rotates queries and keys, after projection and per head; values stay as they are."""

    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        self.spec = spec

    def rotate(self, x: Tensor, offset: int) -> Tensor:
        return rotate(x, self.spec, offset)

    def extra_repr(self) -> str:
        return str(self.spec)
