"""Self-attention of the linear kind, with the parameters and the interface of the softmax kind."""

from typing import Any

import torch
from torch import Tensor

from rope_fairseq.feature_maps import FeatureMap
from rope_fairseq.kv_cache import is_identity
from rope_fairseq.linear_attention import attend_causally, attend_linearly
from rope_fairseq.multihead_attention import IncrementalState, PositionedAttention


class LinearSelfAttention(PositionedAttention):
    """Self-attention whose time and memory are linear in the length (see linear_attention.py).

    Its position encoding may rotate features, and does nothing else: there are no scores that a
    bias could be added to. There are no weights either, and so no dropout of weights.

    Args:
        feature_map: from queries and keys of heads to features.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, feature_map: FeatureMap, **kwargs: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **kwargs)
        self.feature_map = feature_map

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
    ) -> tuple[Tensor, None]:
        """Attend; as :meth:`PositionedAttention.forward`, but for what follows.

        Args:
            key_padding_mask: [batch, tgt_len], of the positions in ``query``; in incremental
                decoding it may also hold those before them.
            incremental_state: keeps a :class:`LinearState`, whatever the number of steps.

        Raises:
            NotImplementedError: weights are asked for, or a mask other than that of the future.
        """
        if need_weights or need_head_weights or before_softmax:
            raise NotImplementedError("linear attention has no weights: need_weights must be False")
        if attn_mask is not None and not self.causal:
            raise NotImplementedError("linear attention of an encoder takes no attn_mask")
        tgt_len = query.size(0)
        saved = None
        if incremental_state is not None:
            saved = self._get_input_buffer(incremental_state)
        state = None if saved is None else saved.get("linear_state")
        offset = 0 if state is None else state.length
        rotation = self.position.rotation(tgt_len, offset, query.device, lengths)
        q, k, v = self._project(query, (self.q_proj, self.k_proj, self.v_proj))
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask[:, -tgt_len:].to(torch.bool)
        # Sums over a whole sentence are no matter for bfloat16.
        with torch.autocast(query.device.type, enabled=False):
            features = self.feature_map.query(q), self.feature_map.key(k)
            if saved is None and (not self.causal or attn_mask is None):
                out = attend_linearly(
                    *features, v, rotation=rotation, key_padding_mask=key_padding_mask
                )
            else:
                out, state = attend_causally(
                    *features, v, rotation=rotation, key_padding_mask=key_padding_mask, state=state
                )
        if saved is not None:
            saved["linear_state"] = state
            self._set_input_buffer(incremental_state, saved)
        # [batch, num_heads, tgt_len, head_dim] -> [tgt_len, batch, embed_dim]
        return self.out_proj(out.transpose(1, 2).flatten(2)).transpose(0, 1), None

    def reorder_incremental_state(
        self, incremental_state: IncrementalState | None, new_order: Tensor
    ) -> IncrementalState | None:
        """See :meth:`PositionedAttention.reorder_incremental_state`."""
        saved = self._get_input_buffer(incremental_state)
        state = saved.get("linear_state")
        if state is None or is_identity(new_order, state.keys.size(0)):
            return incremental_state
        saved["linear_state"] = state.select(new_order)
        return self._set_input_buffer(incremental_state, saved)
