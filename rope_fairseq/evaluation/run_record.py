"""What came out of a whole run, from its work folder, as one small file to keep.

    python -m rope_fairseq.evaluation.run_record --work DIR --output JSON

DIR is a work folder of ``scripts/reproduce.sh``. Everything is read there: the scores, in all and
by length; architecture, encoding, seed and updates from the model that was scored; options and
versions of its training from the manifest, and the values of the config that it names; commit,
hardware, parameters, validation loss and what ended it from the training's log; its time from there
or the last checkpoint. A run that is unfinished, or in which a step ran on something else than what
is there now, is refused.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rope_fairseq.checkpoint import load_checkpoint, num_updates, options
from rope_fairseq.corpus.signature import read_record
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.evaluation.report import Report, read_report
from rope_fairseq.files import replacing
from rope_fairseq.lines import read_lines
from rope_fairseq.manifest import ROOT, check_current, describe_file
from rope_fairseq.schedule import MAX_TOKENS, UPDATE_FREQ, read_config

# Each reads what the one before has written, so that all are of one run.
STEPS = ("train", "average", "translate", "score")
LAST, SCORES = "checkpoints/checkpoint_last.pt", "scores.json"
SCORE = ("name", "value", "kind", "signature")
# Options of the step train that are no changes of the config.
NO_OVERRIDES = ("tokens_per_update", "task.source_lang", "task.target_lang")

COMMIT = re.compile(r"commit: (\S+)")
HARDWARE = re.compile(r"hardware: (\{.*\})")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+) \(num\. trained: [\d,]+\)")
DEVICES = re.compile(r"training on (\d+) devices")
TOKENS = re.compile(r"max tokens per device = (\d+)")
VALID = re.compile(
    r"epoch \d+ \| valid on 'valid' subset \| loss ([\d.]+|nan|-?inf) .*\| num_updates (\d+)\b"
)
DONE = re.compile(r"done training in ([\d.]+) seconds")
# What fairseq says when it ends training, and resume.py when it finds it ended.
STOPS = {
    "patience": re.compile(r"early stop since valid performance|complete at .*: out of patience"),
    "max_update": re.compile(r"num_updates: \d+ >= max_update|complete at .*: --max-update"),
    "stop_time_hours": re.compile(r"> stop_time_hours: |complete at .*: --stop-time-hours"),
    "stop_min_lr": re.compile(r"\(--stop-min-lr="),
}


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
        ``parameters``; ``commit`` and ``hardware`` (all of them, where the parts of the training
        differ; None where one does not say); ``validation_loss``: [update, loss] each;
        ``stopped_by``: a name in :data:`STOPS`, or None where it ended otherwise, by max_epoch;
        ``starts``: how often a training was started or gone on with, not counting those that
        ended before they validated, of which nothing is left; ``devices``: how many
        processes trained together when it ended; and ``training_seconds`` where it was not
        interrupted.

    Raises:
        UserError: the log does not begin or does not end with fairseq's training, nothing was
            validated in it, or its parts had batches of different size.
    """
    ends, parameters = [], []
    sizes: dict[int, None] = {}
    commits: list[str | None] = []
    machines: list[str | None] = []
    commit = machine = None
    is_new = False
    losses: dict[int, float] = {}
    stopped_by = devices = size = None
    for line in read_lines(path):
        if found := PARAMETERS.search(line):
            stopped_by, is_new = None, True
            parameters.append(int(found[1].replace(",", "")))
        elif found := COMMIT.fullmatch(line):
            commit, machine = found[1], None
        elif found := HARDWARE.fullmatch(line):
            machine = hardware_line(found[1])
        elif found := DEVICES.search(line):
            devices = int(found[1])
        elif found := TOKENS.search(line):
            size = int(found[1])
        elif found := VALID.search(line):
            if is_new:
                commits.append(commit)
                machines.append(machine)
                commit = machine = None
                is_new = False
                if size is not None:
                    sizes[size] = None
            # What was trained again after an interruption has been validated again.
            losses[int(found[2])] = float(found[1])
            if not math.isfinite(losses[int(found[2])]):
                raise UserError(
                    f"{path}: validation loss {found[1]} at update {found[2]}: it has diverged"
                )
        elif found := DONE.search(line):
            ends.append(float(found[1]))
        else:
            reasons = (name for name, pattern in STOPS.items() if pattern.search(line))
            stopped_by = next(reasons, stopped_by)
    if not parameters or not losses or not ends:
        raise UserError(f"{path}: not the whole log of a training")
    if len(sizes) > 1:
        raise UserError(
            f"{path}: batches of at most {' and then '.join(map(str, sizes))} tokens a device: "
            "no run of one setting; train it anew"
        )
    said: dict[str, Any] = {
        "parameters": parameters[-1],
        "commit": _all(commits, ", "),
        "hardware": _all(machines, "; "),
        "validation_loss": [[update, losses[update]] for update in sorted(losses)],
        "stopped_by": stopped_by,
        "starts": len(commits),
        "devices": devices,
    }
    if len(parameters) == 1:
        said["training_seconds"] = round(ends[-1], 1)
    return said


