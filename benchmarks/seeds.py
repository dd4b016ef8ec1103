"""The results of ``scripts/table.sh``, for their table and their figures."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.encodings import SOURCES
from benchmarks.encodings_table import Record, read_json
from rope_fairseq.errors import UserError
from rope_fairseq.evaluation.known_run import ENCODING, SEED, content, files_of, settings


@dataclass(frozen=True)
class Run:
    """One training: the file that says what came out of it, and its content."""

    path: Path
    record: Record

    @property
    def seed(self) -> int:
        return self.record["seed"]

    def value(self, score: str) -> float:
        """The value of a kind of score, such as ``sacreBLEU``."""
        return next(found["value"] for found in self.record["scores"] if found["name"] == score)

    @property
    def lowest_loss(self) -> float:
        """On the validation set, in bits a token with smoothed labels."""
        return min(loss for _, loss in self.record["validation_loss"])


#: By encoding, in the order of the table; seeds rising; encodings that were not run are left out.
Runs = dict[str, list[Run]]


def facts(record: Record) -> dict[str, Any]:
    """What must agree in all runs of a table, and what it is called in a message."""
    kinds = [(score["name"], score["kind"], score["signature"]) for score in record["scores"]]
    buckets = [
        (bucket["by"], bucket["shortest"], bucket["longest"], bucket["sentences"])
        for bucket in record["buckets"]
    ]
    values = settings(record)
    return {
        "recipe": record["recipe"],
        "data": content(record["data"]),
        "settings": {key: values[key] for key in values if key not in (ENCODING, SEED)},
        "average": record["average"],
        # Sentences beyond it are left out, and the batches are others.
        "tokens of a batch": record["batch"]["dataset.max_tokens"],
        "scores": kinds,
        "lengths": buckets,
        # A limit of time is another number of updates on each machine.
        "end by time": record["stopped_by"] == "stop_time_hours",
    }


def differing(fact: str, one: Any, other: Any) -> str:
    """Two values of a fact, of mappings only the first key that differs."""
    if isinstance(one, dict):
        sides = (one, other)
        key = next(
            key
            for key in sorted(one | other)
            if len({repr(side.get(key, ...)) for side in sides}) > 1
        )
        return f"{key} is {one.get(key, 'not set')}, there {other.get(key, 'not set')}"
    if isinstance(one, list):
        one, other = next(
            (pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]), (one, other)
        )
    return f"{fact}: {one}, there {other}"


def read(results: Path, recipe: str) -> Runs:
    """The runs of a recipe.

    Raises:
        UserError: a file is not what its name says, or two runs are not of one table: another
            recipe, data, config, options, average, other kinds or signatures of scores.
    """
    runs: Runs = {}
    for encoding, seed, path in files_of(recipe, results, SOURCES):
        record = read_json(path)
        assert record is not None
        is_ = tuple(record.get(key) for key in ("recipe", "position_encoding", "seed"))
        if is_ != (recipe, encoding, seed):
            raise UserError(
                f"{path}: is of recipe {is_[0]}, position encoding {is_[1]}, seed {is_[2]}"
            )
        runs.setdefault(encoding, []).append(Run(path, record))
    check_alike([run for some in runs.values() for run in some])
    return runs


def check_alike(runs: Iterable[Run]) -> None:
    """Refuse runs that no table may mix.

    Raises:
        UserError: see :func:`read`.
    """
    first: tuple[Run, dict[str, Any]] | None = None
    for run in runs:
        try:
            of_this = facts(run.record)
        except (LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{run.path}: not written by scripts/table.sh: {error!r}") from None
        if first is None:
            first = run, of_this
        for fact, value in of_this.items():
            if value != first[1][fact]:
                raise UserError(
                    f"{run.path}: not of one table with {first[0].path.name}: "
                    f"{differing(fact, value, first[1][fact])}"
                )
