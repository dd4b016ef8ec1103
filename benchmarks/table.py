"""The tables of a measurement, written between two marks of a page.

    python -m benchmarks.table JSON [PAGE]

Without PAGE they are printed. The marks are HTML comments named after the JSON file; for
``results/bench.json``: ``<!-- bench: begin -->`` and ``<!-- bench: end -->``.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plan
from rope_fairseq.errors import UserError, run_main
from rope_fairseq.files import replacing

NOT_MEASURED = "Not measured yet."
QUARTILES = ("low", "median", "high")


@dataclass(frozen=True)
class Target:
    """An upper bound for a ratio, and where the measured one stands."""

    text: str
    limit: float | None
    kind: str
    system: str
    size: str = "base"
    ratio: str = "ratio"


TARGETS = (
    Target("training step, base, 37k symbols, length 30", 0.85, "training", plan.ROPE),
    Target("the same, bfloat16", 0.50, "training", plan.BFLOAT16),
    Target("training step, tiny, 10k symbols, length 30", 0.70, "training", plan.ROPE, "tiny"),
    Target(
        *("`rope` over `none`, base, 37k symbols, length 30", 1.01, "training", plan.ROPE),
        ratio="ratio_to_none",
    ),
    Target("peak memory of a step, base, 37k symbols, 4,096 tokens", 0.60, "memory", plan.ROPE),
    Target("beam search, base, task `rope_translation`", 0.60, "decoding", plan.SEARCH),
    Target("the same, default task", None, "decoding", plan.EXPORTED_BY),
    Target("the same, `rope_translation`, bfloat16", 0.40, "decoding", plan.SEARCH_BFLOAT16),
    Target("CTranslate2, int8", 0.36, "decoding", plan.INT8),
)


def columns(*names: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, with a space behind it."""
    lines = [names, ["---"] * len(names), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] + [""]


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def with_quartiles(summary: dict[str, float], factor: float = 1) -> str:
    low, median, high = (number(summary[name] * factor) for name in QUARTILES)
    return f"{median} ({low}–{high})"


