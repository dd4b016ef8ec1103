"""Getting WMT14 from what is damaged, missing or another file: one line, and the folder stays."""

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rope_fairseq.corpus import download
from rope_fairseq.corpus.miniature import write_archive
from tests.corpora import (
    CRAWL,
    EUROPARL,
    NEWS,
    SPLITS,
    TEST13,
    TEST14,
    get,
    left,
    members,
    one_error,
    small_disk,
    small_mirror,
    wmt14,
)
from tests.serving import Server


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "DELAYS", (0, 0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def mirror() -> Path:
    return small_mirror()


def copy_of(mirror: Path, folder: Path) -> Path:
    """A mirror that a test may change."""
    for name, content in left(mirror).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def rewrite(mirror: Path, path: str, change: Callable[[dict[str, bytes]], object]) -> None:
    """Change the members of an archive, and the table with it."""
    content = members(mirror / path)
    change(content)
    write_archive(mirror / path, content)
    sign(mirror, path)


def sign(mirror: Path, path: str) -> None:
    """Make the table fit an archive."""
    content = (mirror / path).read_bytes()
    row = f"{path}\t{len(content)}\tsha256:{hashlib.sha256(content).hexdigest()}"
    table = (mirror / "archives.tsv").read_text().split("\n")
    table = [row if line.startswith(f"{path}\t") else line for line in table]
    (mirror / "archives.tsv").write_text("\n".join(table))


def cut(mirror: Path, path: str, signed: bool = True) -> None:
    content = (mirror / path).read_bytes()
    (mirror / path).write_bytes(content[: len(content) // 2])
    if signed:
        sign(mirror, path)


def spoil(mirror: Path, path: str, signed: bool = True) -> None:
    content = bytearray((mirror / path).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    (mirror / path).write_bytes(content)
    if signed:
        sign(mirror, path)


def replace(mirror: Path, path: str, content: bytes) -> None:
    (mirror / path).write_bytes(content)
    sign(mirror, path)


def twice(mirror: Path) -> None:
    name = "commoncrawl.de-en.de"
    content = members(mirror / CRAWL)[name]
    with tarfile.open(mirror / CRAWL, "w:gz") as tar:
        for _ in range(2):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    sign(mirror, CRAWL)


def outside(mirror: Path) -> None:
    """A test set with a member that would land beside the folder it is unpacked to."""
    rewrite(mirror, TEST14, lambda content: content.update({"../../../stray": b"text"}))


SGM13 = "test/newstest2013-src.de.sgm"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: cut(m, CRAWL, signed=False), f"{{m}}/{CRAWL}: has "),
        (lambda m: spoil(m, CRAWL, signed=False), f"{{m}}/{CRAWL}: its sha256 is "),
        (lambda m: (m / NEWS).unlink(), f"{{m}}/{NEWS}: no such file"),
        (lambda m: (m / "archives.tsv").unlink(), f"{{m}}/{EUROPARL}: has "),
        (
            lambda m: (m / "archives.tsv").write_text("<html>\n"),
            "{m}/archives.tsv:1: '<html>' is not a file's path, size in bytes and",
        ),
        (
            lambda m: (m / "archives.tsv").write_text("# nothing\n"),
            f"{{m}}/archives.tsv: lacks {EUROPARL}, {CRAWL}, {NEWS}, {TEST13}, {TEST14}",
        ),
        (lambda m: cut(m, CRAWL), f"{{m}}/{CRAWL}: damaged ("),
        # By chance of the bytes "damaged (…)", or "has no …, or is damaged before it".
        (lambda m: spoil(m, CRAWL), f"{{m}}/{CRAWL}: "),
        (lambda m: replace(m, NEWS, b"<html>not found</html>"), f"{{m}}/{NEWS}: damaged (not a gz"),
        (lambda m: replace(m, NEWS, b""), f"{{m}}/{NEWS}: damaged ("),
        (
            lambda m: rewrite(m, EUROPARL, lambda c: c.pop("training/europarl-v7.de-en.de")),
            f"{{m}}/{EUROPARL}: has no training/europarl-v7.de-en.de, or is damaged before it",
        ),
        (
            lambda m: rewrite(m, CRAWL, lambda c: c.update({"commoncrawl.de-en.de": b"Eins\n"})),
            f"{{m}}/{CRAWL}: commoncrawl.de-en.en has 106 but commoncrawl.de-en.de has 1 lines: "
            "line n of one must translate line n of the other",
        ),
        (twice, f"{{m}}/{CRAWL}: holds commoncrawl.de-en.de twice"),
        (lambda m: cut(m, TEST14), f"{{m}}/{TEST14}: damaged ("),
        (lambda m: replace(m, TEST14, b"no gzip"), f"{{m}}/{TEST14}: damaged ("),
        (lambda m: rewrite(m, TEST13, lambda c: c.pop(SGM13)), f"{{m}}/{TEST13}: has no {SGM13}"),
        (
            lambda m: rewrite(m, TEST13, lambda c: c.update({SGM13: b'<seg id="1">Eins</seg>\n'})),
            f"{{m}}/{TEST13}: wmt13 has 20 source sentences and 1 references",
        ),
        (
            lambda m: rewrite(m, TEST13, lambda c: c.update(dict.fromkeys(c, b"<srcset>\n"))),
            f"{{m}}/{TEST13}: wmt13 has 0 source sentences and 0 references",
        ),
        (
            lambda m: rewrite(m, TEST13, lambda c: c.update({SGM13: b'<seg id="1">\xe4</seg>\n'})),
            f"{{m}}/{TEST13}: wmt13 is not UTF-8 (",
        ),
        (outside, f"{{m}}/{TEST14}: damaged ("),
    ],
    ids=[
        "truncated",
        "damaged",
        "missing",
        "no table",
        "a page instead of the table",
        "an empty table",
        "truncated, as its table says",
        "damaged, as its table says",
        "no archive",
        "empty",
        "missing member",
        "unequal members",
        "a member twice",
        "truncated test set",
        "test set no archive",
        "test set without reference",
        "unequal test set",
        "empty test set",
        "test set not UTF-8",
        "a member that leaves the folder",
    ],
)
def test_a_bad_archive_is_refused_in_one_line_and_the_folder_stays(
    damage: Callable[[Path], object],
    message: str,
    mirror: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy, data = copy_of(mirror, tmp_path / "copy"), tmp_path / "data"
    data.mkdir()
    (data / "train.en").write_text("of an earlier run\n")
    damage(copy)
    capsys.readouterr()
    assert get(wmt14, data, "--mirror", copy, "--downloads", tmp_path / "downloads") == 2
    assert one_error(capsys).startswith(message.format(m=copy))
    assert left(data) == {"train.en": b"of an earlier run\n"}
    assert not list(tmp_path.rglob("stray"))


def test_a_member_without_a_last_line_end_does_not_run_into_the_next_part(
    mirror: Path, tmp_path: Path
) -> None:
    whole, copy = tmp_path / "whole", copy_of(mirror, tmp_path / "copy")
    assert get(wmt14, whole, "--mirror", mirror) == 0
    for name in ("training/europarl-v7.de-en.de", "training/europarl-v7.de-en.en"):
        rewrite(copy, EUROPARL, lambda content: content.update({name: content[name][:-1]}))  # noqa: B023
    assert get(wmt14, tmp_path / "data", "--mirror", copy) == 0
    for lang in ("en", "de"):
        assert left(tmp_path / "data")[f"train.{lang}"] == left(whole)[f"train.{lang}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{t}/data", "--mirror", "{t}/nowhere"], "{t}/nowhere: no such folder"),
        (["{t}/data", "--mirror", "ftp://example.org"], "ftp://example.org: must be http://…"),
        (["{t}/data", "--mirror", "http://127.0.0.1:9"], "http://127.0.0.1:9/archives.tsv: no co"),
        (["{t}/data", "--mirror"], "argument --mirror: expected one argument; --help lists the"),
        (
            ["{t}/data", "--source-lang", "fr"],
            "--source-lang fr --target-lang de: must be en and de",
        ),
        (["{t}/data", "--target-lang", "en"], "--source-lang en --target-lang en: must be en and"),
        (["{t}/file/data", "--mirror", "{m}"], "{t}/file/data: Not a directory"),
        (["{t}/data", "--mirror", "{s}", "--downloads", "{t}/file"], "{t}/file"),
        (["{t}/data", "--miror", "{m}"], "unrecognized arguments: --miror"),
        ([], "the following arguments are required: FOLDER"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: list[str],
    message: str,
    mirror: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    with Server.of_folder(mirror).running() as server:
        names = {"t": tmp_path, "m": mirror, "s": server.base}
        assert get(wmt14, *(argument.format(**names) for argument in arguments)) == 2
    assert one_error(capsys).startswith(message.format(**names))
    assert left(tmp_path) == {"file": b""}


def test_two_runs_into_one_folder(
    mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    with wmt14.writing_corpus(data, "en", "de") as new:
        (new / "mine").write_text("")
        assert get(wmt14, data, "--mirror", mirror) == 2
        assert one_error(capsys).startswith(f"{data}: another get.sh is at work there; wait for")
        assert (new / "mine").exists()
        for name in ("source.json", *(f"{s}.{lang}" for s in SPLITS for lang in ("en", "de"))):
            (new / name).write_text("")
    assert get(wmt14, data, "--mirror", mirror) == 0


# 16 kB: full while the training text is written; 60 kB: while sacrebleu unpacks a test set.
@pytest.mark.parametrize("size", ["16k", "60k"])
def test_a_full_disk_is_one_line(
    size: str, mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "disk"
    with small_disk(data, size):
        assert get(wmt14, data, "--mirror", mirror) == 2
        assert one_error(capsys) == f"{data}: No space left on device"
        assert not left(data)
