"""Your own corpus: any two text files, line n of one the translation of line n of the other.

Files may be plain, .gz or .xz. Without --valid or --test, pairs are held out of the training text
for them: evenly spread, always the same ones for the same files, and only pairs of which neither
side occurs a second time, so that no test sentence stands in the training text. They are from the
same documents as the training text all the same; a test set of other documents says more.
"""

import gzip
import hashlib
import lzma
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import without_fairseq  # noqa: F401

from rope_fairseq.corpus.folder import (
    SPLITS,
    append_lines,
    check_languages,
    corpus_parser,
    write_source,
    writing_corpus,
)
from rope_fairseq.errors import UserError, run_main

HELD_OUT = 1000
# Without --held-out, each set is at most this part of all pairs.
LARGEST_PART = 0.05
# Candidates looked at for each pair that is wanted; bounds the memory.
CANDIDATES = 16
# A held-out sentence is one that people would write: not longer, and without these characters,
# which a test set would keep and a training text loses.
LONGEST = 100  # words
UNWANTED = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufeff]")

Pair = tuple[Path, Path]


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


def key(line: bytes) -> bytes:
    """What makes two lines the same sentence: their words, whatever the spaces between them."""
    return hashlib.blake2b(b" ".join(line.split()), digest_size=16).digest()


def fit_to_hold_out(line: bytes) -> bool:
    """Could this side stand in a test set?"""
    try:
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError:
        return False
    return 1 <= len(text.split()) <= LONGEST and not UNWANTED.search(text)


