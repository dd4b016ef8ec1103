"""Checkpoints of a model with another position encoding or kind of attention, for fine-tuning."""

import logging

from torch import Tensor, nn

logger = logging.getLogger(__name__)

#: What may differ, and the names of its modules: ``encoder.embed_positions.weight``,
#: ``encoder.shared_positions.…``, ``encoder.layers.0.self_attn.position.…``;
#: ``encoder.layers.0.self_attn.feature_map.projection``.
PARTS = {
    "position encoding": {"embed_positions", "shared_positions", "position"},
    "kind of attention": {"feature_map"},
}


def match_parts(model: nn.Module, state: dict[str, Tensor]) -> None:
    """For each of :data:`PARTS`: drop from ``state``, in place, the tensors of another one, which
    mean nothing to this model. If it then has none of the model's own, they begin with their
    initial values; where only some are missing, the checkpoint is damaged, and loading it fails."""
    initial = model.state_dict()
    for part, names in PARTS.items():
        own = {key for key in initial if names & set(key.split("."))}
        stored = {key for key in state if names & set(key.split("."))}
        for key in sorted(stored - own):
            logger.info("dropping %s of the checkpoint: not of this %s", key, part)
            del state[key]
        if not stored & own:
            for key in sorted(own):
                logger.warning("%s is not in the checkpoint: begins with its initial value", key)
                state[key] = initial[key]