def _all(said: Sequence[str | None], between: str) -> str | None:
    """What the starts say, each once; None where one says nothing."""
    known = [one for one in said if one is not None]
    return between.join(dict.fromkeys(known)) if len(known) == len(said) > 0 else None


def hardware_line(text: str) -> str:
    """What :mod:`rope_fairseq.hardware` prints, for people: ``NAME (avx2), 2 cores, 7.8 GiB``."""
    facts = json.loads(text)
    gpus = Counter(facts.get("gpus", []))
    words = [f"{count} × {name}" for name, count in gpus.items()] + [facts["processor"]]
    if facts.get("flags"):
        words[-1] += f" ({', '.join(facts['flags'])})"
    for name in ("cores", "threads"):
        if name in facts:
            words.append(f"{facts[name]} {name if facts[name] != 1 else name[:-1]}")
    return ", ".join([*words, f"{facts['memory_gib']} GiB"])


def config_values(training: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the config of a step train: key → value.

    Raises:
        UserError: the manifest names none, or the file has changed since.
    """
    found: dict[str, Any] = {}
    for name, recorded in training.get("inputs", {}).items():
        if re.fullmatch(r"configs/[^/]+\.yaml", name):
            if not (ROOT / name).is_file() or describe_file(ROOT / name) != recorded:
                raise UserError(f"{ROOT / name}: is not what the step train ran with")
            found |= read_config(ROOT / name, [])
    if not found:
        raise UserError(f"manifests/train.json: names no file of {ROOT / 'configs'} as an input")
    return found


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
    training, averaging = (
        read_record(work / "manifests" / f"{step}.json") for step in ("train", "average")
    )
    state = load_checkpoint(work / "model" / "averaged.pt")
    model, seed = options(state, "model"), options(state, "common").get("seed")
    try:
        recipe, data, changes = (report.about[name] for name in ("recipe", "data", "changes"))
        encoding = model["position_encoding"]
        architecture, averaged = model["_name"], state["extra_state"]["averaged_from"]
    except KeyError as error:
        raise UserError(f"{work}: not a run of reproduce.sh: it says no {error}") from None
    log = read_log(work / "logs" / "train.log")
    # What each device took of an update, which its number decides.
    groups = {key: key.split(".") for key in (MAX_TOKENS, UPDATE_FREQ)}
    batch = {key: options(last, group).get(name) for key, (group, name) in groups.items()}
    record = {
        "name": f"{recipe}, {encoding}",
        "recipe": recipe,
        "architecture": architecture,
        "position_encoding": encoding,
        "seed": seed,
        "updates": num_updates(last),
        "averaged": [entry["updates"] for entry in averaged],
        "parameters": log.pop("parameters"),
        "scores": [{name: getattr(score, name) for name in SCORE} for score in report.scores],
        "buckets": [asdict(bucket) for bucket in report.buckets],
        "data": data,
        "changes": changes,
        "command": command(recipe, training["options"]),
        "options": training["options"],
        "config": config_values(training),
        "average": averaging["options"],
        "batch": batch,
    }
    # The clock that goes on after an interruption: what was trained twice counts once.
    clock = (last.get("extra_state") or {}).get("previous_training_time")
    if clock is not None:
        log["training_seconds"] = round(float(clock), 1)  # of several devices, a tensor
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
