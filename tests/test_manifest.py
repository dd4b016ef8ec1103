"""rope_fairseq.manifest: a step is done when its manifest says so, and only then."""

import subprocess
import sys
from pathlib import Path

import pytest

from rope_fairseq import manifest
from rope_fairseq.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


class Step:
    """A step with an input file, an input folder, an output file and an output folder."""

    def __init__(self, work: Path) -> None:
        self.file = work / "manifests" / "step.json"
        self.inputs = [work / "in.txt", work / "in"]
        self.outputs = [work / "out.txt", work / "out"]
        self.options = {"size": "3"}
        for folder in ("in", "out"):
            (work / folder / "deep").mkdir(parents=True)
            (work / folder / "deep" / "a").write_text(folder)
            (work / f"{folder}.txt").write_text(folder)

    def check(self) -> str | None:
        return manifest.check(self.file, self.inputs, self.options, self.outputs)

    def write(self) -> None:
        manifest.write(self.file, self.inputs, self.options, self.outputs)


@pytest.fixture
def step(tmp_path: Path) -> Step:
    """A step that has been run."""
    step = Step(tmp_path)
    assert step.check() == "not run yet"
    step.write()
    assert step.check() is None
    return step


def test_an_output_alone_never_counts(tmp_path: Path) -> None:
    assert Step(tmp_path).check() == "not run yet"


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("in.txt", "IN", "input in.txt changed"),
        ("in/deep/a", "IN", "input in/deep/a changed"),
        ("in/b", "", "input in/b is new"),
        ("out.txt", "ou", "output out.txt changed"),
        ("out.txt", "OUT", "output out.txt changed"),
        ("out/deep/a", "", "output out/deep/a changed"),
        ("out/b", "", "output out/b is not from this step"),
    ],
)
def test_a_changed_file_makes_the_step_run(
    path: str, content: str, reason: str, step: Step, tmp_path: Path
) -> None:
    (tmp_path / path).write_text(content)
    assert step.check() == reason


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("in/deep/a", "input in/deep/a is gone"),
        ("out.txt", "output out.txt is missing"),
        ("out/deep/a", "output out/deep/a is missing"),
        ("manifests/step.json", "not run yet"),
    ],
)
def test_a_missing_file_makes_the_step_run(
    path: str, reason: str, step: Step, tmp_path: Path
) -> None:
    (tmp_path / path).unlink()
    assert step.check() == reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": "4"}, "option size was 3, is 4"),
        ({"size": "3", "more": "1"}, "option more was not set, is 1"),
        ({}, "option size was 3, is not set"),
    ],
)
def test_a_changed_option_makes_the_step_run(
    options: dict[str, str], reason: str, step: Step
) -> None:
    step.options = options
    assert step.check() == reason


def test_another_version_of_a_tool_makes_the_step_run(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = manifest.tool_versions()
    assert versions.keys() == {
        *("python", "torch", "fairseq", "sentencepiece", "subword-nmt", "sacremoses", "sacrebleu"),
        "rope_fairseq",
    }
    monkeypatch.setattr(manifest, "tool_versions", lambda: versions | {"torch": "torch 0.1"})
    assert step.check() == f"version of torch was {versions['torch']}, is torch 0.1"


def test_a_touched_or_moved_work_folder_stays_done(step: Step, tmp_path: Path) -> None:
    (tmp_path / "in.txt").touch()
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in [*step.inputs, *step.outputs, step.file.parent]:
        path.rename(moved / path.name)
    again = [[moved / path.name for path in paths] for paths in (step.inputs, step.outputs)]
    assert manifest.check(moved / "manifests/step.json", again[0], step.options, again[1]) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"inputs": {}}'])
def test_a_damaged_manifest_makes_the_step_run(content: str, step: Step) -> None:
    step.file.write_text(content)
    assert step.check() is not None


def test_an_interrupted_run_may_continue_only_from_the_same_start(step: Step) -> None:
    step.options = {"size": "4"}
    assert step.check() == "option size was 3, is 4"
    # Killed here. The old options do not make the old outputs good again.
    assert step.check() == "interrupted, same inputs and options"
    step.options = {"size": "3"}
    assert step.check() == "option size was 4, is 3"
    step.write()
    assert step.check() is None


def test_a_damaged_output_is_no_interrupted_run(step: Step) -> None:
    step.outputs[0].write_text("half")
    assert step.check() == "output out.txt changed"


def test_an_input_that_changes_while_the_step_runs_is_refused(step: Step) -> None:
    step.options = {"size": "4"}
    step.check()
    step.inputs[0].write_text("edited")
    with pytest.raises(UserError, match="input in.txt changed while step was running"):
        step.write()
    assert not step.file.exists()


def test_a_missing_output_is_not_written_down(step: Step) -> None:
    step.outputs[0].unlink()
    with pytest.raises(UserError, match=r"output .*out.txt: no such file or folder"):
        step.write()


def run_manifest(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "tool.py", "manifest", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_line_exits_with_0_1_and_2(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("in")
    (tmp_path / "out").write_text("out")
    rest = ["--file", tmp_path / "manifests/step.json", "--input", tmp_path / "in"]
    rest += ["--option", "a=1", "b=x=y", "--output", tmp_path / "out"]
    run = run_manifest("check", *rest)
    assert (run.returncode, run.stdout, run.stderr) == (1, "not run yet\n", "")
    assert run_manifest("write", *rest).returncode == 0
    done = run_manifest("check", *rest)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for arguments, message in (
        (["--option", "a"], "error: --option 'a': expected NAME=VALUE\n"),
        (["--input", tmp_path / "no"], f"error: input {tmp_path}/no: no such file or folder\n"),
    ):
        wrong = run_manifest("check", *rest, *arguments)
        assert (wrong.returncode, wrong.stderr) == (2, message)
