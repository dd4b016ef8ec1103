"""The relative bias of T5 (Raffel et al. 2020, arXiv 1910.10683, section 2.1).

    score_ij = q_i·k_j / √d + b[bucket(j − i), head]

One table b for all layers of the encoder and one for those of the decoder. Half of the buckets are
single distances; the others grow logarithmically up to the maximum distance, behind which one
bucket holds all. The encoder has separate buckets for both directions. T5 itself does not divide by
√d but starts from smaller projections; here all encodings divide.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rope_fairseq.position.base import PositionEncoding, Shared, Side
from rope_fairseq.position.relative import distances, toeplitz


def relative_buckets(
    distance: Tensor, bidirectional: bool, buckets: int, max_distance: int
) -> Tensor:
    """The bucket of each distance.

    Args:
        distance: LongTensor of any shape, key − query.
        bidirectional: keys behind the query (distance above 0) have buckets of their own, the upper
            half; otherwise they all count as distance 0.
        buckets: number of buckets, even, at least 4.
        max_distance: from here on all distances share a bucket; above the number of buckets that
            hold one distance.

    Returns:
        LongTensor of the shape of ``distance``, 0..buckets−1.
    """
    first = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    single = buckets // 2
    # In float32, as T5's own code.
    steps = torch.log(distance.clamp(min=1).float() / single) / math.log(max_distance / single)
    far = (single + (steps * (buckets - single)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < single, distance, far)


class RelativeBuckets(nn.Module):
    """The table b [buckets, num_heads] of one encoder or decoder."""

    def __init__(self, side: Side, buckets: int, max_distance: int) -> None:
        super().__init__()
        self.bidirectional, self.max_distance = side.bidirectional, max_distance
        self.bucket_bias = nn.Parameter(torch.empty(buckets, side.num_heads))
        nn.init.normal_(self.bucket_bias, std=side.embed_dim**-0.5)

    def forward(self, tgt_len: int, src_len: int) -> Tensor:
        """b of each pair of query and key: [num_heads, tgt_len, src_len]."""
        bucket = relative_buckets(
            distances(tgt_len, src_len, self.bucket_bias.device),
            self.bidirectional,
            self.bucket_bias.size(0),
            self.max_distance,
        )
        return toeplitz(F.embedding(bucket, self.bucket_bias).t().contiguous(), tgt_len, src_len)


class T5PositionEncoding(PositionEncoding):
    """Adds buckets · num_heads parameters to each of encoder and decoder."""

    def __init__(self, shared: RelativeBuckets) -> None:
        super().__init__()
        self.shared = Shared(shared)

    def score_bias(self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        bias: Tensor = self.shared.module(query.size(2), key.size(2))
        return bias[None]
