"""Checkpoints of a model with another position encoding or kind of attention, for fine-tuning."""

import logging

from torch import Tensor, nn

from rope_fairseq.errors import UserError

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
    initial values; where only some are missing, the checkpoint is damaged, and loading it fails.

    Raises:
        UserError: the checkpoint has another number of random features.
    """
    initial = model.state_dict()
    for part, names in PARTS.items():
        own = {key for key in initial if names & set(key.split("."))}
        stored = {key for key in state if names & set(key.split("."))}
        for key in sorted(stored - own):
            logger.info("dropping %s of the checkpoint: not of this %s", key, part)
            del state[key]
        for key in sorted(key for key in stored & own if key.endswith("feature_map.projection")):
            found, wanted = state[key].size(0), initial[key].size(0)
            if found != wanted:
                raise UserError(
                    f"--linear-features {wanted}: the checkpoint's {key} has {found} random "
                    f"features a head; say --linear-features {found}"
                )
        if not stored & own:
            for key in sorted(own):
                logger.warning("%s is not in the checkpoint: begins with its initial value", key)
                state[key] = initial[key]
