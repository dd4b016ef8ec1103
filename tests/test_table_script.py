"""scripts/table.sh: a recipe with several encodings and seeds, whose results add up."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from rope_fairseq.evaluation import known_run
from tests.tiny import ROOT, call, run, scripts
from tests.toy import kill_during_training, toy_project

SCRIPT = ROOT / "scripts" / "table.sh"
RUNS = ["rope-seed1", "sinusoidal-seed1"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A toy whose runs end by patience: the learning rate is too high to go on falling."""
    folder = toy_project(tmp_path_factory.mktemp("project"), "toy")
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks")
    file = folder / "configs" / "toy.yaml"
    config = yaml.safe_load(file.read_text())
    config["optimization"] |= {"stop_time_hours": 0, "lr": [0.05], "max_update": 200}
    config["checkpoint"] |= {"save_interval_updates": 2, "patience": 2}
    file.write_text(yaml.safe_dump(config))
    page = folder / "page.md"
    page.write_text("a table\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "--message=x")
    page.write_text("a table of new results\n")
    return folder


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", folder, *words], check=True, capture_output=True, encoding="utf-8"
    )
    return done.stdout.strip()


def table_sh(project: Path, *words: str | Path) -> subprocess.CompletedProcess:
    return run(project / "scripts" / "table.sh", "toy", *words, cwd=project, env=scripts())


def tables(done: subprocess.CompletedProcess) -> list[str]:
    """What it says of each run."""
    lines = done.stdout.splitlines()
    return [line.removeprefix("table: ") for line in lines if line.startswith("table: ")]


def results(folder: Path) -> dict[str, dict]:
    return {
        path.stem.removeprefix("toy-"): json.loads(path.read_text())
        for path in folder.glob("*.json")
    }


@pytest.mark.timeout(900)  # whole runs, slow on a machine that is busy
def test_it_goes_on_after_a_kill_and_keeps_what_came_out(project):
    script, work = project / "scripts" / "table.sh", project / "exp" / "toy-table"
    kill_during_training(script, "toy", update=7, env=scripts())
    assert not list((project / "results").iterdir())

    done = table_sh(project, "--seeds", "1")  # of rope and sinusoidal, as ever
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "@ 6 updates" in done.stdout  # it went on
    # The corpus was ready, and is ready in every run's folder.
    ran = [line.split(":")[0] for line in done.stdout.splitlines() if ": running (" in line]
    assert ran == ["train", "average", "translate", "score"] * 2
    found = results(project / "results")
    assert sorted(found) == sorted(RUNS)
    # A page that has changed is no change of the code.
    assert {record["commit"] for record in found.values()} == {
        git(project, "rev-parse", "--short", "HEAD")
    }
    table = (project / "results" / "toy.md").read_text()
    assert table in done.stdout and table.count("](toy-") == len(RUNS)
    for figure in ("curves", "lengths"):
        assert (project / "results" / f"toy-{figure}.png").stat().st_size > 1000
    assert tables(done) == ["rope, seed 1", "sinusoidal, seed 1"]
    for name, record in found.items():
        assert f"{record['position_encoding']}-seed{record['seed']}" == name
        assert record["recipe"] == "toy" and record["config"]["optimization.max_update"] == 200
        assert record["stopped_by"] == "patience" and record["updates"] < 200
        assert record["starts"] == (2 if name == RUNS[0] else 1)
        assert record["training_seconds"] > 0 and "cores" in record["hardware"]
        assert sum(bucket["sentences"] for bucket in record["buckets"]) == 12
    # Each has its own model, of the same data.
    assert len({json.dumps(record["validation_loss"]) for record in found.values()}) == 2
    assert len({record["data"] for record in found.values()}) == 1
    ours = [work / name / "data-bin" / "train.en-de.en.bin" for name in ("data", *RUNS)]
    assert len({path.read_bytes() for path in ours}) == 1
    assert len({os.stat(path).st_ino for path in ours}) == len(ours)  # copies, not links


