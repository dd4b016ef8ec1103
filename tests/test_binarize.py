"""rope_fairseq.corpus.binarize: the files of fairseq-preprocess, byte for byte."""

import random
from pathlib import Path

import pytest
from fairseq import options
from fairseq_cli import preprocess

from rope_fairseq.corpus import blocks
from rope_fairseq.corpus.__main__ import main
from rope_fairseq.corpus.binarize import binarize, build_dictionary
from rope_fairseq.lines import write_lines
from rope_fairseq.text import MODEL_FILE, Text
from tests.tiny import call

SPLITS = ("train", "valid", "test")


def write_pieces(folder: Path, types: int, seed: int = 1) -> Path:
    """Random pieces of ``types`` types, and text.json with a file in the place of the model."""
    folder.mkdir()
    rng = random.Random(seed)
    pieces = [f"▁{n:x}" if n % 3 else f"ä{n}漢" for n in range(types)]
    weights = [1 / (1 + n % 50) for n in range(types)]
    for split, count in zip(SPLITS, (types // 5, 20, 13), strict=True):
        for lang in ("en", "de"):
            # Pieces that are not in train, empty lines, and the names of fairseq's own symbols.
            extra = ["unseen" if split != "train" else "▁", "<unk>", "<pad>"]
            lines = [
                " ".join(rng.choices([*pieces, *extra], [*weights, 1, 0.01, 0.01], k=n % 23))
                for n in range(count)
            ]
            write_lines(folder / f"{split}.{lang}", lines)
    (folder / MODEL_FILE).write_bytes(b"a model")
    Text("en", "de", model=folder / MODEL_FILE).save(folder)
    return folder


# More than 65,500 types need four bytes a number.
@pytest.mark.parametrize(("types", "workers"), [(40, 1), (300, 2), (70_000, 2)])
def test_the_files_are_those_of_fairseq_preprocess(
    types: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 500 if types < 1000 else 2**20)
    text = write_pieces(tmp_path / "text", min(types, 300))
    if types == 70_000:
        lines = [
            " ".join(f"t{n}" for n in range(start, start + 100)) for start in range(0, types, 100)
        ]
        write_lines(text / "train.en", lines)
        write_lines(text / "train.de", reversed(lines))
    preprocess.main(
        options.get_preprocessing_parser().parse_args(
            [
                *("--source-lang", "en", "--target-lang", "de", "--joined-dictionary"),
                *(f"--{split}pref={text}/{split}" for split in SPLITS),
                f"--destdir={tmp_path}/theirs",
            ]
        )
    )
    report = binarize(text, tmp_path / "ours", workers)
    theirs = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    ours = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    del theirs["preprocess.log"]
    assert ours.pop(MODEL_FILE) == b"a model"
    assert ours.pop("text.json") == (text / "text.json").read_bytes()
    assert sorted(ours) == sorted(theirs)
    assert ours == theirs
    assert len(report) == 7
    assert report[1].startswith("train.en: ")


def test_the_report_counts_what_is_not_in_the_dictionary(tmp_path: Path) -> None:
    text = write_pieces(tmp_path / "text", 20)
    for split, line in zip(SPLITS, ("a b", "a c", ""), strict=True):
        for lang in ("en", "de"):
            write_lines(text / f"{split}.{lang}", [line])
    assert binarize(text, tmp_path / "ours", 1) == [
        "dictionary: 8 types",
        "train.en: 1 sentences, 3 pieces, 0.000% unknown",
        "valid.en: 1 sentences, 3 pieces, 33.333% unknown",
        "test.en: 1 sentences, 1 pieces, 0.000% unknown",
        "train.de: 1 sentences, 3 pieces, 0.000% unknown",
        "valid.de: 1 sentences, 3 pieces, 33.333% unknown",
        "test.de: 1 sentences, 1 pieces, 0.000% unknown",
    ]
    dictionary = build_dictionary([text / "train.en"], 1)
    assert dictionary.symbols[4:6] == ["a", "b"]


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        ("train.en", [], "{text}/train.en: No such file or directory"),
        ("text.json", [], "{text}/text.json: No such file or directory"),
        ("", ["--workers", "0"], "--workers 0: at least 1 is needed"),
        ("empty", [], "{text}/train.en and {text}/train.de: no piece in them"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    spoil: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = write_pieces(tmp_path / "text", 20)
    if spoil == "empty":
        for lang in ("en", "de"):
            (text / f"train.{lang}").write_bytes(b"\n\n")
    elif spoil:
        (text / spoil).unlink()
    status = call(main, "binarize", "--text", text, "--output", tmp_path / "ours", *options)
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("error: " + message.format(text=text))
    assert error.count("\n") == 1
    assert not (tmp_path / "ours").exists()
