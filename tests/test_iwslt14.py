"""IWSLT14 from a miniature of its archive: the text, the cleaning and the data as fairseq's script
makes them, and what is refused."""

import gzip
import hashlib
import json
import random
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fairseq.models import build_model
from subword_nmt.learn_bpe import learn_bpe

from rope_fairseq.corpus import download
from rope_fairseq.corpus.download import fetch
from rope_fairseq.corpus.miniature import read_demo, write_mirror
from rope_fairseq.corpus.rules import Limits
from rope_fairseq.corpus.table import Wanted, parse_table
from rope_fairseq.errors import UserError
from rope_fairseq.recipe import CONFIGS, load_recipe
from rope_fairseq.schedule import read_config
from rope_fairseq.text import Text
from tests.conftest import TinyTask
from tests.corpora import get, left, load, members, one_error
from tests.serving import Server
from tests.test_configs import composed
from tests.tiny import ROOT, run

iwslt14 = load("iwslt14", "get")
miniature = load("iwslt14", "miniature")

# fairseq was written for Hydra 1.0, and Hydra warns of that.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:(?s)\s*(version_base=|.* is validated against ConfigStore schema)"
)

PAIRS = 400
LANGS = ("de", "en")
ARCHIVE = "de-en.tgz"
TRAIN = "de-en/train.tags.de-en.{}"
XML = "de-en/IWSLT14.{}.de-en.{}.xml"
# As ls sorts them, which is not the order of the test set.
PARTS = ["TED.dev2010", "TED.tst2010", "TED.tst2011", "TED.tst2012", "TEDX.dev2012"]
IN_ORDER = ["TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012"]
FILES = [f"{split}.{lang}" for split in ("train", "test") for lang in LANGS]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "DELAYS", (0, 0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature; tests must not change it."""
    folder = tmp_path_factory.mktemp("iwslt14") / "mirror"
    miniature.make(folder, PAIRS, seed=1)
    return folder


@pytest.fixture(scope="module")
def work(mirror: Path) -> Path:
    """What prepare.sh makes of the miniature, as a user runs it."""
    folder = mirror.parent / "work"
    result = run(
        ROOT / "scripts/prepare.sh",
        *("iwslt14", "--work", folder, "--mirror", mirror, "--merges", "150"),
        env={"PYTHON": sys.executable},
    )
    assert result.returncode == 0, result.stderr
    return folder


def lines_of(path: Path) -> list[str]:
    return path.read_bytes().decode().removesuffix("\n").split("\n")


def pairs_in(folder: Path, split: str) -> list[tuple[str, str]]:
    sides = [lines_of(folder / f"{split}.{lang}") for lang in LANGS]
    return list(zip(*sides, strict=True))


# The miniature


def test_the_miniature_has_the_layout_of_the_archive(mirror: Path) -> None:
    assert sorted(left(mirror)) == ["archives.tsv", ARCHIVE]
    tests = [XML.format(part, lang) for part in PARTS for lang in LANGS]
    others = ["de-en/README", "de-en/train.en", *(TRAIN.format(lang) for lang in LANGS)]
    content = members(mirror / ARCHIVE)
    assert list(content) == tests + others
    table = parse_table((mirror / "archives.tsv").read_text(), "archives.tsv")
    packed = (mirror / ARCHIVE).read_bytes()
    digest = hashlib.sha256(packed).hexdigest()
    assert table == {ARCHIVE: Wanted(ARCHIVE, f"sha256:{digest}", len(packed))}
    for lang in LANGS:
        text = content[TRAIN.format(lang)].decode().split("\n")
        assert text[0].startswith("<url>http") and text[1].startswith("<keywords>")
        assert text[2] == "<talkid>1</talkid>"
        assert re.fullmatch("<title>.*</title>", text[3])
        assert re.fullmatch("<description>.*</description>", text[4])
    xml = content[XML.format("TED.tst2012", "en")].decode().split("\n")
    assert xml[1] == "<mteval>" and xml[2].startswith('<refset setid="iwslt2014-TED.tst2012" ')
    assert sum(re.fullmatch(r'<seg id="\d+"> .* </seg>', line) is not None for line in xml) == 8


def test_the_same_options_give_the_same_bytes(mirror: Path, tmp_path: Path) -> None:
    assert get(miniature, tmp_path / "same", "--pairs", PAIRS) == 0
    assert left(tmp_path / "same") == left(mirror)
    assert get(miniature, tmp_path / "other", "--pairs", PAIRS, "--seed", 2) == 0
    assert left(tmp_path / "other")[ARCHIVE] != left(mirror)[ARCHIVE]


def test_bad_options_of_the_miniature_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get(miniature, tmp_path / "mirror", "--pairs", "39") == 2
    assert one_error(capsys) == "--pairs 39: must be from 40 to 24655"
    assert not left(tmp_path)


# The text


def test_lines_of_text_are_those_of_fairseqs_script() -> None:
    tags = (
        b"<url>http://x</url>\n<keywords>a, b</keywords>\n<talkid>1</talkid>\n"
        b"<title>A title</title>\n<description>Of <b>it</b></description>\n\n One.\r\n<speaker>S"
    )
    assert list(iwslt14.train_lines(iter(tags.splitlines(keepends=True)))) == [
        *(b"A title", b"Of <b>it</b>", b"", b" One.\r", b"<speaker>S")
    ]
    xml = (
        '<doc docid="1">\n<title>no text</title>\n<seg id="1"> It\u2019s &amp; one.\t</seg>\r\n'
        '<seg id="2"></seg>\n  <seg id="33">x </seg> y\n<seg>none</seg>\n</doc>\n'
    ).encode()
    assert list(iwslt14.test_lines(iter(xml.splitlines(keepends=True)))) == [
        *(b"It's &amp; one.", b"", b"  xy")
    ]


def test_the_corpus_is_the_text_of_the_archive(work: Path, mirror: Path) -> None:
    start = random.Random(1).randrange(24655 - PAIRS + 1)
    demo = (read_demo("train", lang)[start : start + PAIRS] for lang in LANGS)
    whole = set(zip(*demo, strict=True))
    text = pairs_in(work / "data", "train")
    assert len(text) == PAIRS
    # All but the traps, of which the last is a pair of the demo.
    assert sum(pair in whole for pair in text) == PAIRS - 18
    assert ("", "") in text and (" ", "An empty German side.") in text
    test = pairs_in(work / "data", "test")
    assert test[0] == (
        "Fragen &amp; Antworten, \u201ewie geht's\u201c",
        "Questions &amp; answers, it's",
    )
    assert test[1] == ("eins zwei", "one\u2028two")
    # Each part has eight; the third comes second.
    demo_test = list(zip(*(read_demo("test", lang)[:40] for lang in LANGS), strict=True))
    assert test[2:] == demo_test[2:8] + demo_test[32:40] + demo_test[8:32]


def test_the_description_says_what_the_corpus_is(work: Path, mirror: Path) -> None:
    source = json.loads((work / "data/source.json").read_text())
    packed = (mirror / ARCHIVE).read_bytes()
    checksum = f"sha256:{hashlib.sha256(packed).hexdigest()}"
    assert source == {
        "corpus": "iwslt14",
        "published": False,
        "base": str(mirror),
        "licence": "that of the other data",
        "archives": [{"path": ARCHIVE, "size": len(packed), "checksum": checksum}],
        "train": {"name": "train.tags.de-en", "lines": PAIRS},
        "test": {
            "name": "dev2010+dev2012+tst2010+tst2011+tst2012",
            "lines": 40,
            "parts": [{"part": part, "lines": 8} for part in IN_ORDER],
        },
    }
    assert sorted(left(work / "data")) == sorted([*FILES, "source.json"])
    assert "|published:no|" in json.loads((work / "data.json").read_text())["signature"]


def test_english_to_german_is_the_same_text(work: Path, mirror: Path, tmp_path: Path) -> None:
    languages = ("--source-lang", "en", "--target-lang", "de")
    assert get(iwslt14, tmp_path, "--mirror", mirror, *languages) == 0
    assert all(left(tmp_path)[name] == left(work / "data")[name] for name in FILES)


# Tokens, cleaning, validation set, BPE


def kept_by_moses(source: str, target: str) -> bool:
    """The rules of Moses' clean-corpus-n.perl -ratio 1.5 … 1 175, written anew from its text."""
    sides = [
        re.sub(r"\s+", " ", side).removeprefix(" ").removesuffix(" ") for side in (source, target)
    ]
    if "" in sides:
        return False
    counts = [side.count(" ") + 1 for side in sides]
    if any(not 1 <= count <= 175 for count in counts):
        return False
    if counts[0] / counts[1] > 1.5 or counts[1] / counts[0] > 1.5:
        return False
    return not any(re.search(r"[^\s|]{1001}", side) for side in sides)


def words(count: int) -> str:
    return " ".join(["w"] * count)


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        ("", "", False),
        ("a", "", False),
        (" ", "a", False),
        ("\u00a0", "a", False),
        ("a", "a", True),
        ("a", "a a", False),
        ("a a", "a a a", True),  # 1.5 is not over 1.5
        ("a a a", "a a", True),
        ("a a", "a a a a", False),
        (words(116), words(174), True),
        (words(116), words(175), False),
        (words(117), words(175), True),
        (words(175), words(175), True),
        (words(176), words(175), False),
        (words(175), words(176), False),
        ("a" * 1000, "a", True),
        ("a" * 1001, "a", False),
        ("a", "\u00e4" * 1000, True),  # characters, not bytes
        ("a", "\u00e4" * 1001, False),
        ("a  a\t a ", "a a", True),
        ("a\u00a0a a", "a a", True),  # a no-break space parts words
        ("&#124;", "a", True),
    ],
)
def test_the_limits_of_cleaning_are_those_of_moses(source: str, target: str, kept: bool) -> None:
    limits = Limits(max_tokens=175, max_ratio=1.5, keep_duplicates=True)
    assert kept_by_moses(source, target) is kept
    assert (limits.broken(source, target) is None) is kept


