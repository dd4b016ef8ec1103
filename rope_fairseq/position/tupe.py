"""Untied positional encoding (Ke, He, Liu 2021, arXiv 2006.15595): TUPE-R.

    score_ij = (q_i·k_j + (p_i U_Q)·(p_j U_K)) / √(2d) + b[bucket(j − i), head]

p are learned embeddings of absolute positions, U_Q and U_K their own projections; b is T5's bias.
All of them are shared by the layers of the encoder or decoder. As in the authors' code a layer norm
comes before the projections, which the equation leaves out. Their treatment of [CLS] is not here:
translation has no such token.
"""

import torch
from torch import Tensor, nn

from rope_fairseq.attention import padding_kind
from rope_fairseq.errors import UserError
from rope_fairseq.position.base import PositionEncoding, Shared, Side
from rope_fairseq.position.t5 import RelativeBuckets


class UntiedPositions(nn.Module):
    """p with its norm, U_Q, U_K and b of one encoder or decoder."""

    def __init__(self, side: Side, buckets: int, max_distance: int) -> None:
        super().__init__()
        self.side = side
        self.embedding = nn.Embedding(side.max_positions, side.embed_dim)
        nn.init.normal_(self.embedding.weight, std=side.embed_dim**-0.5)
        self.norm = nn.LayerNorm(side.embed_dim)
        self.query_projection = nn.Linear(side.embed_dim, side.embed_dim, bias=False)
        self.key_projection = nn.Linear(side.embed_dim, side.embed_dim, bias=False)
        nn.init.xavier_uniform_(self.query_projection.weight)
        nn.init.xavier_uniform_(self.key_projection.weight)
        self.buckets = RelativeBuckets(side, buckets, max_distance)

    def forward(self, tgt_len: int, src_len: int, position: Tensor | None) -> Tensor:
        """The scores of positions: [1 or batch, num_heads, tgt_len, src_len].

        Args:
            position: [batch, src_len], of each key, or None where they are 0..src_len−1.

        Raises:
            UserError: there are more positions than embeddings.
        """
        limit, longest = self.side.max_positions, src_len
        if src_len > limit and position is not None:
            longest = int(position.max()) + 1
        if longest > limit:
            option = "source" if self.side.bidirectional else "target"
            raise UserError(
                f"sentence of {longest} tokens: --position-encoding tupe has learned "
                f"--max-{option}-positions {limit}"
            )
        # [longest, embed_dim] -> [1, longest, num_heads, head_dim]
        embedded = self.norm(self.embedding.weight[:longest])
        query, key = (
            projection(embedded).unflatten(-1, (self.side.num_heads, -1))[None]
            for projection in (self.query_projection, self.key_projection)
        )
        if position is not None:  # [batch, src_len, num_heads, head_dim]
            query, key = query[0][position[:, -tgt_len:]], key[0][position]
        query = query[:, -tgt_len:] * (2 * self.side.head_dim) ** -0.5
        scores = torch.matmul(query.transpose(1, 2), key.permute(0, 2, 3, 1))
        return scores + self.buckets(tgt_len, src_len)


class TupePositionEncoding(PositionEncoding):
    """Adds (max_positions + 2 + 2·embed_dim)·embed_dim + buckets · num_heads parameters to each of
    encoder and decoder. Longer sentences than ``max_positions`` are refused."""

    terms = 2

    def __init__(self, shared: UntiedPositions) -> None:
        super().__init__()
        self.shared = Shared(shared)

    def score_bias(self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        position = None
        # Positions count real tokens. Padding to the right of them changes nothing, unless it is
        # what makes the batch too wide.
        too_wide = key.size(2) > self.shared.module.side.max_positions
        if key_padding_mask is not None and (too_wide or padding_kind(key_padding_mask) == "other"):
            position = ((~key_padding_mask).cumsum(1) - 1).clamp(min=0)
        scores: Tensor = self.shared.module(query.size(2), key.size(2), position)
        return scores
