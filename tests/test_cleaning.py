"""rope_fairseq.corpus clean: which pairs are left out or changed, and that pairs never shift."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rope_fairseq.corpus import blocks
from rope_fairseq.corpus.clean import clean_corpus
from rope_fairseq.corpus.rules import NOTES, RULES, Limits
from rope_fairseq.errors import UserError
from rope_fairseq.lines import read_lines
from rope_fairseq.text import Text
from tests.tiny import ROOT

EN_DE = Text("en", "de")
GOOD = [("one good line", "eine gute Zeile"), ("another one", "noch eine"), ("last", "letzte")]

Bytes = list[tuple[bytes, bytes]]


def encoded(pairs: list[tuple[str, str]]) -> Bytes:
    return [(source.encode(), target.encode()) for source, target in pairs]


def write_split(folder: Path, split: str, pairs: Bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for side, lang in enumerate(("en", "de")):
        (folder / f"{split}.{lang}").write_bytes(b"".join(pair[side] + b"\n" for pair in pairs))


def write_data(folder: Path, **splits: list[tuple[str, str]]) -> Path:
    for split in ("train", "valid", "test"):
        write_split(folder, split, encoded(splits.get(split, GOOD)))
    return folder


def clean(data: Path, output: Path, **limits: object) -> dict:
    """Clean with two processes; the report as it is written."""
    clean_corpus(EN_DE, data, output, Limits(**limits), workers=2)
    return json.loads((output / "cleaning.json").read_text())


def pairs(folder: Path, split: str) -> list[tuple[str, str]]:
    sides = (read_lines(folder / f"{split}.{lang}") for lang in ("en", "de"))
    return list(zip(*sides, strict=True))


def dropped(report: dict, split: str = "train") -> dict[str, int]:
    return {rule: n for rule, n in report["pairs"][split]["dropped"].items() if n}


# Rules


@pytest.mark.parametrize(
    ("source", "target", "limits", "rule"),
    [
        ("a", "b", {}, None),
        ("", "b", {}, "empty_side"),
        ("a", " \t\u00a0 ", {}, "empty_side"),
        ("a", "\x00\u00ad\ufeff\u2028\x7f", {}, "empty_side"),
        # Counted in tokens: "a," is two.
        ("a, b, c", "b", {"max_tokens": 5}, None),
        ("a, b, c", "b", {"max_tokens": 4}, "too_long"),
        ("b", "a, b, c", {"max_tokens": 4}, "too_long"),
        ("a " * 10_000, "b", {}, "too_long"),
        ("a " * 250, "b " * 250, {}, None),
        ("a " * 251, "b " * 251, {}, "too_long"),
        ("a " * 251, "b " * 251, {"max_tokens": 0}, None),
        ("a" * 1000, "b", {}, None),
        ("a" * 1001, "b", {}, "long_word"),
        ("a b c", "x y", {"max_ratio": 1.5}, None),
        ("x y", "a b c", {"max_ratio": 1.5}, None),
        ("a b c d", "x y", {"max_ratio": 1.5}, "length_ratio"),
        ("x y", "a b c d", {"max_ratio": 1.5}, "length_ratio"),
        ("a b c d", "x", {}, None),
        # A side in the test set ("tested, here" / "hier geprüft").
        ("tested , here", "x y", {"drop_test_overlap": True}, "in_test_set"),
        ("x y", "hier gepru\u0308ft", {"drop_test_overlap": True}, "in_test_set"),
        ("hier geprüft", "tested, here", {"drop_test_overlap": True}, None),
        ("tested, here", "hier geprüft", {}, None),
        # Twice the first pair of train, after cleaning.
        ("one  good\tline", "eine gute\u2028Zeile", {}, "duplicate"),
        ("one good line", "eine gute Zeile", {"keep_duplicates": True}, None),
        ("one good line", "eine andere Zeile", {}, None),
        # The first rule counts the pair.
        ("", "b " * 300, {"max_ratio": 2}, "empty_side"),
        ("a " * 300, "b", {"max_ratio": 2}, "too_long"),
        ("a " * 100, "hier geprüft", {"max_ratio": 2, "drop_test_overlap": True}, "length_ratio"),
    ],
)
def test_a_training_pair_is_left_out_by_the_first_rule_that_it_breaks(
    source: str, target: str, limits: dict, rule: str | None, tmp_path: Path
) -> None:
    data = write_data(
        tmp_path / "data", train=[*GOOD, (source, target)], test=[("tested, here", "hier geprüft")]
    )
    report = clean(data, tmp_path / "tok", **limits)
    assert dropped(report) == ({rule: 1} if rule else {})
    assert report["pairs"]["train"]["read"] == 4
    assert (
        report["pairs"]["train"]["kept"]
        == 4 - (rule is not None)
        == len(pairs(tmp_path / "tok", "train"))
    )
    assert set(report["pairs"]["train"]["dropped"]) == set(RULES)
    assert dropped(report, "valid") == dropped(report, "test") == {}


def test_text_that_is_not_utf8_is_left_out_of_train(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    lines = [*encoded(GOOD[:1]), ("schön".encode("latin-1"), b"b"), (b"c", b"\xff"), (b"d", b"e")]
    write_split(data, "train", lines)
    assert dropped(clean(data, tmp_path / "tok")) == {"not_utf8": 2}
    assert pairs(tmp_path / "tok", "train") == [GOOD[0], ("d", "e")]


def test_validation_pairs_are_left_out_when_empty_or_too_long_and_test_pairs_never(
    tmp_path: Path,
) -> None:
    some = [("", "a"), ("b", "b"), ("b", "b"), ("c " * 9, "c"), ("d" * 1001, "d"), ("e", "")]
    data = write_data(tmp_path / "data", valid=some, test=some)
    report = clean(data, tmp_path / "tok", max_tokens=8, max_ratio=1, drop_test_overlap=True)
    assert dropped(report, "valid") == {"empty_side": 2, "too_long": 1, "long_word": 1}
    assert pairs(tmp_path / "tok", "valid") == [("b", "b"), ("b", "b")]
    assert dropped(report, "test") == {}
    expected = [(source.strip(), target) for source, target in some]
    assert pairs(tmp_path / "tok", "test") == expected


def test_duplicates_are_found_over_blocks_and_the_first_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)
    many = [(f"line {n % 70}", f"Zeile {n % 35}") for n in range(300)]
    data = write_data(tmp_path / "data", train=many)
    report = clean(data, tmp_path / "tok")
    assert pairs(tmp_path / "tok", "train") == many[:70]
    assert dropped(report) == {"duplicate": 230}
    assert report["words"] == {"train.en": 140, "train.de": 140, "different": 72}
    words = dict(line.split("\t") for line in read_lines(tmp_path / "tok" / "words.tsv"))
    assert (words["line"], words["Zeile"], words["3"], words["40"]) == ("70", "70", "3", "1")
    assert list(words) == sorted(words)


# Changes


@pytest.mark.parametrize(
    ("raw", "tokens", "kinds"),
    [
        (b"a b\n", "a b", []),
        ("a\u2028b\n".encode(), "a b", ["line_separator"]),
        ("a\u2029b\u0085c\n".encode(), "a b c", ["line_separator"]),
        (b"a\x0cb\n", "a b", ["form_feed"]),
        (b"a\rb\n", "a b", ["carriage_return"]),
        (b"a\r\r\n", "a", ["carriage_return", "windows_line_end"]),
        (b"a b\r\n", "a b", ["windows_line_end"]),
        (b"a\x00b\n", "a b", ["nul"]),
        (b"a\x01b\x7f\n", "a b", ["control"]),
        (b"a\tb\n", "a b", []),
        ("a\ufeffb\n".encode(), "ab", ["byte_order_mark"]),
        ("Donau\u00addampf\n".encode(), "Donaudampf", ["soft_hyphen"]),
        ("u\u0308ber\n".encode(), "über", ["not_nfc"]),
        ("a▁b\n".encode(), "a _ b", ["space_symbol"]),
        (b"DOTMULTI\n", "DOT MULTI", ["dotmulti"]),
    ],
)
def test_what_is_changed_in_a_line_is_counted_with_one_note(
    raw: bytes, tokens: str, kinds: list[str], tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data", train=[("1", "1"), ("2", "2"), ("3", "3")])
    (data / "train.en").write_bytes(b"1\n" + raw + b"3\n")
    report = clean_corpus(EN_DE, data, tmp_path / "tok", Limits(), workers=1)
    assert pairs(tmp_path / "tok", "train") == [("1", "1"), (tokens, "2"), ("3", "3")]
    where = {"train.en": {"lines": 1, "first": 2}}
    assert report.json()["changes"] == dict.fromkeys(kinds, where)
    assert sorted(report.changes.notes()) == sorted(
        f"note: {NOTES[kind]} (train.en 1 line, the first is 2)" for kind in kinds
    )


# The acceptance test: everything at once, through the command line


def corpus(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "tool.py", "corpus", *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def clean_command(data: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    langs = ("--source-lang", "en", "--target-lang", "de")
    return corpus("clean", "--data", data, "--output", output, *langs, *options)


ODD_PAIRS = [
    ("\ufeffbyte order mark\r".encode(), b"0"),
    (b"Windows line end\r", b"1\r"),
    ("line\u2028separator".encode(), b"2"),
    ("next\u0085line".encode(), "3\u2028".encode()),
    (b"form\x0cfeed", b"4"),
    (b"lone\rreturn", b"\r5"),
    (b"nul\x00character", b"6\x00"),
    (b"", b"7"),
    (b"eight", "\u2028\x0c\x00".encode()),
    (b"word " * 10_000, b"9"),
    (b"not \xff UTF-8", b"10"),
    ("soft\u00adhyphen".encode(), "1\u00ad1".encode()),
    ("u\u0308mlaut".encode(), b"12"),
    (b"bell\x07", b"13"),
    (b"byte order mark", b"0"),
    (b"the last has no line end", b"15"),
]
ODD_TOKENS = [
    ("byte order mark", "0"),
    ("Windows line end", "1"),
    ("line separator", "2"),
    ("next line", "3"),
    ("form feed", "4"),
    ("lone return", "5"),
    ("nul character", "6"),
    ("softhyphen", "11"),
    ("ümlaut", "12"),
    ("bell", "13"),
    ("the last has no line end", "15"),
]


def test_a_corpus_with_everything_odd_is_cleaned_as_documented(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    write_split(data, "train", ODD_PAIRS)
    # The test set keeps all its lines, in their order, but for what is not UTF-8.
    write_split(data, "test", [pair for pair in ODD_PAIRS if b"\xff" not in pair[0]])
    for split in ("train", "test"):
        path = data / f"{split}.en"
        path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    result = clean_command(data, tmp_path / "tok")
    assert result.returncode == 0, result.stderr
    assert pairs(tmp_path / "tok", "train") == ODD_TOKENS
    tested = [target for _, target in pairs(tmp_path / "tok", "test")]
    assert tested == ["0", "1", "2", "3", "4", "5", "6", "7", "", *"9 11 12 13 0 15".split()]
    out = result.stdout.splitlines()
    assert out[:3] == [
        "train: 16 pairs, 11 kept; left out: not_utf8 1, empty_side 2, too_long 1, duplicate 1",
        "valid: 3 pairs, 3 kept",
        "test: 15 pairs, 15 kept",
    ]
    kinds = "byte_order_mark soft_hyphen nul form_feed carriage_return line_separator control"
    expected = [*kinds.split(), "not_nfc", "windows_line_end", "no_final_newline"]
    assert [line.partition(" (test.")[0] for line in out[3:]] == [
        f"note: {NOTES[kind]}" for kind in expected
    ]
    assert "train.en 1 line, the first is 16" in out[-1]
    assert {line.partition(":")[0] for line in result.stderr.splitlines()} == {
        "clean train",
        "clean valid",
        "clean test",
    }


# Refused: one line, and nothing is written


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (
            {"train.de": b"a\n"},
            [],
            "{data}/train.en has 3 lines but {data}/train.de has 1: "
            "line n of one must translate line n of the other",
        ),
        ({"test.en": b"a\nb\nc\nd"}, [], "{data}/test.en has 4 lines but {data}/test.de has 3: "),
        ({"valid.en": b"", "valid.de": b""}, [], "{data}/valid.en and {data}/valid.de are empty: "),
        ({"test.de": None}, [], "{data}/test.de: No such file or directory"),
        (
            {"test.de": b"a\nb\xe4\nc\n"},
            [],
            "{data}/test.de:2: not UTF-8 (byte 0xe4 at byte 2 of the line)",
        ),
        ({"valid.en": b"\xe4\nb\nc\n"}, [], "{data}/valid.en:1: not UTF-8 (byte 0xe4 at byte 1"),
        (
            {"train.en": b"\n\n\xff\n"},
            [],
            "{data}/train.en and {data}/train.de: no pair is left; left out: not_utf8 1, "
            "empty_side 2",
        ),
        (
            {"valid.en": b"\n\n\n"},
            [],
            "{data}/valid.en and {data}/valid.de: no pair is left; left out: empty_side 3",
        ),
        ({}, ["--max-tokens", "-1"], "--max-tokens -1: must be above 0, or 0 for no limit"),
        ({}, ["--max-ratio", "0.5"], "--max-ratio 0.5: must be at least 1, or 0 for no limit"),
        ({}, ["--max-ratio", "nan"], "--max-ratio nan: must be at least 1"),
        ({}, ["--workers", "0"], "--workers 0: at least 1 is needed"),
        ({}, ["--output", "{data}/train.en"], "output {data}/train.en"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    files: dict[str, bytes | None], options: list[str], message: str, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data")
    for name, content in files.items():
        if content is None:
            (data / name).unlink()
        else:
            (data / name).write_bytes(content)
    before = {path: path.read_bytes() for path in data.iterdir()}
    result = clean_command(data, tmp_path / "tok", *(o.format(data=data) for o in options))
    errors = [line for line in result.stderr.splitlines() if not line.startswith("clean ")]
    assert result.returncode == 2
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {message.format(data=data)}")
    assert not list((tmp_path / "tok").glob("*"))
    assert {path: path.read_bytes() for path in data.iterdir()} == before


def test_an_old_result_stays_when_cleaning_fails(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    clean(data, tmp_path / "tok")
    before = {path: path.read_bytes() for path in (tmp_path / "tok").iterdir()}
    (data / "train.en").write_bytes(b"\n\n\n")
    with pytest.raises(UserError, match="no pair is left"):
        clean(data, tmp_path / "tok")
    assert {path: path.read_bytes() for path in (tmp_path / "tok").iterdir()} == before


def test_the_number_of_processes_does_not_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 50)
    data = write_data(tmp_path / "data")
    write_split(data, "train", ODD_PAIRS * 3)
    results = []
    for workers in (1, 3):
        clean_corpus(EN_DE, data, tmp_path / str(workers), Limits(), workers)
        files = sorted((tmp_path / str(workers)).iterdir())
        results.append({path.name: path.read_bytes() for path in files})
    assert results[0] == results[1]


# Text that is tokens already


def test_tokens_are_split_at_spaces_and_nothing_else_is_changed(tmp_path: Path) -> None:
    given = [
        ("a man 's x &quot; , A", "ein — „ x ▁ u\u0308 DOTMULTI DOT."),
        ("two  spaces ", " am\u00adAnfang a\u00a0b"),
        ("a\tb\x0cc", "a\u2028b"),
        ("a man 's x &quot; , A", "ein — „ x ▁ u\u0308 DOTMULTI DOT."),  # a duplicate
        (" ", "b"),
        ("a b c d e f", "b"),
    ]
    data = write_data(tmp_path / "data", train=given, test=[("", "x  y")])
    report = clean_corpus(
        EN_DE, data, tmp_path / "tok", Limits(max_tokens=12, max_ratio=3), 1, tokenized=True
    )
    assert pairs(tmp_path / "tok", "train") == [
        given[0],
        ("two spaces", "am\u00adAnfang a\u00a0b"),
        ("a b c", "a b"),
    ]
    assert pairs(tmp_path / "tok", "test") == [("", "x y")]
    written = json.loads((tmp_path / "tok" / "cleaning.json").read_text())
    assert written["options"]["tokenized"] is True
    assert dropped(written) == {"duplicate": 1, "empty_side": 1, "length_ratio": 1}
    changes = {kind: set(files) for kind, files in written["changes"].items()}
    assert changes == {
        "spaces": {"train.en", "train.de", "test.de"},
        "form_feed": {"train.en"},
        "line_separator": {"train.de"},
    }
    assert any(line.startswith("note: spaces at an end of a line") for line in report.lines())


# Validation taken from the training text


@pytest.mark.parametrize("at_a_time", [4, 20_000])
def test_every_nth_pair_that_is_kept_is_validation(
    at_a_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rope_fairseq.corpus.clean.LINES_AT_A_TIME", at_a_time)
    given = [(f"line {n}", f"Zeile {n}") for n in range(1, 24)]
    given[5:5] = [("", "x"), given[0], given[1]]
    data = write_data(tmp_path / "data", train=given)
    for lang in ("en", "de"):
        (data / f"valid.{lang}").unlink()
    report = clean_corpus(EN_DE, data, tmp_path / "tok", Limits(), 2, valid_every=3)
    found = {split: pairs(tmp_path / "tok", split) for split in ("train", "valid")}
    # As awk 'NR%3==0' and 'NR%3!=0' of what is kept.
    kept = [(f"line {n}", f"Zeile {n}") for n in range(1, 24)]
    assert found["valid"] == kept[2::3] and len(found["valid"]) == 7
    assert found["train"] == [pair for number, pair in enumerate(kept, 1) if number % 3]
    words = dict(line.split("\t") for line in read_lines(tmp_path / "tok" / "words.tsv"))
    assert (words["line"], words["1"]) == ("16", "2") and "3" not in words
    counts = json.loads((tmp_path / "tok" / "cleaning.json").read_text())
    assert counts["options"]["valid_every"] == 3
    assert (counts["pairs"]["train"]["read"], counts["pairs"]["train"]["kept"]) == (26, 16)
    assert counts["pairs"]["valid"] == {
        "read": 7,
        "kept": 7,
        "dropped": dict.fromkeys(RULES, 0),
    }
    assert list(report.lines())[1] == "valid: 7 pairs, 7 kept; 1 in 3 of those kept of train"


@pytest.mark.parametrize(
    ("every", "message"),
    [
        (1, "^--valid-every 1: at least 2 is needed$"),
        (4, "^--valid-every 4: only 3 training pairs are kept of .*train.en and .*train.de; a"),
    ],
)
def test_a_validation_set_without_a_pair_is_refused(
    every: int, message: str, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data")
    with pytest.raises(UserError, match=message):
        clean_corpus(EN_DE, data, tmp_path / "tok", Limits(), 1, valid_every=every)
    assert not list((tmp_path / "tok").glob("*.*"))
