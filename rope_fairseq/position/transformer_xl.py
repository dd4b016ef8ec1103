"""The relative encoding of Transformer-XL (Dai et al. 2019, arXiv 1901.02860, section 3.3).

    score_ij = (q_i·k_j + q_i·W_R R_{i−j} + u·k_j + v·W_R R_{i−j}) / √d

R is the sinusoid encoding of the distance: with D the embedding's dimension, R_m holds sin(m ω_c)
for all c and then cos(m ω_c), where ω_c = 10000^(−2c/D), c = 0..D/2−1. In the encoder m has both
signs.
W_R is each layer's own; u and v are shared by all layers, as in the paper's summary of the
algorithm.
"""

import torch
from torch import Tensor, nn

from rope_fairseq.position.base import PositionEncoding, Shared, Side
from rope_fairseq.position.relative import by_key, distances, products
from rope_fairseq.rotary import RotarySpec, rotation_table


class TransformerXLBiases(nn.Module):
    """u and v, [num_heads, head_dim] each."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.content_bias = nn.Parameter(torch.empty(side.num_heads, side.head_dim))
        self.position_bias = nn.Parameter(torch.empty(side.num_heads, side.head_dim))
        # As in the authors' code.
        nn.init.normal_(self.content_bias, std=0.02)
        nn.init.normal_(self.position_bias, std=0.02)


class TransformerXLPositionEncoding(PositionEncoding):
    """Adds embed_dim² parameters a layer, and 2·embed_dim to each of encoder and decoder."""

    def __init__(self, side: Side, shared: TransformerXLBiases) -> None:
        super().__init__()
        self.side, self.shared = side, Shared(shared)
        self.projection = nn.Linear(side.embed_dim, side.embed_dim, bias=False)
        nn.init.xavier_uniform_(self.projection.weight)

    def _sinusoids(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor:
        """R of each distance: [src_len + tgt_len − 1, embed_dim], float32."""
        ahead = -distances(tgt_len, src_len, device)  # i − j, query − key
        # The table of rotary embedding has the frequencies of the sinusoids: cos and sin of mω_c.
        table = rotation_table(RotarySpec(self.side.embed_dim), src_len + tgt_len, device)
        cos, sin = table[ahead.abs()].unbind(-1)
        return torch.cat((sin * ahead.sign()[:, None], cos), dim=-1)

    def score_bias(self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        tgt_len, src_len = query.size(2), key.size(2)
        biases: TransformerXLBiases = self.shared.module
        scale = self.side.head_dim**-0.5  # before the products, which in half precision round
        sinusoids = self._sinusoids(tgt_len, src_len, query.device)
        # [columns, embed_dim] -> [num_heads, columns, head_dim]
        relative = self.projection(sinusoids.to(self.projection.weight.dtype)) * scale
        relative = relative.unflatten(-1, (self.side.num_heads, -1)).transpose(0, 1)
        position = by_key(products(query + biases.position_bias[:, None], relative), src_len)
        # [batch, num_heads, 1, src_len]
        content_bias = (biases.content_bias * scale)[:, None].type_as(key)
        return position + torch.matmul(content_bias, key.transpose(2, 3))
