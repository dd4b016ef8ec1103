"""The README's table of all position encodings: their cost, and the BLEU of a short training.

    python -m benchmarks.encodings_table [PAGE]

Without PAGE it is printed. It is made from ``results/encodings.json`` (``make bench-encodings``:
parameters and time) and ``results/short-NAME-seed1.json`` (``scripts/encodings.sh``: BLEU); what is
not there is "not run". Its place in a page: between the marks ``<!-- encodings: begin -->`` and
``<!-- encodings: end -->``.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT, table
from benchmarks.encodings import SINUSOIDAL, SOURCES
from rope_fairseq.errors import UserError, run_main

RESULTS = ROOT / "results"
NAME = "encodings"
NOT_RUN = "not run"
SEED = 1
#: A training step above this many times the one with sinusoidal positions is marked.
LIMIT = 1.60
BLEU = "sacreBLEU"

Record = dict[str, Any]


def read_json(path: Path) -> Record | None:
    """A JSON object, or None when there is no such file.

    Raises:
        UserError: it is no JSON object.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}: not the record of a run")
    return record


def read_short(results: Path) -> dict[str, Record]:
    """The short trainings that were run, by encoding.

    Raises:
        UserError: a file is not what its name says.
    """
    found = {}
    for name in SOURCES:
        path = results / f"short-{name}-seed{SEED}.json"
        record = read_json(path)
        if record is None:
            continue
        is_ = record.get("position_encoding"), record.get("seed")
        if is_ != (name, SEED):
            raise UserError(f"{path}: is of position encoding {is_[0]}, seed {is_[1]}")
        found[name] = record
    return found


def measured(record: Record | None) -> Record | None:
    """The comparison of the encodings in a record of ``bench.py``."""
    for comparison in [] if record is None else record["comparisons"]:
        if comparison["kind"] == NAME:
            return comparison
    return None


def bleu(run: Record) -> Record:
    """The score that the table shows."""
    return next(score for score in run["scores"] if score["name"] == BLEU)


def extra_parameters(systems: Mapping[str, Record], name: str) -> str:
    """How many parameters more than the same model without an encoding."""
    if not {name, "none"} <= systems.keys():
        return NOT_RUN
    return f"{systems[name]['parameters'] - systems['none']['parameters']:,}"


def step_time(systems: Mapping[str, Record], name: str) -> str:
    ratio = systems.get(name, {}).get("ratio")
    if ratio is None:
        return NOT_RUN
    cell = table.ratio_cell(ratio)
    return f"**{cell}**" if ratio["median"] > LIMIT else cell


def about_time(comparison: Record, systems: Mapping[str, Record]) -> list[str]:
    """What a step was, and whether one was too slow."""
    shape = comparison["shape"]
    line = (
        f"Step: {comparison['size']}, {shape['size']['vocabulary']:,} symbols, "
        f"{comparison['tokens']:,} tokens in sentences of {shape['length']}, attention dropout "
        f"{shape['attention_dropout']:g}; median and quartiles of the ratios within rounds."
    )
    ratios = [system["ratio"]["median"] for system in systems.values() if "ratio" in system]
    if any(ratio > LIMIT for ratio in ratios):
        line += f" **Bold**: above {LIMIT:.2f}."
    return [line, ""]


def same(runs: Mapping[str, Record], say: Callable[[Record], str]) -> str:
    """``say`` of all runs: once where all agree, else with the encodings that each is true of."""
    found: dict[str, list[str]] = {}
    for name, run in runs.items():
        found.setdefault(say(run), []).append(name)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in found.items())


def about_bleu(runs: Mapping[str, Record]) -> list[str]:
    """What the BLEU is, and what it was trained with; one line a fact in which runs may differ."""
    kind = same(runs, lambda run: f"{bleu(run)['kind']}, `{bleu(run)['signature']}`")
    updates = same(runs, lambda run: f"{run['updates']:,} updates")
    data = same(runs, lambda run: f"`{run['data']}`")
    commit = same(runs, lambda run: f"commit {run.get('commit') or 'not recorded'}")
    return [f"BLEU: {BLEU}, {kind}; {updates}; one seed ({SEED}); {data}; {commit}.", ""]


def render(record: Record | None, runs: Mapping[str, Record]) -> str:
    """The table and what it rests on.

    Args:
        record: of ``bench.py --only encodings``, or None.
        runs: of ``scripts/encodings.sh``, by encoding.
    """
    comparison = measured(record)
    systems = comparison["systems"] if comparison else {}
    rows = []
    for name, source in SOURCES.items():
        score = f"{bleu(runs[name])['value']:.2f}" if name in runs else NOT_RUN
        cells = extra_parameters(systems, name), step_time(systems, name), score
        rows.append((f"`{name}`", str(source), *cells))
    names = ("encoding", "source", "extra parameters", f"step time, {SINUSOIDAL} = 1")
    lines = table.columns(*names, "BLEU of a short demo training", rows=rows)
    if comparison and record:
        lines += about_time(comparison, systems) + table.about(record)
    if runs:
        lines += about_bleu(runs)
    return "\n".join(lines).strip()


def show(source: Path, pages: Sequence[Path]) -> None:
    """Write the table into pages, between the marks named after ``source``, or print it where there
    is none.

    Args:
        source: the record of ``bench.py``, which may be missing; those of the short trainings are
            beside it.

    Raises:
        UserError: a result is not what it should be, or a page has no marks.
    """
    record, runs = read_json(source), read_short(source.parent)
    try:
        text = render(record, runs)
    except (LookupError, TypeError, AttributeError, StopIteration, ValueError) as error:
        raise UserError(
            f"{source}: it, or a short-*.json beside it, was not written by its script: {error!r}"
        ) from None
    if not pages:
        print(text)
    for page in pages:
        table.write(page, source.stem, text)


def main() -> None:
    if len(sys.argv) > 2:
        raise UserError("usage: python -m benchmarks.encodings_table [PAGE]")
    show(RESULTS / f"{NAME}.json", [Path(word) for word in sys.argv[1:]])


if __name__ == "__main__":
    run_main(main)
