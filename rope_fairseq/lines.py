"""Lines of text files: what counts as a line, and what must never count as one.

A line ends at ``\\n`` and nowhere else. Python's text mode also ends lines at a lone carriage
return, and ``str.splitlines`` at U+0085, U+2028, U+2029, form feeds and more: one such character
inside a sentence of a parallel corpus shifts every later pair. Files are therefore read as bytes.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from tqdm import tqdm

from rope_fairseq.errors import UserError
from rope_fairseq.files import replacing

PLAIN_PROGRESS_LINES = 10_000

T = TypeVar("T")


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Lines of a binary stream, without their ends.

    A carriage return directly before ``\\n`` (Windows) and a byte order mark at the start are
    dropped. A last line without ``\\n`` counts.

    Args:
        stream: a file opened in binary mode; iterating over it splits at ``\\n`` only.
        name: the file's name, for messages.

    Raises:
        UserError: a line is not UTF-8; names the file and the line (counted from 1).
    """
    for number, raw in enumerate(stream, start=1):
        yield decode_line(raw, name, number)


def decode_line(raw: bytes, name: str, number: int) -> str:
    """One line of a file, as :func:`decode_lines` gives it.

    Args:
        raw: the line, its end included.
        name: the file's name, for messages.
        number: the line's number, counted from 1.
    """
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}:{number}: not UTF-8 (byte 0x{raw[error.start]:02x} at byte "
            f"{error.start + 1} of the line); convert the file to UTF-8, for example with iconv"
        ) from None
    line = line.removesuffix("\n").removesuffix("\r")
    return line.removeprefix("\ufeff") if number == 1 else line


def read_lines(path: str | Path) -> Iterator[str]:
    """Lines of a UTF-8 file as :func:`decode_lines` gives them."""
    with open(path, "rb") as stream:
        yield from decode_lines(stream, str(path))


def count_lines(path: str | Path) -> int:
    """Number of lines that :func:`read_lines` gives, without decoding them."""
    with open(path, "rb") as stream:
        return sum(1 for _ in stream)


def encode_line(line: str) -> bytes:
    """One line for a binary stream.

    Raises:
        ValueError: the line holds a line end, which would shift every later line.
    """
    if "\n" in line:
        raise ValueError(f"a line must not contain a line end: {line!r}")
    return line.encode("utf-8") + b"\n"


def write_lines(path: str | Path, lines: Iterable[str]) -> int:
    """Write a UTF-8 file with ``\\n`` line ends; it appears under its name only when complete.

    Returns:
        The number of lines written.
    """
    count = 0
    with replacing(path) as stream:
        for line in lines:
            stream.write(encode_line(line))
            count += 1
    return count


def write_stream(stream: BinaryIO, lines: Iterable[str]) -> None:
    """Write lines to standard output or another binary stream."""
    for line in lines:
        stream.write(encode_line(line))
    stream.flush()


def progress(
    items: Iterable[T], total: int, label: str, size: Callable[[T], int] = lambda _: 1
) -> Iterator[T]:
    """Pass items through and show on standard error how far we are: a bar on a terminal, else
    (logs and continuous integration) a plain line every 10,000 lines, at most twenty, and at the
    end.

    Args:
        items: lines, or blocks of them.
        total: number of lines.
        label: what is being done.
        size: lines in an item.
    """
    if sys.stderr.isatty():
        with tqdm(total=total, desc=label, unit=" lines") as bar:
            for item in items:
                yield item
                bar.update(size(item))
        return
    step = max(PLAIN_PROGRESS_LINES, total // 20)
    count = 0
    for item in items:
        yield item
        before, count = count, count + size(item)
        if count // step > before // step and count < total:
            print(f"{label}: {count:,} of {total:,} lines", file=sys.stderr, flush=True)
    print(f"{label}: {count:,} lines", file=sys.stderr, flush=True)
