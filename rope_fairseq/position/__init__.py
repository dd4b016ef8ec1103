"""Position encodings: the options, their checks, and which module carries which encoding."""

from dataclasses import dataclass

from rope_fairseq.errors import UserError
from rope_fairseq.position.base import PositionEncoding
from rope_fairseq.position.rope import RotaryPositionEncoding
from rope_fairseq.rotary import LAYOUTS, SCALINGS, RotarySpec

__all__ = [
    "ABSOLUTE",
    "ENCODINGS",
    "PositionEncoding",
    "PositionOptions",
    "RotaryPositionEncoding",
    "build_position_encoding",
]

ENCODINGS = ("rope", "sinusoidal", "learned", "none")

#: Encodings that are added to the token embeddings; the model builds them, not the attention.
ABSOLUTE = ("sinusoidal", "learned")


@dataclass(frozen=True)
class PositionOptions:
    """The options of position encodings, as on the command line.

    Raises:
        UserError: an option is outside its range; the message names it.
    """

    encoding: str = "rope"
    rope_base: float = 10000.0
    rope_layout: str = "interleaved"
    rope_fraction: float = 1.0
    rope_scaling: str = "none"

    def __post_init__(self) -> None:
        _choose("--position-encoding", self.encoding, ENCODINGS)
        _choose("--rope-layout", self.rope_layout, LAYOUTS)
        _choose("--rope-scaling", self.rope_scaling, SCALINGS)
        if not 0 < self.rope_base < float("inf"):
            raise UserError(f"--rope-base {self.rope_base}: must be a positive number")
        if not 0 < self.rope_fraction <= 1:
            raise UserError(f"--rope-fraction {self.rope_fraction}: must be above 0 and at most 1")

    def rotary_spec(self, head_dim: int) -> RotarySpec:
        """The rotation of a head of ``head_dim`` channels.

        Raises:
            UserError: the rotated part of the head is not a whole, even number of channels.
        """
        dim = round(self.rope_fraction * head_dim)
        if dim < 2 or dim % 2 or abs(dim - self.rope_fraction * head_dim) > 1e-6:
            raise UserError(
                f"head dimension {head_dim} with --rope-fraction {self.rope_fraction} rotates "
                f"{self.rope_fraction * head_dim:g} channels: rope needs an even number of at "
                "least 2; change --encoder/--decoder-embed-dim, -attention-heads or the fraction"
            )
        return RotarySpec(dim, self.rope_base, self.rope_layout, self.rope_scaling)

    def describe(self) -> str:
        """The encoding with the options that act on it, for the training log."""
        if self.encoding != "rope":
            return self.encoding
        return (
            f"rope (base {self.rope_base:g}, layout {self.rope_layout}, "
            f"fraction {self.rope_fraction:g}, scaling {self.rope_scaling})"
        )


def _choose(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{option} {value}: choose from {', '.join(choices)}")


def build_position_encoding(options: PositionOptions, head_dim: int) -> PositionEncoding:
    """The part of an encoding that acts inside one self-attention module."""
    if options.encoding == "rope":
        return RotaryPositionEncoding(options.rotary_spec(head_dim))
    return PositionEncoding()
