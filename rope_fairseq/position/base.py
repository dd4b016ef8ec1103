"""The one interface between a position encoding and the attention that carries it."""

import torch
from torch import Tensor, nn

from rope_fairseq.rotary import Rotation


class PositionEncoding(nn.Module):
    """What an encoding may do inside one self-attention module. The default does nothing.

    An encoding overrides the methods that it needs. Its parameters, if it has any, belong to it
    and so to the attention module that holds it.
    """

    #: True where :meth:`value_term` returns something: the attention weights are then computed
    #: explicitly, because no fused kernel gives them.
    has_value_term = False

    def rotation(self, seq_len: int, offset: int, device: torch.device) -> Rotation | None:
        """How queries and keys are turned by their own position, once, before keys are cached.

        Args:
            seq_len: number of positions.
            offset: the first of them.

        Returns:
            A rotation whose table is broadcastable to [batch, seq_len, 2, num_heads, dim/2, 2], or
            None.
        """
        return None

    def score_bias(self, query: Tensor, key: Tensor, offset: int) -> Tensor | None:
        """What is added to the scaled scores.

        Args:
            query: [batch, num_heads, tgt_len, head_dim], rotated.
            key: [batch, num_heads, src_len, head_dim], cached keys included.
            offset: position of the first query; the first key stands at position 0.

        Returns:
            Tensor broadcastable to [batch, num_heads, tgt_len, src_len], or None.
        """
        return None

    def value_term(self, weights: Tensor, offset: int) -> Tensor | None:
        """What is added to the attention's output, before heads are joined.

        Args:
            weights: [batch, num_heads, tgt_len, src_len], after dropout.
            offset: position of the first query.

        Returns:
            Tensor [batch, num_heads, tgt_len, head_dim], or None.
        """
        return None
