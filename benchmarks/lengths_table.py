"""The tables of self-attention over length, made from what lengths.py has measured.

    python -m benchmarks.lengths_table JSON [PAGE]

Without PAGE they are printed. Their place in a page is between marks named after the JSON file, as
in table.py; without the file they are "Not measured yet."
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.encodings_table import read_json
from rope_fairseq.errors import UserError, run_main

#: Linear attention at the greatest length is to take at most so many times what it takes at the
#: shortest, which is an eighth of it.
LIMIT = 9.0

Record = dict[str, Any]


def met(kind: str, ratio: Any) -> str:
    """Whether linear attention keeps the limit; empty for softmax, and if not measured."""
    if ratio is None or not kind.startswith("linear"):
        return ""
    return "yes" if (ratio if isinstance(ratio, float) else ratio["median"]) <= LIMIT else "no"


def over_length(
    record: Record, title: str, ratio: str, cell: Callable[[Record], str | None]
) -> list[str]:
    """A table of the training calls, a row for each kind in each direction.

    Args:
        ratio: name of the ratio in the record.
        cell: what is shown of a length; None where it was not measured.
    """
    lengths = record["lengths"]
    first, last = lengths[0], lengths[-1]
    rows = []
    for found in record["training"]:
        at = found["at"]
        cells = [cell(at.get(str(length), {})) or "left out" for length in lengths]
        value = at.get(str(last), {}).get(ratio)
        direction = "causal" if found["causal"] else "bidirectional"
        judged = table.ratio_cell(value), met(found["kind"], value)
        rows.append((f"{found['kind']}, {direction}", *cells, *judged))
    names = [f"{length:,}" for length in lengths]
    return table.columns(title, *names, f"{last:,} : {first:,}", f"≤ {LIMIT:g}", rows=rows)


def milliseconds(cell: Record) -> str | None:
    return table.number(cell["summary"]["median"] * 1000) if "summary" in cell else None


def mebibytes(cell: Record) -> str | None:
    return table.number(cell["bytes"] / 2**20) if "bytes" in cell else None


def decoding(record: Record) -> list[str]:
    rows = []
    for found in record["decoding"]:
        sizes = [table.number(size / 2**10) for size in found["bytes"].values()]
        times = found["at"].values()
        cells = [milliseconds(cell) or "left out" for cell in times]
        ratio = [cell.get("time_ratio") for cell in times][-1:]
        rows.append((found["kind"], *sizes, *cells, *map(table.ratio_cell, ratio)))
    if not rows:
        return []
    first = record["decoding"][0]
    steps = [f"KiB after {int(count):,}" for count in first["bytes"]]
    positions = [f"ms at {int(position):,}" for position in first["at"]]
    return table.columns("state and step of decoding", *steps, *positions, "ratio", rows=rows)


def about(record: Record) -> list[str]:
    """What was measured; the machine, and whatever spoils the numbers."""
    size = record["size"]
    return [
        f"One self-attention of {size['embed_dim']} channels and {size['heads']} heads with rotary "
        "positions, one sentence, float32, forward and backward. Ratios of times: median and "
        "quartiles of those within rounds. Memory: the peak of a process during the call beyond "
        "what it held before, which is the program, parameters and input. State: all its buffers, "
        "with their room to grow.",
        "",
        *table.about(record),
    ]


def render(record: Record | None) -> str:
    """The tables and what they rest on; ``record`` is of ``lengths.py``, or None."""
    if record is None:
        return table.NOT_MEASURED
    lines = over_length(record, "time of a call, ms", "time_ratio", milliseconds)
    lines += over_length(record, "memory of a call, MiB", "memory_ratio", mebibytes)
    return "\n".join(lines + decoding(record) + about(record)).strip()


def show(source: Path, pages: Sequence[Path]) -> None:
    """Write the tables into pages, or print them where there is none.

    Raises:
        UserError: the file was not written by ``lengths.py``, or a page has no marks for it.
    """
    record = read_json(source)
    try:
        text = render(record)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{source}: not written by benchmarks.lengths: {error!r}") from None
    if not pages:
        print(text)
    for page in pages:
        table.write(page, source.stem, text)


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise UserError("usage: python -m benchmarks.lengths_table JSON [PAGE]")
    source, *pages = map(Path, sys.argv[1:])
    show(source, pages)


if __name__ == "__main__":
    run_main(main)
