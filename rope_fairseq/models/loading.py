"""Checkpoints of a model with another position encoding, for fine-tuning."""

import logging

from torch import Tensor, nn

logger = logging.getLogger(__name__)


def _of_positions(key: str) -> bool:
    """Whether a parameter belongs to a position encoding: ``encoder.embed_positions.weight``,
    ``encoder.shared_positions.…``, ``encoder.layers.0.self_attn.position.…``."""
    return bool({"embed_positions", "shared_positions", "position"} & set(key.split(".")))


def match_positions(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Drop from ``state``, in place, the positions of another encoding, which mean nothing to this
    model. If it then has none of the model's own, they begin with their initial values; where only
    some are missing, the checkpoint is damaged, and loading it fails."""
    own = {key: tensor for key, tensor in model.state_dict().items() if _of_positions(key)}
    stored = {key for key in state if _of_positions(key)}
    for key in sorted(stored - own.keys()):
        logger.info("dropping %s of the checkpoint: not of this position encoding", key)
        del state[key]
    if not stored & own.keys():
        for key in sorted(own):
            logger.warning("%s is not in the checkpoint: begins with its initial value", key)
            state[key] = own[key]
