"""BPE by subword-nmt: the same merges, pieces and binary data as its commands and fairseq's."""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from fairseq import options
from fairseq.data import encoders
from fairseq_cli import preprocess

from rope_fairseq.corpus import blocks
from rope_fairseq.corpus.__main__ import main
from rope_fairseq.corpus.binarize import binarize
from rope_fairseq.corpus.bpe import encode_corpus, train_bpe
from rope_fairseq.corpus.clean import clean_corpus
from rope_fairseq.corpus.folder import SPLITS
from rope_fairseq.corpus.miniature import read_demo
from rope_fairseq.corpus.rules import Limits
from rope_fairseq.corpus.signature import show, sign_corpus
from rope_fairseq.errors import UserError
from rope_fairseq.lines import read_lines, write_lines
from rope_fairseq.pieces import SubwordNmt
from rope_fairseq.text import Text
from tests.tiny import call, run

MERGES = 300
OPTIONS = Text("en", "de", escape=True, lowercase=True, bpe="subword_nmt")


def subword_nmt(*arguments: str | Path, text: str) -> str:
    """What the command writes for a text."""
    command = (Path(sys.executable).with_name("subword-nmt"), *arguments)
    done = run(*command, input=text)
    assert done.returncode == 0, done.stderr
    return done.stdout


def content(*files: Path) -> str:
    return "".join(file.read_bytes().decode() for file in files)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of 1,000 / 20 / 20 pairs of the demo, lower-cased."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "data").mkdir()
    for split, count in zip(SPLITS, (1000, 20, 20), strict=True):
        for lang in ("en", "de"):
            lines = read_demo(split, lang)[:count]
            if split == "test":  # an empty line, and characters that train does not have
                lines[3:5] = ["", "漢字 \u0d85"]
            write_lines(folder / "data" / f"{split}.{lang}", lines)
    clean_corpus(OPTIONS, folder / "data", folder / "tok", Limits(), workers=1)
    return folder / "tok"


