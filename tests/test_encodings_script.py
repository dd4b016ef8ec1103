"""scripts/encodings.sh: a short training of each encoding, and the record of what came out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.encodings import SOURCES
from tests.tiny import ROOT, run, scripts
from tests.toy import kill_during_training, toy_project

SCRIPT = ROOT / "scripts" / "encodings.sh"
OPTIONS = ("--encodings", "none", "--updates", "22")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return toy_project(tmp_path_factory.mktemp("project"), "demo")


def encodings_sh(project: Path, *words: str, **settings) -> subprocess.CompletedProcess:
    return run(project / "scripts" / "encodings.sh", *words, **settings)


def test_it_goes_on_after_a_kill_and_keeps_what_came_out(project):
    script = project / "scripts" / "encodings.sh"
    kill_during_training(script, *OPTIONS, update=10, env=scripts())
    kept = project / "results" / "short-none-seed1.json"
    assert not kept.exists()

    done = encodings_sh(project, *OPTIONS, env=scripts())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "@ 8 updates" in done.stdout  # it went on
    work = project / "exp" / "short" / "none"
    record = json.loads(kept.read_text())
    scores = json.loads((work / "scores.json").read_text())["scores"]
    assert [s["value"] for s in record["scores"]] == [s["value"] for s in scores]
    said = [record[name] for name in ("name", "seed", "updates", "averaged")]
    assert said == ["demo, none", 1, 22, [4, 8, 12, 16, 20]]
    # The project of this test is no checkout, and the log says so.
    assert record["commit"] == "unknown" and record["starts"] == 2
    assert record["training_seconds"] > 0 and record["stopped_by"] == "max_update"
    assert [update for update, _ in record["validation_loss"]][-1] == 22
    assert record["command"] == (
        "scripts/reproduce.sh demo model.position_encoding=none optimization.max_update=22 "
        "optimization.stop_time_hours=0"
    )

    kept.unlink()
    again = encodings_sh(project, *OPTIONS, env=scripts())
    assert again.returncode == 0 and ": running" not in again.stdout
    assert json.loads(kept.read_text()) == record


def test_another_seed_is_another_training_beside_it(project):
    """Through the command that the script would run: the same but for the seed."""
    (project / "scripts" / "reproduce.sh").write_text('#!/bin/bash\necho "$@"\nexit 3\n')
    for words, seed in ((("--seed=2",), ["common.seed=2"]), ((), [])):
        done = encodings_sh(project, *OPTIONS, "--work", "w", *words, cwd=project, env=scripts())
        assert done.returncode == 3  # no record of what failed
        folder = "w/none-seed2" if seed else "w/none"
        assert done.stdout.splitlines()[1].split() == [
            *("demo", "--work", folder, "--max-update", "22", "optimization.stop_time_hours=0"),
            *(*seed, "model.position_encoding=none"),
        ]
    config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    assert config["common"]["seed"] == 1  # what is not said


@pytest.mark.parametrize(
    "words, message",
    [
        (["--encodings", "rope,rotary"], "--encodings rope,rotary: there is no 'rotary'; choose"),
        (["--encodings", "rope,,none"], "there is no ''; choose from sinusoidal, learned, rope"),
        (["--encodings", ","], "there is no ''"),
        (["--encodings"], "--encodings needs a value"),
        (["--encodings="], "--encodings needs a value"),
        (["--updates", "0"], "--updates 0: must be a whole number above 0"),
        (["--seed", "one"], "--seed one: must be a whole number"),
        (["--results", "/proc/none"], "--results /proc/none: cannot be made"),
        (["model.dropout=1"], "unknown argument model.dropout=1; usage: encodings.sh"),
    ],
)
def test_wrong_options_are_one_line(words, message, tmp_path):
    done = run(SCRIPT, *words, cwd=tmp_path, env={"PYTHON": sys.executable})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_the_scripts_know_the_encodings_of_the_table():
    common = SCRIPT.with_name("common.sh").read_text()
    assert f"\nENCODINGS={','.join(SOURCES)}\n" in common
