"""The figures of a recipe with several position encodings and seeds, made from results/ alone.

    python -m benchmarks.seeds_figure RECIPE [--results DIR] [--output DIR]

``RECIPE-curves.png``: validation loss by update, a line for each run. ``RECIPE-lengths.png``: BLEU
by the length of the source, for each encoding the mean over seeds, and a bar from the least to the
largest. DIR is that of the results unless named. They are made from
``results/RECIPE-ENCODING-seedN.json`` (``scripts/table.sh``).
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.encodings import SOURCES
from benchmarks.seeds import Run, Runs, read
from benchmarks.seeds_table import parser
from rope_fairseq.analysis.figure import (
    COLOURS,
    STYLES,
    add_legend,
    blank,
    require_matplotlib,
    save,
)
from rope_fairseq.errors import UserError, run_main
from rope_fairseq.evaluation.buckets import Bucket
from rope_fairseq.files import replacing

COLOURS_OF_THE_FILE = 96
#: BLEU of fewer is chance. Where no bucket has as many, all are shown.
FEWEST_SENTENCES = 20


def look(encoding: str) -> dict[str, Any]:
    """Colour and line of an encoding, the same in all figures; beyond the colours there are eight,
    with another line."""
    index = list(SOURCES).index(encoding)
    rounds, colour = divmod(index, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": STYLES[rounds]}


def draw_curves(runs: Runs) -> Any:
    """Validation loss over updates, the first tenth of the updates left out: there it falls from
    values that would hide the rest."""
    figure, axes = blank(4)
    highest = max(run.record["validation_loss"][-1][0] for some in runs.values() for run in some)
    for encoding, some in runs.items():
        for index, run in enumerate(some):
            points = [p for p in run.record["validation_loss"] if p[0] >= highest / 10]
            axes.plot(
                [update for update, _ in points],
                [loss for _, loss in points],
                **look(encoding),
                linewidth=1,
                label=f"{encoding} (n = {len(some)})" if index == 0 else None,
            )
    axes.set_xlabel("updates")
    axes.set_ylabel("validation loss, bits a token, smoothed labels")
    add_legend(axes)
    return figure


def by_length(some: Sequence[Run]) -> list[tuple[float, float, float] | None]:
    """Least, mean and largest BLEU of each bucket over seeds; None where no sentence is."""
    found: list[tuple[float, float, float] | None] = []
    for buckets in zip(*(run.record["buckets"] for run in some), strict=True):
        values = [bucket["value"] for bucket in buckets if bucket["value"] is not None]
        # statistics.mean is exact: a sum's rounding could lie outside equal values.
        found.append((min(values), statistics.mean(values), max(values)) if values else None)
    return found


def shown_buckets(buckets: Sequence[Any]) -> list[int]:
    """Those of enough sentences, or where none has enough, all that are not empty."""
    filled = [index for index, bucket in enumerate(buckets) if bucket["sentences"]]
    enough = [index for index in filled if buckets[index]["sentences"] >= FEWEST_SENTENCES]
    return enough or filled


def draw_lengths(runs: Runs) -> Any:
    """Encodings stand beside each other in a bucket."""
    figure, axes = blank(4)
    first = next(iter(runs.values()))[0]
    buckets = first.record["buckets"]
    shown = shown_buckets(buckets)
    for number, (encoding, some) in enumerate(runs.items()):
        values = by_length(some)
        lows, means, highs = zip(*(values[index] for index in shown), strict=True)
        place = (number - (len(runs) - 1) / 2) * 0.4 / len(runs)
        axes.errorbar(
            [place + index for index in range(len(shown))],
            means,
            [
                [mean - low for mean, low in zip(means, lows, strict=True)],
                [high - mean for mean, high in zip(means, highs, strict=True)],
            ],
            **look(encoding),
            marker="o",
            markersize=4,
            linewidth=1,
            capsize=2,
            label=f"{encoding} (n = {len(some)})",
        )
    names = [
        f"{Bucket(**buckets[index]).words}\n({buckets[index]['sentences']:,})" for index in shown
    ]
    axes.set_xticks(range(len(shown)), names)
    hidden = sum(bucket["sentences"] for bucket in buckets) - sum(
        buckets[index]["sentences"] for index in shown
    )
    left_out = f"; {hidden:,} longer or shorter left out" if hidden else ""
    axes.set_xlabel(f"words of the {buckets[0]['by']} (sentences{left_out})")
    signature = next(s["signature"] for s in first.record["scores"] if s["name"] == "sacreBLEU")
    axes.set_ylabel("sacreBLEU" + (", case ignored" if "case:lc" in signature else ""))
    add_legend(axes)
    return figure


def main() -> None:
    made = parser("seeds_figure")
    made.add_argument("--output", type=Path, metavar="DIR")
    arguments = made.parse_intermixed_args()
    output = arguments.output or arguments.results
    runs = read(arguments.results, arguments.recipe)
    if not runs:
        raise UserError(
            f"{arguments.results}: holds no {arguments.recipe}-ENCODING-seedN.json; run "
            "scripts/table.sh first"
        )
    require_matplotlib()
    for name, draw in (("curves", draw_curves), ("lengths", draw_lengths)):
        try:
            figure = draw(runs)
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{arguments.results}: a {arguments.recipe}-*.json was not written by its script: "
                f"{error!r}"
            ) from None
        with replacing(output / f"{arguments.recipe}-{name}.png") as file:
            save(figure, file, COLOURS_OF_THE_FILE)


if __name__ == "__main__":
    run_main(main)
