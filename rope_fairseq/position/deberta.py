"""Disentangled attention (He et al. 2021, DeBERTa, arXiv 2006.03654, section 3.1).

    score_ij = (q_i·k_j + q_i·W_K P_δ(i,j) + k_j·W_Q P_δ(j,i)) / √(3d)

content to content, content to position, position to content. δ(i, j) is the distance i − j clipped
to −k..k−1 and counted from 0. P is shared by the layers of the encoder or decoder; W_K and W_Q are
each layer's own. The absolute positions that DeBERTa feeds to its last layers are for masked words
and not here.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rope_fairseq.position.base import PositionEncoding, Shared, Side
from rope_fairseq.position.relative import by_key, distances, products


class DistanceEmbedding(nn.Module):
    """P [2k, embed_dim]."""

    def __init__(self, side: Side, max_distance: int) -> None:
        super().__init__()
        self.distance_embedding = nn.Parameter(torch.empty(2 * max_distance, side.embed_dim))
        nn.init.normal_(self.distance_embedding, std=side.embed_dim**-0.5)


class DebertaPositionEncoding(PositionEncoding):
    """Adds 2·embed_dim² parameters a layer, and 2k·embed_dim to each of encoder and decoder."""

    terms = 3

    def __init__(self, side: Side, shared: DistanceEmbedding) -> None:
        super().__init__()
        self.side, self.shared = side, Shared(shared)
        self.key_projection = nn.Linear(side.embed_dim, side.embed_dim, bias=False)
        self.query_projection = nn.Linear(side.embed_dim, side.embed_dim, bias=False)
        nn.init.xavier_uniform_(self.key_projection.weight)
        nn.init.xavier_uniform_(self.query_projection.weight)

    def _project(self, projection: nn.Module, distance: Tensor) -> Tensor:
        """W P / √(3d) of each distance (first minus second argument of δ): [num_heads, columns,
        head_dim]."""
        table: Tensor = self.shared.module.distance_embedding
        k = table.size(0) // 2
        row = (distance + k).clamp(0, 2 * k - 1)
        if row.numel() > 2 * k:  # some distances are alike
            projected = F.embedding(row, projection(table))
        else:
            projected = projection(F.embedding(row, table))
        projected = projected * (self.terms * self.side.head_dim) ** -0.5
        return projected.unflatten(-1, (self.side.num_heads, -1)).transpose(0, 1)

    def score_bias(self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        tgt_len, src_len = query.size(2), key.size(2)
        ahead = distances(tgt_len, src_len, query.device)  # j − i, key − query
        keys = self._project(self.key_projection, -ahead)
        queries = self._project(self.query_projection, ahead)
        content_to_position = by_key(products(query, keys), src_len)
        if tgt_len == 1:  # each key has one distance: column j is for key j
            position_to_content = (key * queries).sum(-1)[:, :, None]
        else:
            # For a key the queries are what keys are for a query, in the opposite direction.
            by_query = by_key(products(key, queries.flip(1)), tgt_len)
            position_to_content = by_query.transpose(2, 3)
        return content_to_position + position_to_content
