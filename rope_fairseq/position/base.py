"""The one interface between a position encoding and the attention that carries it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_fairseq.rotary import Rotation


@dataclass(frozen=True)
class Side:
    """The encoder or decoder whose self-attention carries an encoding.

    Attributes:
        bidirectional: queries see keys behind themselves too: the encoder.
        max_positions: tokens of the longest sentence.
        random_features: in linear attention, how many features of a query or key of one head there
            are and may be rotated, where they are not one for each channel.
    """

    embed_dim: int
    num_heads: int
    bidirectional: bool
    max_positions: int = 1024
    random_features: int | None = None

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


class PositionEncoding(nn.Module):
    """What an encoding may do inside one self-attention module. The default does nothing.

    An encoding overrides the methods that it needs. Its own parameters, if it has any, belong to
    it and so to the attention module that holds it; those that all layers of an encoder or decoder
    share belong to that encoder or decoder (see :class:`Shared`).
    """

    #: How many products of a query part with a key part a score sums up; it is divided by
    #: √(terms · head_dim), so that its variance does not depend on the encoding.
    terms = 1

    #: True where :meth:`rotation` needs the lengths of the source sentences.
    needs_lengths = False

    #: True where :meth:`value_term` returns something: the attention weights are then computed
    #: explicitly, because no fused kernel gives them.
    has_value_term = False

    def rotation(
        self, seq_len: int, offset: int, device: torch.device, lengths: Tensor | None = None
    ) -> Rotation | None:
        """How queries and keys are turned by their own position, once, before keys are cached.

        Args:
            seq_len: number of positions.
            offset: the first of them.
            lengths: [batch], tokens of each source sentence without padding, end of sentence
                included; given where ``needs_lengths``.

        Returns:
            A rotation whose table is broadcastable to [batch, seq_len, 2, num_heads, dim/2, 2], or
            None.
        """
        return None

    def score_bias(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """What is added to the scores, themselves already divided by √(terms · head_dim).

        Args:
            query: [batch, num_heads, tgt_len, head_dim], rotated; the queries stand at the last
                positions of the keys.
            key: [batch, num_heads, src_len, head_dim], cached keys included.
            key_padding_mask: [batch, src_len], True at padding.

        Returns:
            Tensor broadcastable to [batch, num_heads, tgt_len, src_len], or None.
        """
        return None

    def value_term(self, weights: Tensor) -> Tensor | None:
        """What is added to the attention's output, before heads are joined.

        Args:
            weights: [batch, num_heads, tgt_len, src_len], after dropout.

        Returns:
            Tensor [batch, num_heads, tgt_len, head_dim], or None.
        """
        return None


class Shared:
    """A module that the encodings of several layers use and none of them owns.

    Held in this, and not as an attribute, it is registered once: by the encoder or decoder. So it
    has one name in checkpoints, whichever layers are left out of them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
