"""The rotations to compare: every combination of a command line's bases, sizes and scalings."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from torch import Tensor

from rope_fairseq.analysis.curves import frequencies, wavelengths
from rope_fairseq.errors import UserError
from rope_fairseq.rotary import SCALINGS, RotarySpec

LONGEST = 10**9  # tokens of a sentence; more are a slip of the keyboard
LARGEST_DIM = 2**16
MOST_CURVES = 8  # the colours that all kinds of colour vision can tell apart

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """A rotation, and for the scaling ``dynamic`` the tokens of the sentence that it is for."""

    spec: RotarySpec
    length: int | None = None

    def theta(self) -> Tensor:
        """The frequencies [dim/2], float64."""
        return frequencies(self.spec, self.length)

    def columns(self) -> dict[str, str]:
        """For a table: what has no effect is empty."""
        spec = self.spec
        has_factor, has_original = spec.scaling != "none", spec.scaling in ("dynamic", "yarn")
        return {
            "base": repr(spec.base),
            "dim": str(spec.dim),
            "scaling": spec.scaling,
            "factor": repr(spec.factor) if has_factor else "",
            "original_max_positions": str(spec.original_max_positions) if has_original else "",
            "length": "" if self.length is None else str(self.length),
        }

    def parts(self) -> tuple[str, str, str]:
        """Base, size and scaling in words; the last is empty for ``none``."""
        spec = self.spec
        scaling = f"{spec.scaling}, factor {spec.factor:.12g}"
        if spec.scaling in ("dynamic", "yarn"):
            scaling += f", L₀ = {spec.original_max_positions}"
        if self.length is not None:
            scaling += f", L = {self.length}"
        plain = spec.scaling == "none"
        return f"base {spec.base:.12g}", f"d = {spec.dim}", "" if plain else scaling

    def __str__(self) -> str:
        return _joined(self.parts())


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(filter(None, parts)) or "not scaled"


def named(settings: Sequence[Setting]) -> tuple[str, list[str]]:
    """What all settings have in common, for a title, and a name for each that has the rest.

    The common part is empty where nothing is in common, or there is one setting alone.
    """
    parts = [setting.parts() for setting in settings]
    varying = [index for index in range(3) if len({part[index] for part in parts}) > 1]
    if not varying:
        return "", [_joined(part) for part in parts]
    same = [parts[0][index] for index in range(3) if index not in varying]
    common = _joined(same) if any(same) else ""
    return common, [_joined(part[index] for index in varying) for part in parts]


def _listed(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A type for argparse: values joined by commas."""

    def parse(text: str) -> list[T]:
        try:
            return [kind(word) for word in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r}: must be one or more {'whole ' if kind is int else ''}numbers, "
                "joined by commas"
            ) from None

    return parse


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`chosen` reads."""
    parser.add_argument(
        "--base",
        type=_listed(float),
        default=[10000.0],
        metavar="B,…",
        help="base of the frequencies, or several (default 10000)",
    )
    parser.add_argument(
        "--dim",
        type=_listed(int),
        default=[128],
        metavar="D,…",
        help="rotated channels of a head, or several (default 128)",
    )
    parser.add_argument(
        "--scaling",
        type=lambda text: text.split(","),
        default=["none"],
        metavar="S,…",
        help=f"one or more of {', '.join(SCALINGS)} (default none)",
    )
    parser.add_argument(
        "--factor", type=float, metavar="A", help="of the scalings (dynamic: 1 without it)"
    )
    parser.add_argument(
        "--original-max-positions",
        type=int,
        metavar="L0",
        help="tokens that the model was trained with: for yarn and dynamic",
    )
    parser.add_argument(
        "--length", type=int, metavar="L", help="for dynamic: tokens of the sentence"
    )


def chosen(arguments: argparse.Namespace) -> list[Setting]:
    """Every combination of ``--base``, ``--dim`` and ``--scaling``, each once.

    Raises:
        UserError: a value is outside its range, an option is missing or has no effect, or there
            are more curves than can be told apart.
    """
    factor, original = arguments.factor, arguments.original_max_positions
    scalings = set(arguments.scaling)
    if factor is None and (needing := scalings & {"linear", "ntk", "yarn"}):
        raise UserError(f"--scaling {min(needing)}: needs --factor")
    if factor is not None and scalings == {"none"}:
        raise UserError(f"--factor {factor:g}: has no effect without --scaling")
    if "dynamic" in scalings and arguments.length is None:
        raise UserError("--scaling dynamic: needs --length, the tokens of a sentence")
    if arguments.length is not None:
        if "dynamic" not in scalings:
            raise UserError(f"--length {arguments.length}: has an effect on dynamic alone")
        if arguments.length < 1:
            raise UserError(f"--length {arguments.length}: must be at least 1")
    for option, value in (("--length", arguments.length), ("--original-max-positions", original)):
        if value is not None and value > LONGEST:
            raise UserError(f"{option}: must be at most {LONGEST:,}")
    if max(arguments.dim) > LARGEST_DIM:
        raise UserError(f"--dim: must be at most {LARGEST_DIM:,}")
    settings = []
    for base, dim, scaling in product(arguments.base, arguments.dim, arguments.scaling):
        try:
            spec = RotarySpec(
                dim,
                base,
                scaling=scaling,
                factor=1.0 if factor is None else factor,
                original_max_positions=original,
            )
            setting = Setting(spec, arguments.length if scaling == "dynamic" else None)
            theta = setting.theta()
        except ValueError as error:
            raise UserError(str(error)) from None
        if not (theta.isfinite() & wavelengths(theta).isfinite()).all():
            raise UserError(f"{setting}: a frequency is too large or too small for float64")
        settings.append(setting)
    settings = list(dict.fromkeys(settings))
    if len(settings) > MOST_CURVES:
        raise UserError(f"{len(settings)} curves: a figure holds at most {MOST_CURVES}")
    return settings
