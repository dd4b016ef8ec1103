"""The folder that ``data-prep/CORPUS/get.sh`` writes: raw text, all of it or nothing.

FOLDER/{train,valid,test}.{SOURCE,TARGET}   one sentence a line, line n of both sides a pair
FOLDER/source.json                          where the text is from

Where a recipe makes the validation set itself (``clean.valid_every``) there is no valid; where the
corpus is tokens there is raw.test as well, the test set as people read it.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from rope_fairseq.errors import Parser, UserError

SPLITS = ("train", "valid", "test")
SOURCE_FILE = "source.json"
BLOCK = 1 << 20  # bytes in memory at a time


def corpus_parser(description: str, **languages: str | None) -> Parser:
    """The options that every get.sh has.

    Args:
        description: what it does, for ``--help``.
        languages: ``source`` and ``target``, the default language codes; without, they must be
            given.
    """
    parser = Parser(
        prog="get.sh",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the text goes")
    for side in ("source", "target"):
        default = languages.get(side)
        parser.add_argument(
            f"--{side}-lang",
            default=default,
            required=default is None,
            metavar="LANG",
            help=f"code of the {side} language" + (f" (default {default})" if default else ""),
        )
    return parser


def check_languages(source_lang: str, target_lang: str) -> None:
    """Refuse codes that cannot be the endings of two different files."""
    for side, lang in (("source", source_lang), ("target", target_lang)):
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", lang):
            raise UserError(f"--{side}-lang {lang!r}: not a language code such as en or pt_BR")
    if source_lang == target_lang:
        raise UserError(f"--source-lang and --target-lang are both {source_lang!r}")


@contextmanager
def writing_corpus(
    folder: Path, source_lang: str, target_lang: str, parts: Sequence[str] = SPLITS
) -> Iterator[Path]:
    """A folder to write to, whose files take their places in ``folder`` when the block ends.

    The block writes PART.LANG for each of ``parts`` and source.json (:func:`write_source`) into the
    folder that it is given; what else it leaves there is removed. When it raises, ``folder`` is as
    before. The description goes away first and comes last, so text beside a description is the text
    that it describes, even after a kill between two renames.

    Raises:
        UserError: another process is writing this folder.
        OSError: ``folder`` cannot be written to, or the disk is full; names ``folder``.
    """
    check_languages(source_lang, target_lang)
    work = folder / ".get.tmp"
    names = [f"{split}.{lang}" for split in parts for lang in (source_lang, target_lang)]
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None
    try:
        with _only_writer(work):
            new = work / "new"
            shutil.rmtree(new, ignore_errors=True)  # of a run that was killed
            try:
                new.mkdir()
                yield new
                missing = [name for name in (*names, SOURCE_FILE) if not (new / name).is_file()]
                if missing:
                    raise RuntimeError(f"not written: {', '.join(missing)}")
                (folder / SOURCE_FILE).unlink(missing_ok=True)
                for name in (*names, SOURCE_FILE):
                    os.replace(new / name, folder / name)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        inside = error.filename is None or Path(str(error.filename)).is_relative_to(work)
        if error.strerror and inside:
            # A full disk says no name by itself, or that of a temporary file.
            raise OSError(error.errno, error.strerror, str(folder)) from None
        raise


@contextmanager
def _only_writer(work: Path) -> Iterator[None]:
    """Hold the lock in ``work``, a folder that its holder removes."""
    busy = UserError(f"{work.parent}: another get.sh is at work there; wait for it to end")
    lock = work / "lock"
    with open(lock, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        # Has the last holder removed the file between our open and our lock?
        if not lock.exists() or not os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            raise busy
        yield


def write_source(folder: Path, source: dict[str, Any]) -> None:
    """Write the description: what the corpus is and where each part of it is from."""
    text = json.dumps(source, indent=2, ensure_ascii=False) + "\n"
    (folder / SOURCE_FILE).write_text(text, encoding="utf-8")


def append_lines(target: BinaryIO, source: IO[bytes]) -> int:
    """Append the text that ``source`` still holds, its last line ended, block by block.

    Returns:
        The number of lines, which end at ``\\n`` and nowhere else.
    """
    lines = 0
    last = b"\n"
    while block := source.read(BLOCK):
        target.write(block)
        lines += block.count(b"\n")
        last = block[-1:]
    if last != b"\n":
        target.write(b"\n")
        lines += 1
    return lines
