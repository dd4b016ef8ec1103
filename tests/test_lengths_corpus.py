"""The corpus of the recipe extrapolate: a test set of every class of length, and a run on it."""

import json
import lzma
import random
import re
from pathlib import Path

import pytest

from tests.corpora import LANGUAGES, SPLITS, get, left, load, one_error
from tests.tiny import ROOT, WORDS, run, scripts

lengths = load("lengths", "get")
CLASSES = ("--classes", "4,8,12")
NAMES = ["1-4", "5-8", "9-12"]
COUNT = 600


@pytest.fixture
def text(tmp_path: Path) -> tuple[Path, Path]:
    """Pairs of 1 to 15 words, long ones seldom. Every fifth source side occurs again; every
    seventh pair is lopsided."""
    rng = random.Random(1)
    sides: tuple[list[str], list[str]] = ([], [])
    for number in range(COUNT):
        size = min(rng.randint(1, 15) for _ in range(2))
        name = number if number % 5 else 5
        sides[0].append(" ".join([f"n{name}", *["word"] * (size - 1)]))
        sides[1].append(
            "  ".join([f"N{number}", *["Wort"] * (20 if number % 7 == 0 else size - 1)])
        )
    files = (tmp_path / "text.en.xz", tmp_path / "text.de")
    files[0].write_bytes(lzma.compress("".join(f"{line}\n" for line in sides[0]).encode()))
    files[1].write_text("".join(f"{line}\n" for line in sides[1]))
    return files


def pairs(folder: Path, split: str) -> list[tuple[str, str]]:
    sides = [(folder / f"{split}.{lang}").read_text().splitlines() for lang in ("en", "de")]
    return list(zip(*sides, strict=True))


def longer(pair: tuple[str, str]) -> int:
    return max(len(side.split()) for side in pair)


def test_the_test_set_has_as_many_pairs_of_each_class_and_the_rest_is_kept(
    text: tuple[Path, Path], tmp_path: Path
) -> None:
    for folder in ("data", "again"):
        arguments = ("--train", *text, *LANGUAGES, *CLASSES, "--held-out", "20")
        assert get(lengths, tmp_path / folder, *arguments) == 0
    data = tmp_path / "data"
    assert left(data) == left(tmp_path / "again")
    split = {name: pairs(data, name) for name in SPLITS}
    assert {name: len(split[name]) for name in SPLITS} == {
        "train": COUNT - 80,
        "valid": 20,
        "test": 60,
    }
    sizes = [longer(pair) for pair in split["test"]]
    for first, last in ((1, 4), (5, 8), (9, 12)):
        assert sum(first <= size <= last for size in sizes) == 20
    assert all(longer(pair) <= 4 for pair in split["valid"])
    # Evenly spread: every quarter of the text has some of each class.
    for first in (1, 5, 9):
        numbers = [
            int(target.split()[0][1:]) * 4 // COUNT
            for source, target in split["test"]
            if first <= longer((source, target)) < first + 4
        ]
        assert set(numbers) == {0, 1, 2, 3}
    # No held-out side stands in the training text, no lopsided pair is held out, nothing is lost.
    for side in (0, 1):
        held = {pair[side] for name in ("valid", "test") for pair in split[name]}
        assert len(held) == 80 and not held & {pair[side] for pair in split["train"]}
    assert not any(target.count("Wort") == 20 for _, target in split["valid"] + split["test"])
    assert max(longer(pair) for pair in split["train"]) == 21
    everything = [pair for name in SPLITS for pair in split[name]]
    assert {target.split()[0] for _, target in everything} == {f"N{n}" for n in range(COUNT)}
    source = json.loads((data / "source.json").read_text())
    assert source["test_pairs_by_words"] == dict.fromkeys(NAMES, 20)
    assert source["valid"] == {"held_out_of": "train", "lines": 20}


def test_a_given_validation_set_is_taken_as_it_is_and_none_of_it_is_in_the_test_set(
    text: tuple[Path, Path], tmp_path: Path
) -> None:
    arguments = ("--train", *text, *LANGUAGES, *CLASSES, "--held-out", "20")
    assert get(lengths, tmp_path / "first", *arguments) == 0
    valid = (tmp_path / "first/test.en", tmp_path / "first/test.de")
    assert get(lengths, tmp_path / "second", *arguments, "--valid", *valid) == 0
    second = tmp_path / "second"
    assert (second / "valid.de").read_bytes() == valid[1].read_bytes()
    assert len(pairs(second, "test")) == 60
    assert not set(pairs(second, "test")) & set(pairs(tmp_path / "first", "test"))