def test_every_pair_of_lengths_is_kept_or_not_as_by_moses() -> None:
    limits = Limits(max_tokens=175, max_ratio=1.5, keep_duplicates=True)
    for first in range(180):
        for second in (round(first * ratio) + d for ratio in (2 / 3, 1, 1.5) for d in (-1, 0, 1)):
            pair = words(first), words(max(0, second))
            assert (limits.broken(*pair) is None) is kept_by_moses(*pair), (first, second)


def test_where_cleaning_differs_from_moses() -> None:
    """A line of a script without spaces counts by its characters; sacremoses parts those of
    Chinese anyway, which Moses' own tokenizer does not."""
    limits = Limits(max_tokens=175, max_ratio=1.5, keep_duplicates=True)
    assert kept_by_moses("\u4e2d\u56fd\u4e2d\u56fd", "china")
    assert limits.broken("\u4e2d\u56fd\u4e2d\u56fd", "china") == "length_ratio"
    assert Text("de", "en").tokenize("\u4e2d\u56fd", "de") == "\u4e2d \u56fd"


def test_tokens_are_made_small_after_tokenizing(work: Path) -> None:
    expected = (
        "ende . dann kam dr. weiss . er ging .",
        "the end . then dr. white came . he went .",
    )
    tokens = pairs_in(work / "tok", "train") + pairs_in(work / "tok", "valid")
    assert expected in tokens
    # Made small before, the sentences would not be parted and Dr. not be known.
    first = Text("de", "en", normalize=False, escape=True, lowercase=True)
    assert first.tokenize("The end. Then Dr. White came. He went.", "en") == (
        "the end. then dr. white came. he went ."
    )
    # Typographic quotes stay in the training text, and entities are escaped once more.
    assert ("das ist johns buch .", "that \u2019 s john &apos;s book .") in tokens
    assert any("&amp; amp ; answers" in english for _, english in tokens)


