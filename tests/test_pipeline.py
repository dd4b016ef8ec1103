"""The scripts from raw text to scores: prepare, train (killed and resumed), average, translate,
score, on a project of its own with a toy corpus."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from tests.tiny import run, scripts
from tests.toy import kill_during_training, toy_project

PREPARE = ["data", "clean", "bpe", "encode", "binarize", "sign"]
STEPS = [*PREPARE, "train", "average", "translate", "score"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The project's scripts and package with the recipe ``toy`` instead of its own ones."""
    return toy_project(tmp_path_factory.mktemp("project"), "toy")


def script(project: Path, name: str, *arguments: str) -> subprocess.CompletedProcess:
    return run(project / "scripts" / name, *arguments, env=scripts())


def succeed(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def what_ran(output: str) -> dict[str, str]:
    """Step → 'running' or 'up to date', as the scripts report."""
    return dict(re.findall(rf"^({'|'.join(STEPS)}): (running|up to date)", output, re.MULTILINE))


def test_from_raw_text_to_scores_through_a_kill(project):
    kill_during_training(project / "scripts" / "reproduce.sh", "toy", update=14)
    work = project / "exp" / "toy"
    assert not (work / "manifests" / "train.json").exists()
    assert (work / "checkpoints" / "checkpoint_last.pt").is_file()

    output = succeed(script(project, "reproduce.sh", "toy"))
    assert what_ran(output) == {
        step: "up to date" if step in PREPARE else "running" for step in STEPS
    }
    assert "Loaded checkpoint" in output and "@ 12 updates" in output  # it went on
    averaged = torch.load(work / "model" / "averaged.pt")
    updates = [entry["updates"] for entry in averaged["extra_state"]["averaged_from"]]
    assert updates == [8, 12, 16, 20, 24]  # fairseq keeps the last update under another name

    # What the user gets to see: three scores with their kinds, five samples, the model, the time.
    scores = json.loads((work / "scores.json").read_text())
    for kind in ("sacreBLEU", "tokenized BLEU", "compound-split BLEU", "chrF2"):
        assert re.search(rf"^{kind} .*\d", output, re.MULTILINE), output[-3000:]
    assert re.search(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:", output)
    assert [score["name"] for score in scores["scores"]][0] == "sacreBLEU"
    assert scores["about"]["data"].startswith("corpus:toy|pairs:300+12+12|vocab:100|")
    sampled = output.partition("Sample translations")[2]
    assert len(re.findall(r"^\s*reference", sampled, re.MULTILINE)) >= 5
    assert str(work / "model" / "averaged.pt") in output
    assert (work / "test.hyp.de").read_text().count("\n") == 12
    for step in STEPS:
        assert (work / "logs" / f"{step}.log").is_file()

    again = succeed(script(project, "reproduce.sh", "toy"))
    assert what_ran(again) == dict.fromkeys(STEPS, "up to date")


def test_one_changed_option_reruns_exactly_the_later_steps(project):
    succeed(script(project, "reproduce.sh", "toy"))
    path = project / "configs" / "recipes" / "toy.yaml"
    recipe = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(recipe | {"average": {"last": 3, "by": "update"}}))
    output = succeed(script(project, "reproduce.sh", "toy"))
    assert what_ran(output) == {
        step: "running" if step in STEPS[-3:] else "up to date" for step in STEPS
    }
    # Another option of training: it starts anew, not from the old checkpoints.
    output = succeed(script(project, "train.sh", "toy", "optimization.max_update=5"))
    assert what_ran(output) == {"train": "running"}
    assert "Loaded checkpoint" not in output
    work = project / "exp" / "toy"
    kept = sorted(path.name for path in (work / "checkpoints.old").glob("*.pt"))
    assert "checkpoint_last.pt" in kept and len(kept) == 7
    # A mistyped option is found before anything is moved, and a wrong value loses nothing either.
    for wrong in ("optimization.max_updates=5", "model.rope_base=1", "model.position_encoding=x"):
        assert script(project, "train.sh", "toy", wrong).returncode != 0
    assert (work / "checkpoints.old" / "checkpoint_last.pt").is_file()
    # The right options again: their checkpoints come back, and what was logged of them.
    log = work / "logs" / "train.log"
    validated = "| valid on 'valid' subset |"
    assert validated not in log.read_text()
    output = succeed(script(project, "train.sh", "toy", "optimization.max_update=5"))
    assert "train: goes on from the checkpoints that were in checkpoints.old\n" in output
    assert validated not in output and validated in log.read_text()
    assert (work / "checkpoints" / "checkpoint_last.pt").is_file()
    left = [path.name for path in work.iterdir() if path.name.startswith("checkpoints")]
    assert left == ["checkpoints"] and not (work / "checkpoints" / "train.log").exists()


def test_two_runs_may_take_turns_and_lose_nothing(project):
    """A killed run, another one by mistake, which is killed too, and each of them again."""
    work = project / "exp" / "turns"
    checkpoints, old, log = work / "checkpoints", work / "checkpoints.old", work / "logs/train.log"
    right = ("toy", "--work", str(work))
    mistaken = (*right, "model.dropout=0.3")
    kill_during_training(project / "scripts" / "reproduce.sh", *right, update=5, env=scripts())
    began = (checkpoints / ".start").read_text()
    trained = log.read_text()
    kill_during_training(project / "scripts" / "train.sh", *mistaken, update=5, env=scripts())
    assert (old / ".start").read_text() == began and (old / "train.log").read_text() == trained
    # As if killed while the two were exchanged.
    (checkpoints / "train.log").write_text(log.read_text())
    checkpoints.rename(work / "checkpoints.other")
    old.rename(checkpoints)
    output = succeed(script(project, "train.sh", *right))
    assert "Loaded checkpoint" in output and log.read_text().startswith(trained)
    assert (checkpoints / ".start").read_text() == began and (old / "checkpoint_last.pt").is_file()
    output = succeed(script(project, "train.sh", *mistaken))
    assert "checkpoints.old\n" in output and "Loaded checkpoint" in output
    assert (old / ".start").read_text() == began
    assert log.read_text().count("num. shared model params") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "recipe 'nosuch'"),
        ([], "no recipe given"),
        (["toy", "beam"], "unknown argument beam"),
        (["toy", "checkpoint.keep_interval_updates=1"], "keeps 1 checkpoints by update"),
        (["toy", "optimization.max_updates=5"], "overrides optimization.max_updates=5: "),
        (["toy", "--work", "/proc/none"], "work folder /proc/none cannot be written to"),
        (["toy", "model.position_encoding=ropes"], "--position-encoding ropes: choose from"),
        (["toy", "model.encoder_embed_dim=36"], "head dimension 9"),
    ],
)
def test_bad_input_to_training_is_one_line(project, arguments, message):
    if any(
        argument.startswith(("model.", "optimization.", "checkpoint.")) for argument in arguments
    ):
        succeed(script(project, "prepare.sh", "toy"))
    result = script(project, "train.sh", *arguments)
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in result.stderr
