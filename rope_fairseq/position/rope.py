"""Rotary position embedding as an encoding of the attention (arXiv 2104.09864)."""

import torch
from torch import Tensor

from rope_fairseq.position.base import PositionEncoding
from rope_fairseq.remembered import remembered
from rope_fairseq.rotary import RotarySpec, Rotation, dynamic_table, rotation_table


class RotaryPositionEncoding(PositionEncoding):
    """Rotates queries and keys, after projection and per head; values stay as they are.

    Attributes:
        spec: the rotation.
        needs_lengths: the scaling is ``dynamic``.
        target_extra: tokens that a target may have beyond its source. Under ``dynamic`` a
            decoder's length is the source's plus this: known before its first step, so that
            cached keys, rotated once, stay right, and training and decoding agree. 0 in the
            encoder.
    """

    def __init__(self, spec: RotarySpec, target_extra: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.needs_lengths = spec.scaling == "dynamic"
        self.target_extra = target_extra

    def rotation(
        self, seq_len: int, offset: int, device: torch.device, lengths: Tensor | None = None
    ) -> Rotation:
        """See :meth:`PositionEncoding.rotation`.

        Returns:
            A rotation with a table [seq_len, 1, 1, dim/2, 2], under ``dynamic`` with one
            [batch, seq_len, 1, 1, dim/2, 2].
        """
        spec, extra = self.spec, self.target_extra
        if not self.needs_lengths:
            table = rotation_table(spec, offset + seq_len, device)[offset:]
        elif lengths is None:
            raise ValueError("scaling dynamic: needs the lengths of the source sentences")
        else:
            # All layers of an encoder or decoder ask for the same.
            table = remembered(
                lengths,
                (spec, seq_len, offset, extra),
                lambda: dynamic_table(spec, lengths + extra, seq_len, offset),
            )
        return Rotation(table[..., None, None, :, :], spec.layout)

    def extra_repr(self) -> str:
        return f"{self.spec}, target_extra={self.target_extra}"