def test_every_23rd_pair_that_is_kept_is_validation(work: Path) -> None:
    text = Text("de", "en", normalize=False, escape=True)
    raw = pairs_in(work / "data", "train")
    tokens = [(text.tokenize(de, "de"), text.tokenize(en, "en")) for de, en in raw]
    kept = [(de.lower(), en.lower()) for de, en in tokens if kept_by_moses(de, en)]
    assert PAIRS - 40 < len(kept) < PAIRS - 6
    assert pairs_in(work / "tok", "valid") == kept[22::23]
    del kept[22::23]
    assert pairs_in(work / "tok", "train") == kept
    # On both sides of the limits, and duplicates: see trap() of the miniature.
    sizes = {
        (len(de.split()), len(en.split())) for de, en in kept + pairs_in(work / "tok", "valid")
    }
    assert {(2, 3), (175, 175)} <= sizes
    assert not {(2, 4), (5, 3), (176, 176)} & sizes


def test_bpe_is_learned_on_the_training_text_alone(work: Path, tmp_path: Path) -> None:
    joint = "".join((work / f"tok/train.{lang}").read_text() for lang in LANGS)
    (tmp_path / "joint").write_text(joint)
    with open(tmp_path / "joint") as lines, open(tmp_path / "codes", "w") as codes:
        learn_bpe(lines, codes, 150)
    assert (work / "text/bpecodes").read_text() == (tmp_path / "codes").read_text()
    assert json.loads((work / "text/text.json").read_text())["lowercase_tokens"] is True