@pytest.mark.timeout(900)  # whole runs, slow on a machine that is busy
def test_a_run_that_was_killed_ends_with_the_numbers_of_one_that_was_not(project):
    code = project / "rope_fairseq" / "version.py"
    code.write_text(f"{code.read_text()}# changed\n")
    undisturbed = ("--work", "other", "--results", "whole", "--encodings=rope", "--seeds=1")
    assert table_sh(project, *undisturbed).returncode == 0
    (whole,) = results(project / "whole").values()
    killed = results(project / "results")[RUNS[0]]
    assert killed["starts"] == 2
    assert whole["commit"] == f"{killed['commit']}+changes"
    of_the_run = ("training_seconds", "starts", "commit")
    assert {name: whole[name] for name in whole if name not in of_the_run} == {
        name: killed[name] for name in killed if name not in of_the_run
    }


def test_a_result_is_not_made_again_where_its_folder_is_gone(project):
    work, kept = project / "exp" / "toy-table", project / "results"
    for name in RUNS:
        shutil.rmtree(work / name)
    # As if others had come from another machine.
    for name, record in results(kept).items():
        record["seed"], record["options"]["common.seed"] = 7, "7"
        path = kept / f"toy-{name.replace('seed1', 'seed7')}.json"
        path.write_text(json.dumps(record | {"hardware": "another", "commit": "another"}))
    before = {path: path.read_bytes() for path in kept.glob("*.json")}
    again = table_sh(project, "--encodings", "sinusoidal,rope", "--seeds", "7,1")
    assert again.returncode == 0 and ": running (" not in again.stdout
    assert tables(again) == [
        f"{name}, seed {seed}: up to date ({kept}/toy-{name}-seed{seed}.json)"
        for seed in (7, 1)
        for name in ("sinusoidal", "rope")
    ]
    assert [path.name for path in work.iterdir()] == ["data"]

    refused = table_sh(project, "--encodings=rope", "--seeds=1", "--devices=2", "model.dropout=0")
    assert refused.returncode == 2
    assert refused.stderr == (
        f"error: {kept}/toy-rope-seed1.json: of another run: model.dropout was 0.1, is 0; "
        "remove it or say --force\n"
    )
    assert {path: path.read_bytes() for path in kept.glob("*.json")} == before

    # Nothing is prepared for what can be no part of a table.
    unprepared = ("--work", "unprepared", "--encodings=rope", "--seeds=2", "model.dropout=0")
    refused = table_sh(project, *unprepared)
    assert refused.returncode == 2 and refused.stderr == (
        f"error: {kept}/toy-rope-seed1.json: of another run, no table can have both: model.dropout "
        "was 0.1, is 0; remove it\n"
    )
    assert refused.stdout == "" and not (project / "unprepared").exists()

    # What it would run, and how it gets its data.
    stub = project / "scripts" / "reproduce.sh"
    stub.unlink()
    stub.write_text('#!/bin/bash\necho "would $@"\nexit 3\n')
    stub.chmod(0o755)
    made = (
        *("--force", "--seeds", "1", "--encodings", "rope", "--devices", "1"),
        "model.dropout=0",
    )
    refused = table_sh(project, *made)
    assert refused.returncode == 2 and refused.stderr == (
        f"error: {kept}/toy-rope-seed7.json: of another run, no table can have both: model.dropout "
        "was 0.1, is 0; remove it\n"
    )
    for name in results(kept):
        if name != RUNS[0]:
            (kept / f"toy-{name}.json").unlink()
    folder = work / RUNS[0]
    for _ in range(2):
        done = table_sh(project, *made)
        assert done.returncode == 3
        assert "table: rope-seed1 is made anew: model.dropout was 0.1, is 0\n" in done.stderr
        assert done.stdout.splitlines()[-1] == (
            f"would toy --devices 1 model.dropout=0 --work {folder} model.position_encoding=rope "
            "common.seed=1"
        )
        whole = (work / "data" / "text" / "train.en").read_bytes()
        assert (folder / "text" / "train.en").read_bytes() == whole
        # As if it had been killed while copying.
        (folder / "text" / "train.en").write_bytes(whole[:9])
        (folder / "manifests" / "sign.json").unlink()
    # Begun on other devices.
    launch = folder / "logs" / "train.launch"
    launch.write_text("1 nodes, 4 devices each, job  0: dataset.max_tokens=125 model.dropout=0\n")
    refused = table_sh(project, *made)
    assert refused.returncode == 2 and refused.stderr.splitlines()[-1] == (
        f"error: {folder}: was begun with at most 125 tokens a device, is 500; say --devices as "
        "then, or remove it"
    )
    (left,) = kept.glob("*.json")
    assert left.read_bytes() == before[left]  # until there is another