def test_a_class_with_fewer_pairs_gives_all_that_are_fit(
    text: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--train", *text, *LANGUAGES, "--classes", "12,15", "--held-out", "50")
    assert get(lengths, tmp_path / "data", *arguments) == 0
    fit = [pair for split in SPLITS for pair in pairs(tmp_path / "data", split)]
    fit = [pair for pair in fit if longer(pair) in (13, 14, 15) and not pair[0].startswith("n5 ")]
    fit = [pair for pair in fit if len(pair[0].split()) == len(pair[1].split())]
    assert 1 <= len(fit) < 50
    sizes = json.loads((tmp_path / "data/source.json").read_text())["test_pairs_by_words"]
    assert sizes == {"1-12": 50, "13-15": len(fit)}
    assert f"1-12: 50, 13-15: {len(fit)}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--classes", "4,30,40", "--held-out", "9"],
            "{t}/text.en.xz and {t}/text.de: none of 0 pairs of 31-40 words",
        ),
        (["--classes", "8,4"], "--classes 8,4: must be rising whole numbers of words"),
        (["--classes", "4,4"], "--classes 4,4: must be rising whole numbers of words"),
        (["--classes", "0,4"], "--classes 0,4: must be rising whole numbers of words"),
        (["--classes", ""], "--classes : must be rising whole numbers of words"),
        (["--held-out", "0"], "--held-out 0: must be at least 1"),
        (["--held-out", "300"], "--held-out 300: must be at least 1, and what is held out at most"),
        (["--held-out", "few"], "argument --held-out: invalid int"),
        (["--test", "{t}/text.de", "{t}/text.en.xz"], "unrecognized arguments: --test"),
        (["--valid", "{t}/text.de", "{t}/nowhere"], "{t}/text.de: given twice"),
        (["--train", "{t}/text.de", "{t}/nowhere"], "{t}/nowhere: no such file"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    text: tuple[Path, Path],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = left(tmp_path)
    words = [argument.format(t=tmp_path) for argument in arguments]
    assert get(lengths, tmp_path / "data", "--train", *text, *LANGUAGES, *words) == 2
    assert one_error(capsys).startswith(message.format(t=tmp_path))
    assert left(tmp_path) == before


def test_training_is_on_short_pairs_and_long_sentences_are_translated(tmp_path: Path) -> None:
    """The recipe on a toy corpus: fairseq drops what is longer than 32 tokens, and only then."""
    small = ("model.encoder_embed_dim=32", "model.encoder_layers=1", "model.decoder_layers=1")
    rng = random.Random(1)
    files = (tmp_path / "text.en", tmp_path / "text.de")
    with open(files[0], "w") as source, open(files[1], "w") as target:
        for _ in range(200):
            words = rng.choices(list(WORDS), k=rng.choice([4, 6, 8, 10, 70]))
            source.write(" ".join(words) + ".\n")
            target.write(" ".join(WORDS[word] for word in words) + ".\n")
    result = run(
        *(ROOT / "scripts/reproduce.sh", "extrapolate", "--work", tmp_path / "work"),
        *("--train", *files, *LANGUAGES, "--held-out=3", "--classes", "12,80"),
        *("--vocab-size", "150", "--max-update", "5", "model.position_encoding=alibi", *small),
        env=scripts(),
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    train = [
        [len(line.split()) + 1 for line in (tmp_path / f"work/text/train.{lang}").open()]
        for lang in ("en", "de")
    ]
    too_long = sum(max(pair) > 32 for pair in zip(*train, strict=True))
    log = (tmp_path / "work/logs/train.log").read_text()
    skipped = re.findall(r"([\d,]+) samples have invalid sizes .* max_positions=\(32, 32\)", log)
    assert skipped[0] == str(too_long) and too_long > 20
    encoded = (tmp_path / "work/text/test.en").read_text().splitlines()
    assert max(len(line.split()) for line in encoded) > 64
    translated = (tmp_path / "work/test.hyp.de").read_text().splitlines()
    assert len(translated) == len(encoded) == 6
