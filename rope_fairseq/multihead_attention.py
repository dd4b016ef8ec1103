"""Multi-head attention for every position encoding: a drop-in for fairseq's module.

Parameter names and shapes are those of ``fairseq.modules.MultiheadAttention``, so checkpoints move
between the two. ``forward`` replaces both code paths of fairseq's (the one with incremental state
and the one without).
"""

from collections.abc import Sequence
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from rope_fairseq.attention import attend, attention_weights
from rope_fairseq.dropout import Dropout
from rope_fairseq.kv_cache import GrowingRows, is_identity, sentences_of
from rope_fairseq.position import PositionEncoding
from rope_fairseq.projection import is_plain_linear, project
from rope_fairseq.rotary import Rotation, rotate_pairs

IncrementalState = dict[str, dict[str, Any]]


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
        self.dropout_module = Dropout(kwargs.get("dropout", 0.0), "MultiheadAttention")
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
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; the arguments are those of fairseq's module, and ``lengths``.

        Args:
            query: [tgt_len, batch, embed_dim].
            key: [src_len, batch, embed_dim], the encoder's output in cross-attention; not read in
                self-attention, nor in cross-attention once its projection is cached. ``value`` is
                never read: fairseq always passes the same tensor as ``key``.
            key_padding_mask: [batch, src_len], True at padding.
            incremental_state: the cache of incremental decoding; rotated keys are kept in it.
            attn_mask: [tgt_len, src_len], added to the scores (see ``causal`` above).
            lengths: [batch], of the source sentences, where the encoding ``needs_lengths``.

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
            rotation = self.position.rotation(tgt_len, offset, query.device, lengths)
            q, k, v = self._project(query, (self.q_proj, self.k_proj, self.v_proj), rotation)
        else:
            (q,) = self._project(query, (self.q_proj,))
            k = v = None
            if not (saved is not None and static_kv and "prev_key" in saved):
                assert key is not None
                if saved is not None:
                    key, key_padding_mask = self._one_per_sentence(key, key_padding_mask, batch)
                k, v = self._project(key, (self.k_proj, self.v_proj))

        if saved is not None:
            k, v, key_padding_mask = self._extend_cache(saved, k, v, key_padding_mask, static_kv)
            saved["beams"] = batch // k.size(0)
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
        bias = self.position.score_bias(q, k, key_padding_mask)
        scale = (self.position.terms * self.head_dim) ** -0.5
        if attn_mask is not None and not self.causal:
            mask_bias = _additive(attn_mask, q.dtype)
            bias = mask_bias if bias is None else bias + mask_bias
        dropout_p = self.dropout_module.active_p

        weights = None
        # torch's CPU kernel has no dropout: it would fall back to the same three steps, with masks
        # that cost more (see dropout.py).
        explicit = dropout_p > 0 and q.device.type == "cpu"
        if need_weights or self.position.has_value_term or explicit:
            weights = attention_weights(
                q, k, key_padding_mask=key_padding_mask, causal=causal, bias=bias, scale=scale
            )
            dropped = self.dropout_module(weights).type_as(v)
            out = torch.matmul(dropped, v)
            term = self.position.value_term(dropped)
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
                scale=scale,
                dropout_p=dropout_p,
            )

        if beams > 1:
            out = out.unflatten(2, (beams, tgt_len)).transpose(1, 2).flatten(0, 1)
        # [batch, num_heads, tgt_len, head_dim] -> [batch, tgt_len, embed_dim], which is how it lies
        # in memory, and the same seen as [tgt_len, batch, embed_dim].
        out = self.out_proj(out.transpose(1, 2).flatten(2)).transpose(0, 1)
        if not need_weights:
            return out, None
        assert weights is not None
        if beams > 1:
            weights = weights.unflatten(2, (beams, tgt_len)).transpose(1, 2).flatten(0, 1)
        # [batch, num_heads, tgt_len, src_len] -> [num_heads, batch, tgt_len, src_len]
        weights = weights.transpose(0, 1)
        return out, weights if need_head_weights else weights.mean(dim=0)

    def _project(
        self, x: Tensor, layers: Sequence[nn.Module], rotation: Rotation | None = None
    ) -> list[Tensor]:
        """[seq_len, batch, embed_dim] through each layer: [batch, num_heads, seq_len, head_dim].
        A rotation turns the results of the first two."""
        x = x.transpose(0, 1)
        # For a single position, to join the weights would cost as much as the product.
        is_worth_it = torch.is_grad_enabled() or x.size(1) > 1
        if is_worth_it and all(map(is_plain_linear, layers)):
            parts = project(x, layers, self.head_dim, rotation)  # type: ignore[arg-type]
        else:
            parts = tuple(layer(x).unflatten(2, (-1, self.head_dim)) for layer in layers)
            if rotation is not None:
                turned = rotate_pairs(torch.stack(parts[:2], dim=2), rotation).unbind(2)
                parts = (*turned, *parts[2:])
        return [part.transpose(1, 2) for part in parts]

    def _one_per_sentence(
        self, key: Tensor, key_padding_mask: Tensor | None, batch: int
    ) -> tuple[Tensor, Tensor | None]:
        """Drop the copies that beam search made of each sentence (``set_beam_size``). Called in
        incremental decoding alone: a training batch after a search has no such copies, nor has a
        later search with another beam, whose sentences are seen to differ."""
        beam = self.beam_size
        if beam > 1 and batch == key.size(1) and batch % beam == 0:
            beams = key.unflatten(1, (-1, beam))
            if torch.equal(beams[:, :, :-1], beams[:, :, 1:]):
                key = beams[:, :, 0]
                if key_padding_mask is not None:
                    key_padding_mask = key_padding_mask[::beam]
        return key, key_padding_mask

    def _extend_cache(
        self,
        saved: dict[str, Any],
        k: Tensor | None,
        v: Tensor | None,
        key_padding_mask: Tensor | None,
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Join this step's keys and values to the cached ones.

        ``saved`` holds them under fairseq's names and in its layout, [batch, num_heads, src_len,
        head_dim]; those of self-attention are views of buffers (see :class:`GrowingRows`).
        """
        if self.self_attention:
            assert k is not None and v is not None
            for name, new in (("prev_key", k), ("prev_value", v)):
                growing = saved.setdefault(f"{name}_rows", GrowingRows())
                saved[name] = growing.append(new)
        elif not (static_kv and "prev_key" in saved):
            assert k is not None and v is not None
            # Read at every step: each head's in one piece.
            saved["prev_key"], saved["prev_value"] = k.contiguous(), v.contiguous()
        k, v = saved["prev_key"], saved["prev_value"]
        assert k is not None and v is not None
        if key_padding_mask is not None:  # else fairseq keeps a float mask
            key_padding_mask = key_padding_mask.to(torch.bool)
        key_padding_mask = MultiheadAttention._append_prev_key_padding_mask(
            key_padding_mask=key_padding_mask,
            prev_key_padding_mask=saved.get("prev_key_padding_mask"),
            batch_size=k.size(0),
            src_len=k.size(2),
            static_kv=static_kv,
        )
        saved["prev_key_padding_mask"] = key_padding_mask
        return k, v, key_padding_mask

    def reorder_incremental_state(
        self, incremental_state: IncrementalState | None, new_order: Tensor
    ) -> IncrementalState | None:
        """Let the cache follow the hypotheses; nothing is copied where none moved.

        Args:
            new_order: [new_batch], which row of the batch each new row continues. In
                cross-attention ``beam_size`` rows in succession (``set_beam_size``) may belong to
                one sentence, and then share its keys. (fairseq's module leaves that cache as it
                is whenever sizes agree, also where sentences changed places.)
        """
        saved = self._get_input_buffer(incremental_state)
        if "prev_key" not in saved:
            return incremental_state
        count = saved["prev_key"].size(0)
        if self.encoder_decoder_attention:
            new_order = sentences_of(new_order, saved["beams"], self.beam_size)
        if is_identity(new_order, count):
            return incremental_state
        for name in ("prev_key", "prev_value"):
            growing = saved.get(f"{name}_rows")
            if growing is None:
                saved[name] = saved[name].index_select(0, new_order)
            else:
                saved[name] = growing.select(new_order)
        mask = saved["prev_key_padding_mask"]
        if mask is not None:
            saved["prev_key_padding_mask"] = mask.index_select(0, new_order)
        return self._set_input_buffer(incremental_state, saved)


def _additive(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to the scores, from one that may be boolean (True: masked)."""
    if attn_mask.dtype == torch.bool:
        return torch.zeros_like(attn_mask, dtype=dtype).masked_fill(attn_mask, float("-inf"))
    return attn_mask.to(dtype)
