"""scripts/prepare.sh: steps that run exactly when they must, restart after a kill, clear errors."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.tiny import ROOT, scripts

STEPS = ["data", "clean", "bpe", "encode", "binarize", "sign"]
DEMO_COUNTS = {"train": 24655, "valid": 500, "test": 500}
GET = """#!/usr/bin/env bash
set -e
mkdir -p "$1"
cp "$(dirname "$0")"/*.en "$(dirname "$0")"/*.de "$1"
echo '{"corpus": "tiny"}' >"$1/source.json"
"""
FOLDERS = ("data", "tok", "text", "data-bin")


class Project:
    """A copy of the scripts and the package with a recipe ``tiny`` of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.corpus = root / "data-prep" / "tiny"
        ignore = shutil.ignore_patterns("__pycache__")
        for folder in ("scripts", "rope_fairseq"):
            shutil.copytree(ROOT / folder, root / folder, ignore=ignore)
        self.corpus.mkdir(parents=True)
        (self.corpus / "get.sh").write_text(GET)
        (self.corpus / "get.sh").chmod(0o755)
        nouns = ["cat", "dog", "house", "tree", "window", "garden"]
        for split, count in (("train", 60), ("valid", 9), ("test", 7)):
            words = [(nouns[n % 6], nouns[n // 6 % 6], n) for n in range(count)]
            english = "".join(f"The {a} sees the {b}, {n} times.\n" for a, b, n in words)
            (self.corpus / f"{split}.en").write_text(english)
            (self.corpus / f"{split}.de").write_text(english.replace("The", "Der"))
        (root / "configs" / "recipes").mkdir(parents=True)
        shutil.copy(ROOT / "configs" / "demo.yaml", root / "configs")
        self.change_recipe()

    def change_recipe(self, **changes: object) -> None:
        recipe = yaml.safe_load((ROOT / "configs" / "recipes" / "demo.yaml").read_text())
        recipe |= {"corpus": "tiny", "vocab_size": 70} | changes
        (self.root / "configs" / "recipes" / "tiny.yaml").write_text(yaml.safe_dump(recipe))

    def command(self, *arguments: str | Path) -> tuple[list[str], dict[str, str]]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | scripts()
        return [str(self.root / "scripts" / "prepare.sh"), *map(str, arguments)], environment

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command, environment = self.command(*arguments)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)

    def steps_run(self, work: Path) -> list[str]:
        """The steps that did not print "up to date"."""
        result = self.run("tiny", "--work", work)
        assert result.returncode == 0, result.stderr
        ran = [step for step in STEPS if f"{step}: running (" in result.stdout]
        assert [step for step in STEPS if f"{step}: up to date" not in result.stdout] == ran
        return ran


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Path]:
    """A project and a work folder in which everything is prepared."""
    base = tmp_path_factory.mktemp("prepare")
    project = Project(base / "project")
    assert project.steps_run(base / "work") == STEPS
    return project, base / "work"


@pytest.fixture
def copied(finished: tuple[Project, Path], tmp_path: Path) -> tuple[Project, Path]:
    """The same, to be changed by one test."""
    for folder in (finished[0].root, finished[1]):
        shutil.copytree(folder, tmp_path / folder.name)
    project = Project.__new__(Project)
    project.root = tmp_path / "project"
    project.corpus = project.root / "data-prep" / "tiny"
    return project, tmp_path / "work"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def test_everything_is_made_and_nothing_is_left_over(finished: tuple[Project, Path]) -> None:
    work = finished[1]
    folders = {path.name for path in work.iterdir() if path.is_dir()}
    assert folders == {*FOLDERS, "logs", "manifests"}
    assert not list(work.rglob("*.tmp")) and not list(work.rglob("*.started"))
    for step in STEPS:
        assert (work / "manifests" / f"{step}.json").is_file()
        assert (work / "logs" / f"{step}.log").is_file()
    assert "encode train.en: 60 lines" in (work / "logs" / "encode.log").read_text()
    for name in ("sentencepiece.bpe.model", "text.json"):
        assert (work / "data-bin" / name).read_bytes() == (work / "text" / name).read_bytes()
    dictionaries = [(work / "data-bin" / f"dict.{lang}.txt").read_bytes() for lang in ("en", "de")]
    assert dictionaries[0] == dictionaries[1]
    signature = json.loads((work / "data.json").read_text())
    assert signature["signature"].startswith("corpus:tiny|pairs:60+9+7|vocab:70|merges:")
    assert signature["source"] == {"corpus": "tiny"}
    assert signature["signature"] in (work / "logs" / "sign.log").read_text()


def test_nothing_runs_twice_not_even_in_a_moved_folder(copied: tuple[Project, Path]) -> None:
    assert copied[0].steps_run(copied[1]) == []


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "steps"),
    [
        # What a step makes again is the same as before, so no later step runs.
        (lambda work: (work / "manifests/encode.json").unlink(), ["encode"]),
        (lambda work: truncate(work / "text/train.de"), ["encode"]),
        (lambda work: (work / "text/sentencepiece.bpe.model").unlink(), ["bpe"]),
        (lambda work: truncate(work / "data/valid.en"), ["data"]),
        (lambda work: truncate(work / "data-bin/train.en-de.de.bin"), ["binarize"]),
        (lambda work: truncate(work / "tok/train.en"), ["clean"]),
        (lambda work: (work / "tok/text.json").unlink(), ["clean"]),
        (lambda work: truncate(work / "data.json"), ["sign"]),
    ],
)
def test_a_damaged_step_alone_runs_again(
    damage: Callable[[Path], None],
    steps: list[str],
    copied: tuple[Project, Path],
    finished: tuple[Project, Path],
) -> None:
    project, work = copied
    damage(work)
    assert project.steps_run(work) == steps
    for folder in FOLDERS:
        assert content(work / folder) == content(finished[1] / folder)


def test_a_changed_option_runs_exactly_the_later_steps(copied: tuple[Project, Path]) -> None:
    project, work = copied
    project.change_recipe(vocab_size=60)
    assert project.steps_run(work) == ["bpe", "encode", "binarize", "sign"]
    assert project.steps_run(work) == []


def test_a_rule_of_cleaning_that_drops_nothing_runs_no_later_step_but_the_signature(
    copied: tuple[Project, Path],
) -> None:
    project, work = copied
    rules = yaml.safe_load((ROOT / "configs" / "recipes" / "demo.yaml").read_text())["clean"]
    project.change_recipe(clean=rules | {"max_tokens": 200})
    assert project.steps_run(work) == ["clean", "sign"]
    assert json.loads((work / "data.json").read_text())["cleaning"]["options"]["max_tokens"] == 200


def test_a_changed_test_set_does_not_train_the_bpe_model_again(
    copied: tuple[Project, Path],
) -> None:
    project, work = copied
    with open(project.corpus / "test.en", "a") as english:
        english.write("The cat.\n")
    with open(project.corpus / "test.de", "a") as german:
        german.write("\n")
    assert project.steps_run(work) == ["data", "clean", "encode", "binarize", "sign"]
    assert (work / "text/test.de").read_text().endswith("\n\n")


def test_a_killed_run_is_taken_up_and_gives_the_same(
    finished: tuple[Project, Path], tmp_path: Path
) -> None:
    project, work = finished[0], tmp_path / "work"
    command, environment = project.command("tiny", "--work", work)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("encode: running"):
        assert process.poll() is None
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    result = project.run("tiny", "--work", work)
    assert result.returncode == 0, result.stderr
    assert (
        "data: up to date\nclean: up to date\nbpe: up to date\nencode: running (interrupted"
        in result.stdout
    )
    for folder in FOLDERS:
        assert content(work / folder) == content(finished[1] / folder)


def test_a_second_run_in_the_same_folder_is_refused(finished: tuple[Project, Path]) -> None:
    with open(finished[1] / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = finished[0].run("tiny", "--work", finished[1])
    assert result.returncode == 2
    assert (
        result.stderr == f"error: another script is at work in {finished[1]}; wait for it to end\n"
    )


def test_help_is_the_comment_at_the_head_of_the_script(finished: tuple[Project, Path]) -> None:
    result = finished[0].run("--help")
    assert result.returncode == 0
    assert result.stdout.startswith("prepare.sh RECIPE [--work DIR]")
    assert "\n\nRaw text to fairseq's binary data" in result.stdout
    assert "source " not in result.stdout


# Bad input: one clear line, exit status 2, nothing half-written


def unequal(project: Project) -> None:
    with open(project.corpus / "train.de", "a") as file:
        file.write("one more\n")


def latin1(project: Project) -> None:
    with open(project.corpus / "valid.de", "ab") as file:
        file.write("schön\n".encode("latin-1"))
    with open(project.corpus / "valid.en", "a") as file:
        file.write("nice\n")


def empty(project: Project) -> None:
    for path in project.corpus.glob("*.[ed][ne]"):
        path.write_text("")


@pytest.mark.parametrize(
    ("spoil", "last_step", "message"),
    [
        (
            unequal,
            "clean",
            "error: {work}/data/train.en has 60 lines but {work}/data/train.de has 61: "
            "line n of one must translate line n of the other",
        ),
        (
            latin1,
            "clean",
            "error: {work}/data/valid.de:10: not UTF-8 (byte 0xf6 at byte 4 of the line); "
            "convert the file to UTF-8, for example with iconv",
        ),
        (
            empty,
            "clean",
            "error: {work}/data/train.en and {work}/data/train.de are empty: "
            "at least one sentence pair is needed",
        ),
        (
            lambda project: project.change_recipe(vocab_size=4000),
            "bpe",
            "error: vocab_size 4000: the largest possible for the words of {work}/tok/words.tsv "
            "is ",
        ),
        (
            lambda project: (project.corpus / "test.de").unlink(),
            "data",
            "error: output {work}/data/test.de: no such file or folder",
        ),
        (
            lambda project: (project.corpus / "get.sh").write_text("#!/bin/sh\nexit 3\n"),
            "data",
            "error: step data failed with status 3; its output is in {work}/logs/data.log",
        ),
    ],
    ids=["unequal", "not UTF-8", "empty", "vocabulary", "missing file", "failing command"],
)
def test_a_bad_corpus_is_refused_in_one_line(
    spoil: Callable[[Project], object], last_step: str, message: str, tmp_path: Path
) -> None:
    project, work = Project(tmp_path / "project"), tmp_path / "work"
    spoil(project)
    result = project.run("tiny", "--work", work)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode != 0
    assert len(errors) == 1
    assert errors[0].startswith(message.format(work=work))
    assert result.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in result.stderr
    # The step is not done, and neither it nor a later one has left anything half-written.
    done = STEPS[: STEPS.index(last_step)]
    assert {path.stem for path in (work / "manifests").glob("*.json")} == set(done)
    assert not list(work.rglob("*.tmp"))
    assert not (work / "data-bin").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["huge", "--work", "{tmp}/work"], "recipe 'huge': there is no "),
        (["tiny", "--work"], "--work needs a folder"),
        (["tiny", "--work", "{tmp}/work", "--vocab", "3"], "unknown argument --vocab; usage: "),
        ([], "no recipe given; usage: prepare.sh RECIPE [--work DIR]"),
        (
            ["tiny", "--work", "{tmp}/file/work"],
            "work folder {tmp}/file/work cannot be written to (Not a directory)",
        ),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(
    arguments: list[str], message: str, finished: tuple[Project, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    result = finished[0].run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {message.format(tmp=tmp_path)}")
    if "huge" in message:
        assert result.stderr.endswith("recipes that exist: tiny\n")


def test_an_interpreter_without_the_packages_is_refused_in_one_line(
    finished: tuple[Project, Path], tmp_path: Path
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    command, environment = finished[0].command("tiny", "--work", tmp_path / "work")
    result = subprocess.run(
        command, env=environment | {"PYTHON": str(bare)}, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: the interpreter {bare} lacks fairseq")
    assert result.stderr.count("\n") == 1


# The demo corpus


def unpack(corpus: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [corpus / "get.sh", folder],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_demo_corpus_unpacks_to_the_stated_number_of_lines(tmp_path: Path) -> None:
    assert unpack(ROOT / "data-prep" / "demo", tmp_path / "data").returncode == 0
    pages = {}
    for split, count in DEMO_COUNTS.items():
        for side in ("en", "de", "src"):
            assert (tmp_path / "data" / f"{split}.{side}").read_bytes().count(b"\n") == count
        pages[split] = set((tmp_path / "data" / f"{split}.src").read_text().splitlines())
    assert not pages["train"] & pages["valid"]
    assert not pages["train"] & pages["test"]
    assert not pages["valid"] & pages["test"]


@pytest.mark.parametrize("kind", ["damaged", "exchanged", "missing"])
def test_a_damaged_demo_corpus_is_refused_and_nothing_is_unpacked(
    kind: str, tmp_path: Path
) -> None:
    corpus = tmp_path / "demo"
    shutil.copytree(ROOT / "data-prep" / "demo", corpus)
    if kind == "damaged":
        truncate(corpus / "valid.en.xz")
    elif kind == "exchanged":
        shutil.copy(corpus / "test.en.xz", corpus / "valid.en.xz")
    else:
        (corpus / "valid.en.xz").unlink()
    result = unpack(corpus, tmp_path / "data")
    assert result.returncode != 0
    assert result.stderr.startswith(f"error: {corpus}/valid.en.xz: ")
    assert result.stderr.count("\n") == 1
    assert not list((tmp_path / "data").iterdir())
