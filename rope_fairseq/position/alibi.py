"""Attention with linear biases (Press, Smith, Lewis 2022, arXiv 2108.12409, section 3).

    score_ij = q_i·k_j / √d − slope_h · |i − j|

Symmetric in the encoder. No parameters.
"""

import functools

import torch
from torch import Tensor

from rope_fairseq.position.base import PositionEncoding, Side
from rope_fairseq.position.relative import distances, toeplitz


def alibi_slopes(num_heads: int) -> Tensor:
    """The slope of each head: for n heads, n a power of two, the geometric series 2^(−8/n),
    2^(−16/n), …, 2^(−8); for other numbers, by the authors' code, the series of the next lower
    power n, filled up with every other slope of that of 2n.

    Returns:
        Tensor [num_heads], float32.
    """

    def series(heads: int) -> Tensor:
        return 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)

    lower = 2 ** (num_heads.bit_length() - 1)
    more = series(2 * lower)[::2][: num_heads - lower]
    return torch.cat((series(lower), more)).float()


@functools.cache
def _slopes_on(num_heads: int, device: torch.device) -> Tensor:
    # Here and not in a buffer, where .half() would round them; and outside inference mode, in
    # which a tensor made could not be used for training later.
    with torch.inference_mode(False):
        return alibi_slopes(num_heads).to(device)


class AlibiPositionEncoding(PositionEncoding):
    def __init__(self, side: Side) -> None:
        super().__init__()
        self.num_heads = side.num_heads

    def score_bias(self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        tgt_len, src_len = query.size(2), key.size(2)
        distance = distances(tgt_len, src_len, query.device).abs()
        slopes = _slopes_on(self.num_heads, query.device)
        return toeplitz(-slopes[:, None] * distance, tgt_len, src_len)[None]
