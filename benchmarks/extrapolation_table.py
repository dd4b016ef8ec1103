"""The README's table of translations longer than the training's sentences.

    python -m benchmarks.extrapolation_table [PAGE]

Without PAGE it is printed. It is made from ``results/extrapolate-*.json``
(``scripts/extrapolate.sh``); what is not there is "not run". Its place in a page: between the marks
``<!-- extrapolation: begin -->`` and ``<!-- extrapolation: end -->``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import table
from benchmarks.encodings_table import BLEU, NOT_RUN, Record, bleu, same
from benchmarks.extrapolation import NAME, RESULTS, SEED, SYSTEMS, Runs, label, read
from rope_fairseq.errors import UserError, run_main


def column(bucket: Record) -> str:
    return f"{bucket['shortest']}–{bucket['longest']} (n = {bucket['sentences']:,})"


def cell(bucket: Record, best: str) -> str:
    """BLEU, bold where no other is better, and the ratio of lengths."""
    if bucket["value"] is None:
        return "–"
    value = f"{bucket['value']:.2f}"
    return f"{f'**{value}**' if value == best else value} ({bucket['length_ratio']:.2f})"


def rows(runs: Runs) -> list[tuple[str, ...]]:
    """A row for each system of the comparison, and for each other one that was run."""
    columns = zip(*(run["buckets"] for run in runs.values()), strict=True)
    best = []
    for buckets in columns:
        values = [bucket["value"] for bucket in buckets if bucket["value"] is not None]
        best.append(f"{max(values):.2f}" if len(values) > 1 else "")
    found = []
    for system in (*SYSTEMS, *(system for system in runs if system not in SYSTEMS)):
        encoding, scaling = system
        name = f"`{encoding}`" + (f", scaled `{scaling}`" if scaling else "")
        cells = [NOT_RUN] * max(len(best), 1)
        if system in runs:
            cells = [
                cell(bucket, top) for bucket, top in zip(runs[system]["buckets"], best, strict=True)
            ]
        found.append((name, *cells))
    return found


def about(runs: Runs) -> list[str]:
    """What the numbers are and rest on; one fact each in which runs may differ."""
    named = {label(system): run for system, run in runs.items()}
    trained = {label((name, None)): run for (name, scaling), run in runs.items() if not scaling}
    trained = trained or named
    first = next(iter(named.values()))
    kind = same(named, lambda run: f"{bleu(run)['kind']}, `{bleu(run)['signature']}`")
    updates = same(named, lambda run: f"{run['updates']:,} updates")
    commit = same(named, lambda run: f"commit {run.get('commit') or 'not recorded'}")
    hardware = same(named, lambda run: run["hardware"])
    losses = ", ".join(
        f"{name} {run['validation_loss'][-1][1]:.3f}" if run["validation_loss"] else f"{name} –"
        for name, run in trained.items()
    )
    lines = [
        f"Columns: source tokens, end of sentence included; trained on at most "
        f"{first['trained_source_tokens']}. {BLEU} on {kind}; in brackets the length of the "
        f"translations over that of the references. **Bold**: the best of a column. "
        f"{first['longer_left_out']:,} longer test sentences are left out.",
        "",
        f"{updates}; one seed ({SEED}), which says nothing about small differences; "
        f"`{first['data']}`; {commit}; {hardware}. Validation loss at the end: {losses}.",
        "",
    ]
    scaled = [
        f"{scaling} `{run['model_overrides']}`" for (_, scaling), run in runs.items() if scaling
    ]
    if scaled:
        lines += [
            f"Scaled: the same model of rope with `--model-overrides` {'; '.join(scaled)}.",
            "",
        ]
    return lines


def render(runs: Runs) -> str:
    """The table and what it rests on."""
    first = next(iter(runs.values()), None)
    columns = [column(bucket) for bucket in first["buckets"]] if first else ["BLEU"]
    lines = table.columns("encoding", *columns, rows=rows(runs))
    return "\n".join(lines + (about(runs) if runs else [])).strip()


def show(results: Path, pages: Sequence[Path]) -> None:
    """Write the table into pages, or print it where there is none.

    Raises:
        UserError: a result is not what it should be, or a page has no marks.
    """
    runs = read(results)
    try:
        text = render(runs)
    except (LookupError, TypeError, AttributeError, StopIteration, ValueError) as error:
        raise UserError(
            f"{results}: an extrapolate-*.json was not written by its script: {error!r}"
        ) from None
    if not pages:
        print(text)
    for page in pages:
        table.write(page, NAME, text)


def main() -> None:
    if len(sys.argv) > 2:
        raise UserError("usage: python -m benchmarks.extrapolation_table [PAGE]")
    show(RESULTS, [Path(word) for word in sys.argv[1:]])


if __name__ == "__main__":
    run_main(main)
