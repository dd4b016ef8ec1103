"""What is kept of a run: all read from its work folder, and refused unless all of it is one run."""

import json
from pathlib import Path

import pytest
import torch

from rope_fairseq import manifest
from rope_fairseq.errors import UserError
from rope_fairseq.evaluation import run_record
from tests.tiny import call

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
ABOUT = {"recipe": "demo", "data": "corpus:toy|pairs:3+1+1", "changes": "common.seed=7"}
OPTIONS = {
    "common.seed": "7",
    "model.position_encoding": "t5",
    "task.source_lang": "'en'",
    "task.target_lang": "'de'",
    "tokens_per_update": "500",
}
START = """\
commit: abc1234
{'_name': None, 'common': {'seed': 7}}
position encoding: t5 (max distance 128, buckets 32)
num. shared model params: 4,462,592 (num. trained: 4,462,592)
num. expert model params: 0 (num. trained: 0)
"""
VALID = (
    "epoch 001 | valid on 'valid' subset | loss {} | nll_loss 8.602 | ppl 388.46 | wps 8273.2 | "
    "wpb 610.2 | bsz 22.7 | num_updates {}{}\n"
)
FIRST, SECOND = VALID.format("8.983", 10, ""), VALID.format("7.5", 20, " | best_loss 7.5")
LOG = START + FIRST + SECOND + "done training in 12.34 seconds\n"


def checkpoint(updates: int, **extra_state) -> dict:
    return {
        "model": {"weight": torch.zeros(2)},
        "cfg": {
            "common": {"seed": 7},
            "model": {"_name": "rope_transformer", "position_encoding": "t5"},
        },
        "optimizer_history": [{"num_updates": updates}],
        "extra_state": extra_state,
    }


def step(work: Path, name: str, inputs: list[str], outputs: list[str], **options: str) -> None:
    paths = [[work / file for file in files] for files in (inputs, outputs)]
    manifest.write(work / "manifests" / f"{name}.json", paths[0], options, paths[1])


@pytest.fixture
def work(tmp_path) -> Path:
    """A work folder as reproduce.sh leaves it, with small files of the same names."""
    work = tmp_path / "work"
    for name in ("data-bin", "checkpoints", "model", "logs", "data"):
        (work / name).mkdir(parents=True)
    for name in ("data-bin/train.bin", "data/test.en", "data/test.de", "test.hyp.de"):
        (work / name).write_text(name)
    last, averaged = work / "checkpoints/checkpoint_last.pt", work / "model/averaged.pt"
    torch.save(checkpoint(22), last)
    torch.save(checkpoint(20), work / "checkpoints/checkpoint_1_20.pt")
    torch.save(checkpoint(20, averaged_from=[{"updates": 10}, {"updates": 20}]), averaged)
    (work / "logs/train.log").write_text(LOG)
    score = {"name": "sacreBLEU", "value": 14.5, "kind": "raw", "signature": SIGNATURE, "digits": 2}
    (work / "scores.json").write_text(json.dumps({"about": ABOUT, "scores": [score]}))
    step(work, "train", ["data-bin"], ["checkpoints"], **OPTIONS)
    step(
        *(work, "average", ["checkpoints/checkpoint_1_20.pt", "manifests/train.json"]),
        ["model/averaged.pt"],
    )
    step(work, "translate", ["model", "data/test.en"], ["test.hyp.de"])
    step(work, "score", ["test.hyp.de", "data/test.de"], ["scores.json"])
    return work


