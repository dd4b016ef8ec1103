"""What came out of a whole run, from its work folder, as one small file to keep.

    python -m rope_fairseq.evaluation.run_record --work DIR --output JSON

DIR is a work folder of ``scripts/reproduce.sh``. Everything is read there: the scores;
architecture, encoding, seed and updates from the model that was scored; options and versions of its
training from the manifest; commit, parameters, validation loss and time from the training's log. A
run that is unfinished, or in which a step ran on something else than what is there now, is refused.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rope_fairseq.checkpoint import load_checkpoint, num_updates, options
from rope_fairseq.corpus.signature import read_record
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.evaluation.report import Report, read_report
from rope_fairseq.files import replacing
from rope_fairseq.lines import read_lines
from rope_fairseq.manifest import check_current, describe_file

# Each reads what the one before has written, so that all are of one run.
STEPS = ("train", "average", "translate", "score")
LAST, SCORES = "checkpoints/checkpoint_last.pt", "scores.json"
SCORE = ("name", "value", "kind", "signature")
# Options of the step train that are no changes of the config.
NO_OVERRIDES = ("tokens_per_update", "task.source_lang", "task.target_lang")

COMMIT = re.compile(r"commit: (\S+)")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+) \(num\. trained: [\d,]+\)")
VALID = re.compile(
    r"epoch \d+ \| valid on 'valid' subset \| loss ([\d.]+|nan|-?inf) .*\| num_updates (\d+)\b"
)
DONE = re.compile(r"done training in ([\d.]+) seconds")


def check_complete(work: Path) -> None:
    """Refuse a run that is unfinished, or that mixes two.

    Raises:
        UserError: a step is not done, or what it read has changed since; so have the scores or
            the last checkpoint, which no step reads.
    """
    for step in STEPS:
        check_current(work / "manifests" / f"{step}.json")
    for step, name in (("train", LAST), ("score", SCORES)):
        recorded = read_record(work / "manifests" / f"{step}.json").get("outputs", {}).get(name)
        if not (work / name).is_file() or describe_file(work / name) != recorded:
            raise UserError(f"{work / name}: not what the step {step} wrote; run its script again")


def read_log(path: Path) -> dict[str, Any]:
    """What a training log says of the whole training; it may have been interrupted and gone on.

    Returns:
        ``parameters``, ``commit`` (all of them, where the parts of the training differ; None where
        one does not say), ``validation_loss``: [update, loss] each, and ``training_seconds`` where
        the training was not interrupted.

    Raises:
        UserError: the log does not begin or does not end with fairseq's training.
    """
    starts, ends, parameters = 0, [], []
    commits: list[str] = []
    losses: dict[int, float] = {}
    for line in read_lines(path):
        if found := PARAMETERS.search(line):
            starts += 1
            parameters.append(int(found[1].replace(",", "")))
        elif found := COMMIT.fullmatch(line):
            commits.append(found[1])
        elif found := VALID.search(line):
            # What was trained again after an interruption has been validated again.
            losses[int(found[2])] = float(found[1])
            if not math.isfinite(losses[int(found[2])]):
                raise UserError(
                    f"{path}: validation loss {found[1]} at update {found[2]}: it has diverged"
                )
        elif found := DONE.search(line):
            ends.append(float(found[1]))
    if not parameters or not ends:
        raise UserError(f"{path}: not the whole log of a training")
    said: dict[str, Any] = {
        "parameters": parameters[-1],
        # A start from which nothing was trained has a commit, too, but no model.
        "commit": ", ".join(dict.fromkeys(commits)) if len(commits) >= starts else None,
        "validation_loss": [[update, losses[update]] for update in sorted(losses)],
    }
    if starts == 1:
        said["training_seconds"] = round(ends[-1], 1)
    return said


def command(recipe: str, training: Mapping[str, str]) -> str:
    """The command of such a run: recipe and overrides; other changes are in the report's."""
    overrides = [f"{key}={training[key]}" for key in training if key not in NO_OVERRIDES]
    return " ".join(["scripts/reproduce.sh", recipe, *overrides])


def make(work: Path) -> dict[str, Any]:
    """The record of a finished run.

    Raises:
        UserError: the run is unfinished, or a file of it is not what a run writes.
    """
    check_complete(work)
    last = load_checkpoint(work / LAST)
    report: Report = read_report(work / SCORES)
    training = read_record(work / "manifests" / "train.json")
    state = load_checkpoint(work / "model" / "averaged.pt")
    model, seed = options(state, "model"), options(state, "common").get("seed")
    try:
        recipe, data, changes = (report.about[name] for name in ("recipe", "data", "changes"))
        encoding = model["position_encoding"]
        architecture, averaged = model["_name"], state["extra_state"]["averaged_from"]
    except KeyError as error:
        raise UserError(f"{work}: not a run of reproduce.sh: it says no {error}") from None
    log = read_log(work / "logs" / "train.log")
    record = {
        "name": f"{recipe}, {encoding}",
        "architecture": architecture,
        "position_encoding": encoding,
        "seed": seed,
        "updates": num_updates(last),
        "averaged": [entry["updates"] for entry in averaged],
        "parameters": log.pop("parameters"),
        "scores": [{name: getattr(score, name) for name in SCORE} for score in report.scores],
        "data": data,
        "changes": changes,
        "command": command(recipe, training["options"]),
    }
    return record | log | {"versions": training["versions"]}


def main() -> None:
    parser = Parser(prog="python -m rope_fairseq.evaluation.run_record", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="work folder of reproduce.sh")
    parser.add_argument("--output", type=Path, required=True, metavar="JSON")
    arguments = parser.parse_args()
    if not arguments.work.is_dir():
        raise UserError(f"--work {arguments.work}: no such folder")
    record = make(arguments.work)
    with replacing(arguments.output) as file:
        file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    print(
        f"{arguments.output}: {record['name']}, seed {record['seed']}, {record['updates']} updates"
    )


if __name__ == "__main__":
    run_main(main)
