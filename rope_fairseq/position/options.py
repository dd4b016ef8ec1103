"""The options of position encodings and their checks."""

from dataclasses import dataclass

from rope_fairseq.errors import UserError
from rope_fairseq.rotary import LAYOUTS, SCALINGS, RotarySpec

ENCODINGS = (
    "rope",
    "sinusoidal",
    "learned",
    "shaw",
    "transformer-xl",
    "t5",
    "tupe",
    "deberta",
    "alibi",
    "none",
)

#: Encodings that are added to the token embeddings; the model builds them, not the attention.
ABSOLUTE = ("sinusoidal", "learned")

#: Encodings with a parameter for each position: longer sentences are refused.
BOUNDED = ("learned", "tupe")

#: Distances that an encoding tells apart where ``--relative-max-distance`` is not given: the
#: papers' values.
MAX_DISTANCES = {"shaw": 16, "t5": 128, "tupe": 128, "deberta": 512}

#: Encodings that have buckets of distances.
BUCKETED = ("t5", "tupe")


@dataclass(frozen=True)
class PositionOptions:
    """The options of position encodings, as on the command line (see models/config.py).

    Raises:
        UserError: an option is outside its range; the message names it.
    """

    encoding: str = "rope"
    rope_base: float = 10000.0
    rope_layout: str = "interleaved"
    rope_fraction: float = 1.0
    rope_scaling: str = "none"
    rope_scaling_factor: float | None = None
    rope_original_max_positions: int | None = None
    rope_target_extra: int = 50
    relative_max_distance: int | None = None
    relative_buckets: int = 32

    def __post_init__(self) -> None:
        _choose("--position-encoding", self.encoding, ENCODINGS)
        _choose("--rope-layout", self.rope_layout, LAYOUTS)
        _choose("--rope-scaling", self.rope_scaling, SCALINGS)
        _check("--rope-base", self.rope_base, 0 < self.rope_base < float("inf"), "positive")
        fraction = self.rope_fraction
        _check("--rope-fraction", fraction, 0 < fraction <= 1, "above 0 and at most 1")
        self._check_scaling()
        distance, buckets = self.relative_max_distance, self.relative_buckets
        _check("--relative-max-distance", distance, distance is None or distance >= 1, "at least 1")
        _check(
            "--relative-buckets",
            buckets,
            buckets >= 4 and buckets % 2 == 0,
            "even and at least 4",
        )
        if self.encoding in BUCKETED and self.max_distance <= buckets // 2:
            raise UserError(
                f"--relative-max-distance {self.max_distance}: must be above half of "
                f"--relative-buckets {buckets}, which hold a single distance each in the decoder"
            )

    def _check_scaling(self) -> None:
        scaling, factor = self.rope_scaling, self.rope_scaling_factor
        original, extra = self.rope_original_max_positions, self.rope_target_extra
        _check(
            "--rope-scaling-factor",
            factor,
            factor is None or 1 <= factor < float("inf"),
            "at least 1",
        )
        is_length = original is None or original >= 1
        _check("--rope-original-max-positions", original, is_length, "at least 1")
        _check("--rope-target-extra", extra, extra >= 0, "at least 0")
        if scaling != "none" and self.encoding != "rope":
            raise UserError(
                f"--rope-scaling {scaling}: has no effect with --position-encoding {self.encoding}"
            )
        if factor is not None and scaling == "none":
            raise UserError(
                f"--rope-scaling-factor {factor:g}: has no effect without --rope-scaling"
            )
        if factor is None and scaling in ("linear", "ntk", "yarn"):
            raise UserError(
                f"--rope-scaling {scaling}: needs --rope-scaling-factor, how many times longer "
                "sentences become"
            )
        if original is None and scaling in ("dynamic", "yarn"):
            raise UserError(
                f"--rope-scaling {scaling}: needs --rope-original-max-positions, the length that "
                "the model was trained with"
            )
        if scaling == "yarn" and self.rope_base <= 1:
            raise UserError(f"--rope-base {self.rope_base:g}: must be above 1 with yarn")

    @property
    def max_distance(self) -> int:
        """``--relative-max-distance``, or the paper's."""
        return self.relative_max_distance or MAX_DISTANCES[self.encoding]

    def rotary_spec(
        self,
        head_dim: int,
        what: str = "head dimension",
        remedy: str = "--encoder/--decoder-embed-dim, -attention-heads",
    ) -> RotarySpec:
        """The rotation of a head of ``head_dim`` channels.

        Args:
            what: the name of their number in messages.
            remedy: the options that change it.

        Raises:
            UserError: the rotated part of the head is not a whole, even number of channels, or
                too small for the scaling.
        """
        dim = round(self.rope_fraction * head_dim)
        if dim < 2 or dim % 2 or abs(dim - self.rope_fraction * head_dim) > 1e-6:
            raise UserError(
                f"{what} {head_dim} with --rope-fraction {self.rope_fraction} rotates "
                f"{self.rope_fraction * head_dim:g} channels: rope needs an even number of at "
                f"least 2; change {remedy} or the fraction"
            )
        if dim == 2 and self.rope_scaling in ("ntk", "dynamic"):
            raise UserError(
                f"--rope-scaling {self.rope_scaling}: needs at least 4 rotated channels a head, "
                f"and {what} {head_dim} with --rope-fraction {self.rope_fraction} has 2"
            )
        return RotarySpec(
            dim,
            self.rope_base,
            self.rope_layout,
            self.rope_scaling,
            self.rope_scaling_factor or 1.0,
            self.rope_original_max_positions,
        )

    def describe(self) -> str:
        """The encoding with the options that act on it, for the training log."""
        words = []
        if self.encoding == "rope":
            words += [f"base {self.rope_base:g}", f"layout {self.rope_layout}"]
            words += [f"fraction {self.rope_fraction:g}", f"scaling {self.rope_scaling}"]
            if self.rope_scaling != "none":
                words.append(f"factor {self.rope_scaling_factor or 1:g}")
            if self.rope_scaling in ("dynamic", "yarn"):
                words.append(f"original max positions {self.rope_original_max_positions}")
            if self.rope_scaling == "dynamic":
                words.append(f"target length source + {self.rope_target_extra}")
        if self.encoding in MAX_DISTANCES:
            words.append(f"max distance {self.max_distance}")
        if self.encoding in BUCKETED:
            words.append(f"buckets {self.relative_buckets}")
        return f"{self.encoding} ({', '.join(words)})" if words else self.encoding


def _choose(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{option} {value}: choose from {', '.join(choices)}")


def _check(option: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise UserError(f"{option} {value}: must be {wanted}")
