"""rope_fairseq.text and .lines: what a line is, text to pieces and back."""

import json
import lzma
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from fairseq.binarizer import FileBinarizer, VocabularyDatasetBinarizer
from fairseq.data import Dictionary, data_utils, encoders

from rope_fairseq import text, tokenizer
from rope_fairseq.corpus.bpe import train_bpe
from rope_fairseq.corpus.clean import clean_corpus
from rope_fairseq.corpus.rules import Limits
from rope_fairseq.errors import UserError
from rope_fairseq.lines import count_lines, read_lines, write_lines
from rope_fairseq.text import Text

ROOT = Path(__file__).resolve().parent.parent
# Characters that Python or other readers take for line ends inside a line.
FALSE_LINE_ENDS = "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


def demo_lines(name: str, count: int) -> list[str]:
    packed = ROOT / "data-prep" / "demo" / f"{name}.xz"
    return lzma.decompress(packed.read_bytes()).decode("utf-8").split("\n")[:count]


def write_corpus(folder: Path, pairs: dict[str, list[tuple[str, str]]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in pairs.items():
        write_lines(folder / f"{split}.en", (pair[0] for pair in lines))
        write_lines(folder / f"{split}.de", (pair[1] for pair in lines))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus folder of 1,500 / 20 / 20 pairs of the demo."""
    pairs = {
        split: list(zip(demo_lines(f"{split}.en", n), demo_lines(f"{split}.de", n), strict=True))
        for split, n in (("train", 1500), ("valid", 20), ("test", 20))
    }
    return write_corpus(tmp_path_factory.mktemp("corpus") / "data", pairs)


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.json and a BPE model of 500 pieces."""
    folder = tmp_path_factory.mktemp("model")
    clean_corpus(Text("en", "de"), data, folder / "tok", Limits(), workers=1)
    train_bpe(folder / "tok", 500, folder / "text")
    return folder / "text"


@pytest.fixture(scope="module")
def en_de(model: Path) -> Text:
    return Text.load(model)


# Lines


@pytest.mark.parametrize("character", FALSE_LINE_ENDS)
def test_only_a_newline_ends_a_line(character: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(f"a{character}b\nc\n".encode())
    assert list(read_lines(path)) == [f"a{character}b", "c"]
    assert count_lines(path) == 2


def test_windows_line_ends_and_a_byte_order_mark_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffa\r\n\r\n\ufeffb\r\nc".encode())
    assert list(read_lines(path)) == ["a", "", "\ufeffb", "c"]


def test_text_that_is_not_utf8_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "latin1.de"
    path.write_bytes("gut\nschön\n".encode("latin-1"))
    with pytest.raises(UserError, match=rf"^{path}:2: not UTF-8 \(byte 0xf6 at byte 4"):
        list(read_lines(path))


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write_lines(path, ["old"])
    with pytest.raises(ValueError, match="line end"):
        write_lines(path, ["new", "two\nlines"])
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert path.read_text() == "old\n"


# Text to pieces and back


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("character", FALSE_LINE_ENDS + "\x00\x1f\x7f\x9f\t\u00a0\u3000")
def test_encoded_text_holds_no_control_character_and_no_other_space(
    character: str, normalize: bool, en_de: Text
) -> None:
    options = Text("en", "de", normalize=normalize, model=en_de.model)
    pieces = options.encode(f"left{character}right", "en")
    assert pieces == en_de.encode("left right", "en")
    assert pieces.splitlines() == [pieces]
    assert pieces.split() == pieces.split(" ")


def test_fairseq_reads_as_many_encoded_lines_as_there_are(en_de: Text, tmp_path: Path) -> None:
    raw = [f"one {character} two" for character in FALSE_LINE_ENDS] + ["", "end"]
    write_lines(tmp_path / "text", (en_de.encode(line, "en") for line in raw))
    dictionary = Dictionary()
    summary = FileBinarizer.multiprocess_dataset(
        str(tmp_path / "text"),
        "mmap",
        VocabularyDatasetBinarizer(dictionary),
        str(tmp_path / "bin"),
        vocab_size=len(dictionary),
    )
    assert summary.num_seq == len(raw)
    assert len(data_utils.load_indexed_dataset(str(tmp_path / "bin"), dictionary)) == len(raw)


@pytest.mark.parametrize(
    ("lang", "line"),
    [
        ("en", 'The "Open" dialog, the well-known one, appears (again).'),
        ("en", "AT & T, R & D: don't, it's, the user's"),
        ("en", "(see (1), [2] & {3}) 1,000.50 e.g. this..."),
        ("en", "THISISPROTECTED000 www.example.org"),
        ("en", "漢字"),
        ("de", 'Öffnen Sie "Datei", dann (ggf.) die Ober-Fläche.'),
        ("de", "Es kostet 1.000,50 € und 20 £ mehr; $A $1"),
        ("en", ""),
    ],
)
def test_decode_restores_what_was_encoded(lang: str, line: str, en_de: Text) -> None:
    assert en_de.decode(en_de.encode(line, lang), lang) == line


@pytest.mark.parametrize(
    ("lang", "line", "restored"),
    [
        # Symbols that the tokenizer sets apart stay apart.
        ("en", "a/b Ctrl+C a_b", "a / b Ctrl + C a _ b"),
        ("en", "https://x.org/a?b=c&d", "https: / / x.org / a? b = c & d"),
        # A literal entity must not become the character that it stands for.
        ("en", "&amp; &apos; &lt;", "& amp; & apos; & lt;"),
        # The side of a single quote is lost.
        ("en", "John's 'quoted' word", "John's' quoted 'word"),
        # The normaliser makes typography plain and moves a comma into English quotes.
        ("de", "„Hallo“ – sagte…", '"Hallo" - sagte...'),
        ("en", '"hello", and', '"hello," and'),
        # Its rule that makes another number of this one is off.
        ("en", "10\u00a0000 units", "10 000 units"),
        ("de", "10\u00a0000 Stück", "10 000 Stück"),
        # The space symbol of sentencepiece.
        ("en", "a▁b ▁", "a _ b _"),
        # sacremoses' placeholder for dots.
        ("en", "DOTMULTI x", "DOT MULTI x"),
        # A soft hyphen, and a byte order mark in the middle of joined files.
        ("de", "Donau\u00addampf\ufeffschiff", "Donaudampfschiff"),
        # A combining accent stays on its letter, as the composed character.
        ("de", "u\u0308ber", "über"),
    ],
)
def test_what_decode_does_not_restore_is_as_documented(
    lang: str, line: str, restored: str, en_de: Text
) -> None:
    assert en_de.decode(en_de.encode(line, lang), lang) == restored


@pytest.mark.parametrize("lang", ["en", "de"])
def test_encoding_a_decoded_line_gives_the_same_pieces(lang: str, en_de: Text) -> None:
    for line in demo_lines(f"valid.{lang}", 200):
        pieces = en_de.encode(line, lang)
        assert en_de.encode(en_de.decode(pieces, lang), lang) == pieces


@pytest.mark.parametrize("line", ["&amp; & <b> 'x' [y] | \"z\"", "AT&T"])
def test_escaping_is_undone_once(line: str, en_de: Text) -> None:
    escaping = Text("en", "de", escape=True, model=en_de.model)
    assert "&amp;" in escaping.tokenize(line, "en")
    assert escaping.detokenize(escaping.tokenize(line, "en"), "en") == en_de.detokenize(
        en_de.tokenize(line, "en"), "en"
    )


def test_aggressive_dash_splits_are_marked_and_joined_again(en_de: Text) -> None:
    splitting = Text("en", "de", aggressive_dash_splits=True, model=en_de.model)
    assert splitting.tokenize("well-known", "en") == "well @-@ known"
    assert splitting.detokenize("well @-@ known", "en") == "well-known"


def test_a_language_that_is_not_the_models_is_refused(en_de: Text) -> None:
    with pytest.raises(UserError, match="language 'fr' is not one of this model's, 'en' and 'de'"):
        en_de.encode("Bonjour", "fr")


# text.json


def test_options_survive_save_and_load_in_a_moved_folder(en_de: Text, tmp_path: Path) -> None:
    options = Text("en", "de", False, True, True, model=en_de.model)
    (tmp_path / "a").mkdir()
    options.save(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    loaded = Text.load(tmp_path / "b" / "text.json")
    assert (loaded.normalize, loaded.escape, loaded.aggressive_dash_splits) == (False, True, True)
    assert loaded.encode("one", "en") == options.encode("one", "en")


def change(values: dict, **changes: object) -> dict:
    return {key: value for key, value in (values | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: change(values, escape=None), "key 'escape' is missing"),
        (lambda values: change(values, sacremoses=None), "key 'sacremoses' is missing"),
        (lambda values: change(values, lower=True), "unknown key 'lower'"),
        (lambda values: change(values, lowercase=1), "key 'lowercase' has the value 1, not a bool"),
        (
            lambda values: change(values, bpe="char"),
            "key 'bpe' has the value 'char', not 'sentencepiece' or 'subword_nmt'",
        ),
        (lambda values: change(values, bpe=[]), "key 'bpe' has the value"),
        (lambda values: change(values, bpe="subword_nmt"), "key 'subword-nmt' is missing"),
        (lambda values: change(values, **{"subword-nmt": "0.3.8"}), "unknown key 'subword-nmt'"),
        (lambda values: change(values, escape="no"), "key 'escape' has the value 'no', not a bool"),
        (lambda values: [], "expected an object"),
    ],
)
def test_a_wrong_options_file_is_refused(
    edit: Callable[[dict], object], message: str, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "text.json"
    path.write_text(json.dumps(edit(json.loads((model / "text.json").read_text()))))
    with pytest.raises(UserError, match=message) as error:
        Text.load(path)
    assert str(error.value).startswith(str(path))


def test_an_options_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("normalize: true\n")
    with pytest.raises(UserError, match="not a JSON file"):
        Text.load(tmp_path)


def test_another_version_of_a_tool_is_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = json.loads((model / "text.json").read_text()) | {"sacremoses": "0.0.1"}
    (tmp_path / "text.json").write_text(json.dumps(values))
    Text.load(tmp_path)
    assert "was written with sacremoses 0.0.1" in caplog.text


def test_a_missing_or_damaged_bpe_model_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_bytes((model / "text.json").read_bytes())
    with pytest.raises(UserError, match="no such sentencepiece model"):
        Text.load(tmp_path).encode("one", "en")
    (tmp_path / text.MODEL_FILE).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a sentencepiece model"):
        Text.load(tmp_path).encode("one", "en")


# The command line


def run_text(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "tool.py", "text", *arguments],
        input=stdin,
        capture_output=True,
        timeout=120,
    )


def test_the_command_line_gives_one_line_for_one_line(model: Path, en_de: Text) -> None:
    lines = ["one\u2028two", "", "a\rb", "the end"]
    raw = "\r\n".join(lines).encode()
    encoded = run_text("encode", "--model", model, "--lang", "en", stdin=raw)
    expected = [en_de.encode(line, "en") for line in lines]
    assert encoded.stdout.decode().split("\n") == [*expected, ""]
    decoded = run_text("decode", "--model", model, "--lang", "en", stdin=encoded.stdout)
    assert decoded.stdout.decode() == "one two\n\na b\nthe end\n"
    assert (encoded.stderr, decoded.stderr) == (b"", b"")


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["--lang", "en"], b"ok\n\xff\n", "standard input:2: not UTF-8"),
        (["--lang", "xx"], b"ok\n", "language 'xx'"),
    ],
)
def test_bad_input_is_one_line_on_standard_error(
    arguments: list[str], stdin: bytes, message: str, model: Path
) -> None:
    result = run_text("encode", "--model", model, *arguments, stdin=stdin)
    errors = result.stderr.decode().splitlines()
    assert result.returncode == 2
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {message}")


# Inside fairseq


def test_fairseqs_tokenizer_and_bpe_give_the_same_pieces(model: Path, en_de: Text) -> None:
    tokenize = encoders.build_tokenizer(
        Namespace(tokenizer="rope_text", text_options=str(model / "text.json"))
    )
    segment = encoders.build_bpe(
        Namespace(bpe="sentencepiece", sentencepiece_model=str(model / text.MODEL_FILE))
    )
    assert isinstance(tokenize, tokenizer.RopeTextTokenizer)
    for line in ['He said "x & y" — it\'s a▁b', "", *demo_lines("valid.en", 50)]:
        pieces = segment.encode(tokenize.encode(line))
        assert pieces == en_de.encode(line, "en")
        assert tokenize.decode(segment.decode(pieces)) == en_de.decode(pieces, "de")


def test_fairseqs_tokenizer_without_its_options_is_refused() -> None:
    with pytest.raises(UserError, match="needs --text-options"):
        encoders.build_tokenizer(Namespace(tokenizer="rope_text"))
