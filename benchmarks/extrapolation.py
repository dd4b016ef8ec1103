"""The results of ``scripts/extrapolate.sh``, for its table and its figure."""

from pathlib import Path

from benchmarks import ROOT
from benchmarks.encodings import SOURCES
from benchmarks.encodings_table import Record, read_json
from rope_fairseq.errors import UserError

RESULTS = ROOT / "results"
NAME = "extrapolation"
SEED = 1
SCALINGS = ("linear", "ntk", "dynamic", "yarn")

#: What is compared: encoding, and scaling at test time or None. More encodings are added if run.
SYSTEMS: tuple[tuple[str, str | None], ...] = (
    *(("sinusoidal", None), ("rope", None)),
    *(("rope", scaling) for scaling in SCALINGS),
    *(("alibi", None), ("t5", None)),
)
MORE = tuple((name, None) for name in SOURCES if (name, None) not in SYSTEMS)

#: By system, those that were not run left out.
Runs = dict[tuple[str, str | None], Record]


def label(system: tuple[str, str | None]) -> str:
    """``rope`` or ``rope, ntk``."""
    return ", ".join(word for word in system if word)


def test_set(run: Record) -> tuple:
    """What must agree for BLEU to be comparable bucket by bucket: data and buckets."""
    spans = [
        (bucket["shortest"], bucket["longest"], bucket["sentences"]) for bucket in run["buckets"]
    ]
    return run["data"], spans, run["longer_left_out"], run["trained_source_tokens"]


def read(results: Path) -> Runs:
    """The systems that were run with seed 1, in the order of the table.

    Raises:
        UserError: a file is not what its name says, or two are of other data or buckets.
    """
    runs: Runs = {}
    for system in SYSTEMS + MORE:
        path = results / f"extrapolate-{'-'.join(word for word in system if word)}.json"
        run = read_json(path)
        if run is None:
            continue
        is_ = run.get("position_encoding"), run.get("scaling"), run.get("seed")
        if is_ != (*system, SEED):
            raise UserError(
                f"{path}: is of position encoding {is_[0]}, scaling {is_[1]}, seed {is_[2]}"
            )
        try:
            of_this, of_first = test_set(run), test_set(next(iter(runs.values()), run))
        except (LookupError, TypeError) as error:
            raise UserError(f"{path}: not written by scripts/extrapolate.sh: {error!r}") from None
        if of_this != of_first:
            raise UserError(
                f"{path}: is of other data or sentences than that of {label(next(iter(runs)))}; "
                "run scripts/extrapolate.sh for all of them alike"
            )
        runs[system] = run
    return runs
