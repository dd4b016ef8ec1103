"""blocks, staging, duplicates, words of rope_fairseq.corpus: memory small, files whole."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rope_fairseq.corpus import blocks, duplicates, words
from rope_fairseq.corpus.blocks import Block, ordered_map, read_blocks
from rope_fairseq.corpus.duplicates import DuplicateFinder, digest
from rope_fairseq.corpus.staging import staging
from rope_fairseq.corpus.words import WordCounter, merge_counts, read_counts
from rope_fairseq.errors import UserError
from tests.tiny import ROOT

# Blocks and processes


def test_blocks_hold_all_lines_of_all_files_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 20)
    (tmp_path / "a").write_bytes(b"1\n22\r\n" + b"3" * 50 + b"\n\n5\x0c\n6")
    (tmp_path / "b").write_bytes(b"a\nb\n\nd\ne\nf\n")
    found = list(read_blocks(tmp_path / "a", tmp_path / "b"))
    assert found == [
        Block(1, ([b"1\n", b"22\r\n", b"3" * 50 + b"\n"], [b"a\n", b"b\n", b"\n"])),
        Block(4, ([b"\n", b"5\x0c\n", b"6"], [b"d\n", b"e\n", b"f\n"])),
    ]
    (tmp_path / "empty").write_bytes(b"")
    assert list(read_blocks(tmp_path / "empty")) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_results_keep_the_order_of_the_items(workers: int) -> None:
    def slow_at_first(n: int) -> int:
        time.sleep(0.05 if n < 3 else 0)
        return n * n

    assert list(ordered_map(slow_at_first, iter(range(40)), workers)) == [n * n for n in range(40)]


def test_few_items_are_taken_in_advance() -> None:
    taken = []

    def items():
        for n in range(100):
            taken.append(n)
            yield n

    results = ordered_map(lambda n: n, items(), 2)
    assert next(results) == 0
    assert len(taken) <= 2 * blocks.BLOCKS_PER_WORKER + 2
    results.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_process_is_raised_here(workers: int) -> None:
    def refuse(n: int) -> int:
        if n == 5:
            raise UserError("five")
        return n

    with pytest.raises(UserError, match="^five$"):
        list(ordered_map(refuse, range(20), workers))


def test_a_killed_process_is_an_error_for_the_user() -> None:
    def die(n: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match="one of the 2 worker processes was killed"):
        list(ordered_map(die, range(3), 2))


def test_no_process_outlives_a_killed_parent() -> None:
    # The package without its __init__, which imports fairseq.
    program = (
        "import os, sys, time, types\n"
        "sys.modules['rope_fairseq'] = package = types.ModuleType('rope_fairseq')\n"
        f"package.__path__ = [{str(ROOT / 'rope_fairseq')!r}]\n"
        "from rope_fairseq.corpus.blocks import ordered_map\n"
        "def work(n): os.write(1, b'%d\\n' % os.getpid()); time.sleep(100)\n"
        "list(ordered_map(work, range(2), 2))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# Files that appear together


def test_files_appear_together_and_scratch_folders_do_not(tmp_path: Path) -> None:
    with staging(tmp_path / "new" / "out", "step") as folder:
        (folder / "a").write_text("1")
        (folder / "scratch").mkdir()
        (folder / "scratch" / "b").write_text("2")
        assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == [".step.tmp"]
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == ["a"]


def test_an_error_leaves_the_old_files_and_the_next_run_tidies_up(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / ".step.tmp").mkdir()
    (tmp_path / ".step.tmp" / "left").write_text("by a killed run")
    with pytest.raises(KeyError), staging(tmp_path, "step") as folder:
        (folder / "a").write_text("new")
        raise KeyError
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output .*file"), staging(tmp_path / "file", "step"):
        pass


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError) as error, staging(tmp_path, "step"):
        with open("/dev/full", "wb") as stream:
            stream.write(b"x" * 100_000)
    assert error.value.filename == str(tmp_path)
    assert not list(tmp_path.iterdir())


# Duplicates and words


@pytest.mark.parametrize("pairs_per_file", [1000, 7])
def test_every_repetition_is_marked_and_nothing_else(
    pairs_per_file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "PAIRS_PER_FILE", pairs_per_file)
    items = random.Random(1).choices([b"item %d" % n for n in range(120)], k=200)
    finder = DuplicateFinder(tmp_path / "digests", len(items))
    for start in range(0, len(items), 33):
        finder.add(b"".join(map(digest, items[start : start + 33])))
    marked = finder.mark(tmp_path / "marks")
    expected = [int(item in items[:n]) for n, item in enumerate(items)]
    assert list((tmp_path / "marks").read_bytes()) == expected
    assert marked == sum(expected) > 0


def test_without_pairs_nothing_is_marked(tmp_path: Path) -> None:
    assert DuplicateFinder(tmp_path / "digests", 0).mark(tmp_path / "marks") == 0
    assert (tmp_path / "marks").read_bytes() == b""


@pytest.mark.parametrize("in_memory", [1000, 5])
def test_words_are_counted_whether_they_fit_in_memory_or_not(
    in_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "WORDS_IN_MEMORY", in_memory)
    lines = ["the cat , the dog\n", "ä b ä\u0301 \u00a0x\n", "the the\n", "漢 a b\n" * 3]
    counters = [WordCounter(tmp_path, name) for name in ("one", "two")]
    for number, line in enumerate(lines):
        assert counters[number % 2].add(line.encode()) == len(line.encode().split())
    files = [file for counter in counters for file in counter.close()]
    assert len(files) == (2 if in_memory == 1000 else 3)
    with open(tmp_path / "words.tsv", "wb") as stream:
        different = merge_counts(files, stream)
    expected = Counter("".join(lines).encode().split())
    assert list(read_counts(tmp_path / "words.tsv")) == sorted(expected.items())
    assert different == len(expected)
