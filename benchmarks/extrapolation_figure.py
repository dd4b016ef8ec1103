"""The README's figure of translations longer than the training's sentences: BLEU by length.

    python -m benchmarks.extrapolation_figure [PNG]

It is made from ``results/extrapolate-*.json`` (``scripts/extrapolate.sh``); what is not there is
left out. PNG is ``docs/extrapolation.png`` unless named.
"""

import math
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.extrapolation import NAME, RESULTS, Runs, label, read
from rope_fairseq.analysis.figure import COLOURS, add_legend, blank, require_matplotlib, save
from rope_fairseq.errors import UserError, run_main
from rope_fairseq.files import replacing

# One more sign than the colour, also where two lines cover each other.
MARKERS = "osD^v<>P"
COLOURS_OF_THE_FILE = 96


def draw(runs: Runs) -> Any:
    """A line for each system over the buckets; dashed where rope is scaled."""
    figure, axes = blank(4)
    buckets = next(iter(runs.values()))["buckets"]
    for index, (system, run) in enumerate(runs.items()):
        values = [bucket["value"] for bucket in run["buckets"]]
        axes.plot(
            range(len(values)),
            [math.nan if value is None else value for value in values],
            color=COLOURS[index % len(COLOURS)],
            # Beyond the eight colours markers pair with others.
            marker=MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
            markersize=5,
            linestyle="--" if system[1] else "-",
            linewidth=1.3,
            label=label(system),
        )
    spans = [f"{bucket['shortest']}–{bucket['longest']}" for bucket in buckets]
    axes.set_xticks(range(len(spans)), spans)
    trained = next(iter(runs.values()))["trained_source_tokens"]
    axes.set_xlabel(f"tokens of the source (trained on at most {trained})")
    axes.set_ylabel("sacreBLEU")
    axes.set_ylim(bottom=0)
    add_legend(axes)
    return figure


def main() -> None:
    if len(sys.argv) > 2:
        raise UserError("usage: python -m benchmarks.extrapolation_figure [PNG]")
    output = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / f"{NAME}.png"
    runs = read(RESULTS)
    if not runs:
        raise UserError(f"{RESULTS}: holds no extrapolate-*.json; run scripts/extrapolate.sh first")
    require_matplotlib()
    with replacing(output) as file:
        save(draw(runs), file, COLOURS_OF_THE_FILE)


if __name__ == "__main__":
    run_main(main)
