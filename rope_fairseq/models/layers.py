"""Encoder and decoder of the RoPE Transformer: fairseq's, with attention that knows positions."""

import logging
from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from rope_fairseq.multihead_attention import PositionedAttention
from rope_fairseq.position import PositionOptions, build_position_encoding

logger = logging.getLogger(__name__)


def _self_attention(
    layer: nn.Module, embed_dim: int, side: Any, cfg: Any, causal: bool
) -> PositionedAttention:
    options: PositionOptions = cfg.position_options
    return PositionedAttention(
        embed_dim,
        side.attention_heads,
        position=build_position_encoding(options, embed_dim // side.attention_heads),
        causal=causal,
        dropout=cfg.attention_dropout,
        self_attention=True,
        q_noise=layer.quant_noise,
        qn_block_size=layer.quant_noise_block_size,
    )


class RopeEncoderLayer(TransformerEncoderLayerBase):
    def build_self_attention(self, embed_dim: int, cfg: Any) -> PositionedAttention:
        return _self_attention(self, embed_dim, cfg.encoder, cfg, causal=False)


class RopeDecoderLayer(TransformerDecoderLayerBase):
    def __init__(self, cfg: Any, no_encoder_attn: bool = False) -> None:
        super().__init__(cfg, no_encoder_attn)
        # The decoder alone decides who returns attention weights (see RopeDecoder).
        self.need_attn = False

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> PositionedAttention:
        return _self_attention(self, embed_dim, cfg.decoder, cfg, causal=True)

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> PositionedAttention:
        return PositionedAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            encoder_decoder_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )

    def make_generation_fast_(self, need_attn: bool = False, **kwargs: Any) -> None:
        pass


def _wrap(layer: nn.Module, cfg: Any) -> nn.Module:
    """Activation checkpointing and FSDP, as fairseq wraps its own layers."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )


def _drop_unused_positions(module: Any, state_dict: dict[str, Tensor], name: str) -> None:
    """Absolute positions of a stock checkpoint mean nothing to an encoding that has none."""
    if module.embed_positions is None:
        prefix = f"{name}.embed_positions."
        for key in [k for k in state_dict if k.startswith(prefix)]:
            logger.info("dropping %s of the checkpoint: no absolute position embedding here", key)
            del state_dict[key]


class RopeEncoder(TransformerEncoderBase):
    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        return _wrap(RopeEncoderLayer(cfg, return_fc=self.return_fc), cfg)

    def upgrade_state_dict_named(
        self, state_dict: dict[str, Tensor], name: str
    ) -> dict[str, Tensor]:
        _drop_unused_positions(self, state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)


class RopeDecoder(TransformerDecoderBase):
    """fairseq's decoder, which computes attention weights only for a reader.

    fairseq always asks the last layer for its weights, in training too. Here they are computed
    when the caller names a layer or heads, and otherwise only outside training, unless
    ``make_generation_fast_`` said that nobody will read them (without ``--print-alignment``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_attn = True

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return _wrap(RopeDecoderLayer(cfg, no_encoder_attn), cfg)

    def make_generation_fast_(self, need_attn: bool = False, **kwargs: Any) -> None:
        self.need_attn = need_attn

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None,
        incremental_state: dict[str, Any] | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """As in fairseq: features [batch, tgt_len, embed_dim] and a dict whose ``attn`` is
        [None] where no weights were wanted."""
        asked = alignment_layer is not None or alignment_heads is not None
        if not asked and (self.training or not self.need_attn):
            alignment_layer = -1  # the number of no layer
        return super().extract_features(
            prev_output_tokens,
            encoder_out,
            incremental_state,
            full_context_alignment,
            alignment_layer,
            alignment_heads,
        )

    def upgrade_state_dict_named(
        self, state_dict: dict[str, Tensor], name: str
    ) -> dict[str, Tensor]:
        _drop_unused_positions(self, state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)
