"""Parallel text as people have it: two files, line n of one the translation of line n of the other.

Files may be plain, .gz or .xz.
"""

import argparse
import gzip
import hashlib
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from rope_fairseq.errors import UserError

Pair = tuple[Path, Path]


def add_sets(parser: argparse.ArgumentParser, *splits: str) -> None:
    """``--SPLIT SOURCE TARGET`` for each; train must be given."""
    for split in splits:
        parser.add_argument(
            f"--{split}",
            nargs=2,
            type=Path,
            metavar=("SOURCE", "TARGET"),
            required=split == "train",
            help=f"the {split} text in both languages",
        )


def given_sets(arguments: argparse.Namespace, *splits: str) -> dict[str, Pair]:
    """split → its two files, for those of :func:`add_sets` that were given."""
    return {
        split: tuple(getattr(arguments, split)) for split in splits if getattr(arguments, split)
    }


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's text, unpacked by its ending; a damaged file is one line that names it."""
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise UserError(f"{path}: cannot be unpacked as {path.suffix} ({error})") from None


def check_files(files: Sequence[Path], outputs: Sequence[Path]) -> None:
    """Refuse what is no file, is empty, is given twice, or would be overwritten."""
    for number, path in enumerate(files):
        if not path.exists():
            raise UserError(f"{path}: no such file")
        if not path.is_file():
            raise UserError(f"{path}: must be a file that can be read several times")
        for other in files[:number]:
            if path.samefile(other):
                raise UserError(f"{path}: given twice (also as {other})")
        for output in outputs:
            if output.exists() and path.samefile(output):
                raise UserError(f"{path}: would be overwritten; choose another FOLDER")
        with opened(path) as file:
            start = file.read(2)
            if not start:
                raise UserError(f"{path}: empty")
            if start in (b"\xff\xfe", b"\xfe\xff"):
                raise UserError(f"{path}: UTF-16; convert it: iconv -f UTF-16 -t UTF-8")


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends. A generator each: so an error names its own file."""
    with opened(path) as file:
        yield from file


def pairs_of(files: Pair) -> Iterator[tuple[bytes, bytes]]:
    """The pairs of lines, with their ends.

    Raises:
        UserError: one file has more lines; names both counts.
    """
    counts = [0, 0]
    for pair in zip_longest(lines_of(files[0]), lines_of(files[1])):
        for side in (0, 1):
            counts[side] += pair[side] is not None
        if counts[0] == counts[1]:
            yield pair
    if counts[0] != counts[1]:
        raise UserError(
            f"{files[0]} has {counts[0]:,} lines but {files[1]} has {counts[1]:,}: "
            "line n of one must translate line n of the other"
        )


def describe(files: Pair, lines: int) -> dict[str, Any]:
    """The entry of source.json: the files as given, their hashes, the pairs taken from them."""
    entries = []
    for path in files:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries.append({"path": str(path), "checksum": f"sha256:{digest}"})
    return {"files": entries, "lines": lines}
