"""The options that choose between softmax and linear attention, and their checks."""

from dataclasses import dataclass

from rope_fairseq.errors import UserError
from rope_fairseq.feature_maps import FEATURE_MAPS
from rope_fairseq.position import ABSOLUTE, PositionOptions

KINDS = ("softmax", "linear")

#: Encodings that linear attention can carry: all others change scores, which it does not have.
LINEAR_ENCODINGS = ("rope", *ABSOLUTE, "none")


@dataclass(frozen=True)
class AttentionKind:
    """How self-attention of encoder and decoder is computed, as on the command line (see
    models/config.py).

    Raises:
        UserError: an option is unknown, outside its range or without effect; the message names it.
    """

    kind: str = "softmax"
    feature_map: str = "elu"
    features: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"--attention-kind {self.kind}: choose from {', '.join(KINDS)}")
        name, features = self.feature_map, self.features
        if name not in FEATURE_MAPS:
            raise UserError(f"--linear-feature-map {name}: choose from {', '.join(FEATURE_MAPS)}")
        if features is not None and features < 1:
            raise UserError(f"--linear-features {features}: must be at least 1")
        if self.kind != "linear" and name != AttentionKind.feature_map:
            raise UserError(
                f"--linear-feature-map {name}: has no effect with --attention-kind {self.kind}"
            )
        if features is not None and name != "favor":
            raise UserError(
                f"--linear-features {features}: has an effect with --linear-feature-map favor only"
            )

    def check_carries(self, position: PositionOptions) -> None:
        """Raises:
        UserError: this kind of attention cannot carry the encoding.
        """
        if self.kind != "linear":
            return
        if position.encoding not in LINEAR_ENCODINGS:
            raise UserError(
                f"--position-encoding {position.encoding}: changes scores, which --attention-kind "
                f"linear does not have; choose from {', '.join(LINEAR_ENCODINGS)}"
            )
        if position.rope_scaling == "yarn":
            raise UserError(
                "--rope-scaling yarn: has a temperature of the softmax, which --attention-kind "
                "linear does not have; choose none, linear, ntk or dynamic"
            )

    def describe(self) -> str:
        """For the training log."""
        if self.kind != "linear":
            return self.kind
        if self.feature_map != "favor":
            return f"linear ({self.feature_map})"
        return f"linear (favor, {self.features or 'd·ln d'} features)"
