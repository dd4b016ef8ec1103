"""The one interface between a position encoding and the attention that carries it."""

from torch import Tensor, nn


class PositionEncoding(nn.Module):
    """What an encoding may do inside one self-attention module. The default does nothing.

    An encoding overrides the methods that it needs. Its parameters, if it has any, belong to it
    and so to the attention module that holds it.
    """

    #: True where :meth:`value_term` returns something: the attention weights are then computed
    #: explicitly, because no fused kernel gives them.
    has_value_term = False

    def rotate(self, x: Tensor, offset: int) -> Tensor:
        """Change queries and keys by their own position, once, before keys are cached.

        Args:
            x: [seq_len, batch, …, num_heads, head_dim].
            offset: position of the first row.

        Returns:
            Tensor of the same shape and dtype.
        """
        return x

    def score_bias(self, query: Tensor, key: Tensor, offset: int) -> Tensor | None:
        """What is added to the scaled scores.

        Args:
            query: [batch, num_heads, tgt_len, head_dim], as :meth:`rotate` left it.
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
