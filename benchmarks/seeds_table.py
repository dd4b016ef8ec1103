"""The table of a recipe with several position encodings and seeds, made from results/ alone.

    python -m benchmarks.seeds_table RECIPE [--results DIR] [--output FILE | PAGE]

Without PAGE or FILE, which holds the table alone, it is printed. It is made from
``results/RECIPE-ENCODING-seedN.json`` (``scripts/table.sh``); what is not there is "not run". Its
place in a page: between the marks
``<!-- RECIPE: begin -->`` and ``<!-- RECIPE: end -->``.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT, table
from benchmarks.encodings import SINUSOIDAL, SOURCES
from benchmarks.encodings_table import NOT_RUN, Record, same
from benchmarks.seeds import Run, Runs, read
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.evaluation.known_run import ENCODING, SEED
from rope_fairseq.evaluation.seeds import LEAST, Comparison, summary, welch
from rope_fairseq.files import replacing
from rope_fairseq.recipe import load_recipe

RESULTS = ROOT / "results"
BASELINE = SINUSOIDAL
COMPOUNDS = "compound-split BLEU"
#: The order of the columns; the published kind of a recipe comes first.
SCORES = ("sacreBLEU", "tokenized BLEU", COMPOUNDS, "chrF2")
LOSS = "validation loss"


@dataclass(frozen=True)
class Published:
    """A value that others have published for a recipe with some encoding."""

    encoding: str
    score: str
    value: str
    authors: str
    arxiv: str

    def __str__(self) -> str:
        return f"{self.value} ([{self.authors}](https://arxiv.org/abs/{self.arxiv}))"


#: By recipe. Multi30k: test_2016_flickr, the text-only Transformer-tiny. WMT14: newstest2014; the
#: papers do not state the kind, which for Vaswani et al. is known from tensor2tensor's script.
PUBLISHED = {
    "wmt14": (
        Published(SINUSOIDAL, COMPOUNDS, "27.3", "Vaswani et al. 2017", "1706.03762"),
        Published("rope", COMPOUNDS, "27.5, kind not stated", "Su et al. 2021", "2104.09864"),
    ),
    "wmt14-big": (Published(SINUSOIDAL, COMPOUNDS, "28.4", "Vaswani et al. 2017", "1706.03762"),),
    "multi30k": (Published(SINUSOIDAL, "tokenized BLEU", "41.02", "Wu et al. 2021", "2105.14462"),),
}


def published_for(recipe: str, runs: Runs) -> tuple[Published, ...]:
    """What is published for such runs: nothing where they say that they change the recipe, or that
    their data are a miniature."""
    records = [run.record for some in runs.values() for run in some]
    others = any(changes(record) or "|published:no" in record["data"] for record in records)
    return () if others else PUBLISHED.get(recipe, ())


def changes(record: Record) -> str:
    """What a run changes of its recipe, beside the encoding and the seed; empty where nothing."""
    own = tuple(f"{key}=" for key in (ENCODING, SEED))
    said = "" if record["changes"] == "none" else record["changes"]
    return "; ".join(one for one in said.split("; ") if one and not one.lstrip("+").startswith(own))


def score_names(published: Sequence[Published], runs: Runs) -> list[str]:
    """The kinds of scores in the order of the columns."""
    first = [*(entry.score for entry in published), *SCORES]
    for some in runs.values():
        own = [score["name"] for score in some[0].record["scores"]]
        first = [name for name in first if name in own] + own
    return list(dict.fromkeys(first))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``41.02 ± 0.31``, of one value ``41.02``."""
    found = summary(values)
    std = "" if found.std is None else f" ± {found.std:.{digits}f}"
    return f"{found.mean:.{digits}f}{std}"