@pytest.mark.parametrize(
    "words, message",
    [
        (["demo", "--encodings", "rope,rotary"], "there is no 'rotary'; choose from sinusoidal"),
        (["demo", "--seeds", "1,x"], "--seeds 1,x: must be whole numbers with commas"),
        (["demo", "--seeds", "1,,2"], "--seeds 1,,2: must be whole numbers with commas"),
        (["demo", "--seeds="], "--seeds needs a value"),
        (["demo", "--seeds", "01"], "--seeds 01: must be whole numbers with commas"),
        (["demo", "common.seed=4"], "override common.seed=4: say --seeds N"),
        (["demo", "++common.seed=4"], "override ++common.seed=4: say --seeds N"),
        (["demo", "--max-tokens", "9"], "unknown argument --max-tokens; usage: table.sh RECIPE"),
        (["demo", "model.position_encoding=t5"], "position_encoding=t5: say --encodings NAME"),
        (["demo", "--nodes", "2"], "unknown argument --nodes; usage: table.sh RECIPE"),
        (["demo", "--epochs"], "unknown argument --epochs; an override is KEY=VALUE"),
        (["demo", "--devices", "0"], "--devices 0: must be a whole number above 0"),
        (["demo", "--results", "/proc/none"], "--results /proc/none: cannot be made"),
        (
            ["wmt14-sinusoidal"],
            "recipe wmt14-sinusoidal: has model.position_encoding=sinusoidal itself; choose one",
        ),
        (["dema"], "recipe 'dema': there is no"),
        ([], "no recipe given; usage: table.sh RECIPE"),
    ],
)
def test_wrong_options_are_one_line(words, message, tmp_path):
    words = [*words, "--work", str(tmp_path / "work")]
    done = run(SCRIPT, *words, cwd=tmp_path, env={"PYTHON": sys.executable})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


SIGNATURE = "corpus:toy|pairs:3+1+1|sha256:0123|sacremoses:0.2.0|rope_fairseq:0.1.0"
OPTIONS = {"common.seed": "1", "model.dropout": "0.1"}
CONFIG = {"common.seed": 4, "optimization.lr": [0.5], "task.source_lang": "en"}


def kept() -> dict:
    return {
        "recipe": "toy",
        "data": SIGNATURE,
        "options": OPTIONS,
        "config": CONFIG,
        "average": {"last": "5", "by": "update"},
        "batch": {"dataset.max_tokens": 4096, "optimization.update_freq": [2]},
        "scores": [{"name": "chrF2", "signature": f"nrefs:1|version:{version('sacrebleu')}"}],
        "commit": "abc",
    }


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, None),
        # Tools that made the same text change nothing, nor does a value that is said once more.
        ({"data": SIGNATURE.replace("0.1.0", "0.2.0")}, None),
        ({"config": CONFIG | {"common.seed": 5}}, None),
        ({"config": CONFIG | {"common.seed": 1}, "options": {"model.dropout": "0.1"}}, None),
        ({"options": OPTIONS | {"optimization.lr": "[0.5]", "task.source_lang": "'en'"}}, None),
        ({"options": OPTIONS | {"optimization.lr": "[5e-1]"}}, None),
        (
            {"data": SIGNATURE.replace("0123", "4567")},
            "its data was corpus:toy|pairs:3+1+1|sha256:",
        ),
        ({"recipe": "raw"}, "its recipe was toy, is raw"),
        ({"options": {"common.seed": "1"}}, "model.dropout was 0.1, is not set"),
        ({"options": OPTIONS | {"+x.y": "[1"}}, "x.y was not set, is [1"),
        ({"config": CONFIG | {"optimization.lr": [0.25]}}, "optimization.lr was [0.5], is [0.25]"),
        ({"average": {"last": "3", "by": "update"}}, "last was 5, is 3"),
        ({"batch": {"dataset.max_tokens": 4096}}, None),
        (
            {"batch": {"dataset.max_tokens": 2048}},
            "dataset.max_tokens was 4096, is 2048 on as many",
        ),
    ],
)
def test_what_makes_another_run(change, expected):
    wanted = {name: kept()[name] for name in kept() if name not in ("commit", "scores")} | change
    found = known_run.difference(kept(), wanted)
    assert found is None if expected is None else found is not None and expected in found