# The published archive


@pytest.fixture
def published(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Path]:
    """The miniature as if it were what is published, with this many pairs for training."""

    def pretend(train: int) -> Path:
        folder = tmp_path / "published"
        folder.mkdir()
        packed = (mirror / ARCHIVE).read_bytes()
        (folder / ARCHIVE).write_bytes(packed)
        here = tmp_path / "here"
        here.mkdir()
        (here / "archives.tsv").write_text(f"{ARCHIVE}\t{len(packed)}\t-\n")
        monkeypatch.setattr(iwslt14, "HERE", here)
        monkeypatch.setattr(iwslt14, "PUBLISHED_PAIRS", {"train": train, "test": 40})
        return folder

    return pretend


def test_the_published_archive_has_a_size_and_no_checksum() -> None:
    table = parse_table((iwslt14.HERE / "archives.tsv").read_text(encoding="ascii"), "")
    assert table == {ARCHIVE: Wanted(ARCHIVE, None, 19_982_877)}
    assert {"train": 174_443, "test": 6_750} == iwslt14.PUBLISHED_PAIRS


def test_without_a_checksum_the_archive_is_known_by_its_pairs(
    published: Callable[[int], Path],
    work: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, data = published(PAIRS), tmp_path / "data"
    assert get(iwslt14, data, "--mirror", folder) == 0
    digest = hashlib.sha256((folder / ARCHIVE).read_bytes()).hexdigest()
    size = (folder / ARCHIVE).stat().st_size
    printed = capsys.readouterr().err
    assert f"iwslt14: {ARCHIVE} has {size:,} bytes and sha256:{digest}; no checksum is" in printed
    assert "NOT the published corpus" not in printed
    source = json.loads((data / "source.json").read_text())
    assert source["published"] is True and source["licence"].startswith("TED's, CC BY-NC-ND;")
    assert source["archives"] == [{"path": ARCHIVE, "size": size, "checksum": f"sha256:{digest}"}]
    assert all(left(data)[name] == left(work / "data")[name] for name in FILES)


def test_another_archive_of_the_same_size_is_refused(
    published: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published(PAIRS + 1)
    assert get(iwslt14, tmp_path / "data", "--mirror", folder) == 2
    assert one_error(capsys) == (
        f"{folder}/{ARCHIVE}: has 400 pairs for train, the published archive 401: another file; "
        "delete it and get it again, or name another server with --mirror"
    )
    assert not left(tmp_path / "data")


def test_a_download_goes_on_and_is_not_repeated(
    published: Callable[[int], Path], work: Path, tmp_path: Path
) -> None:
    arguments = (tmp_path / "data", "--downloads", tmp_path / "downloads", "--mirror")
    with Server.of_folder(published(PAIRS)).running() as server:
        server.drops = [1000]
        for _ in range(2):
            assert get(iwslt14, *arguments, server.base) == 0
            assert all(left(tmp_path / "data")[name] == left(work / "data")[name] for name in FILES)
        asked = [asked for path, asked in server.requests if path == f"/{ARCHIVE}"]
    assert asked == [None, "bytes=1000-"]


def test_of_a_file_without_a_checksum_the_size_is_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert fetch(str(tmp_path), Wanted("file", None, 7), tmp_path) == tmp_path / "file"
    assert fetch(str(tmp_path), Wanted("file", None), tmp_path) == tmp_path / "file"
    with pytest.raises(UserError, match="file: has 7 bytes, not 8: damaged or another file"):
        fetch(str(tmp_path), Wanted("file", None, 8), tmp_path)


# What is refused


def rewrite(folder: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    content = members(folder / ARCHIVE)
    change(content)
    write_mirror(folder, {ARCHIVE: content}, "changed")


def put(folder: Path, content: bytes) -> None:
    (folder / ARCHIVE).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    (folder / "archives.tsv").write_text(f"{ARCHIVE}\t{len(content)}\tsha256:{digest}\n")


def spoil(folder: Path, place: int) -> None:
    """Change a byte; the table fits, as if nothing were known of the archive."""
    content = bytearray((folder / ARCHIVE).read_bytes())
    content[place] ^= 1
    put(folder, bytes(content))


def twice(folder: Path) -> None:
    name = TRAIN.format("de")
    (folder / "text").write_bytes(b"Eins\n")
    with tarfile.open(folder / ARCHIVE, "w:gz") as tar:
        for _ in range(2):
            tar.add(folder / "text", name)
    put(folder, (folder / ARCHIVE).read_bytes())


DE, EN, XML_DE = TRAIN.format("de"), TRAIN.format("en"), XML.format("TEDX.dev2012", "de")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: (m / ARCHIVE).unlink(), f"{{m}}/{ARCHIVE}: no such file"),
        (lambda m: (m / "archives.tsv").unlink(), f"{{m}}/{ARCHIVE}: has "),
        (
            lambda m: (m / "archives.tsv").write_text(f"{ARCHIVE}\t5\n"),
            "{m}/archives.tsv:1: 'de-en.tgz\\t5' is not a file's path, size in bytes and sha256:",
        ),
        (
            lambda m: (m / "archives.tsv").write_text("# nothing\n"),
            f"{{m}}/archives.tsv: lacks {ARCHIVE}",
        ),
        (lambda m: put(m, b"<html>not found</html>"), f"{{m}}/{ARCHIVE}: damaged (Not a gz"),
        (lambda m: put(m, b""), f"{{m}}/{ARCHIVE}: damaged ("),
        (lambda m: put(m, gzip.compress(b"no tar" * 100)), f"{{m}}/{ARCHIVE}: damaged ("),
        (
            lambda m: put(m, (m / ARCHIVE).read_bytes()[:-4000]),
            f"{{m}}/{ARCHIVE}: damaged (",
        ),
        # gzip's checksum of its content, behind all members.
        (lambda m: spoil(m, -8), f"{{m}}/{ARCHIVE}: damaged (CRC check failed"),
        (twice, f"{{m}}/{ARCHIVE}: holds {DE} twice"),
        (lambda m: rewrite(m, lambda c: c.pop(DE)), f"{{m}}/{ARCHIVE}: has no {DE}"),
        (lambda m: rewrite(m, lambda c: c.pop(XML_DE)), f"{{m}}/{ARCHIVE}: has no {XML_DE}"),
        (
            lambda m: rewrite(m, lambda c: c.update({DE: c[DE] + b"Noch eins\n"})),
            f"{{m}}/{ARCHIVE}: {DE} has 401 but {EN} has 400 lines of text: line n of one must",
        ),
        (
            lambda m: rewrite(m, lambda c: c.update({XML_DE: b'<seg id="1">Eins</seg>\n'})),
            f"{{m}}/{ARCHIVE}: {XML_DE} has 1 but {XML.format('TEDX.dev2012', 'en')} has 8 lines",
        ),
    ],
)
def test_a_bad_archive_is_refused_in_one_line_and_the_folder_stays(
    damage: Callable[[Path], object],
    message: str,
    mirror: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy, data = tmp_path / "copy", tmp_path / "data"
    for folder in (copy, data):
        folder.mkdir()
    for name, content in left(mirror).items():
        (copy / name).write_bytes(content)
    (data / "train.en").write_text("of an earlier run\n")
    damage(copy)
    assert get(iwslt14, data, "--mirror", copy, "--downloads", tmp_path / "downloads") == 2
    assert one_error(capsys).startswith(message.format(m=copy))
    assert left(data) == {"train.en": b"of an earlier run\n"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mirror", "{t}/nowhere"], "{t}/nowhere: no such folder"),
        (["--source-lang", "fr"], "--source-lang fr --target-lang en: must be de and en"),
        (["--target-lang", "de"], "--source-lang de --target-lang de: must be de and en"),
        (["--miror", "{t}"], "unrecognized arguments: --miror"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(t=tmp_path) for argument in arguments]
    assert get(iwslt14, tmp_path / "data", *given) == 2
    assert one_error(capsys).startswith(message.format(t=tmp_path))
    assert not left(tmp_path)


def test_a_last_line_without_an_end_counts(mirror: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    content = {name: text.removesuffix(b"\n") for name, text in members(mirror / ARCHIVE).items()}
    write_mirror(copy, {ARCHIVE: content}, "changed")
    for folder, base in (("whole", mirror), ("data", copy)):
        assert get(iwslt14, tmp_path / folder, "--mirror", base) == 0
    for name in FILES:
        assert left(tmp_path / "data")[name] == left(tmp_path / "whole")[name]


# Recipes and config


def test_the_recipe_is_fairseqs() -> None:
    recipe = load_recipe("iwslt14")
    assert (recipe.corpus, recipe.source_lang, recipe.target_lang) == ("iwslt14", "de", "en")
    assert (recipe.merges, recipe.vocab_size) == (10_000, None)
    text, clean = recipe.text, recipe.clean
    assert (text.lowercase_tokens, text.lowercase) == (True, False)
    assert (text.escape, text.normalize, text.tokenized) == (True, False, False)
    assert (clean.max_tokens, clean.max_ratio, clean.valid_every) == (175, 1.5, 23)
    assert not clean.drop_duplicates and not clean.drop_test_overlap
    assert (recipe.average.last, recipe.average.by) == (10, "epoch")
    assert (recipe.config, recipe.tokens_per_update) == ("iwslt14", 4096)
    assert recipe.overrides == ()  # the encoding is table.sh's


def test_the_config_is_that_of_fairseqs_readme() -> None:
    expected = {
        "model._name": "rope_transformer_iwslt_de_en",
        "model.share_decoder_input_output_embed": True,
        "model.dropout": 0.3,
        "criterion.label_smoothing": 0.1,
        "optimizer._name": "adam",
        "optimizer.adam_betas": "(0.9,0.98)",
        "optimizer.weight_decay": 1e-4,
        "lr_scheduler._name": "inverse_sqrt",
        "lr_scheduler.warmup_updates": 4000,
        "optimization.lr": [5e-4],
        "optimization.clip_norm": 0,
        "optimization.max_update": 50_000,
        "dataset.max_tokens": 4096,
        "generation.beam": 5,
        "generation.lenpen": 1,
        "generation.max_len_a": 0,
        "generation.max_len_b": 200,
        "checkpoint.keep_last_epochs": 10,
    }
    values = read_config(CONFIGS / "iwslt14.yaml")
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize("encoding", ["rope", "sinusoidal"])
def test_the_model_is_transformer_iwslt_de_en(encoding: str) -> None:
    cfg = composed("iwslt14", f"model.position_encoding={encoding}")
    with torch.device("meta"):  # shapes alone
        model = build_model(cfg.model, TinyTask(10_000 - 4))  # fairseq adds four symbols
    layer = model.encoder.layers[0]
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (6, 6)
    assert tuple(layer.fc1.weight.shape) == (1024, 512)
    assert layer.self_attn.num_heads == 4 and layer.normalize_before is False
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight
    assert model.encoder.embed_tokens.weight is not model.decoder.embed_tokens.weight
    assert cfg.optimizer.weight_decay == 1e-4 and cfg.generation.beam == 5
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(42e6, rel=0.01)


def test_a_dry_run_prints_the_commands_and_writes_nothing(tmp_path: Path) -> None:
    result = run(
        ROOT / "scripts/reproduce.sh",
        *("iwslt14", "--dry-run", "--work", tmp_path / "work"),
        env={"PYTHON": sys.executable},
    )
    assert result.returncode == 0, result.stderr
    clean = re.search("python -m rope_fairseq.corpus clean .*", result.stdout)
    assert clean is not None
    for option in (
        *("--max-tokens 175", "--max-ratio 1.5", "--keep-duplicates", "--valid-every 23"),
        *("--lowercase-tokens", "--no-normalize", "--escape"),
    ):
        assert option in clean[0]
    assert "--merges 10000" in result.stdout
    assert "--config-name iwslt14 " in result.stdout and "--last 10 --by epoch" in result.stdout
    assert not left(tmp_path)
