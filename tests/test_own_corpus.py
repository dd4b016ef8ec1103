"""Your own corpus: files taken as they are, pairs held out, what is refused."""

import gzip
import hashlib
import json
import lzma
import os
import sys
from pathlib import Path

import pytest

from tests.corpora import LANGUAGES, SPLITS, get, left, one_error, own
from tests.tiny import ROOT, run


def write(folder: Path, name: str, lines: list[str]) -> Path:
    path = folder / name
    text = "".join(f"{line}\n" for line in lines).encode()
    packer = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(packer(text))
    return path


@pytest.fixture
def text(tmp_path: Path) -> tuple[Path, Path]:
    """400 pairs; every fourth source side and every tenth target side occurs again."""
    english = [f"sentence {n if n % 4 else 4}" for n in range(400)]
    german = [f"Satz  {n}" if n % 10 else "Satz" for n in range(400)]
    return write(tmp_path, "text.en.gz", english), write(tmp_path, "text.de.xz", german)


def pairs(folder: Path, split: str) -> list[tuple[str, str]]:
    sides = [(folder / f"{split}.{lang}").read_text().splitlines() for lang in ("en", "de")]
    return list(zip(*sides, strict=True))


def test_three_given_pairs_of_files_are_taken_as_they_are(
    text: tuple[Path, Path], tmp_path: Path
) -> None:
    files = {
        split: (
            write(tmp_path, f"{split}.x", [f"{split} a\rb\u2028c", ""]),
            write(tmp_path, f"{split}.y", ["x\x85y", "z"]),
        )
        for split in SPLITS
    }
    files["test"][0].write_bytes(b"one\ntwo")  # no last line end
    given = [word for split in SPLITS for word in (f"--{split}", *files[split])]
    assert get(own, tmp_path / "data", *given, *LANGUAGES) == 0
    found = left(tmp_path / "data")
    source = json.loads(found.pop("source.json"))
    assert found == {
        f"{split}.{lang}": files[split][side].read_bytes().removesuffix(b"\n") + b"\n"
        for split in SPLITS
        for side, lang in enumerate(("en", "de"))
    }
    assert [source[split]["lines"] for split in SPLITS] == [2, 2, 2]
    assert source["test"]["files"][0] == {
        "path": str(files["test"][0]),
        "checksum": f"sha256:{hashlib.sha256(b'one' + bytes([10]) + b'two').hexdigest()}",
    }


def test_pairs_are_held_out_evenly_and_none_of_their_sides_stays_in_the_training_text(
    text: tuple[Path, Path], tmp_path: Path
) -> None:
    for folder in ("data", "again"):
        assert get(own, tmp_path / folder, "--train", *text, *LANGUAGES) == 0
    data = tmp_path / "data"
    assert left(data) == left(tmp_path / "again")
    split = {name: pairs(data, name) for name in SPLITS}
    assert [len(split[name]) for name in SPLITS] == [360, 20, 20]  # 5 % each
    for side in (0, 1):
        held = [" ".join(pair[side].split()) for name in ("valid", "test") for pair in split[name]]
        assert len(set(held)) == 40
        assert not set(held) & {" ".join(pair[side].split()) for pair in split["train"]}
    for name in ("valid", "test"):
        numbers = [int(english.split()[1]) for english, _ in split[name]]
        gaps = [after - before for before, after in zip(numbers, numbers[1:], strict=False)]
        assert 15 <= min(gaps) and max(gaps) <= 25
    # Nothing is lost, and the rest keeps its order.
    numbers = [german for _, german in split["train"] if german != "Satz"]
    assert numbers == sorted(numbers, key=lambda line: int(line.split()[1]))
    assert json.loads((data / "source.json").read_text())["valid"] == {
        "held_out_of": "train",
        "lines": 20,
    }


def test_nothing_is_held_out_that_the_given_test_set_has(
    text: tuple[Path, Path], tmp_path: Path
) -> None:
    first = tmp_path / "first"
    assert get(own, first, "--train", *text, *LANGUAGES, "--held-out", 20) == 0
    test = (first / "valid.en", first / "valid.de")
    arguments = ("--train", *text, "--test", *test, *LANGUAGES, "--held-out", 20)
    assert get(own, tmp_path / "second", *arguments) == 0
    second = pairs(tmp_path / "second", "valid")
    assert len(second) == 20 and not set(second) & set(pairs(first, "valid"))
    assert pairs(tmp_path / "second", "test") == pairs(first, "valid")


