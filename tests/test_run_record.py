"""What is kept of a run: all read from its work folder, and refused unless all of it is one run."""

import json
import re
from pathlib import Path

import fairseq_cli.train
import pytest
import torch

from rope_fairseq import hardware, manifest, resume
from rope_fairseq.errors import UserError
from rope_fairseq.evaluation import run_record
from rope_fairseq.schedule import read_config
from tests.tiny import ROOT, call

CONFIG = ROOT / "configs" / "demo.yaml"

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
hardware: {"processor": "Abacus", "flags": ["avx2"], "cores": 2, "memory_gib": 8, "threads": 1}
{'_name': None, 'common': {'seed': 7}}
position encoding: t5 (max distance 128, buckets 32)
num. shared model params: 4,462,592 (num. trained: 4,462,592)
num. expert model params: 0 (num. trained: 0)
training on 1 devices (GPUs/TPUs)
max tokens per device = 1024 and max sentences per device = None
"""
VALID = (
    "epoch 001 | valid on 'valid' subset | loss {} | nll_loss 8.602 | ppl 388.46 | wps 8273.2 | "
    "wpb 610.2 | bsz 22.7 | num_updates {}{}\n"
)
FIRST, SECOND = VALID.format("8.983", 10, ""), VALID.format("7.5", 20, " | best_loss 7.5")
STOP = "Stopping training due to num_updates: 20 >= max_update: 20\n"
LOG = START + FIRST + STOP + SECOND + "done training in 12.34 seconds\n"
HARDWARE = "Abacus (avx2), 2 cores, 1 thread, 8 GiB"
BUCKET = {
    "by": "source",
    "shortest": 0,
    "longest": 10,
    "sentences": 1,
    "value": 14.5,
    "signature": SIGNATURE,
    "length_ratio": 0.5,
}


def checkpoint(updates: int, **extra_state) -> dict:
    return {
        "model": {"weight": torch.zeros(2)},
        "cfg": {
            "common": {"seed": 7},
            "model": {"_name": "rope_transformer", "position_encoding": "t5"},
            "dataset": {"max_tokens": 1024},
            "optimization": {"update_freq": [2]},
        },
        "optimizer_history": [{"num_updates": updates}],
        "extra_state": extra_state,
    }


def step(
    work: Path, name: str, inputs: list[str | Path], outputs: list[str], **options: str
) -> None:
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
    report = {"about": ABOUT, "scores": [score], "buckets": [BUCKET]}
    (work / "scores.json").write_text(json.dumps(report))
    step(work, "train", ["data-bin", CONFIG], ["checkpoints"], **OPTIONS)
    step(
        *(work, "average", ["checkpoints/checkpoint_1_20.pt", "manifests/train.json"]),
        ["model/averaged.pt"],
        last="5",
        by="update",
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
        "recipe": "demo",
        "architecture": "rope_transformer",
        "position_encoding": "t5",
        "seed": 7,
        "updates": 22,
        "averaged": [10, 20],
        "parameters": 4462592,
        "scores": [{"name": "sacreBLEU", "value": 14.5, "kind": "raw", "signature": SIGNATURE}],
        "buckets": [BUCKET],
        "data": "corpus:toy|pairs:3+1+1",
        "changes": "common.seed=7",
        "command": "scripts/reproduce.sh demo common.seed=7 model.position_encoding=t5",
        "options": OPTIONS,
        "config": read_config(CONFIG),
        "average": {"last": "5", "by": "update"},
        "batch": {"dataset.max_tokens": 1024, "optimization.update_freq": [2]},
        "commit": "abc1234",
        "hardware": HARDWARE,
        "validation_loss": [[10, 8.983], [20, 7.5]],
        "stopped_by": "max_update",
        "starts": 1,
        "devices": 1,
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
            {"commit": "abc1234, abc1235+changes", "validation_loss": [[10, 8.98], [20, 7.5]],
             "starts": 2, "hardware": HARDWARE, "stopped_by": None},
        ),
        # Killed behind its last update, it had nothing left to do, on another machine.
        (
            LOG + START.replace("Abacus", "Brain").replace(', "threads": 1', ', "gpus": ["N", "N"]')
            + "training is complete at 20 updates: out of patience\ndone training in 0.0 seconds\n",
            {"stopped_by": "patience", "starts": 1, "hardware": HARDWARE},
        ),
        # Gone on with on another machine.
        (
            START + FIRST
            + START.replace("Abacus", "Brain").replace(', "threads": 1', ', "gpus": ["N", "N"]')
            + SECOND + "done training in 5 seconds\n",
            {"starts": 2, "hardware": f"{HARDWARE}; 2 × N, Brain (avx2), 2 cores, 8 GiB"},
        ),
        # Killed before there was a model.
        ("commit: abc1234\n" + LOG, {"commit": "abc1234", "training_seconds": 12.3}),
        # Some of it was trained by an older version of train.sh, which did not say.
        (START.partition("\n")[2] + FIRST + LOG, {"commit": None, "hardware": HARDWARE}),
        (LOG.split("\n", 2)[2], {"commit": None, "hardware": None, "training_seconds": 12.3}),
    ],
)  # fmt: skip
def test_a_training_that_was_interrupted(log, expected, tmp_path):
    (tmp_path / "log").write_text(log)
    said = run_record.read_log(tmp_path / "log")
    assert said["parameters"] == 4462592 and said.items() >= expected.items()
    # The time of one part of a training is not that of the training.
    assert ("training_seconds" in said) == (log.count("num. shared") == 1)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("early stop since valid performance hasn't improved for last 10 runs", "patience"),
        ("Stopping training due to num_updates: 8000 >= max_update: 8000", "max_update"),
        (
            "Stopping training due to cumulative_training_time: 0.17 > stop_time_hours: "
            "0.16 hour(s)",
            "stop_time_hours",
        ),
        (
            "stopping training because current learning rate (0) is smaller than or equal to "
            "minimum learning rate (--stop-min-lr=1)",
            "stop_min_lr",
        ),
        ("training is complete at 9 updates: --max-update is reached", "max_update"),
        ("training is complete at 9 updates: --stop-time-hours is reached", "stop_time_hours"),
        ("end of epoch 3 (average epoch stats below)", None),
    ],
)
def test_what_ended_the_training(line, reason, tmp_path):
    prefix = "[2026-11-30 12:00:00,000][fairseq_cli.train][INFO] - "
    (tmp_path / "log").write_text(f"{START}{FIRST}{prefix}{line}\ndone training in 1 seconds\n")
    assert run_record.read_log(tmp_path / "log")["stopped_by"] == reason


def test_the_lines_are_those_of_fairseq_and_of_resume():
    """What the patterns look for is still what the training says."""
    said = Path(fairseq_cli.train.__file__).read_text() + Path(resume.__file__).read_text()
    for words in (
        *("early stop since valid performance", "num_updates: {num_updates} >= max_update"),
        *('} > "\n', 'f"stop_time_hours: {cfg', "(--stop-min-lr="),
        *("training is complete at %d updates: %s", '"out of patience"'),
        *('"--max-update is reached"', '"--stop-time-hours is reached"'),
        "max tokens per device = {} and max sentences per device",
    ):
        assert words in said, words


def test_the_time_of_an_interrupted_training_is_that_of_its_last_checkpoint(work, tmp_path):
    (work / "logs/train.log").write_text(START + FIRST + LOG)
    assert "training_seconds" not in run_record.make(work)
    torch.save(checkpoint(22, previous_training_time=torch.tensor(34.56)), work / run_record.LAST)
    step(work, "train", ["data-bin", CONFIG], ["checkpoints"], **OPTIONS)
    for name, inputs, outputs in (
        ("average", ["checkpoints/checkpoint_1_20.pt", "manifests/train.json"], ["model"]),
        ("translate", ["model", "data/test.en"], ["test.hyp.de"]),
        ("score", ["test.hyp.de", "data/test.de"], ["scores.json"]),
    ):
        step(work, name, inputs, outputs)
    assert run_record.make(work)["training_seconds"] == 34.6
    assert run_record.make(work)["starts"] == 2


def test_the_hardware_is_this_machine(monkeypatch):
    for threads, said in (("3", ", 3 threads, "), ("", " cores?, [\\d.]+ GiB$")):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        line = run_record.hardware_line(json.dumps(hardware.describe()))
        assert re.search(said, line) and re.search(r"[^,(]+ .*, \d+ cores?, ", line), line


def test_the_values_of_the_config_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "ROOT", tmp_path)
    config = tmp_path / "configs" / "toy.yaml"
    config.parent.mkdir()
    config.write_text("model:\n  dropout: 0.3\noptimization:\n  lr: [0.002]\n")
    described = {"configs/toy.yaml": manifest.describe_file(config), "data-bin/x": {"size": 1}}
    values = run_record.config_values({"inputs": described})
    assert values == {"model.dropout": 0.3, "optimization.lr": [0.002]}
    config.write_text("model: {}\n")
    with pytest.raises(UserError, match="toy.yaml: is not what the step train ran with"):
        run_record.config_values({"inputs": described})
    with pytest.raises(UserError, match="train.json: names no file of .*/configs as an input"):
        run_record.config_values({"inputs": {"/elsewhere/configs/toy.yaml": {}}})


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
    # A training that was done already, with a log of its own.
    for log in (START, f"{START}done training in 0.1 seconds\n"):
        (work / "logs/train.log").write_text(log)
        assert "train.log: not the whole log of a training" in refused(work, tmp_path, capsys)
    (work / "logs/train.log").unlink()
    assert "train.log: No such file" in refused(work, tmp_path, capsys)
    with pytest.raises(UserError, match="the step train is not finished"):
        run_record.make(tmp_path)


def test_batches_of_two_sizes_are_refused(work, tmp_path, capsys):
    other = START.replace("on 1 dev", "on 4 dev").replace("= 1024", "= 256")
    (work / "logs/train.log").write_text(other + START + LOG)  # killed before it validated
    assert run_record.make(work)["starts"] == 1
    (work / "logs/train.log").write_text(other + FIRST + LOG)
    error = refused(work, tmp_path, capsys)
    assert "train.log: batches of at most 256 and then 1024 tokens a device" in error


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_run_that_has_diverged_is_refused(loss, work, tmp_path, capsys):
    log = START + VALID.format(loss, 10, "") + "done training in 12.34 seconds\n"
    (work / "logs/train.log").write_text(log)
    error = refused(work, tmp_path, capsys)
    assert f"train.log: validation loss {loss} at update 10: it has diverged" in error
