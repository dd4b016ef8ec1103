"""Getting WMT14 from a miniature of its archives, in a folder and on a server."""

import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rope_fairseq.corpus import download
from rope_fairseq.corpus.table import Wanted, parse_table
from tests.corpora import (
    ARCHIVES,
    CRAWL,
    EUROPARL,
    LANGUAGES,
    NEWS,
    PAIRS,
    SPLITS,
    TEST13,
    TEST14,
    get,
    left,
    members,
    miniature,
    one_error,
    small_mirror,
    wmt14,
)
from tests.serving import Server
from tests.tiny import ROOT, run


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "DELAYS", (0, 0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def mirror() -> Path:
    return small_mirror()


# The miniature


def test_the_miniature_has_the_layout_of_the_archives(mirror: Path) -> None:
    assert sorted(left(mirror)) == sorted([*ARCHIVES, "archives.tsv"])
    names = {path: list(members(mirror / path)) for path in ARCHIVES}
    assert names[EUROPARL] == [
        f"training/europarl-v7.{lang}-en.{side}"
        for lang in ("cs", "de", "es", "fr")
        for side in (lang, "en")
    ]
    assert names[CRAWL] == [
        f"commoncrawl.{lang}-en.{side}"
        for lang in ("cs", "de", "fr")
        for side in ("annotation", lang, "en")
    ]
    assert names[NEWS] == [
        f"training/news-commentary-v9.{lang}-en.{side}"
        for lang in ("cs", "de", "fr")
        for side in (lang, "en")
    ]
    assert names[TEST13] == [f"test/newstest2013-src.{lang}.sgm" for lang in ("en", "de")]
    assert sorted(names[TEST14]) == [
        f"test-full/newstest2014-deen-{side}.{lang}.sgm"
        for side in ("ref", "src")
        for lang in ("de", "en")
    ]
    for path in ARCHIVES:
        assert (mirror / path).read_bytes()[4:8] == bytes(4)  # gzip's own time
    table = parse_table((mirror / "archives.tsv").read_text(), "archives.tsv")
    for path, content in left(mirror).items():
        if path != "archives.tsv":
            digest = hashlib.sha256(content).hexdigest()
            assert table[path] == Wanted(path, f"sha256:{digest}", len(content))


def test_the_test_sets_are_sgm_with_documents_and_counted_segments(mirror: Path) -> None:
    text = members(mirror / TEST14)["test-full/newstest2014-deen-ref.de.sgm"].decode()
    lines = text.splitlines()
    assert lines[0] == '<refset setid="newstest2014" srclang="any" trglang="de">'
    assert lines[-1] == "</refset>"
    assert lines[1].startswith('<doc sysid="ref" docid="libreoffice-help/')
    assert lines[1].endswith('" genre="news" origlang="en">')
    assert lines[3].startswith('<seg id="1">') and lines[3].endswith("</seg>")
    assert text.count("<seg ") == 20
    assert text.count("<doc ") == text.count("</doc>") == text.count('<seg id="1">') > 1


def test_the_same_options_give_the_same_bytes(mirror: Path, tmp_path: Path) -> None:
    assert get(miniature, tmp_path / "same", "--pairs", PAIRS) == 0
    assert left(tmp_path / "same") == left(mirror)
    assert get(miniature, tmp_path / "other", "--pairs", PAIRS, "--seed", 2) == 0
    assert left(tmp_path / "other")[EUROPARL] != left(mirror)[EUROPARL]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pairs", "39"], "--pairs 39: must be from 40 to 24655"),
        (["--pairs", "24656"], "--pairs 24656: must be from 40 to 24655"),
        (["--pairs", "many"], "argument --pairs: invalid int value: 'many'; --help lists the"),
        (["--sed", "1"], "unrecognized arguments: --sed 1; --help lists the options"),
    ],
)
def test_bad_options_of_the_miniature_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get(miniature, tmp_path / "mirror", *arguments) == 2
    assert one_error(capsys).startswith(message)
    assert not left(tmp_path)


