"""How often each word of a corpus occurs, in bounded memory.

Counts that grow too many are written to disk, sorted by word; at the end all that was written is
merged. ``words.tsv`` holds ``word<TAB>count`` lines in the order of the words' bytes.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

WORDS_FILE = "words.tsv"
# About 60 MB. English and German text of WMT's size has some million different words.
WORDS_IN_MEMORY = 500_000


class WordCounter:
    """Counts words and writes them to files ``NAME.0``, ``NAME.1``, … of a folder.

    Args:
        folder: scratch folder that exists.
        name: begins the files' names; different for counters that share a folder.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._counts: Counter[bytes] = Counter()
        self._files: list[Path] = []

    def add(self, text: bytes) -> int:
        """Count the words of UTF-8 text, which stand between ASCII spaces and line ends.

        Returns:
            The number of words, repeated ones included.
        """
        words = text.split()
        self._counts.update(words)
        if len(self._counts) > WORDS_IN_MEMORY:
            self._write()
        return len(words)

    def close(self) -> list[Path]:
        """The files written; the counter is empty then."""
        self._write()
        return self._files

    def _write(self) -> None:
        file = self._folder / f"{self._name}.{len(self._files)}"
        with open(file, "wb") as stream:
            stream.writelines(b"%b\t%d\n" % item for item in sorted(self._counts.items()))
        self._files.append(file)
        self._counts.clear()


def read_counts(path: Path) -> Iterator[tuple[bytes, int]]:
    """Words and counts of a file in the format of ``words.tsv``."""
    with open(path, "rb") as stream:
        for line in stream:
            word, _, count = line.partition(b"\t")
            yield word, int(count)


def merge_counts(files: Iterable[Path], stream: BinaryIO) -> int:
    """Add up files that are sorted by word, into a file that is sorted by word.

    Returns:
        The number of different words.
    """
    different = 0
    counts = heapq.merge(*map(read_counts, files), key=itemgetter(0))
    for word, same in groupby(counts, key=itemgetter(0)):
        different += 1
        stream.write(b"%b\t%d\n" % (word, sum(count for _, count in same)))
    return different
