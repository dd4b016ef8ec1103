"""The estimator: attention weights summed by the distance from query to key. No fairseq here."""

from collections.abc import Sequence

import torch
from torch import Tensor


class ByDistance:
    """Sums, in float64, of the attention weights of all pairs of real tokens by distance.

    A pair is a query at position i and a key at position j of one sentence; its distance is j − i
    tokens, below 0 where the key precedes the query. Each pair that attention may look at (all, or
    under ``causal`` those with j ≤ i) counts once in each layer and head; padding does not count.

    Args:
        layers, heads: of one side of a model.
        reach: the largest distance, one less than the tokens of the longest sentence.
        causal: keys after the query are masked, and their distances left out.

    Attributes:
        distances: [n], int64: −reach, …, reach, under ``causal`` up to 0.
        pairs: [n], int64: pairs at each distance.
        queries: number of queries, the real tokens.
    """

    def __init__(self, layers: int, heads: int, reach: int, causal: bool = False) -> None:
        self._reach = reach
        last = reach + 1 if causal else 2 * reach + 1
        self._kept = slice(0, last)
        self._sums = torch.zeros(layers, heads, 2 * reach + 1, dtype=torch.float64)
        self._pairs = torch.zeros(2 * reach + 1, dtype=torch.int64)
        self.distances = torch.arange(-reach, reach + 1)[self._kept]
        self.queries = 0

    def add(self, weights: Sequence[Tensor], real: Tensor) -> None:
        """Count a batch.

        Args:
            weights: of each layer [heads, batch, seq_len, seq_len], the last axis that of the
                keys; of any floating dtype, 0 at masked keys.
            real: [batch, seq_len], False at padding.
        """
        position = torch.arange(real.size(1))
        index = (position - position[:, None] + self._reach).flatten()  # [query, key] flattened
        both = real[:, :, None] & real[:, None, :]  # [batch, query, key]
        self._pairs.index_add_(0, index, both.sum(0).flatten())
        self.queries += int(real.sum())
        for sums, layer in zip(self._sums, weights, strict=True):
            summed = torch.where(both, layer.double(), 0).sum(1)  # [heads, query, key]
            sums.index_add_(1, index, summed.flatten(1))

    @property
    def pairs(self) -> Tensor:
        return self._pairs[self._kept]

    def mean(self) -> Tensor:
        """Mean weight of the pairs at each distance [layers, heads, n]: the mean over the queries
        that have a key at that distance. Not a number where no pair is."""
        return self._sums[..., self._kept] / self.pairs

    def share(self) -> Tensor:
        """Share of all attention that goes to each distance [layers, heads, n]: the mean over all
        queries of the weight that they give to it. Its sum over distances is 1."""
        return self._sums[..., self._kept] / self.queries

    def at(self, distance: int) -> Tensor:
        """:meth:`share` at one distance [layers, heads], 0 where no sentence reaches."""
        is_it = self.distances == distance
        return self.share()[..., is_it].sum(-1)

    def mean_distance(self) -> Tensor:
        """Mean of \\|j − i\\| over queries, weighted by attention [layers, heads], in tokens."""
        return (self.share() * self.distances.abs()).sum(-1)