@pytest.fixture(scope="module")
def model(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.json, the merges and the corpus in pieces."""
    folder = tmp_path_factory.mktemp("text")
    train_bpe(tokens, None, folder, MERGES)
    encode_corpus(tokens, folder, folder, workers=1)
    return folder


def test_the_merges_are_those_that_the_command_learns_from_both_sides(
    tokens: Path, model: Path
) -> None:
    both = content(tokens / "train.en", tokens / "train.de")
    learned = subword_nmt("learn-bpe", "-s", str(MERGES), text=both)
    assert content(model / "bpecodes") == learned
    assert learned.count("\n") == MERGES + 1


def test_the_order_of_words_and_ties_between_pairs_change_no_merge(tmp_path: Path) -> None:
    # Every pair of letters occurs twice.
    words = "dc ba fe dc ba fe gh hg gh hg".split()
    found = []
    for number, order in enumerate((words, words[::-1], sorted(words))):
        (tmp_path / str(number)).mkdir()
        for split in SPLITS:
            for lang in ("en", "de"):
                lines = [" ".join(order)] if lang == "en" else ["x"]
                write_lines(tmp_path / str(number) / f"{split}.{lang}", lines)
        clean_corpus(OPTIONS, tmp_path / str(number), tmp_path / f"{number}.tok", Limits(), 1)
        train_bpe(tmp_path / f"{number}.tok", None, tmp_path / f"{number}.text", 5)
        found.append(content(tmp_path / f"{number}.text" / "bpecodes"))
        both = content(*(tmp_path / str(number) / f"train.{lang}" for lang in ("en", "de")))
        assert found[-1] == subword_nmt("learn-bpe", "-s", "5", text=both)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_pieces_are_those_that_the_command_makes(
    workers: int, tokens: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5000)
    encode_corpus(tokens, model, tmp_path, workers)
    for split in SPLITS:
        for lang in ("en", "de"):
            name = f"{split}.{lang}"
            applied = subword_nmt(
                "apply-bpe", "-c", model / "bpecodes", text=content(tokens / name)
            )
            assert content(tmp_path / name) == applied
    assert list(read_lines(tmp_path / "test.en"))[3] == ""


def test_the_binary_data_is_that_of_fairseq_preprocess(model: Path, tmp_path: Path) -> None:
    binarize(model, tmp_path / "ours", workers=1)
    langs = ("--source-lang", "en", "--target-lang", "de", "--joined-dictionary")
    files = [f"--{split}pref={model}/{split}" for split in SPLITS]
    arguments = [*langs, *files, f"--destdir={tmp_path}/theirs"]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    theirs = {file.name: file.read_bytes() for file in (tmp_path / "theirs").iterdir()}
    del theirs["preprocess.log"]
    ours = {file.name: file.read_bytes() for file in (tmp_path / "ours").iterdir()}
    for name in ("bpecodes", "text.json"):
        assert ours.pop(name) == (model / name).read_bytes()
    assert ours == theirs


def test_decode_gives_back_the_text_but_for_its_case(model: Path) -> None:
    text = Text.load(model)
    for lang in ("en", "de"):
        for line in read_demo("valid", lang)[:100]:
            raw = Text("en", "de")
            restored = text.decode(text.encode(line, lang), lang)
            assert restored == raw.detokenize(raw.tokenize(line.lower(), lang), lang)
    assert text.encode("", "en") == text.decode("", "en") == ""
    # A translation that ends inside a word.
    assert text.join("a@@ b c@@") == "ab c"


def test_fairseqs_tokenizer_and_bpe_give_the_same_pieces(model: Path) -> None:
    text = Text.load(model)
    path = str(model / "text.json")
    tokenize = encoders.build_tokenizer(Namespace(tokenizer="rope_text", text_options=path))
    segment = encoders.build_bpe(
        Namespace(bpe=text.bpe, bpe_codes=str(model / "bpecodes"), bpe_separator="@@")
    )
    for line in ['He said "x & y" — It\'s a▁b @@ c@@ d', "", *read_demo("valid", "en")[:50]]:
        pieces = segment.encode(tokenize.encode(line))
        assert pieces == text.encode(line, "en")
        assert tokenize.decode(segment.decode(pieces)) == text.decode(pieces, "de")


def test_the_options_name_the_bpe_and_its_version(model: Path) -> None:
    version = SubwordNmt.distribution
    assert (model / "text.json").read_text() == (
        '{\n  "source_lang": "en",\n  "target_lang": "de",\n  "normalize": true,\n'
        '  "escape": true,\n  "aggressive_dash_splits": false,\n  "lowercase": true,\n'
        '  "bpe": "subword_nmt",\n  "model": "bpecodes",\n'
        f'  "sacremoses": "{OPTIONS.versions()["sacremoses"]}",\n'
        f'  "{version}": "{OPTIONS.versions()[version]}"\n}}\n'
    )


def test_another_version_is_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = (model / "text.json").read_text()
    version = OPTIONS.versions()["subword-nmt"]
    (tmp_path / "text.json").write_text(stored.replace(f'-nmt": "{version}', '-nmt": "0.2'))
    Text.load(tmp_path)
    assert f"was written with subword-nmt 0.2, but {version} is installed" in caplog.text


def test_the_signature_names_merges_and_dictionary(
    tokens: Path, model: Path, tmp_path: Path
) -> None:
    binarize(model, tmp_path / "bin", workers=1)
    dictionary = tmp_path / "bin" / "dict.en.txt"
    data = tmp_path / "data.json"
    record = sign_corpus(model, tokens, dictionary, "demo", data, None)
    types = dictionary.read_text().count("\n") + 4
    assert record["vocabulary"] == {"merges": MERGES, "fairseq_dictionary": types}
    assert f"|merges:{MERGES}|dictionary:{types}|sha256:" in record["signature"]
    assert f"|subword-nmt:{OPTIONS.versions()['subword-nmt']}|" in record["signature"]
    assert "sentencepiece" not in record["signature"]
    assert (record["text"]["bpe"], record["text"]["lowercase"]) == ("subword_nmt", True)
    assert "text options: source_lang en" in show(data)


# Refusals


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (10_000, r"merges 10000: the largest possible for the words of .*words.tsv is 2$"),
        (0, "merges 0: at least 1 is needed"),
        (-1, "merges -1: at least 1 is needed"),
    ],
)
def test_merges_out_of_reach_are_refused(merges: int, message: str, tmp_path: Path) -> None:
    tokens = small_tokens(tmp_path, "aab aab b")
    with pytest.raises(UserError, match=message):
        train_bpe(tokens, None, tmp_path / "text", merges)
    assert not (tmp_path / "text").exists()


def test_text_without_a_single_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"merges 1: the largest possible .* is 0$"):
        train_bpe(small_tokens(tmp_path, "a b"), None, tmp_path / "text", 1)


def small_tokens(folder: Path, train: str, text: Text = OPTIONS) -> Path:
    (folder / "data").mkdir()
    for split in SPLITS:
        for lang, line in (("en", train), ("de", "c")):
            write_lines(folder / "data" / f"{split}.{lang}", [line])
    clean_corpus(text, folder / "data", folder / "tok", Limits(), workers=1)
    return folder / "tok"


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        (OPTIONS, ["--vocab-size", "9"], "--vocab-size: is for sentencepiece, but {tokens} was"),
        (Text("en", "de"), ["--merges", "1"], "--merges: is for subword_nmt, but {tokens} was"),
        (OPTIONS, [], "bpe: one of --vocab-size (sentencepiece) and --merges (subword-nmt)"),
        (OPTIONS, ["--merges", "1", "--vocab-size", "9"], "bpe: one of --vocab-size"),
    ],
)
def test_a_size_of_the_other_kind_is_refused(
    text: Text, size: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = small_tokens(tmp_path, "aab aab b", text)
    files = ("--tokens", tokens, "--output", tmp_path / "text")
    capsys.readouterr()
    assert call(main, "bpe", *files, *size) == 2
    assert capsys.readouterr().err.startswith(f"error: {message.format(tokens=tokens)}")
    assert not (tmp_path / "text").exists()


def gone(codes: Path) -> None:
    codes.unlink()


def first_line_lost(codes: Path) -> None:
    codes.write_text("a b\nab c</w>\n")


def no_merge(codes: Path) -> None:
    codes.write_text("#version: 0.2\n")


def cut_off(codes: Path) -> None:
    codes.write_text("#version: 0.2\na b\nab")


def three_parts(codes: Path) -> None:
    codes.write_text("#version: 0.2\na b\nab c d\n")


def binary(codes: Path) -> None:
    codes.write_bytes(b"#version: 0.2\n\xff b\n")


@pytest.mark.parametrize("spoil", [gone, first_line_lost, no_merge, cut_off, three_parts, binary])
def test_a_wrong_file_of_merges_is_refused(
    spoil: Callable[[Path], object], tokens: Path, tmp_path: Path
) -> None:
    train_bpe(tokens, None, tmp_path / "model", 20)
    codes = tmp_path / "model" / "bpecodes"
    spoil(codes)
    reason = "no such file of" if spoil is gone else "not a file that `subword-nmt learn-bpe` wrote"
    for use in (
        lambda: Text.load(tmp_path / "model").encode("one", "en"),
        lambda: Text.load(tmp_path / "model").pieces.sizes(),
        lambda: encode_corpus(tokens, tmp_path / "model", tmp_path / "text", 1),
    ):
        with pytest.raises(UserError, match=f"^{codes}: {reason}"):
            use()
    assert not (tmp_path / "text").exists()


def test_tokens_made_for_another_bpe_are_not_encoded(model: Path, tmp_path: Path) -> None:
    tokens = small_tokens(tmp_path, "a b", Text("en", "de", escape=True, lowercase=True))
    with pytest.raises(UserError, match="was written with bpe sentencepiece, but the model in"):
        encode_corpus(tokens, model, tmp_path / "text", 1)


def test_the_command_line_decodes_what_it_encodes(model: Path) -> None:
    def text(command: str, given: str) -> str:
        arguments = (command, "--model", model, "--lang", "en")
        done = subprocess.run(
            [sys.executable, "-m", "rope_fairseq.text", *arguments],
            input=given.encode(),
            capture_output=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode()

    pieces = text("encode", "Open the Dialog.\n\nR&D\n")
    assert "&amp;" in pieces or "&@@" in pieces
    assert text("decode", pieces) == "open the dialog.\n\nr & d\n"