def test_another_version_of_sacrebleu_makes_another_score():
    wanted = {name: kept()[name] for name in kept() if name not in ("commit", "scores")}
    old = kept() | {"scores": [{"name": "chrF2", "signature": "nrefs:1|version:1.5.0"}]}
    expected = f"its sacreBLEU was 1.5.0, is {version('sacrebleu')}"
    assert known_run.difference(old, wanted) == expected


def test_all_results_of_a_recipe_are_looked_at(tmp_path, capsys):
    """Asked for or not: all of them come into the table."""
    results, data, config = tmp_path / "results", tmp_path / "data.json", tmp_path / "toy.yaml"
    results.mkdir()
    data.write_text(json.dumps({"signature": SIGNATURE}))
    config.write_text("common:\n  seed: 4\noptimization:\n  lr: [0.5]\n")
    same = {"config": {"common.seed": 4, "optimization.lr": [0.5]}}

    def keep(encoding: str, seed: int, **changes) -> Path:
        own = {"model.position_encoding": encoding, "common.seed": str(seed)}
        path = results / f"toy-{encoding}-seed{seed}.json"
        path.write_text(json.dumps(kept() | same | {"options": OPTIONS | own} | changes))
        return path

    words = ("toy", "--results", results, "--config", config, "--max-tokens", 4096)
    words += ("--option", "model.dropout=0.1", "--average", "last=5", "by=update")
    unprepared, words = (*words, "--runs"), (*words, "--data", data, "--runs")
    runs = ("rope-seed1", "rope-seed2", "t5-seed1")
    assert call(known_run.main, *words, *runs) == 0 and capsys.readouterr().out == "\n"
    for encoding, seed in (("rope", 1), ("rope", 10), ("t5", 1)):
        keep(encoding, seed)
    (results / "toy-raw-rope-seed2.json").write_text("{}")  # of the recipe toy-raw
    (results / "toy-rope-seed01.json").write_text("{}")  # of nothing: seed 1 counts once
    assert call(known_run.main, *words, *runs) == 0
    assert capsys.readouterr().out.split() == ["rope-seed1", "t5-seed1"]
    # Before there are data, all else can be compared.
    assert call(known_run.main, *unprepared, *runs) == 0 and capsys.readouterr().out == ""

    whole = (results / "toy-t5-seed1.json").read_text()
    other = keep("t5", 1, average={"last": "3", "by": "update"})
    assert call(known_run.main, *words, *runs) == 2
    message = "of another run: last was 3, is 5; remove it or say --force"
    assert capsys.readouterr().err == f"error: {other}: {message}\n"
    assert call(known_run.main, *unprepared, *runs) == 2
    assert capsys.readouterr().err == f"error: {other}: {message}\n"
    assert call(known_run.main, *unprepared, *runs, "--force") == 0
    assert capsys.readouterr() == ("", "")
    assert call(known_run.main, *words, *runs, "--force") == 0
    out, err = capsys.readouterr()
    assert out == "rope-seed1\n" and err == "table: t5-seed1 is made anew: last was 3, is 5\n"
    # What is not asked for is not made anew either, and would be found in the table.
    for force in ((), ("--force",)):
        assert call(known_run.main, *words, "rope-seed1", *force) == 2
        message = "of another run, no table can have both: last was 3, is 5; remove it"
        assert capsys.readouterr().err == f"error: {other}: {message}\n"

    for content, message in (
        ({"data": "x", "recipe": "toy"}, "it does not say its config"),
        ({"recipe": "toy"}, "it does not say its data"),
        (json.loads(whole) | {"scores": 5}, "it was not written by scripts/table.sh"),
    ):
        other.write_text(json.dumps(content))
        assert call(known_run.main, *words, *runs) == 2
        error = capsys.readouterr().err
        assert error == f"error: {other}: of another run: {message}; remove it or say --force\n"
