"""Rotary position embedding as an encoding of the attention (arXiv 2104.09864)."""

import torch

from rope_fairseq.position.base import PositionEncoding
from rope_fairseq.rotary import RotarySpec, Rotation, rotation_table


class RotaryPositionEncoding(PositionEncoding):
    """Rotates queries and keys, after projection and per head; values stay as they are."""

    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        self.spec = spec

    def rotation(self, seq_len: int, offset: int, device: torch.device) -> Rotation:
        # [seq_len, dim/2, 2] -> [seq_len, 1, 1, dim/2, 2]
        table = rotation_table(self.spec, offset + seq_len, device)[offset:, None, None]
        return Rotation(table, self.spec.layout)

    def extra_repr(self) -> str:
        return str(self.spec)
