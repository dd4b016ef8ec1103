"""The package's metadata, its lock file, and what an installation contains."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import rope_fairseq
from tests.tiny import ROOT, python, run

LOCK = ROOT / "requirements.lock"
INSTALLING_FILES = [
    "setup.py",
    "pyproject.toml",
    "requirements.lock",
    "Makefile",
    ".ci/run",
    "scripts/venv.sh",
    "scripts/lock.sh",
]


class Wheel(NamedTuple):
    """What pip builds of the project."""

    metadata: Distribution
    files: set[str]  # the package's files, without the metadata's
    requirements: list[Requirement]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Wheel:
    """The wheel of a copy of the tree, beside which lies a folder that is not to be packed."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "rope_fairseq", source / "rope_fairseq", ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    target = tmp_path_factory.mktemp("target")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", target, source], check=True)
    with zipfile.ZipFile(next(target.glob("*.whl"))) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(target)
    metadata = PathDistribution(next(target.glob("*.dist-info")))
    return Wheel(metadata, files, [Requirement(text) for text in metadata.requires or []])


@pytest.fixture(scope="module")
def locked() -> dict[str, Version]:
    """Locked version of each package, by canonical name."""
    pins = [line.split("==") for line in _pins()]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def test_every_file_states_the_same_version(wheel):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest_release = re.search(r"^## \[(\d[^]]*)\] - (\S+)$", changelog, re.MULTILINE)
    assert newest_release is not None
    assert wheel.metadata.version == rope_fairseq.__version__
    assert citation["version"] == rope_fairseq.__version__
    assert newest_release.groups() == (rope_fairseq.__version__, citation["date-released"])


def test_citation_names_the_roformer_and_fairseq_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    papers = {paper["authors"][0]["family-names"]: paper for paper in citation["references"]}
    assert papers["Su"]["identifiers"][0]["value"] == "arXiv:2104.09864"
    assert papers["Ott"]["title"].startswith("fairseq: ")


def test_module_prints_the_user_dir_and_nothing_else(tmp_path):
    result = python("rope_fairseq", cwd=tmp_path, check=True)
    assert result.stdout == f"{Path(rope_fairseq.__file__).absolute().parent}\n"


def test_fairseq_takes_the_printed_user_dir(tmp_path):
    user_dir = python("rope_fairseq", cwd=tmp_path, check=True).stdout.strip()
    code = (
        "from fairseq import options; parser = options.get_training_parser();"
        "print(options.parse_args_and_arch(parser).position_encoding)"
    )
    arguments = ["data-bin", "--user-dir", user_dir, "--arch", "rope_transformer_multi30k"]
    result = run(sys.executable, "-c", code, *arguments, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert result.stdout.splitlines()[-1:] == ["rope"], result.stderr


def test_lock_satisfies_every_bound_of_setup_py(wheel, locked):
    pinned = [locked.get(canonicalize_name(requirement.name)) for requirement in wheel.requirements]
    wrong = {
        str(requirement): version
        for requirement, version in zip(wheel.requirements, pinned, strict=True)
        if version is None or version not in requirement.specifier
    }
    assert not wrong


def test_every_dependency_is_bounded_above(wheel):
    bounding = {"<", "<=", "=="}
    unbounded = [
        str(requirement)
        for requirement in wheel.requirements
        if requirement.marker is None
        and not bounding & {bound.operator for bound in requirement.specifier}
    ]
    assert not unbounded


def test_lock_pins_exact_public_versions():
    exact = re.compile(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*")
    assert [line for line in _pins() if not exact.fullmatch(line)] == []


def test_lock_has_neither_torchaudio_nor_cuda_libraries(locked):
    unwanted = re.compile(r"torchaudio|triton|nvidia-.*|cuda-.*")
    assert [name for name in locked if unwanted.fullmatch(name)] == []


@pytest.mark.parametrize("name", INSTALLING_FILES)
def test_installing_files_name_no_host(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert re.findall(r"\w+://\S*|index-url|find-links", text) == []


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    files = (path for path in (ROOT / "rope_fairseq").rglob("*") if path.is_file())
    names = {str(path.relative_to(ROOT)) for path in files if path.parent.name != "__pycache__"}
    assert wheel.files == names


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        # Too old: every check of its version fails.
        (
            'test "$1" = --version && echo "Python 3.9.2"',
            "is not a Python 3.11 or 3.12 (Python 3.9.2)",
        ),
        # Debian's without python3-venv: runs, but has no ensurepip.
        ('case "$2" in *ensurepip*) exit 1;; esac', "apt-get install python3-venv"),
    ],
)
def test_venv_script_refuses_an_unusable_python_in_one_line(tmp_path, behaviour, message):
    fake_python = tmp_path / "python"
    fake_python.write_text(f"#!/bin/sh\n{behaviour}\n", encoding="utf-8")
    fake_python.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "venv.sh", tmp_path / "scripts")
    result = run("bash", script, env={"PYTHON": str(fake_python)})
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (tmp_path / ".venv").exists()


def _pins() -> list[str]:
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]