def test_all_of_it_comes_from_the_work_folder(work, tmp_path, capsys):
    output = tmp_path / "run.json"
    assert call(run_record.main, "--work", work, "--output", output) == 0
    record = json.loads(output.read_text())
    assert set(record.pop("versions")) >= {"torch", "fairseq", "sacrebleu"}
    assert record == {
        "name": "demo, t5",
        "architecture": "rope_transformer",
        "position_encoding": "t5",
        "seed": 7,
        "updates": 22,
        "averaged": [10, 20],
        "parameters": 4462592,
        "scores": [{"name": "sacreBLEU", "value": 14.5, "kind": "raw", "signature": SIGNATURE}],
        "data": "corpus:toy|pairs:3+1+1",
        "changes": "common.seed=7",
        "command": "scripts/reproduce.sh demo common.seed=7 model.position_encoding=t5",
        "commit": "abc1234",
        "validation_loss": [[10, 8.983], [20, 7.5]],
        "training_seconds": 12.3,
    }
    assert capsys.readouterr().out == f"{output}: demo, t5, seed 7, 22 updates\n"


@pytest.mark.parametrize(
    "log, expected",
    [
        # Killed behind update 10, it validated that update again, on changed code.
        (
            START + FIRST + START.replace("4\n", "5+changes\n", 1) + VALID.format("8.98", 10, "")
            + SECOND + "done training in 5 seconds\n",
            {"commit": "abc1234, abc1235+changes", "validation_loss": [[10, 8.98], [20, 7.5]]},
        ),
        # Killed before there was a model.
        ("commit: abc1234\n" + LOG, {"commit": "abc1234", "training_seconds": 12.3}),
        # Some of it was trained by an older version of train.sh, which did not say.
        (START.partition("\n")[2] + FIRST + LOG, {"commit": None}),
        (LOG.partition("\n")[2], {"commit": None, "training_seconds": 12.3}),
    ],
)  # fmt: skip
def test_a_training_that_was_interrupted(log, expected, tmp_path):
    (tmp_path / "log").write_text(log)
    said = run_record.read_log(tmp_path / "log")
    assert said["parameters"] == 4462592 and said.items() >= expected.items()
    # The time of one part of a training is not that of the training.
    assert ("training_seconds" in said) == (log.count("num. shared") == 1)


def refused(work: Path, tmp_path: Path, capsys) -> str:
    output = tmp_path / "run.json"
    assert call(run_record.main, "--work", work, "--output", output) == 2
    assert not output.exists()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("name", run_record.STEPS)
def test_an_unfinished_run_is_refused(name, work, tmp_path, capsys):
    (work / "manifests" / f"{name}.json").rename(work / "manifests" / f"{name}.json.started")
    assert f"the step {name} is not finished there" in refused(work, tmp_path, capsys)


@pytest.mark.parametrize(
    "file, message",
    [
        ("test.hyp.de", "test.hyp.de is not what the step score ran on"),
        ("model/averaged.pt", "averaged.pt is not what the step translate ran on"),
        ("manifests/train.json", "train.json is not what the step average ran on"),
        ("scores.json", "scores.json: not what the step score wrote"),
        ("checkpoints/checkpoint_last.pt", "checkpoint_last.pt: not what the step train wrote"),
    ],
)
def test_a_mixture_of_two_runs_is_refused(file, message, work, tmp_path, capsys):
    with open(work / file, "ab") as stream:
        stream.write(b"\n")
    assert message in refused(work, tmp_path, capsys)


def test_what_is_no_run_is_refused(work, tmp_path, capsys):
    assert "none: no such folder" in refused(tmp_path / "none", tmp_path, capsys)
    (work / "logs/train.log").write_text(START)
    assert "train.log: not the whole log of a training" in refused(work, tmp_path, capsys)
    (work / "logs/train.log").unlink()
    assert "train.log: No such file" in refused(work, tmp_path, capsys)
    with pytest.raises(UserError, match="the step train is not finished"):
        run_record.make(tmp_path)


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_run_that_has_diverged_is_refused(loss, work, tmp_path, capsys):
    log = START + VALID.format(loss, 10, "") + "done training in 12.34 seconds\n"
    (work / "logs/train.log").write_text(log)
    error = refused(work, tmp_path, capsys)
    assert f"train.log: validation loss {loss} at update 10: it has diverged" in error