def spread(total: int, wanted: int) -> list[int]:
    """``wanted`` different numbers below ``total``, evenly spread."""
    return [(2 * index + 1) * total // (2 * wanted) for index in range(wanted)]


def choose(train: Pair, others: Sequence[Pair], total: int, wanted: int) -> list[int]:
    """The numbers, from 0, of ``wanted`` pairs of ``train`` to hold out, in ascending order.

    Memory is that of :data:`CANDIDATES` times ``wanted`` keys, however long the text is.

    Args:
        others: files of the sets that are not made here; no held-out side occurs in them either.
        total: pairs in ``train``.

    Raises:
        UserError: too few pairs may be held out; says how many.
    """
    numbers = set(spread(total, min(total, CANDIDATES * wanted)))
    candidates: dict[int, tuple[bytes, bytes]] = {}
    for number, pair in enumerate(pairs_of(train)):
        if number in numbers and all(map(fit_to_hold_out, pair)):
            candidates[number] = (key(pair[0]), key(pair[1]))
    occurs: tuple[dict[bytes, int], dict[bytes, int]] = (
        {keys[0]: 0 for keys in candidates.values()},
        {keys[1]: 0 for keys in candidates.values()},
    )
    for files in (train, *others):
        for pair in pairs_of(files):
            for side in (0, 1):
                digest = key(pair[side])
                if digest in occurs[side]:
                    occurs[side][digest] += 1
    fit = [
        number
        for number, keys in candidates.items()
        if occurs[0][keys[0]] == 1 and occurs[1][keys[1]] == 1
    ]
    if len(fit) < wanted:
        raise UserError(
            f"{train[0]} and {train[1]}: {wanted} pairs are wanted for validation and test, but of "
            f"{len(numbers):,} looked at only {len(fit):,} are fit (both sides once in the corpus, "
            f"1 to {LONGEST} words, clean UTF-8); lower --held-out or give --valid and --test"
        )
    return [fit[index] for index in spread(len(fit), wanted)]


def held_out_size(asked: int | None, total: int, sets: int, train: Path) -> int:
    """How many pairs each of ``sets`` sets gets.

    Raises:
        UserError: the corpus is too small for that.
    """
    if asked is None:
        size = min(HELD_OUT, int(total * LARGEST_PART))
        if size < 1:
            raise UserError(
                f"{train}: {total} pairs are too few to hold any out; give --valid and --test"
            )
        return size
    if asked < 1 or 2 * asked * sets > total:
        raise UserError(
            f"--held-out {asked}: must be at least 1, and what is held out at most half of the "
            f"{total:,} pairs"
        )
    return asked


def describe(files: Pair, lines: int) -> dict[str, Any]:
    """The entry of source.json: the files as given, their hashes, the pairs taken from them."""
    entries = []
    for path in files:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries.append({"path": str(path), "checksum": f"sha256:{digest}"})
    return {"files": entries, "lines": lines}


def get(
    folder: Path, langs: tuple[str, str], given: dict[str, Pair], asked: int | None = None
) -> dict[str, Any]:
    """Write the corpus into ``folder``; returns its description, as source.json has it.

    Args:
        given: split → its two files; ``train`` at least.
        asked: pairs to hold out for each split that is not given.
    """
    check_languages(*langs)
    made = [split for split in SPLITS if split not in given]
    if asked is not None and not made:
        raise UserError("--held-out: nothing is held out when --valid and --test are given")
    outputs = [folder / f"{split}.{lang}" for split in SPLITS for lang in langs]
    check_files([path for files in given.values() for path in files], outputs)
    lines = {split: sum(1 for _ in pairs_of(files)) for split, files in given.items()}
    train = given["train"]
    goes_to: dict[int, str] = {}
    if made:
        size = held_out_size(asked, lines["train"], len(made), train[0])
        others = [files for split, files in given.items() if split != "train"]
        chosen = choose(train, others, lines["train"], size * len(made))
        goes_to = {number: made[index % len(made)] for index, number in enumerate(chosen)}
    source: dict[str, Any] = {"corpus": "own", "licence": "yours to know"}
    with writing_corpus(folder, *langs) as new:
        for split, files in given.items():
            if split == "train" and made:
                continue
            for path, lang in zip(files, langs, strict=True):
                with opened(path) as text, open(new / f"{split}.{lang}", "wb") as output:
                    append_lines(output, text)
            source[split] = describe(files, lines[split])
        if made:
            divide(train, goes_to, made, new, langs)
            source["train"] = describe(train, lines["train"] - len(goes_to))
            source |= {split: {"held_out_of": "train", "lines": size} for split in made}
        write_source(new, source)
    counts = ", ".join(f"{split} {source[split]['lines']:,}" for split in SPLITS)
    held = f"; held out of the training text: {' and '.join(made)}" if made else ""
    print(f"own: pairs: {counts}{held}", file=sys.stderr)
    return source


def divide(
    train: Pair, goes_to: dict[int, str], made: Sequence[str], new: Path, langs: tuple[str, str]
) -> None:
    """Write each pair of ``train`` to the split that its number goes to, or to train."""
    outputs = {
        (split, side): open(new / f"{split}.{langs[side]}", "wb")
        for split in ("train", *made)
        for side in (0, 1)
    }
    try:
        for number, pair in enumerate(pairs_of(train)):
            split = goes_to.get(number, "train")
            for side in (0, 1):
                # The last line may lack its end, and need not be the last one where it goes.
                outputs[split, side].write(pair[side].removesuffix(b"\n") + b"\n")
    finally:
        for output in outputs.values():
            output.close()


def main() -> None:
    parser = corpus_parser(__doc__)
    for split in SPLITS:
        parser.add_argument(
            f"--{split}",
            nargs=2,
            type=Path,
            metavar=("SOURCE", "TARGET"),
            required=split == "train",
            help=f"the {split} text in both languages",
        )
    parser.add_argument(
        "--held-out",
        type=int,
        metavar="N",
        help=f"pairs for each set that is not given (default {HELD_OUT:,}, but at most "
        f"{LARGEST_PART:.0%}".replace("%", "%%")
        + " of all)",
    )
    arguments = parser.parse_args()
    given = {
        split: tuple(getattr(arguments, split)) for split in SPLITS if getattr(arguments, split)
    }
    langs = (arguments.source_lang, arguments.target_lang)
    get(arguments.folder, langs, given, arguments.held_out)


if __name__ == "__main__":
    run_main(main)
