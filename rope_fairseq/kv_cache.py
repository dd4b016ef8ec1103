"""Keys or values that grow by a position a step and follow the order of the hypotheses."""

import torch
from torch import Tensor

from rope_fairseq.remembered import remembered

#: Positions that the first buffer has room for; each later one has half as many again as needed.
FIRST_CAPACITY = 32


class GrowingRows:
    """One tensor [rows, num_heads, length, head_dim] whose ``length`` grows.

    New positions are written behind the old ones in a buffer with room to spare, and rows change
    their order between two such buffers: what fairseq does by joining and copying all of it twice
    a step. The two take up to three times the memory of what they hold. While gradients are
    recorded nothing is written in place.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._spare: Tensor | None = None
        self._length = 0

    @property
    def rows(self) -> Tensor:
        """What was appended so far, in the present order; valid until the next change."""
        assert self._buffer is not None
        return self._buffer[:, :, : self._length]

    def append(self, new: Tensor) -> Tensor:
        """Add positions and return all: [rows, num_heads, length, head_dim].

        Args:
            new: [rows, num_heads, positions, head_dim].
        """
        start = self._length
        self._length += new.size(2)
        if torch.is_grad_enabled():
            buffer = self._buffer
            self._buffer = new if buffer is None else torch.cat((buffer[:, :, :start], new), dim=2)
            return self._buffer
        if self._buffer is None or self._buffer.size(2) < self._length:
            room = max(FIRST_CAPACITY, self._length * 3 // 2)
            grown = new.new_empty(new.size(0), new.size(1), room, new.size(3))
            if self._buffer is not None:
                grown[:, :, :start] = self._buffer[:, :, :start]
            self._buffer, self._spare = grown, None
        self._buffer[:, :, start : self._length] = new
        return self.rows

    def select(self, order: Tensor) -> Tensor:
        """Take the rows [new_rows] in this order, some of them repeatedly or not at all."""
        old = self.rows
        if torch.is_grad_enabled():
            self._buffer = old.index_select(0, order)
            return self._buffer
        count, buffer = order.numel(), self._buffer
        assert buffer is not None
        if self._spare is None or self._spare.size(0) < count:
            self._spare = buffer.new_empty(count, *buffer.shape[1:])
        chosen = self._spare[:count]
        torch.index_select(old, 0, order, out=chosen[:, :, : self._length])
        # A buffer of which less than half is in use is not worth keeping.
        self._buffer, self._spare = chosen, buffer if buffer.size(0) < 2 * count else None
        return self.rows


def is_identity(order: Tensor, count: int) -> bool:
    """Whether ``order`` [new_rows] leaves ``count`` rows as they are."""

    def look() -> bool:
        return torch.equal(order, torch.arange(count, device=order.device))

    return order.numel() == count and remembered(order, ("identity", count), look)


def sentences_of(order: Tensor, beams: int, new_beams: int) -> Tensor:
    """Which sentences the rows ``order`` [new_rows] belong to, one entry for the beams of each.

    Args:
        order: numbers of rows, of which each sentence has ``beams`` in succession.
        new_beams: how many rows of a sentence stand in succession in ``order``. Where they do
            not, each row gets an entry of its own.

    Returns:
        Tensor [new_sentences], the same one each time that ``order`` is asked about.
    """

    def look() -> Tensor:
        sentences = order.div(beams, rounding_mode="floor")
        if new_beams > 1 and order.numel() % new_beams == 0:
            groups = sentences.view(-1, new_beams)
            if bool((groups == groups[:, :1]).all()):
                return groups[:, 0]
        return sentences

    return remembered(order, ("sentences", beams, new_beams), look)
