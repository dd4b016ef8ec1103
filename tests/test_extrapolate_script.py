"""scripts/extrapolate.sh: trained on short sentences, translated with and without scaling, kept."""

import ast
import json
import sys
from pathlib import Path

import pytest
import yaml
from fairseq import checkpoint_utils

from benchmarks.extrapolation import SCALINGS, SYSTEMS
from rope_fairseq.evaluation import lengths, run_record
from rope_fairseq.position.rope import RotaryPositionEncoding
from tests.tiny import ROOT, call, run, scripts
from tests.toy import kill_at, toy_project

SCRIPT = ROOT / "scripts" / "extrapolate.sh"
TRAIN = ("--train", "text.en", "text.de")
# What the toy project trains on.
SHORT = 16


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = toy_project(tmp_path_factory.mktemp("project"), "extrapolate")
    file = folder / "configs" / "extrapolate.yaml"
    config = yaml.safe_load(file.read_text())
    config["task"] |= {"max_source_positions": SHORT, "max_target_positions": SHORT}
    config["model"] |= {"max_source_positions": 1024, "max_target_positions": 1024}
    config["checkpoint"]["save_interval_updates"] = 1
    config["dataset"]["skip_invalid_size_inputs_valid_test"] = True
    file.write_text(yaml.safe_dump(config))
    return folder


def test_it_goes_on_after_a_kill_and_keeps_what_came_out(project, capsys, monkeypatch):
    script, results = project / "scripts" / "extrapolate.sh", project / "results"
    words = (*TRAIN, "--encodings", "alibi,rope", "--updates", "6")
    kill_at("^translate-ntk: running", script, *words, env=scripts())
    kept = {path: path.read_bytes() for path in results.iterdir()}
    assert [path.name for path in kept] == ["extrapolate-alibi.json"]
    work = project / "exp" / "extrapolate" / "rope"
    assert not (work / "test.hyp.rope-ntk.de").exists()

    done = run(script, *words, "--encodings", "rope", env=scripts())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    ran = [line.split(":")[0] for line in done.stdout.splitlines() if ": running (" in line]
    assert ran == ["translate-ntk", "translate-dynamic", "translate-yarn"]
    assert {path: path.read_bytes() for path in kept} == kept

    records = {
        system: json.loads(
            (results / f"extrapolate-{'-'.join(filter(None, system))}.json").read_text()
        )
        for system in SYSTEMS
        if system[0] in ("alibi", "rope")
    }
    assert len(records) == len(list(results.iterdir())) == 6
    rope = records["rope", None]
    scores = json.loads((work / "scores.json").read_text())["scores"]
    assert [s["value"] for s in rope["scores"]] == [s["value"] for s in scores]
    tokens = [len(line.split()) + 1 for line in (work / "text" / "test.en").open()]
    for (encoding, scaling), record in records.items():
        assert (record["position_encoding"], record["scaling"]) == (encoding, scaling)
        assert (record["seed"], record["updates"], record["commit"]) == (1, 6, "unknown")
        assert record["trained_source_tokens"] == SHORT and "cores" in record["hardware"]
        assert record["validation_loss"][-1][0] == 6 and record["training_seconds"] > 0
        spans = [(b["shortest"], b["longest"]) for b in record["buckets"]]
        assert spans == [(1, 16), (17, 32), (33, 48), (49, 64)]
        for bucket in record["buckets"]:
            within = [n for n in tokens if bucket["shortest"] <= n <= bucket["longest"]]
            assert bucket["sentences"] == len(within)
            assert (bucket["value"] is None) == (bucket["length_ratio"] is None) == (not within)
        assert record["longer_left_out"] == sum(n > 64 for n in tokens)
        assert (record["model_overrides"] is None) == (scaling is None)
    assert rope["buckets"][1]["sentences"] > 0
    assert (
        "'rope_scaling': 'dynamic', 'rope_scaling_factor': 1.0, "
        in (records["rope", "dynamic"]["model_overrides"])
    )
    # The options reach the model.
    for scaling in SCALINGS:
        overrides = ast.literal_eval(records["rope", scaling]["model_overrides"])
        averaged = str(work / "model" / "averaged.pt")
        ((model,), _) = checkpoint_utils.load_model_ensemble([averaged], overrides)
        rotations = [part for part in model.modules() if isinstance(part, RotaryPositionEncoding)]
        assert rotations and {rotation.spec.scaling for rotation in rotations} == {scaling}
        assert max(part.target_extra for part in rotations) == (8 if scaling == "dynamic" else 50)

    # What is no longer what the step wrote is no result.
    monkeypatch.setattr(run_record, "ROOT", project)
    with open(work / "test.hyp.rope-ntk.de", "a") as file:
        file.write("more\n")
    empty = project / "empty"
    empty.mkdir()

    def refused(scaling: str) -> str:
        words = ("--work", work, "--results", empty, "--scaling", scaling)
        assert call(lengths.main, *words) == 2
        return capsys.readouterr().err

    assert "test.hyp.rope-ntk.de: not what the step translate-ntk wrote" in refused("ntk")
    assert "the step translate-pi is not finished there" in refused("pi")
    assert [path.name for path in empty.iterdir()] == ["extrapolate-rope.json"]


