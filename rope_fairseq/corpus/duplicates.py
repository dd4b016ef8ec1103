"""Exact duplicates in a corpus of any size, found on disk in bounded memory.

A 16-byte digest of each sentence pair goes to one of several files, chosen by the digest itself,
so that equal pairs meet in the same file. The files are sorted one at a time. That two different
pairs have the same digest is no concern: for 10⁹ pairs the probability is below 10⁻²⁰.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
# Pairs in a file of digests, about: sorting one takes some 100 bytes a pair.
PAIRS_PER_FILE = 500_000
RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("pair", "<u8")])


def digest(content: bytes) -> bytes:
    """A digest of 16 bytes; the same on every machine."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class DuplicateFinder:
    """Collects the digests of pairs 0, 1, 2, … and says which of them occurred before.

    Args:
        folder: scratch folder, made by this class.
        pairs: upper limit of the number of pairs; decides on the number of files.
    """

    def __init__(self, folder: Path, pairs: int) -> None:
        folder.mkdir()
        self._files = [folder / f"{n}.digests" for n in range(pairs // PAIRS_PER_FILE + 1)]
        self._pairs = 0

    def add(self, digests: bytes) -> None:
        """Digests of the next pairs, 16 bytes each."""
        columns = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
        records = np.empty(len(columns), dtype=RECORD)
        records["high"], records["low"] = columns.T
        records["pair"] = np.arange(self._pairs, self._pairs + len(columns))
        self._pairs += len(columns)
        numbers = records["high"] % len(self._files)
        for number in np.unique(numbers):
            with open(self._files[number], "ab") as stream:
                stream.write(records[numbers == number].tobytes())

    def mark(self, path: Path) -> int:
        """Write a file with one byte for each pair: 1 if an equal pair came earlier, else 0.

        Returns:
            The number of pairs marked.
        """
        with open(path, "wb") as stream:
            stream.truncate(self._pairs)
        if self._pairs == 0:
            return 0
        marks = np.memmap(path, dtype=np.uint8, mode="r+")
        marked = 0
        for file in self._files:
            if file.exists():
                repeated = _repeated(np.fromfile(file, dtype=RECORD))
                marks[repeated] = 1
                marked += len(repeated)
        marks.flush()
        return marked


def _repeated(records: NDArray[np.void]) -> NDArray[np.uint64]:
    """Numbers of the pairs whose digest an earlier pair has."""
    # lexsort takes its last key first: equal digests stand together, the first pair in front.
    ordered = records[np.lexsort((records["pair"], records["low"], records["high"]))]
    same = (ordered["high"][1:] == ordered["high"][:-1]) & (
        ordered["low"][1:] == ordered["low"][:-1]
    )
    return ordered["pair"][1:][same]