def test_sentences_that_no_test_set_should_have_stay_in_the_training_text(tmp_path: Path) -> None:
    odd = ["", "\ufeffmark", "bell\x07", "a\u2028b", "w " * 101, "a\rb", "next\x85line"]
    english = write(tmp_path, "x", [*odd, *(f"good {n}" for n in range(43))])
    german = write(tmp_path, "y", [f"gut {n}" for n in range(50)])
    german.write_bytes(german.read_bytes().replace(b"gut 49", b"gut \xff"))
    assert (
        get(own, tmp_path / "data", "--train", english, german, *LANGUAGES, "--held-out", 12) == 0
    )
    for split in ("valid", "test"):
        for source, _ in pairs(tmp_path / "data", split):
            assert source.startswith("good ")
    train = (tmp_path / "data/train.en").read_bytes().split(b"\n")
    assert {line.encode() for line in odd} <= set(train)
    assert b"gut \xff\n" in (tmp_path / "data/train.de").read_bytes()


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """A corpus of 6 MB a side, and one ten times smaller, in the same memory."""
    # Not getrusage: its maximum is inherited from the process that starts this one.
    measure = (
        "import runpy, sys; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__'); "
        "print(*(line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line))"
    )
    peaks = []
    for count in (10_000, 100_000):
        files = [
            write(tmp_path, f"{count}.{lang}", [f"{lang} {n} {'word ' * 10}" for n in range(count)])
            for lang in ("en", "de")
        ]
        script = ROOT / "data-prep/own/get.py"
        arguments = [tmp_path / f"{count}", "--train", *files, *LANGUAGES, "--held-out", "100"]
        result = run(sys.executable, "-c", measure, script, *arguments)
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout))
    assert peaks[1] - peaks[0] < 3000  # kB


def bad_gzip(tmp_path: Path) -> None:
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"text\n" * 1000)[:-12])
    (tmp_path / "plain.gz").write_bytes(b"text\n" * 400)
    (tmp_path / "bad.xz").write_bytes(lzma.compress(os.urandom(3000))[:-200])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "{t}/x", "{t}/nowhere"], "{t}/nowhere: no such file"),
        (["--train", "{t}/x", "{t}"], "{t}: must be a file that can be read several times"),
        (["--train", "{t}/x", "{t}/x"], "{t}/x: given twice (also as {t}/x)"),
        (["--train", "{t}/x", "{t}/link"], "{t}/link: given twice (also as {t}/x)"),
        (["--train", "{t}/x", "{t}/y", "--test", "{t}/z", "{t}/x"], "{t}/x: given twice"),
        (["--train", "{t}/x", "{t}/empty"], "{t}/empty: empty"),
        (["--train", "{t}/x", "{t}/empty.gz"], "{t}/empty.gz: empty"),
        (
            ["--train", "{t}/x", "{t}/z"],
            "{t}/x has 400 lines but {t}/z has 399: line n of one must translate line n of the",
        ),
        (
            ["--train", "{t}/x", "{t}/y", "--valid", "{t}/two", "{t}/z"],
            "{t}/two has 2 lines but {t}/z has 399: line n of one must translate",
        ),
        (["--train", "{t}/x", "{t}/bad.gz"], "{t}/bad.gz: cannot be unpacked as .gz ("),
        (["--train", "{t}/bad.gz", "{t}/y"], "{t}/bad.gz: cannot be unpacked as .gz ("),
        (["--train", "{t}/x", "{t}/plain.gz"], "{t}/plain.gz: cannot be unpacked as .gz ("),
        (["--train", "{t}/x", "{t}/bad.xz"], "{t}/bad.xz: cannot be unpacked as .xz ("),
        (["--train", "{t}/two", "{t}/due"], "{t}/two: 2 pairs are too few to hold any out; give"),
        (
            ["--train", "{t}/x", "{t}/y", "--held-out", "101"],
            "--held-out 101: must be at least 1, and what is held out at most half of the 400",
        ),
        (["--train", "{t}/x", "{t}/y", "--held-out", "0"], "--held-out 0: must be at least 1"),
        (["--train", "{t}/x", "{t}/y", "--held-out", "few"], "argument --held-out: invalid int"),
        (
            ["--train", "{t}/x", "{t}/same"],
            "{t}/x and {t}/same: 40 pairs are wanted for validation and test, but of 400 looked at "
            "only 0 are fit (",
        ),
        (
            ["--train", "{t}/x", "{t}/y", "--valid", "{t}/two", "{t}/due"]
            + ["--test", "{t}/three", "{t}/tre", "--held-out", "2"],
            "--held-out: nothing is held out when --valid and --test are given",
        ),
        (["--train", "{t}/data/train.en", "{t}/y"], "{t}/data/train.en: would be overwritten;"),
        (["--train", "{t}/x"], "argument --train: expected 2 arguments; --help lists the options"),
        (["--train", "{t}/x", "{t}/y", "--target-lang", "en"], "--source-lang and --target-lang"),
        (["--train", "{t}/x", "{t}/y", "--target-lang", "../de"], "--target-lang '../de': not a"),
        ([], "the following arguments are required: --train; --help lists the options"),
    ],
)
def test_bad_text_is_refused_in_one_line_and_nothing_is_written(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [str(n) for n in range(400)]
    for name, lines in {"x": numbers, "y": numbers, "z": numbers[1:]}.items():
        write(tmp_path, name, [f"{name} {line}" for line in lines])
    for name in ("two", "due", "three", "tre"):
        write(tmp_path, name, [f"{name} 1", f"{name} 2"])
    for name in ("empty", "empty.gz"):
        write(tmp_path, name, [])
    write(tmp_path, "same", ["always the same"] * 400)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    bad_gzip(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path, "data/train.en", numbers)
    before = left(tmp_path)
    words = [argument.format(t=tmp_path) for argument in arguments]
    assert get(own, tmp_path / "data", *LANGUAGES, *words) == 2
    assert one_error(capsys).startswith(message.format(t=tmp_path))
    assert left(tmp_path) == before