def span(values: Sequence[int]) -> str:
    """``7,130`` or ``6,900–8,000``."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def rows(
    published: Sequence[Published], runs: Runs, names: Sequence[str], folder: Path
) -> Iterator[tuple[str, ...]]:
    """A row for each encoding; links are relative to ``folder``."""
    for encoding in SOURCES:
        beside = [str(entry) for entry in published if entry.encoding == encoding]
        some = runs.get(encoding)
        cells = [NOT_RUN] * (len(names) + 4)
        if some:
            links = (f"[{run.seed}]({os.path.relpath(run.path, folder)})" for run in some)
            cells = [
                f"{len(some)}: {', '.join(links)}",
                *(spread([run.value(name) for run in some]) for name in names),
                spread([run.lowest_loss for run in some], 3),
                span([run.record["parameters"] for run in some]),
                span([run.record["updates"] for run in some]),
            ]
        if published:
            cells.insert(2, "; ".join(beside))
        yield (f"`{encoding}`", *cells)


def comparison(encoding: str, measure: str, found: Comparison, digits: int) -> tuple[str, ...]:
    p = "< 0.001" if found.p < 0.001 else f"{found.p:.3f}"
    units = "" if found.in_std is None else f"{found.in_std:+.1f}"
    return (
        f"`{encoding}`",
        measure,
        f"{found.difference:+.{digits}f}",
        f"{found.low:+.{digits}f} to {found.high:+.{digits}f}",
        p,
        units,
    )


def against_baseline(runs: Runs, score: str) -> list[str]:
    """A table of the differences that can be judged, or the line that says that none can."""
    measures: tuple[tuple[str, Callable[[Run], float], int], ...] = (
        (score, lambda run: run.value(score), 2),
        (LOSS, lambda run: run.lowest_loss, 3),
    )
    baseline = runs.get(BASELINE, [])
    cells = [
        comparison(name, measure, judged, digits)
        for name, some in runs.items()
        if name != BASELINE
        for measure, value, digits in measures
        if (judged := welch([*map(value, some)], [*map(value, baseline)])) is not None
    ]
    least = f"from {LEAST} seeds of an encoding and of `{BASELINE}` on"
    if not cells:
        return [f"Differences are judged {least}.", ""]
    title = f"against `{BASELINE}`"
    lines = table.columns(
        *(title, "of", "difference", "95 % interval", "p", "in standard deviations"), rows=cells
    )
    return [
        *lines,
        f"Welch's t-test over seeds, {least}; standard deviation: that of both pooled. Each p "
        "is of one comparison: of twenty between equal encodings, one is expected below 0.05.",
        "",
    ]


def about(runs: Runs, names: Sequence[str]) -> list[str]:
    """What the numbers are and rest on; one fact each in which runs may differ."""
    records = {f"{name} {run.seed}": run.record for name, some in runs.items() for run in some}
    first = next(iter(records.values()))
    scores = {score["name"]: score for score in first["scores"]}
    kinds = "; ".join(
        f"{name}: {scores[name]['kind']}, `{scores[name]['signature']}`" for name in names
    )

    def fact(say: Callable[[dict[str, Any]], str]) -> str:
        return same(records, say)

    changed = fact(
        lambda run: f"Changes of the recipe beside encoding and seed: {changes(run) or 'none'}"
    )
    ends = fact(lambda run: f"ended by {run['stopped_by'] or 'the last epoch'}")
    data = fact(lambda run: f"`{run['data']}`")
    batch = fact(_batch)
    commit = fact(lambda run: f"commit {run['commit'] or 'not recorded'}")
    machine = fact(lambda run: run["hardware"] or "hardware not recorded")
    times = "; ".join(
        f"{name} {spread(known)}"
        for name, some in runs.items()
        if (known := [hours for run in some if (hours := _hours(run)) is not None])
    )
    averaged = first["average"]
    return [
        "Mean ± sample standard deviation over the seeds, which link to their results; of one seed "
        f"the value. {kinds}; {LOSS}: the lowest of the run, bits a token, smoothed labels; less "
        "is better.",
        "",
        f"{changed}. Training {ends}; {batch}; average of the last {averaged['last']} checkpoints "
        f"by {averaged['by']}; hours: {times or 'not recorded'}; {data}; {commit}; {machine}.",
        "",
    ]


def _batch(run: dict[str, Any]) -> str:
    """``2 devices × 4,096 tokens × 1 batch``, as in the configs; on a CPU they are processes."""
    devices, tokens = run.get("devices"), run["batch"]["dataset.max_tokens"]
    batches = run["batch"]["optimization.update_freq"][0]
    known = "devices not recorded" if devices is None else _counted(devices, "device")
    return f"{known} × {tokens:,} tokens × {_counted(batches, 'batch', 'batches')}"


def _counted(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or f'{one}s'}"


def _hours(run: Run) -> float | None:
    seconds = run.record.get("training_seconds")
    return None if seconds is None else seconds / 3600


def render(recipe: str, runs: Runs, folder: Path) -> str:
    """The table and what it rests on, for a page in ``folder``."""
    published = published_for(recipe, runs)
    names = score_names(published, runs)
    columns = [*names]
    if published:
        columns.insert(1, f"published {published[0].score}")
    cells = rows(published, runs, names, folder)
    lines = table.columns("encoding", "seeds", *columns, LOSS, "parameters", "updates", rows=cells)
    if runs:
        lines += against_baseline(runs, names[0]) + about(runs, names)
    return "\n".join(lines).strip()


def show(recipe: str, results: Path, page: Path | None, output: Path | None = None) -> None:
    """Write the table into a page or a file of its own, or print it where there is none.

    Raises:
        UserError: a result is not what it should be, or the page has no marks.
    """
    runs = read(results, recipe)
    try:
        place = page or output
        text = render(recipe, runs, (place.parent if place else Path()).resolve())
    except (LookupError, TypeError, AttributeError, StopIteration, ValueError) as error:
        raise UserError(
            f"{results}: a {recipe}-*.json was not written by its script: {error!r}"
        ) from None
    if output is not None:
        with replacing(output) as file:
            file.write(f"{text}\n".encode())
    elif page is None:
        print(text)
    else:
        table.write(page, recipe, text)


def parser(program: str) -> Parser:
    """The arguments that table and figures share."""
    made = Parser(prog=f"python -m benchmarks.{program}")
    made.add_argument("recipe", help="a file of configs/recipes/, without .yaml")
    made.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    return made


def main() -> None:
    made = parser("seeds_table")
    made.add_argument("page", type=Path, nargs="?", help="with the marks of the recipe")
    made.add_argument("--output", type=Path, metavar="FILE")
    arguments = made.parse_intermixed_args()
    load_recipe(arguments.recipe)  # a mistyped one would be a table of what was not run
    if not arguments.results.is_dir():
        raise UserError(f"--results {arguments.results}: no such folder")
    if arguments.page is not None and arguments.output is not None:
        raise UserError(f"--output {arguments.output}: not together with {arguments.page}")
    show(arguments.recipe, arguments.results.resolve(), arguments.page, arguments.output)


if __name__ == "__main__":
    run_main(main)