def ratio_cell(value: Any) -> str:
    """A ratio: a number, or a spread of several; empty where the reference was left out."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}"
    low, median, high = (f"{value[name]:.2f}" for name in QUARTILES)
    return f"{median} ({low}–{high})"


def find(record: dict[str, Any], target: Target) -> Any:
    """The measured ratio of a target, or None."""
    for comparison in record["comparisons"]:
        shape = comparison["shape"]
        vocabulary = {"base": 37000, "tiny": 10000}[target.size]
        if (
            (comparison["kind"], comparison["size"]) == (target.kind, target.size)
            and shape["size"]["vocabulary"] == vocabulary
            and (shape["length"], shape["attention_dropout"]) == (30, 0)
        ):
            return comparison["systems"].get(target.system, {}).get(target.ratio)
    return None


def targets(record: dict[str, Any]) -> list[str]:
    rows = []
    for target in TARGETS:
        found = find(record, target)
        measured, met = ratio_cell(found), ""
        if found is None:
            measured = "not measured"
            if "bfloat16" in target.text and not record["machine"]["bfloat16"]:
                measured += ": no bfloat16 instructions on this processor"
        elif target.limit is not None:
            median = found if isinstance(found, float) else found["median"]
            met = "yes" if median <= target.limit else "no"
        limit = "" if target.limit is None else f"≤ {target.limit:.2f}"
        rows.append((target.text, limit, measured, met))
    return columns("time or memory, stock fairseq = 1", "target", "measured", "met", rows=rows)


def training(record: dict[str, Any]) -> list[str]:
    rows = []
    for comparison in record["comparisons"]:
        if comparison["kind"] not in plan.TRAININGS:
            continue
        shape = comparison["shape"]
        where = (
            f"{comparison['size']}, {shape['size']['vocabulary']:,}, {shape['length']}, "
            f"{comparison['tokens']:,}, {shape['attention_dropout']:g}"
        )
        for name, system in comparison["systems"].items():
            kernels = ", ".join(f"`{kernel}`" for kernel in system["kernels"])
            cells = with_quartiles(system["summary"]), ratio_cell(system.get("ratio"))
            rows.append((where, name, *cells, kernels or "none seen"))
    names = ("model, symbols, length, tokens, attention dropout", "system", "seconds", "ratio")
    return columns(*names, "attention by", rows=rows) if rows else []


def memory(record: dict[str, Any]) -> list[str]:
    rows = [
        (f"{comparison['tokens']:,}", name, number(system["bytes"] / 2**30))
        + (ratio_cell(system.get("ratio")),)
        for comparison in record["comparisons"]
        if comparison["kind"] == "memory"
        for name, system in comparison["systems"].items()
    ]
    names = ("tokens of the update", "system", "peak of the process, GiB", "ratio")
    return columns(*names, rows=rows) if rows else []


def decoding(record: dict[str, Any]) -> list[str]:
    rows = []
    for comparison in record["comparisons"]:
        if comparison["kind"] == "decoding":
            shape = comparison["shape"]
            tokens = shape["sentences"] * (shape["length"] + 1)
            for name, system in comparison["systems"].items():
                speed = number(tokens / system["summary"]["median"])
                cells = with_quartiles(system["summary"]), speed
                rows.append((name, *cells, ratio_cell(system.get("ratio"))))
    names = ("beam search", "seconds a batch", "target tokens/s", "ratio")
    return columns(*names, rows=rows) if rows else []


def rotation(record: dict[str, Any]) -> list[str]:
    from benchmarks.rotation_system import REPEATS

    rows = []
    for comparison in record["comparisons"]:
        if comparison["kind"] == "rotation":
            for name, system in comparison["systems"].items():
                milliseconds = with_quartiles(system["summary"], 1000 / REPEATS)
                rows.append((name, milliseconds, ratio_cell(system.get("ratio"))))
    return columns("operation on q and k of a layer", "ms", "ratio", rows=rows) if rows else []


def about(record: dict[str, Any]) -> list[str]:
    """The machine, the versions, and whatever spoils the numbers."""
    machine = record["machine"]
    device = machine["processor"] + f" ({', '.join(machine['flags'])})"
    if machine["device"] == "cuda":
        device = f"{machine['gpu']}, CUDA {machine['cuda']}; {device}"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    before, after = machine["load_before"], machine["load_after"]
    lines = [
        f"{device}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['memory_gib']} GiB; {versions}; commit {machine['commit']}, {machine['date']}; "
        f"{record['minutes']} minutes, {record['rounds']} rounds; load average "
        f"{before['average']:.2f} before, {after['average']:.2f} after.",
        "",
    ]
    busy = before["busy"] | after["busy"]
    if busy:
        named = ", ".join(f"{name} {share:.0%}" for name, share in busy.items())
        lines += [f"**Other processes were computing, so the times are too long:** {named}.", ""]
    places: dict[tuple[str, str], list[str]] = {}
    for entry in record["missing"]:
        places.setdefault((entry["system"], entry["why"]), []).append(entry["what"])
    for (system, why), where in places.items():
        lines += [f"Left out: {system} ({'; '.join(where)}): {why}.", ""]
    return lines


def render(record: dict[str, Any]) -> str:
    parts = (about, targets, training, memory, decoding, rotation)
    return "\n".join(line for part in parts for line in part(record)).strip()


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"


def block(page: str, name: str) -> str:
    """What stands between the marks.

    Raises:
        UserError: the page has no such marks.
    """
    begin, end = marks(name)
    if begin not in page or end not in page.partition(begin)[2]:
        raise UserError(f"no line {begin.strip()!r} and, below it, {end.strip()!r}")
    return page.partition(begin)[2].partition(end)[0]


def write(path: Path, name: str, text: str) -> None:
    """Put a text between the marks of a page.

    Raises:
        UserError: the page has no such marks.
    """
    begin, end = marks(name)
    page = path.read_text(encoding="utf-8")
    try:
        old = block(page, name)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    with replacing(path) as file:
        file.write(page.replace(begin + old + end, begin + text + end).encode())


def show(source: Path, pages: Sequence[Path]) -> None:
    """Write the tables of a measurement into pages, or print them where there is none.

    Raises:
        UserError: the file was not written by ``bench.py``, or a page has no marks for it.
    """
    try:
        text = render(json.loads(source.read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{source}: not written by benchmarks.bench: {error!r}") from None
    if not pages:
        print(text)
    for path in pages:
        write(path, source.stem, text)


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise UserError("usage: python -m benchmarks.table JSON [PAGE]")
    source, *pages = map(Path, sys.argv[1:])
    show(source, pages)


if __name__ == "__main__":
    run_main(main)
