"""Encoder and decoder of the RoPE Transformer: fairseq's, with attention that knows positions."""

import logging
from dataclasses import replace
from typing import Any

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from rope_fairseq.dropout import Dropout, add_dropped
from rope_fairseq.feature_maps import build_feature_map
from rope_fairseq.multihead_attention import PositionedAttention
from rope_fairseq.multihead_linear_attention import LinearSelfAttention
from rope_fairseq.position import Side, build_position_encoding, build_shared
from rope_fairseq.precision import computing_in
from rope_fairseq.ready_linear import make_linears_ready
from rope_fairseq.remembered import remembered

logger = logging.getLogger(__name__)


def _self_attention(
    layer: nn.Module, embed_dim: int, side: Any, cfg: Any, causal: bool
) -> PositionedAttention:
    """Without a position encoding, which the encoder or decoder gives it."""
    arguments = dict(
        causal=causal,
        dropout=cfg.attention_dropout,
        self_attention=True,
        q_noise=layer.quant_noise,
        qn_block_size=layer.quant_noise_block_size,
    )
    kind, heads = cfg.attention_kind, side.attention_heads
    if kind.kind == "softmax":
        return PositionedAttention(embed_dim, heads, **arguments)
    features = build_feature_map(kind.feature_map, embed_dim // heads, kind.features)
    return LinearSelfAttention(embed_dim, heads, feature_map=features, **arguments)


class _SubLayers:
    """What encoder and decoder layers share.

    fairseq passes activations as [seq_len, batch, embed_dim]. Here they lie in memory as [batch,
    seq_len, embed_dim] and are seen in fairseq's order at the borders of a layer alone: attention
    reads each sentence in one piece, and nothing is copied on the way.
    """

    def _replace_dropout(self: Any, cfg: Any) -> None:
        self.dropout_module = Dropout.in_place_of(self.dropout_module)
        self.activation_dropout_module = Dropout.in_place_of(self.activation_dropout_module)
        self.compute_dtype = cfg.compute_dtype

    def _attend(
        self: Any, attention: nn.Module, norm: nn.Module, x: Tensor, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """An attention sub-layer with its residual and norm: x [batch, seq_len, embed_dim] to the
        same, and the weights (see :class:`PositionedAttention`)."""
        query = (norm(x) if self.normalize_before else x).transpose(0, 1)
        if "key" not in arguments:
            arguments["key"] = query
        out, weights = attention(query=query, value=arguments["key"], **arguments)
        out = add_dropped(x, out.transpose(0, 1), self.dropout_module.active_p)
        return (out if self.normalize_before else norm(out)), weights

    def _lengths(self: Any, source: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        """Tokens of each source sentence [batch], where the position encoding needs them.

        Args:
            source: [batch, src_len, embed_dim].
            padding_mask: [batch, src_len], True at padding.
        """
        if not self.self_attn.position.needs_lengths:
            return None
        if padding_mask is None:
            return torch.full(source.shape[:1], source.size(1), device=source.device)
        # One tensor for all layers, which remember with it what they compute from it.
        mask = padding_mask.to(torch.bool)
        return remembered(padding_mask, "lengths", lambda: (~mask).sum(1))

    def _feed_forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """The feed-forward sub-layer, and its result before the residual sum."""
        norm = self.final_layer_norm
        hidden = self.activation_fn(self.fc1(norm(x) if self.normalize_before else x))
        result = self.fc2(self.activation_dropout_module(hidden))
        out = add_dropped(x, result, self.dropout_module.active_p)
        return (out if self.normalize_before else norm(out)), result


class _BatchFirstNorm(nn.LayerNorm):
    """The norm of [seq_len, batch, embed_dim] that lies batch first in memory, and its result."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.transpose(0, 1)).transpose(0, 1)


class RopeEncoderLayer(_SubLayers, TransformerEncoderLayerBase):
    def __init__(self, cfg: Any, return_fc: bool = False) -> None:
        super().__init__(cfg, return_fc)
        self._replace_dropout(cfg)

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> Any:
        """As in fairseq: x [seq_len, batch, embed_dim], masks [batch, seq_len] and [seq_len,
        seq_len], True (or not 0) where nothing is to be seen."""
        x = x.transpose(0, 1).contiguous()
        with computing_in(self.compute_dtype, x):
            x, _ = self._attend(
                self.self_attn,
                self.self_attn_layer_norm,
                x,
                key_padding_mask=encoder_padding_mask,
                need_weights=False,
                attn_mask=None if attn_mask is None else attn_mask.to(torch.bool),
                lengths=self._lengths(x, encoder_padding_mask),
            )
            x, result = self._feed_forward(x)
        x = x.transpose(0, 1)
        return (x, result.transpose(0, 1)) if self.return_fc else x

    def build_self_attention(self, embed_dim: int, cfg: Any) -> PositionedAttention:
        return _self_attention(self, embed_dim, cfg.encoder, cfg, causal=False)


class RopeDecoderLayer(_SubLayers, TransformerDecoderLayerBase):
    def __init__(self, cfg: Any, no_encoder_attn: bool = False) -> None:
        super().__init__(cfg, no_encoder_attn)
        self._replace_dropout(cfg)
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

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        prev_self_attn_state: list[Tensor] | None = None,
        prev_attn_state: list[Tensor] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, None]:
        """As in fairseq, without what only its export to ONNX uses (``prev_self_attn_state``,
        ``prev_attn_state``): x [tgt_len, batch, embed_dim] to the same and the weights of
        cross-attention, None unless asked for."""
        if prev_self_attn_state is not None or prev_attn_state is not None:
            raise NotImplementedError("RopeDecoderLayer keeps its cache in incremental_state")
        weights = lengths = None
        if encoder_out is not None:
            lengths = self._lengths(encoder_out.transpose(0, 1), encoder_padding_mask)
        x = x.transpose(0, 1).contiguous()
        with computing_in(self.compute_dtype, x):
            x, _ = self._attend(
                self.self_attn,
                self.self_attn_layer_norm,
                x,
                key_padding_mask=self_attn_padding_mask,
                incremental_state=incremental_state,
                need_weights=False,
                attn_mask=self_attn_mask,
                lengths=lengths,
            )
            if self.encoder_attn is not None and encoder_out is not None:
                x, weights = self._attend(
                    self.encoder_attn,
                    self.encoder_attn_layer_norm,
                    x,
                    key=encoder_out,
                    key_padding_mask=encoder_padding_mask,
                    incremental_state=incremental_state,
                    static_kv=True,
                    need_weights=need_attn or need_head_weights,
                    need_head_weights=need_head_weights,
                )
            x, _ = self._feed_forward(x)
        return x.transpose(0, 1), weights, None

    def make_generation_fast_(self, need_attn: bool = False, **kwargs: Any) -> None:
        pass


def _wrap(layer: nn.Module, cfg: Any) -> nn.Module:
    """Activation checkpointing and FSDP, as fairseq wraps its own layers."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )


class _CarriesPositions:
    """An encoder or decoder whose layers' self-attention carries a position encoding."""

    def _give_position(self: Any, layer: Any, side: Side, cfg: Any) -> None:
        """Let a new layer's self-attention carry the encoding."""
        if cfg.attention_kind.feature_map == "favor":
            side = replace(side, random_features=layer.self_attn.feature_map.dim)
        if not hasattr(self, "shared_positions"):  # the first layer
            self.shared_positions = build_shared(cfg.position_options, side)
        layer.self_attn.position = build_position_encoding(
            cfg.position_options, side, self.shared_positions
        )


def _prepare(side: Any) -> None:
    """Make an encoder or decoder of fairseq serve layers whose memory is batch first."""
    side.dropout_module = Dropout.in_place_of(side.dropout_module)
    if type(side.layer_norm) is nn.LayerNorm:
        side.layer_norm.__class__ = _BatchFirstNorm


class RopeEncoder(_CarriesPositions, TransformerEncoderBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _prepare(self)

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        layer = RopeEncoderLayer(cfg, return_fc=self.return_fc)
        size = cfg.encoder
        side = Side(size.embed_dim, size.attention_heads, True, cfg.max_source_positions)
        self._give_position(layer, side, cfg)
        return _wrap(layer, cfg)


class RopeDecoder(_CarriesPositions, TransformerDecoderBase):
    """fairseq's decoder, which computes attention weights only for a reader.

    fairseq always asks the last layer for its weights, in training too. Here they are computed
    when the caller names a layer or heads, and otherwise only outside training, unless
    ``make_generation_fast_`` said that nobody will read them (without ``--print-alignment``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _prepare(self)
        self.need_attn = True

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        layer = RopeDecoderLayer(cfg, no_encoder_attn)
        size = cfg.decoder
        side = Side(size.embed_dim, size.attention_heads, False, cfg.max_target_positions)
        self._give_position(layer, side, cfg)
        return _wrap(layer, cfg)

    def make_generation_fast_(
        self, need_attn: bool = False, beamable_mm_beam_size: int | None = None, **kwargs: Any
    ) -> None:
        """Called once, when the model is only to translate from now on, with what its search
        needs. (fairseq's own Transformer leaves its beam size at 1.)"""
        self.need_attn = need_attn
        if beamable_mm_beam_size is not None:
            self.set_beam_size(beamable_mm_beam_size)
        make_linears_ready(self)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """An empty tensor, which says that the future is masked: self-attention knows how (see
        ``causal`` in PositionedAttention). fairseq's has the square of the length in numbers."""
        return tensor.new_empty(0)

    def forward(self, prev_output_tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As in fairseq; the projection to the vocabulary is computed in ``compute_dtype`` too."""
        with computing_in(self.cfg.compute_dtype, self.embed_tokens.weight):
            return super().forward(prev_output_tokens, *args, **kwargs)

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
