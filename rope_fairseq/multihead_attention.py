"""Multi-head attention for every position encoding: a drop-in for fairseq's module.

Parameter names and shapes are those of ``fairseq.modules.MultiheadAttention``, so checkpoints move
between the two. ``forward`` replaces both code paths of fairseq's (the one with incremental state
and the one without).
"""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from rope_fairseq.attention import attend, attention_weights
from rope_fairseq.position import PositionEncoding

IncrementalState = dict[str, dict[str, Tensor | None]]


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling ``module`` is F.linear and nothing else: no subclass, hooks (quant-noise
    works through one) or parametrization, which turns the module into a subclass."""
    return type(module) is nn.Linear and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class PositionedAttention(MultiheadAttention):
    """Self- or cross-attention whose self-attention carries a position encoding.

    Args:
        position: what the encoding does in this module; None in cross-attention, where positions
            of two sentences would be compared.
        causal: decoder self-attention. An ``attn_mask`` given to ``forward`` then is fairseq's
            mask of the future, and only says that the mask applies.
        **kwargs: as in fairseq's module (``embed_dim``, ``num_heads``, ``dropout``, …).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        position: PositionEncoding | None = None,
        causal: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **kwargs)
        if not (self.self_attention or self.encoder_decoder_attention):
            raise ValueError("either self_attention or encoder_decoder_attention must be set")
        if position is not None and not self.self_attention:
            raise ValueError("a position encoding belongs to self-attention")
        # The name by which --retain-dropout-modules knows this module in stock models.
        self.dropout_module.module_name = "MultiheadAttention"
        self.position = position if position is not None else PositionEncoding()
        self.causal = causal

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; the arguments are those of fairseq's module.

        Args:
            query: [tgt_len, batch, embed_dim].
            key: [src_len, batch, embed_dim], the encoder's output in cross-attention; not read in
                self-attention, nor in cross-attention once its projection is cached. ``value`` is
                never read: fairseq always passes the same tensor as ``key``.
            key_padding_mask: [batch, src_len], True at padding.
            incremental_state: the cache of incremental decoding; rotated keys are kept in it.
            attn_mask: [tgt_len, src_len], added to the scores (see ``causal`` above).

        Returns:
            The output [tgt_len, batch, embed_dim], and the weights: None unless asked for, [batch,
            tgt_len, src_len] averaged over heads, or [num_heads, batch, tgt_len, src_len] with
            ``need_head_weights``.
        """
        if before_softmax:
            raise NotImplementedError("before_softmax is not served by PositionedAttention")
        need_weights = need_weights or need_head_weights
        tgt_len, batch = query.size(0), query.size(1)
        saved = None
        if incremental_state is not None:
            saved = self._get_input_buffer(incremental_state)

        offset = 0
        k: Tensor | None
        v: Tensor | None
        if self.self_attention:
            if saved is not None and "prev_key" in saved:
                offset = saved["prev_key"].size(2)
            q, k, v = self._project_self(query, offset)
        else:
            q = self._split_heads(self.q_proj(query))
            k = v = None
            if not (saved is not None and static_kv and "prev_key" in saved):
                assert key is not None
                if saved is not None:
                    key, key_padding_mask = self._one_per_sentence(key, key_padding_mask, batch)
                k = self._split_heads(self.k_proj(key))
                v = self._split_heads(self.v_proj(key))

        if saved is not None:
            k, v, key_padding_mask = self._extend_cache(saved, k, v, key_padding_mask, static_kv)
            self._set_input_buffer(incremental_state, saved)
        assert k is not None and v is not None
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.to(torch.bool)

        # The beams of one sentence share its cross-attention keys: they become further queries.
        # [batch, num_heads, tgt_len, head_dim] -> [sentences, num_heads, beams·tgt_len, head_dim]
        sentences = k.size(0)
        beams = batch // sentences
        if beams > 1:
            q = q.unflatten(0, (sentences, beams)).transpose(1, 2).flatten(2, 3)

        causal = self.causal and attn_mask is not None
        bias = self.position.score_bias(q, k, offset)
        if attn_mask is not None and not self.causal:
            mask_bias = _additive(attn_mask, q.dtype)
            bias = mask_bias if bias is None else bias + mask_bias
        dropout = self.dropout_module
        dropout_p = dropout.p if self.training or dropout.apply_during_inference else 0.0

        weights = None
        if need_weights or self.position.has_value_term:
            weights = attention_weights(
                q, k, key_padding_mask=key_padding_mask, causal=causal, bias=bias
            )
            dropped = dropout(weights).type_as(v)
            out = torch.matmul(dropped, v)
            term = self.position.value_term(dropped, offset)
            if term is not None:
                out = out + term
        else:
            out = attend(
                q,
                k,
                v,
                key_padding_mask=key_padding_mask,
                causal=causal,
                bias=bias,
                dropout_p=dropout_p,
            )

        if beams > 1:
            out = out.unflatten(2, (beams, tgt_len)).transpose(1, 2).flatten(0, 1)
        # [batch, num_heads, tgt_len, head_dim] -> [tgt_len, batch, embed_dim]
        out = self.out_proj(out.permute(2, 0, 1, 3).flatten(2))
        if not need_weights:
            return out, None
        assert weights is not None
        if beams > 1:
            weights = weights.unflatten(2, (beams, tgt_len)).transpose(1, 2).flatten(0, 1)
        # [batch, num_heads, tgt_len, src_len] -> [num_heads, batch, tgt_len, src_len]
        weights = weights.transpose(0, 1)
        return out, weights if need_head_weights else weights.mean(dim=0)

    def _project_self(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [seq_len, batch, embed_dim], each [batch, num_heads,
        seq_len, head_dim]; queries and keys rotated."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        # [seq_len, batch, 3, num_heads, head_dim]
        if all(is_plain_linear(p) and p.bias is not None for p in projections):
            weight = torch.cat([p.weight for p in projections])
            bias = torch.cat([p.bias for p in projections])
            qkv = F.linear(x, weight, bias).unflatten(2, (3, -1, self.head_dim))
        else:
            qkv = torch.stack([p(x).unflatten(2, (-1, self.head_dim)) for p in projections], dim=2)
        qk = self.position.rotate(qkv[:, :, :2], offset)
        q, k = qk.permute(2, 1, 3, 0, 4).unbind(0)
        return q, k, qkv[:, :, 2].permute(1, 2, 0, 3)

    def _split_heads(self, x: Tensor) -> Tensor:
        """[seq_len, batch, embed_dim] -> [batch, num_heads, seq_len, head_dim]."""
        return x.unflatten(2, (-1, self.head_dim)).permute(1, 2, 0, 3)

    def _one_per_sentence(
        self, key: Tensor, key_padding_mask: Tensor | None, batch: int
    ) -> tuple[Tensor, Tensor | None]:
        """Drop the copies that beam search made of each sentence (``set_beam_size``). Called in
        incremental decoding alone: a training batch after a search has no such copies."""
        if self.beam_size > 1 and batch == key.size(1):
            key = key[:, :: self.beam_size]
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask[:: self.beam_size]
        return key, key_padding_mask

    def _extend_cache(
        self,
        saved: dict[str, Tensor | None],
        k: Tensor | None,
        v: Tensor | None,
        key_padding_mask: Tensor | None,
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Join this step's keys and values to the cached ones and store the result in ``saved``
        in fairseq's layout: [batch, num_heads, src_len, head_dim]."""
        if "prev_key" in saved:
            prev_key, prev_value = saved["prev_key"], saved["prev_value"]
            assert prev_key is not None and prev_value is not None
            if static_kv:
                k, v = prev_key, prev_value
            else:
                assert k is not None and v is not None
                k = torch.cat((prev_key, k), dim=2)
                v = torch.cat((prev_value, v), dim=2)
        assert k is not None and v is not None
        key_padding_mask = MultiheadAttention._append_prev_key_padding_mask(
            key_padding_mask=key_padding_mask,
            prev_key_padding_mask=saved.get("prev_key_padding_mask"),
            batch_size=k.size(0),
            src_len=k.size(2),
            static_kv=static_kv,
        )
        saved["prev_key"], saved["prev_value"] = k, v
        saved["prev_key_padding_mask"] = key_padding_mask
        return k, v, key_padding_mask


def _additive(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to the scores, from one that may be boolean (True: masked)."""
    if attn_mask.dtype == torch.bool:
        return torch.zeros_like(attn_mask, dtype=dtype).masked_fill(attn_mask, float("-inf"))
    return attn_mask.to(dtype)
