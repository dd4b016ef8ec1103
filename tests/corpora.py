"""Shared by the tests of data-prep/: its scripts as modules, a small mirror, a small disk."""

import atexit
import contextlib
import functools
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.tiny import ROOT, call

SPLITS = ("train", "valid", "test")
EUROPARL = "wmt13/training-parallel-europarl-v7.tgz"
CRAWL = "wmt13/training-parallel-commoncrawl.tgz"
NEWS = "wmt14/training-parallel-nc-v9.tgz"
TEST13 = "wmt13/test.tgz"
TEST14 = "wmt14/test-full.tgz"
ARCHIVES = [EUROPARL, CRAWL, NEWS, TEST13, TEST14]
PAIRS = 200
LANGUAGES = ("--source-lang", "en", "--target-lang", "de")


def load(corpus: str, name: str) -> ModuleType:
    """A script of data-prep/ as a module; no __pycache__, for the folder is a step's input."""
    path = ROOT / "data-prep" / corpus / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{corpus}_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module


miniature = load("wmt14", "miniature")
wmt14 = load("wmt14", "get")
own = load("own", "get")


@functools.cache
def small_mirror() -> Path:
    """The miniature of WMT14, made once; tests must not change it."""
    folder = Path(tempfile.mkdtemp(prefix="rope_fairseq-mirror-"))
    atexit.register(shutil.rmtree, folder)
    miniature.make(folder, PAIRS, seed=1)
    return folder


def members(archive: Path) -> dict[str, bytes]:
    """Name → content of a .tgz."""
    with tarfile.open(archive) as tar:
        return {info.name: tar.extractfile(info).read() for info in tar if info.isreg()}


def left(folder: Path) -> dict[str, bytes]:
    """Every file below the folder."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def get(script: ModuleType, *arguments: str | Path) -> int:
    """Run a get.py in this process; its exit status."""
    return call(script.main, *arguments)


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line ``error: …``, which is the last; without that word."""
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1].removeprefix("error: ")


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a small file system, if this user may."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        made = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        made = False
    if not made:
        pytest.skip("mounting a small file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)