@pytest.mark.parametrize(
    "words, said, folder",
    [
        ((), [], "w/none"),
        (("--seed=2", "--updates=30"), ["common.seed=2", "--max-update", "30"], "w/none-seed2"),
        (
            ("--classes", "4,8", "--source-lang=en", "--valid", "v.en", "v.de", "--held-out=9"),
            "--valid v.en v.de --classes 4,8 --held-out 9 --source-lang en".split(),
            "w/none",
        ),
    ],
)
def test_what_it_runs_of_each_encoding(words, said, folder, tmp_path):
    """Nothing is said of the recipe's own values: the run is that of train.sh without them."""
    (tmp_path / "scripts").mkdir()
    for name in ("extrapolate.sh", "common.sh"):
        (tmp_path / "scripts" / name).symlink_to(ROOT / "scripts" / name)
    stub = tmp_path / "scripts" / "reproduce.sh"
    stub.write_text('#!/bin/bash\necho "$@"\nexit 3\n')
    stub.chmod(0o755)
    done = run(
        *(tmp_path / "scripts" / "extrapolate.sh", "--encodings", "none", "--work", "w"),
        *(*words, *TRAIN),
        cwd=tmp_path,
        env={"PYTHON": sys.executable},
    )
    assert done.returncode == 3 and not list((tmp_path / "results").iterdir())
    assert done.stdout.splitlines()[1].split() == [
        *("extrapolate", "--work", folder, *TRAIN, *said, "model.position_encoding=none"),
    ]


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "--train SOURCE TARGET is needed; usage: extrapolate.sh --train"),
        (("--train", "text.en"), "--train needs two files, source and target"),
        (("--train", "text.en", "--valid"), "--train needs two files, source and target"),
        ((*TRAIN, "--valid", "v.en"), "--valid needs two files, source and target"),
        ((*TRAIN, "--encodings", "rope,ntk"), "--encodings rope,ntk: there is no 'ntk'; choose"),
        ((*TRAIN, "--encodings", ","), "there is no ''"),
        ((*TRAIN, "--updates", "0"), "--updates 0: must be a whole number above 0"),
        ((*TRAIN, "--seed="), "--seed needs a value"),
        ((*TRAIN, "--seed", "one"), "--seed one: must be a whole number"),
        ((*TRAIN, "--results", "/proc/none"), "--results /proc/none: cannot be made"),
        ((*TRAIN, "--test", "a", "b"), "unknown argument --test; usage: extrapolate.sh"),
    ],
)
def test_wrong_options_are_one_line(words, message, tmp_path):
    done = run(SCRIPT, *words, cwd=tmp_path, env={"PYTHON": sys.executable})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_it_knows_the_scalings_and_the_length_of_the_recipe():
    text = SCRIPT.read_text()
    assert f"for scaling in {' '.join(SCALINGS)}; do\n" in text
    config = yaml.safe_load((ROOT / "configs" / "extrapolate.yaml").read_text())
    trained = config["task"]["max_source_positions"]
    assert text.count(f"'rope_original_max_positions': {trained}") == 2
    assert text.count(f"'rope_scaling_factor': {lengths.TIMES}.0") == 3
