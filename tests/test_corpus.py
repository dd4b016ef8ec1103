"""rope_fairseq.corpus bpe and encode: the BPE model, and a corpus in its pieces."""

import io
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from rope_fairseq.corpus import blocks
from rope_fairseq.corpus.bpe import encode_corpus, train_bpe
from rope_fairseq.corpus.clean import clean_corpus
from rope_fairseq.corpus.rules import SPLITS, Limits
from rope_fairseq.errors import UserError
from rope_fairseq.lines import read_lines, write_lines
from rope_fairseq.text import MODEL_FILE, Text
from tests.tiny import ROOT

Pairs = list[tuple[str, str]]


def demo_pairs(split: str, count: int) -> Pairs:
    sides = []
    for lang in ("en", "de"):
        packed = ROOT / "data-prep" / "demo" / f"{split}.{lang}.xz"
        sides.append(lzma.decompress(packed.read_bytes()).decode("utf-8").split("\n")[:count])
    return list(zip(*sides, strict=True))


def cleaned(folder: Path, **splits: Pairs) -> Path:
    """A folder of tokens; splits not given have one pair."""
    (folder / "data").mkdir(parents=True)
    for split in SPLITS:
        for side, lang in enumerate(("en", "de")):
            lines = (pair[side] for pair in splits.get(split, [("a", "b")]))
            write_lines(folder / "data" / f"{split}.{lang}", lines)
    limits = Limits(max_tokens=0)
    clean_corpus(Text("en", "de"), folder / "data", folder / "tok", limits, workers=1)
    return folder / "tok"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of 1,500 / 20 / 20 pairs of the demo."""
    demo = {split: demo_pairs(split, n) for split, n in zip(SPLITS, (1500, 20, 20), strict=True)}
    demo["test"][3] = ("", "")
    return cleaned(tmp_path_factory.mktemp("corpus"), **demo)


@pytest.fixture(scope="module")
def model(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.json and a BPE model of 500 pieces."""
    folder = tmp_path_factory.mktemp("text")
    train_bpe(tokens, 500, folder)
    return folder


# BPE


def pieces_with_scores(processor: SentencePieceProcessor) -> list[tuple[str, float]]:
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(len(processor))]


def test_the_pieces_are_those_that_training_on_the_sentences_gives(
    tokens: Path, model: Path
) -> None:
    sentences = [line for lang in ("en", "de") for line in read_lines(tokens / f"train.{lang}")]
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=written,
        model_type="bpe",
        vocab_size=500,
        normalization_rule_name="identity",
        character_coverage=1.0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    of_sentences = SentencePieceProcessor(model_proto=written.getvalue())
    of_words = SentencePieceProcessor(model_file=str(model / MODEL_FILE))
    assert pieces_with_scores(of_words) == pieces_with_scores(of_sentences)
    assert of_words.encode(sentences) == of_sentences.encode(sentences)


def test_training_twice_gives_the_same_model_byte_for_byte(
    tokens: Path, model: Path, tmp_path: Path
) -> None:
    train_bpe(tokens, 500, tmp_path)
    assert (tmp_path / MODEL_FILE).read_bytes() == (model / MODEL_FILE).read_bytes()
    assert (tmp_path / "text.json").read_bytes() == (model / "text.json").read_bytes()


def test_no_piece_has_the_name_of_a_special_symbol_of_fairseq(model: Path) -> None:
    text = Text.load(model)
    pieces = text.pieces.vocabulary()
    assert len(pieces) == 500
    assert {"<s>", "</s>", "<pad>"}.isdisjoint(pieces)
    assert "<unk>" not in text.encode("<unk> <s> </s> <pad> 漢字 \u0d85", "en").split()


def test_a_very_long_sentence_takes_part_in_the_training(tmp_path: Path) -> None:
    # Longer than the 4,192 bytes beyond which sentencepiece would leave it out.
    tokens = cleaned(tmp_path, train=[("a b", "a b"), ("zebra " * 1000, "c d")])
    train_bpe(tokens, 14, tmp_path / "text")
    assert Text.load(tmp_path / "text").encode("zebra", "en") == "▁zebra"


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (1000, r"vocab_size 1000: the largest possible for the words of .*words.tsv is 12$"),
        (3, r"vocab_size 3: the smallest possible for the words of .*words.tsv is 6$"),
        (0, "vocab_size 0: "),
        (-5, "vocab_size -5: "),
    ],
)
def test_a_vocabulary_out_of_reach_is_refused(
    vocab_size: int, message: str, tmp_path: Path
) -> None:
    tokens = cleaned(tmp_path, train=[("ab ab", "cd")])
    with pytest.raises(UserError, match=message):
        train_bpe(tokens, vocab_size, tmp_path / "text")
    assert not (tmp_path / "text").exists()


@pytest.mark.parametrize("vocab_size", [6, 12])
def test_the_vocabulary_sizes_named_as_possible_are(vocab_size: int, tmp_path: Path) -> None:
    train_bpe(cleaned(tmp_path, train=[("ab ab", "cd")]), vocab_size, tmp_path / "text")
    assert len(Text.load(tmp_path / "text").pieces.vocabulary()) == vocab_size


# Encoding


@pytest.mark.parametrize("workers", [1, 2])
def test_a_corpus_is_encoded_line_by_line_in_order(
    workers: int, tokens: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5000)
    encode_corpus(tokens, model, tmp_path, workers)
    text = Text.load(model)
    for split in SPLITS:
        for lang in ("en", "de"):
            raw = read_lines(tokens.parent / "data" / f"{split}.{lang}")
            expected = [text.encode(line, lang) for line in raw]
            assert list(read_lines(tmp_path / f"{split}.{lang}")) == expected
    assert list(read_lines(tmp_path / "test.en"))[3] == ""
    assert len(list(tmp_path.iterdir())) == 6


def other_options(tokens: Path, model: Path) -> None:
    Text("en", "de", escape=True).save_options(tokens)


def other_languages(tokens: Path, model: Path) -> None:
    Text("de", "en").save_options(tokens)


def no_options(tokens: Path, model: Path) -> None:
    (tokens / "text.json").unlink()


def no_model(tokens: Path, model: Path) -> None:
    (model / MODEL_FILE).unlink()


def damaged_model(tokens: Path, model: Path) -> None:
    (model / MODEL_FILE).write_bytes(b"nonsense")


def no_tokens(tokens: Path, model: Path) -> None:
    (tokens / "valid.de").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_options, "{tokens} was written with escape True, but the model in {model} is for"),
        (other_languages, "{tokens} was written with source_lang de, but the model in {model}"),
        (no_options, "{tokens}: holds no text.json; name the folder that `python -m "),
        (no_model, "{model}/sentencepiece.bpe.model: no such sentencepiece model"),
        (damaged_model, "{model}/sentencepiece.bpe.model: not a sentencepiece model"),
        (no_tokens, "{tokens}/valid.de: No such file or directory"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    spoil: Callable[[Path, Path], None], message: str, tmp_path: Path
) -> None:
    tokens, model = cleaned(tmp_path), tmp_path / "model"
    train_bpe(tokens, 6, model)
    spoil(tokens, model)
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "tool.py", "corpus", "encode", "--tokens", tokens]
        + ["--model", model, "--output", tmp_path / "text"],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if not line.startswith("encode ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: " + message.format(tokens=tokens, model=model))
    assert not list((tmp_path / "text").glob("*"))
