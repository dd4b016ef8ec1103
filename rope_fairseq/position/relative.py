"""Scores and weights by relative position, and between them and those by key.

Queries stand at the last ``tgt_len`` of ``src_len`` positions, so the distance key − query runs
from −(src_len − 1) to tgt_len − 1: ``src_len + tgt_len − 1`` columns of *scores by distance*, of
which each query needs ``src_len``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def distances(tgt_len: int, src_len: int, device: torch.device) -> Tensor:
    """The distance key − query of each column: LongTensor [src_len + tgt_len − 1]."""
    return torch.arange(1 - src_len, tgt_len, device=device)


def products(vectors: Tensor, rows: Tensor) -> Tensor:
    """The product of each vector with the row of each distance, head by head.

    Args:
        vectors: [batch, num_heads, tgt_len, head_dim], queries.
        rows: [num_heads, columns, head_dim].

    Returns:
        Tensor [batch, num_heads, tgt_len, columns].
    """
    return torch.einsum("bhtd,hcd->bhtc", vectors, rows.type_as(vectors))


def by_key(scores: Tensor, src_len: int) -> Tensor:
    """Scores by distance as scores by key: a view, made by starting each row one column earlier
    (the "relative shift" of Transformer-XL, arXiv 1901.02860, appendix B).

    Args:
        scores: [..., tgt_len, src_len + tgt_len − 1].

    Returns:
        Tensor [..., tgt_len, src_len].
    """
    tgt_len, columns = scores.shape[-2:]
    if tgt_len == 1:
        return scores
    if scores.stride()[-2:] != (columns, 1):
        scores = scores.contiguous()
    return scores.as_strided(
        (*scores.shape[:-1], src_len),
        (*scores.stride()[:-2], columns - 1, 1),
        scores.storage_offset() + tgt_len - 1,
    )


def by_distance(weights: Tensor) -> Tensor:
    """Weights by key as weights by distance, the inverse of :func:`by_key`; 0 elsewhere.

    Args:
        weights: [..., tgt_len, src_len].

    Returns:
        Tensor [..., tgt_len, src_len + tgt_len − 1].
    """
    tgt_len, src_len = weights.shape[-2:]
    columns = src_len + tgt_len - 1
    if tgt_len == 1:
        return weights
    rows = F.pad(weights, (0, columns - 1 - src_len))
    return F.pad(rows.flatten(-2), (tgt_len - 1, 1)).unflatten(-1, (tgt_len, columns))


def toeplitz(values: Tensor, tgt_len: int, src_len: int) -> Tensor:
    """What depends on the distance alone, for each pair of query and key.

    Args:
        values: [..., src_len + tgt_len − 1], by distance.

    Returns:
        Tensor [..., tgt_len, src_len].
    """
    # Window w holds the columns w..w+src_len−1; that of query t begins at tgt_len − 1 − t.
    return values.unfold(-1, src_len, 1).flip(-2)
