"""Figures of rotary embedding and of attention over distance, and the numbers in them.

    python -m rope_fairseq.analysis decay --output decay.png
    python -m rope_fairseq.analysis cosines --base 10000,500000 --longest 4096 --output cosines.png
    python -m rope_fairseq.analysis wavelengths --dim 64 --original-max-positions 250
    python -m rope_fairseq.analysis attention MODEL TEXT --output attention.png

The first three start faster, without fairseq, as ``python scripts/tool.py analysis decay …``.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_fairseq.analysis import output, settings
from rope_fairseq.analysis.curve_figures import distance_figure, wavelength_figure
from rope_fairseq.analysis.curves import mean_cosine, relative_upper_bound, wavelengths
from rope_fairseq.analysis.settings import Setting
from rope_fairseq.errors import Parser, UserError, run_main

LONGEST = 256
MOST_DISTANCES = 1_000_000


def decay(arguments: argparse.Namespace) -> None:
    """The bound of RoFormer's section 3.4.3 over distance."""
    chosen, distance = _over_distance(arguments)
    with output.opened(arguments) as files:
        curves = [relative_upper_bound(one.theta(), distance).tolist() for one in chosen]
        files.write(_rows(chosen, curves, "bound"))
        title, label = "Relative upper bound of the score", r"mean of $|S_i|$, $i = 1, …, d/2$"
        files.draw(lambda: distance_figure(chosen, curves, title, label))
    for name, curve in zip(chosen, curves, strict=True):
        print(f"{name}: {curve[0]:.4g} at distance 0, {curve[-1]:.4g} at {len(curve) - 1}")


def cosines(arguments: argparse.Namespace) -> None:
    """The mean of cos(m·theta_i) over distance."""
    chosen, distance = _over_distance(arguments)
    with output.opened(arguments) as files:
        curves = [mean_cosine(one.theta(), distance).tolist() for one in chosen]
        files.write(_rows(chosen, curves, "mean_cosine"))
        title, label = "Score of equal query and key", r"mean of $\cos m\theta_i$, $i = 1, …, d/2$"
        files.draw(lambda: distance_figure(chosen, curves, title, label))
    for name, curve in zip(chosen, curves, strict=True):
        below = next((m for m, value in enumerate(curve) if value < 0), None)
        where = f"not below 0 up to distance {len(curve) - 1}"
        print(f"{name}: {where if below is None else f'below 0 first at distance {below}'}")


def turns(arguments: argparse.Namespace) -> None:
    """Frequencies and wavelengths by pair of channels."""
    chosen = settings.chosen(arguments)
    trained = arguments.original_max_positions
    thetas = [one.theta() for one in chosen]
    # A pair with a longer wavelength never completes a turn in the length trained with.
    unturned = [int((wavelengths(theta) > (trained or 0)).sum()) for theta in thetas]
    notes = [f"{n} of {len(t)} pairs" for n, t in zip(unturned, thetas, strict=True)]
    with output.opened(arguments) as files:
        files.write(_wavelength_rows(chosen, thetas, trained))
        files.draw(lambda: wavelength_figure(chosen, thetas, trained, notes))
    for name, theta, note in zip(chosen, thetas, notes, strict=True):
        shortest, longest = wavelengths(theta).aminmax()  # a base below 1 turns the order round
        line = f"{name}: wavelengths from {shortest:.4g} to {longest:.4g} tokens"
        print(line + (f"; {note} never complete a turn in {trained}" if trained else ""))


def attention(arguments: argparse.Namespace) -> None:
    """Measured attention by distance; the work is in files of its own, as it needs fairseq."""
    import rope_fairseq

    if not hasattr(rope_fairseq, "__version__"):  # started by scripts/tool.py
        raise UserError("attention: needs fairseq; start it as python -m rope_fairseq.analysis")
    from rope_fairseq.analysis.attention import command

    command(arguments)


def _over_distance(arguments: argparse.Namespace) -> tuple[list[Setting], Tensor]:
    """The settings of a curve over distance, and the distances 0 to ``--longest``."""
    longest, original = arguments.longest, arguments.original_max_positions
    if not 1 <= longest <= MOST_DISTANCES:
        raise UserError(f"--longest {longest}: must be from 1 to {MOST_DISTANCES:,}")
    if original is not None and not {"dynamic", "yarn"} & set(arguments.scaling):
        raise UserError(
            f"--original-max-positions {original}: has an effect on yarn and dynamic alone"
        )
    return settings.chosen(arguments), torch.arange(longest + 1)


def _rows(
    chosen: Sequence[Setting], curves: Sequence[Sequence[float]], column: str
) -> Iterator[dict[str, Any]]:
    for one, curve in zip(chosen, curves, strict=True):
        for distance, value in enumerate(curve):
            yield one.columns() | {"distance": distance, column: value}


def _wavelength_rows(
    chosen: Sequence[Setting], thetas: Sequence[Tensor], trained: int | None
) -> Iterator[dict[str, Any]]:
    for one, theta in zip(chosen, thetas, strict=True):
        pairs = zip(theta.tolist(), wavelengths(theta).tolist(), strict=True)
        for pair, (frequency, length) in enumerate(pairs, start=1):
            row: dict[str, Any] = {"pair": pair, "theta": frequency, "wavelength": length}
            yield one.columns() | row | ({"turns": trained / length} if trained else {})


def _parser() -> Parser:
    parser = Parser(
        prog="python -m rope_fairseq.analysis",
        description="Figures of rotary embedding and attention over distance, and their numbers.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for run, name, what in (
        (decay, "decay", "RoFormer's upper bound of the score (section 3.4.3) over distance"),
        (cosines, "cosines", "the mean of cos(m·theta_i) over distance m"),
        (turns, "wavelengths", "theta_i and 2π/theta_i by pair of channels"),
    ):
        curves = commands.add_parser(name, help=what, description=f"Draw {what}.")
        curves.set_defaults(run=run)
        settings.add_options(curves)
        if run is not turns:
            curves.add_argument(
                *("--longest",),
                type=int,
                default=LONGEST,
                metavar="M",
                help=f"distances 0 to M (default {LONGEST})",
            )
        output.add_options(curves)
    what = "a trained model's self-attention by distance"
    measured = commands.add_parser("attention", help=what, description=f"Measure {what}.")
    measured.set_defaults(run=attention)
    measured.add_argument(
        "model", type=Path, metavar="MODEL", help="a model's folder, or a checkpoint in it"
    )
    measured.add_argument("text", type=Path, metavar="FILE", help="raw source text")
    measured.add_argument("--side", choices=("encoder", "decoder"), default="encoder")
    measured.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="decoder: raw translations, which it is given",
    )
    measured.add_argument(
        "--longest", type=int, default=20, metavar="M", help="distances up to M (default 20)"
    )
    output.add_options(measured)
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    run_main(main)
