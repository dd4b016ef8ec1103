"""Which of a recipe's runs are kept already, and are they those that would be made?

    python -m rope_fairseq.evaluation.known_run RECIPE --results DIR --runs rope-seed1 … \\
        [--data DATA] --config YAML --max-tokens N --option K=V … --average K=V … [--force]

In DIR lie the files ``RECIPE-ENCODING-seedN.json`` that
:mod:`~rope_fairseq.evaluation.run_record` has written, on whichever machine; DATA is the
``data.json`` of the data that are ready here; N the most tokens that a device would take at once;
the options are those of the steps train and average, but for encoding and seed. Those of the runs
that are kept are printed; without DATA, while there are none, all else is compared and nothing is
printed. All files make one table: one of another run is refused, in one line that says what
differs, with ``--force`` unless it is among the runs, which are then made anew. Versions, commit
and hardware may differ: the record names them. sacreBLEU's version may not.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from rope_fairseq.corpus.signature import read_record
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.position.options import ENCODINGS
from rope_fairseq.schedule import MAX_TOKENS, UPDATE_FREQ, read_config

#: In which runs of one table may differ, beside what follows from it.
ENCODING, SEED = "model.position_encoding", "common.seed"


def files_of(
    recipe: str, results: Path, encodings: Iterable[str] = ENCODINGS
) -> Iterator[tuple[str, int, Path]]:
    """The files of a recipe's runs: encoding and seed by the name, and the path; by encoding in the
    given order, then by seed."""
    for encoding in encodings:
        pattern = re.compile(re.escape(f"{recipe}-{encoding}-seed") + r"(0|[1-9]\d*)\.json")
        found = [
            (int(match[1]), path)
            for path in results.glob("*.json")
            if (match := pattern.fullmatch(path.name))
        ]
        yield from ((encoding, seed, path) for seed, path in sorted(found))


def content(signature: str) -> str:
    """The part of a data signature that says what the data are, up to the hash of the pieces;
    behind it stand the versions of the tools, which changed nothing if the hash is the same."""
    before, mark, rest = signature.partition("|sha256:")
    return before + mark + rest.partition("|")[0]


def settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a training ran with, key → value: its config, and in its place what its options say."""
    values = dict(record["config"])
    for key, text in record["options"].items():
        values[key.lstrip("+")] = value_of(text)
    # How many devices share the tokens of an update decides these; the record has them as `batch`.
    for key in (MAX_TOKENS, UPDATE_FREQ):
        values.pop(key, None)
    return values


def value_of(text: str) -> Any:
    """The value of an override, as a config has it: Hydra reads 5e-3 as a number, YAML 1.1 not."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # Hydra's grammar is not YAML's
    return _numbers(value)


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value):
        return float(value)
    return value


def difference(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first fact in which a run that is kept is not the one that is wanted, or None.

    Args:
        kept: the record of a run.
        wanted: ``recipe``, ``config``, ``options``, ``average`` and ``batch`` of a record, and
            ``data`` unless they are not there yet; of ``batch`` only what a device takes at once.
    """
    missing = [name for name in wanted if name not in kept]
    if missing:
        return f"it does not say its {missing[0]}"
    for name in ("recipe", "data"):
        if name in wanted and content(kept[name]) != content(wanted[name]):
            return f"its {name} was {kept[name]}, is {wanted[name]}"
    sides = [settings(record) | record["average"] for record in (kept, wanted)]
    for key in sorted(sides[0].keys() | sides[1].keys()):
        was, is_ = (side.get(key, "not set") for side in sides)
        if was != is_:
            return f"{key} was {was}, is {is_}"
    was, is_ = (record["batch"][MAX_TOKENS] for record in (kept, wanted))
    if was != is_:
        # Longer sentences are left out, and the batches are others.
        return f"{MAX_TOKENS} was {was}, is {is_} on as many devices as here; say --devices N"
    tools = {
        found[1]
        for score in kept["scores"]
        if (found := re.search(r"\|version:([^|]+)", score["signature"]))
    }
    installed = version("sacrebleu")
    if tools != {installed}:
        return f"its sacreBLEU was {', '.join(sorted(tools))}, is {installed}"
    return None


def _mapping(pairs: list[str]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in pairs)


def main() -> None:
    parser = Parser(prog="python -m rope_fairseq.evaluation.known_run")
    parser.add_argument("recipe")
    for name, metavar in (("--results", "DIR"), ("--config", "YAML")):
        parser.add_argument(name, type=Path, required=True, metavar=metavar)
    parser.add_argument("--data", type=Path, metavar="JSON")
    parser.add_argument("--max-tokens", type=int, required=True, metavar="N")
    parser.add_argument("--runs", nargs="+", required=True, metavar="ENCODING-seedN")
    for name in ("--option", "--average"):
        parser.add_argument(name, nargs="+", default=[], metavar="K=V")
    parser.add_argument("--force", action="store_true")
    arguments = parser.parse_args()
    data = {} if arguments.data is None else {"data": read_record(arguments.data)["signature"]}
    wanted = data | {
        "recipe": arguments.recipe,
        "config": read_config(arguments.config, []),
        "average": _mapping(arguments.average),
        "batch": {MAX_TOKENS: arguments.max_tokens},
    }
    options = _mapping(arguments.option)
    known, anew = [], []
    for encoding, seed, path in files_of(arguments.recipe, arguments.results):
        run = f"{encoding}-seed{seed}"
        own = options | {ENCODING: encoding, SEED: str(seed)}
        try:
            found = difference(read_record(path), wanted | {"options": own})
        except (LookupError, TypeError, AttributeError):
            found = "it was not written by scripts/table.sh"
        if found is None:
            if run in arguments.runs:
                known.append(run)
        elif run not in arguments.runs:
            raise UserError(f"{path}: of another run, no table can have both: {found}; remove it")
        elif not arguments.force:
            raise UserError(f"{path}: of another run: {found}; remove it or say --force")
        else:
            anew.append(f"table: {run} is made anew: {found}")
    if arguments.data is None:
        return
    print(*known, sep="\n")
    for line in anew:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    run_main(main)