# WMT14


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus that get.sh makes of the miniature, as a user runs it."""
    mirror = small_mirror()
    base = tmp_path_factory.mktemp("corpus")
    home = base / "home"
    home.mkdir()
    result = run(
        ROOT / "data-prep/wmt14/get.sh",
        *(base / "data", "--mirror", mirror, "--downloads", base / "downloads"),
        env={"HOME": str(home), "PYTHON": sys.executable},
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[0] == (
        f"wmt14: {mirror} has a table of its own: this is NOT the published corpus, and a score on "
        "it is no WMT14 score"
    )
    # Neither a copy of a folder's archives nor anything that sacrebleu would believe later.
    assert not left(home) and not (base / "downloads").exists()
    return base / "data"


def test_the_parts_are_joined_in_their_order(corpus: Path, mirror: Path) -> None:
    for lang in ("en", "de"):
        expected = b"".join(
            members(mirror / archive)[f"{member}.{lang}"]
            for archive, member in (
                (EUROPARL, "training/europarl-v7.de-en"),
                (CRAWL, "commoncrawl.de-en"),
                (NEWS, "training/news-commentary-v9.de-en"),
            )
        )
        assert (corpus / f"train.{lang}").read_bytes() == expected
        assert expected.count(b"\n") == PAIRS


def test_defects_of_crawled_text_come_through_and_shift_nothing(corpus: Path) -> None:
    english = (corpus / "train.en").read_bytes().decode().split("\n")
    german = (corpus / "train.de").read_bytes().decode().split("\n")
    for text, defects in ((english, "\u2028 \r \x07"), (german, "\x85 \x0c \x00 \u00ad")):
        for defect in defects.split(" "):
            assert any(defect in line for line in text), repr(defect)
    assert "" in english[:-1] and " " in german
    sides = [miniature.read_demo("train", lang) for lang in ("en", "de")]
    demo = set(zip(*sides, strict=True))
    whole = [pair for pair in zip(english, german, strict=True) if pair in demo]
    # All but the damaged ones still face their translation; duplicates do too.
    assert len(whole) == PAIRS - 11


@pytest.mark.parametrize(("split", "demo"), [("valid", "valid"), ("test", "test")])
def test_the_test_sets_are_what_sacrebleu_reads(corpus: Path, split: str, demo: str) -> None:
    for lang in ("en", "de"):
        expected = [" ".join(line.split()) for line in miniature.read_demo(demo, lang)[:20]]
        assert (corpus / f"{split}.{lang}").read_text().splitlines() == expected


def test_the_description_says_what_the_corpus_is(corpus: Path, mirror: Path) -> None:
    source = json.loads((corpus / "source.json").read_text())
    assert source["corpus"] == "wmt14" and source["published"] is False
    assert source["base"] == str(mirror)
    assert [entry["path"] for entry in source["archives"]] == ARCHIVES
    assert source["train"] == [
        {"part": "Europarl v7", "lines": 84},
        {"part": "Common Crawl", "lines": 106},
        {"part": "News Commentary v9", "lines": 10},
    ]
    assert source["valid"] == {"name": "newstest2013", "sacrebleu": "wmt13", "lines": 20}
    assert source["test"] == {"name": "newstest2014", "sacrebleu": "wmt14/full", "lines": 20}
    assert sorted(left(corpus)) == sorted(
        ["source.json", *(f"{split}.{lang}" for split in SPLITS for lang in ("en", "de"))]
    )


def test_german_to_english_is_the_same_text(corpus: Path, mirror: Path, tmp_path: Path) -> None:
    languages = ("--source-lang", "de", "--target-lang", "en")
    assert get(wmt14, tmp_path, "--mirror", mirror, *languages) == 0
    files = [f"{split}.{lang}" for split in SPLITS for lang in ("en", "de")]
    assert [left(tmp_path)[name] for name in files] == [left(corpus)[name] for name in files]


def test_a_server_that_loses_connections_gives_the_same(
    corpus: Path, mirror: Path, tmp_path: Path
) -> None:
    data, downloads = tmp_path / "data", tmp_path / "downloads"
    arguments = (data, "--downloads", downloads, "--mirror")
    with Server.of_folder(mirror).running() as server:
        server.drops = [None, 1000, 3000]
        assert get(wmt14, *arguments, server.base) == 0
        assert len(server.requests) == len(ARCHIVES) + 1 + 2
        for name, content in left(corpus).items():
            if name != "source.json":
                assert left(data)[name] == content
        # Once more: only the table is asked for again.
        del server.requests[:]
        assert get(wmt14, *arguments, server.base) == 0
        assert [path for path, _ in server.requests] == ["/archives.tsv"]
    # Other data lies beside the published archives, not in their place.
    assert not (downloads / "wmt13").exists()
    assert len(list(downloads.glob("*/wmt13/test.tgz"))) == 1


def test_a_run_that_was_killed_while_it_fetched_goes_on(
    corpus: Path, mirror: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    script = ROOT / "data-prep/wmt14/get.py"
    with Server.of_folder(mirror).running() as server:
        server.drops, server.stalls = [None, None, 4000], threading.Event()
        command = [sys.executable, script, data, "--mirror", server.base]
        command += ["--downloads", tmp_path / "downloads"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in tmp_path.rglob("*.part")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert [path.name for path in data.iterdir()] == [".get.tmp"]
        (data / "train.en").write_text("of an earlier run")
        assert get(wmt14, *map(str, command[2:])) == 0
        asked = [asked for path, asked in server.requests if path == f"/{CRAWL}"]
    assert asked == [None, "bytes=4000-"]
    found = left(data)
    del found["source.json"]
    assert found == {name: text for name, text in left(corpus).items() if name != "source.json"}


def test_the_published_archives_are_those_of_the_table_and_of_sacrebleu() -> None:
    sets = {
        split: wmt14.published_test_set(name, "en", "de")
        for split, (name, _) in wmt14.TEST_SETS.items()
    }
    published = wmt14.published_table(sets)
    assert {path: (wanted.size, wanted.checksum[:13]) for path, wanted in published.items()} == {
        EUROPARL: (657632379, "sha256:0224c7"),
        CRAWL: (918311367, "sha256:c7a74e"),
        NEWS: (80418416, "sha256:cb8953"),
        TEST13: (None, "md5:48eca5d02"),
        TEST14: (None, "md5:a8cd784e0"),
    }


def test_a_mirror_with_the_published_archives_is_the_published_corpus(
    mirror: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    published = parse_table((mirror / "archives.tsv").read_text(), "")
    monkeypatch.setattr(
        wmt14, "published_table", lambda _: {path: published[path] for path in ARCHIVES}
    )
    with Server.of_folder(mirror).running() as server:
        for has_table in (True, False):
            if not has_table:
                del server.files["/archives.tsv"]
            assert get(wmt14, tmp_path, "--mirror", server.base, "--downloads", tmp_path / "d") == 0
            assert json.loads((tmp_path / "source.json").read_text())["published"] is True
    assert "NOT the published corpus" not in capsys.readouterr().err


def test_archives_that_are_here_already_need_no_network(
    mirror: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = parse_table((mirror / "archives.tsv").read_text(), "")
    monkeypatch.setattr(
        wmt14, "published_table", lambda _: {path: published[path] for path in ARCHIVES}
    )
    monkeypatch.setattr(download, "_open", None)  # any request would fail
    for name, content in left(mirror).items():
        (tmp_path / "downloads" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "downloads" / name).write_bytes(content)
    assert get(wmt14, tmp_path / "data", "--downloads", tmp_path / "downloads") == 0
    for name in ("train.en", "test.de"):
        assert left(tmp_path / "data")[name] == left(corpus)[name]


def test_help_names_the_options() -> None:
    for corpus, option in (("wmt14", "--mirror"), ("own", "--held-out"), ("demo", "--source-lang")):
        result = run(ROOT / f"data-prep/{corpus}/get.sh", "--help", env={"PYTHON": sys.executable})
        assert result.returncode == 0
        assert result.stdout.startswith("usage: get.sh [-h]") and option in result.stdout


# The demo has the same interface


def test_the_demo_says_what_it_is(tmp_path: Path) -> None:
    result = run(
        ROOT / "data-prep/demo/get.sh", tmp_path, *LANGUAGES, env={"PYTHON": sys.executable}
    )
    assert result.returncode == 0, result.stderr
    source = json.loads((tmp_path / "source.json").read_text())
    assert (source["corpus"], source["licence"]) == ("demo", "MPL-2.0")
    assert [source[split]["lines"] for split in SPLITS] == [24655, 500, 500]
    for entry in source["files"]:
        digest = hashlib.sha256((tmp_path / entry["path"]).read_bytes()).hexdigest()
        assert entry["checksum"] == f"sha256:{digest}"
