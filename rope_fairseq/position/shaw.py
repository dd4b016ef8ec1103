"""Relative position representations (Shaw, Uszkoreit, Vaswani 2018, arXiv 1803.02155).

With d the head dimension and clip(x) = max(−k, min(k, x)), equations 3 to 5 of the paper:

    e_ij = q_i·(k_j + a^K_clip(j−i)) / √d
    α_i  = softmax(e_i)
    z_i  = Σ_j α_ij (v_j + a^V_clip(j−i))
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rope_fairseq.position.base import PositionEncoding, Side
from rope_fairseq.position.relative import by_distance, by_key, distances


class ShawPositionEncoding(PositionEncoding):
    """Embeddings of clipped distances, added to keys and values; shared by the heads of a layer.

    Adds 2·(2k + 1)·head_dim parameters a layer. The value term needs the attention weights, so no
    fused kernel runs.

    Args:
        max_distance: k; distances beyond it count as k.
    """

    has_value_term = True

    def __init__(self, side: Side, max_distance: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        # [2k + 1, head_dim], from distance −k to k.
        self.key_embedding = nn.Parameter(torch.empty(2 * max_distance + 1, side.head_dim))
        self.value_embedding = nn.Parameter(torch.empty(2 * max_distance + 1, side.head_dim))
        nn.init.xavier_uniform_(self.key_embedding)
        nn.init.xavier_uniform_(self.value_embedding)

    def _rows(self, table: Tensor, tgt_len: int, src_len: int) -> Tensor:
        """The embedding of each distance: [src_len + tgt_len − 1, head_dim]."""
        k = self.max_distance
        return F.embedding(distances(tgt_len, src_len, table.device).clamp(-k, k) + k, table)

    def score_bias(self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        rows = self._rows(self.key_embedding, query.size(2), key.size(2))
        return by_key(torch.matmul(query, (rows * query.size(-1) ** -0.5).t()), key.size(2))

    def value_term(self, weights: Tensor) -> Tensor:
        rows = self._rows(self.value_embedding, weights.size(2), weights.size(3))
        return torch.matmul(by_distance(weights), rows.type_as(weights))

    def extra_repr(self) -> str:
        return f"max_distance={self.max_distance}"
