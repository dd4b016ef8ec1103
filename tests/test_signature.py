"""rope_fairseq.corpus signature: what it says is what the files hold."""

import hashlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rope_fairseq.corpus.bpe import encode_corpus, train_bpe
from rope_fairseq.corpus.clean import clean_corpus
from rope_fairseq.corpus.rules import SPLITS, Limits
from rope_fairseq.corpus.signature import sign_corpus
from rope_fairseq.lines import write_lines
from rope_fairseq.text import Text
from rope_fairseq.version import __version__
from tests.tiny import ROOT

NAMES = [f"{split}.{lang}" for split in SPLITS for lang in ("en", "de")]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A folder with tok/, text/, dict.en.txt and source.json: 3 + 1 + 2 pairs."""
    (tmp_path / "data").mkdir()
    for split, count in zip(SPLITS, (4, 1, 2), strict=True):
        for lang in ("en", "de"):
            lines = ["ab ab", "ab", "", "cd"][:count]
            write_lines(tmp_path / "data" / f"{split}.{lang}", lines)
    clean_corpus(Text("en", "de"), tmp_path / "data", tmp_path / "tok", Limits(), workers=1)
    train_bpe(tmp_path / "tok", 8, tmp_path / "text")
    encode_corpus(tmp_path / "tok", tmp_path / "text", tmp_path / "text", workers=1)
    (tmp_path / "dict.en.txt").write_text("▁ab 6\n▁ 2\nc 2\nd 2\nmadeupword0000 0\n")
    (tmp_path / "source.json").write_text('{"corpus": "toy", "licence": "none"}\n')
    return tmp_path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "tool.py", "corpus", "signature", *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


def sign(folder: Path, *more: str | Path) -> subprocess.CompletedProcess[str]:
    return run(
        *("--text", folder / "text", "--tokens", folder / "tok", "--corpus", "toy"),
        *("--dictionary", folder / "dict.en.txt", "--output", folder / "data.json", *more),
    )


def test_the_file_and_the_line_say_what_the_text_is(prepared: Path) -> None:
    result = sign(prepared, "--source", prepared / "source.json")
    assert (result.returncode, result.stderr) == (0, "")
    record = json.loads((prepared / "data.json").read_text())
    # As the coreutils print it.
    listing = subprocess.run(
        ["sha256sum", *sorted(NAMES)], cwd=prepared / "text", capture_output=True, check=True
    ).stdout
    assert record["sha256"]["all"] == hashlib.sha256(listing).hexdigest()
    tools = {tool: version(tool) for tool in ("sacremoses", "sentencepiece")}
    assert result.stdout == (
        f"corpus:toy|pairs:3+1+2|vocab:8|merges:2|sha256:{record['sha256']['all'][:12]}|"
        f"sacremoses:{tools['sacremoses']}|sentencepiece:{tools['sentencepiece']}|"
        f"rope_fairseq:{__version__}\n"
    )
    assert record["signature"] == result.stdout.strip()
    pieces = {name: len((prepared / "text" / name).read_text().split()) for name in NAMES}
    assert record["pieces"] == pieces
    # Five lines and four symbols that fairseq puts before them.
    assert record["vocabulary"] == {"pieces": 8, "merges": 2, "fairseq_dictionary": 9}
    assert record["pairs"] == {"train": 3, "valid": 1, "test": 2}
    assert record["cleaning"] == json.loads((prepared / "tok" / "cleaning.json").read_text())
    assert record["cleaning"]["pairs"]["train"]["dropped"]["empty_side"] == 1
    assert record["text"]["normalize"] is True
    assert record["versions"] == tools | {
        "rope_fairseq": __version__,
        "python": sys.version.split()[0],
    }
    assert record["source"] == {"corpus": "toy", "licence": "none"}


def test_a_changed_character_or_name_changes_the_hash(prepared: Path) -> None:
    def line() -> str:
        arguments = prepared / "text", prepared / "tok", prepared / "dict.en.txt"
        record = sign_corpus(*arguments, "toy", prepared / "data.json", source=None)
        return record["signature"].split("sha256:")[1].split("|")[0]

    before = line()
    assert line() == before
    text = prepared / "text" / "test.de"
    content = text.read_text()
    text.write_text(content.replace("▁ab", "▁ba"))
    assert line() != before
    text.write_text(content)
    assert line() == before
    (prepared / "text" / "other").write_text("not part of the corpus")
    assert line() == before


def test_show_prints_the_line_and_what_it_does_not_say(prepared: Path) -> None:
    signed = sign(prepared)
    shown = run("--show", prepared / "data.json")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert lines[0] == signed.stdout.strip()
    assert "pairs left out: train empty_side 1" in lines
    assert "source: not stated" in lines
    assert "fairseq dictionary: 9" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--show", "{folder}/nothing.json"], "{folder}/nothing.json: No such file"),
        (["--show", "{folder}/dict.en.txt"], "{folder}/dict.en.txt: not a JSON file"),
        (["--show", "{folder}/source.json"], "{folder}/source.json: not a file that `corpus"),
        (["--text", "{folder}/text"], "signature: --tokens is missing; it is needed without"),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(
    arguments: list[str], message: str, prepared: Path
) -> None:
    result = run(*(argument.format(folder=prepared) for argument in arguments))
    assert result.returncode == 2
    assert result.stderr.startswith("error: " + message.format(folder=prepared))
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "more", "message"),
    [
        ("text/valid.de", "a\nb\n", [], "{folder}/text: valid has 1 and 2 lines"),
        ("text/train.en", None, [], "{folder}/text/train.en: No such file"),
        ("tok/cleaning.json", "[]", [], "{folder}/tok/cleaning.json: expected a JSON object"),
        ("dict.en.txt", None, [], "{folder}/dict.en.txt: No such file"),
        ("source.json", "{", ["--source", "{folder}/source.json"], "{folder}/source.json: not a"),
        ("x", "", ["--corpus", "a|b"], "--corpus 'a|b': a name without | and : is needed"),
    ],
)
def test_wrong_files_are_refused_in_one_line(
    name: str, content: str | None, more: list[str], message: str, prepared: Path
) -> None:
    if content is None:
        (prepared / name).unlink()
    else:
        (prepared / name).write_text(content)
    result = sign(prepared, *(argument.format(folder=prepared) for argument in more))
    assert result.returncode == 2
    assert result.stderr.startswith("error: " + message.format(folder=prepared))
    assert result.stderr.count("\n") == 1
    assert not (prepared / "data.json").exists()
