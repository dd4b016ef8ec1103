"""Is a run that is kept the one that would be made?

    python -m rope_fairseq.evaluation.known_run RECIPE --result JSON --data DATA --config YAML
        --option K=V … --average K=V …

JSON is what :mod:`~rope_fairseq.evaluation.run_record` has written of a run, on whichever machine;
DATA the ``data.json`` of the data that are ready here; the options are those of the steps train and
average. Another run is refused, in one line that says what differs. Versions, commit and hardware
may differ: the record names them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rope_fairseq.corpus.signature import read_record
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.schedule import MAX_TOKENS, UPDATE_FREQ, read_config


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
        wanted: ``recipe``, ``data``, ``config``, ``options`` and ``average`` of a record.
    """
    missing = [name for name in wanted if name not in kept]
    if missing:
        return f"it does not say its {missing[0]}"
    for name in ("recipe", "data"):
        if content(kept[name]) != content(wanted[name]):
            return f"its {name} was {kept[name]}, is {wanted[name]}"
    sides = [settings(record) | record["average"] for record in (kept, wanted)]
    for key in sorted(sides[0].keys() | sides[1].keys()):
        was, is_ = (side.get(key, "not set") for side in sides)
        if was != is_:
            return f"{key} was {was}, is {is_}"
    return None


def _mapping(pairs: list[str]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in pairs)


def main() -> None:
    parser = Parser(prog="python -m rope_fairseq.evaluation.known_run")
    parser.add_argument("recipe")
    for name, metavar in (("--result", "JSON"), ("--data", "JSON"), ("--config", "YAML")):
        parser.add_argument(name, type=Path, required=True, metavar=metavar)
    for name in ("--option", "--average"):
        parser.add_argument(name, nargs="+", default=[], metavar="K=V")
    arguments = parser.parse_args()
    wanted = {
        "recipe": arguments.recipe,
        "data": read_record(arguments.data)["signature"],
        "options": _mapping(arguments.option),
        "config": read_config(arguments.config, []),
        "average": _mapping(arguments.average),
    }
    try:
        found = difference(read_record(arguments.result), wanted)
    except (LookupError, TypeError, AttributeError):
        raise UserError(f"{arguments.result}: not written by scripts/table.sh") from None
    if found is not None:
        raise UserError(f"{arguments.result}: of another run: {found}; remove it or say --force")


if __name__ == "__main__":
    run_main(main)
