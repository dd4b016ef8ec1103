"""IWSLT14 German-English, TED talks: archive to raw text (called by get.sh).

Which lines are text, and what is changed in them, is as in prepare-iwslt14.sh of fairseq
(examples/translation), so that scores compare with those published. Training text: train.tags
without the lines of <url>, <talkid> and <keywords>; titles and descriptions stay, without their
tags. Test: dev2010, dev2012 (TEDx), tst2010, tst2011 and tst2012, in this order. There is no
validation set: cleaning takes it from the training text.
"""

import gzip
import hashlib
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import without_fairseq  # noqa: F401

from rope_fairseq.corpus.download import fetch
from rope_fairseq.corpus.folder import BLOCK, corpus_parser, write_source, writing_corpus
from rope_fairseq.corpus.mirror import TABLE, add_options, downloads_of, table_of
from rope_fairseq.corpus.table import Wanted, parse_table
from rope_fairseq.errors import UserError, run_main

HERE = Path(__file__).resolve().parent
BASE = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14"
ARCHIVE = "de-en.tgz"
DOWNLOADS = HERE.parent.parent / "exp" / "downloads" / "iwslt14"
LICENCE = (
    "TED's, CC BY-NC-ND; cite Cettolo et al. 2012 (WIT3) and 2014 (the IWSLT 2014 evaluation "
    "campaign)"
)
TRAIN = "train.tags.de-en"
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
# Pairs of the published archive, as fairseq's script has printed them to others.
PUBLISHED_PAIRS = {"train": 174_443, "test": 6_750}

NO_TEXT = re.compile(rb"<(?:url|talkid|keywords)>")
TAGS = re.compile(rb"</?(?:title|description)>")
SEGMENT = b"<seg id"
SEGMENT_START = re.compile(rb'<seg id="[0-9]*">\s*')
SEGMENT_END = re.compile(rb"\s*</seg>\s*")
APOSTROPHE = "\u2019".encode()


def member_of(part: str, lang: str) -> str:
    """Where a side of the training text or of a test set lies in the archive."""
    name = f"{TRAIN}.{lang}" if part == TRAIN else f"IWSLT14.{part}.de-en.{lang}.xml"
    return f"de-en/{name}"


def train_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of text of a train.tags file, without their ends."""
    for line in file:
        if not NO_TEXT.search(line):
            yield TAGS.sub(b"", line.removesuffix(b"\n"))


def test_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The segments of a test set, one for each line of the file that holds one. Entities stay as
    they are; ’ becomes ', in the test sets alone: all as in fairseq's script."""
    for line in file:
        if SEGMENT in line:
            line = SEGMENT_START.sub(b"", line.removesuffix(b"\n"))
            yield SEGMENT_END.sub(b"", line).replace(APOSTROPHE, b"'")


def read_archive(archive: Path, langs: tuple[str, str], new: Path) -> dict[str, int]:
    """Write each part of each language into ``new``, as ``PART.LANG``, reading the archive once.

    Returns:
        Lines of each part, the same on both sides.

    Raises:
        UserError: the archive is damaged, lacks a member, or the sides differ in length.
    """
    members = {member_of(part, lang): (part, lang) for part in (TRAIN, *TESTS) for lang in langs}
    lines: dict[str, int] = {}
    try:
        with gzip.open(archive) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
            for info in tar:
                if info.name not in members or not info.isreg():
                    continue
                if info.name in lines:
                    raise UserError(f"{archive}: holds {info.name} twice")
                file = tar.extractfile(info)
                assert file is not None  # a regular file has content
                part, lang = members[info.name]
                texts = train_lines(file) if part == TRAIN else test_lines(file)
                lines[info.name] = 0
                with open(new / f"{part}.{lang}", "wb") as output:
                    for text in texts:
                        output.write(text + b"\n")
                        lines[info.name] += 1
            # To the end, where gzip has the checksum of it all.
            while packed.read(BLOCK):
                pass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{archive}: damaged ({error}); delete it and get it again") from None
    counts = {}
    for part in (TRAIN, *TESTS):
        names = [member_of(part, lang) for lang in langs]
        for name in names:
            if name not in lines:
                raise UserError(f"{archive}: has no {name}")
        first, second = (lines[name] for name in names)
        if first != second:
            raise UserError(
                f"{archive}: {names[0]} has {first:,} but {names[1]} has {second:,} lines of text: "
                "line n of one must translate line n of the other"
            )
        counts[part] = first
    return counts


def join_tests(new: Path, lang: str) -> None:
    """Make the test set of its parts, which are removed."""
    with open(new / f"test.{lang}", "wb") as output:
        for part in TESTS:
            path = new / f"{part}.{lang}"
            output.write(path.read_bytes())
            path.unlink()


def check_published(archive: Path, pairs: dict[str, int]) -> None:
    """Raise UserError unless an archive that should be the published one has its pairs."""
    for split, published in PUBLISHED_PAIRS.items():
        if pairs[split] != published:
            raise UserError(
                f"{archive}: has {pairs[split]:,} pairs for {split}, the published archive "
                f"{published:,}: another file; delete it and get it again, or name another "
                "server with --mirror"
            )


def describe_archive(archive: Path, wanted: Wanted) -> dict[str, Any]:
    """Path, size and SHA-256; printed too where there is no checksum to compare with."""
    with open(archive, "rb") as file:
        checksum = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    size = archive.stat().st_size
    if wanted.checksum is None:
        print(
            f"iwslt14: {wanted.path} has {size:,} bytes and {checksum}; no checksum is published: "
            "compare yours with this one",
            file=sys.stderr,
        )
    return {"path": wanted.path, "size": size, "checksum": checksum}


def get(folder: Path, langs: tuple[str, str], base: str, downloads: Path) -> dict[str, Any]:
    """Write the corpus into ``folder``; returns its description, as source.json has it."""
    published = parse_table((HERE / TABLE).read_text(encoding="ascii"), str(HERE / TABLE))
    table = table_of(base, published, BASE)
    is_published = table == published
    if not is_published:
        print(
            f"iwslt14: {base} has a table of its own: this is NOT the published corpus, and a "
            "score on it is no IWSLT14 score",
            file=sys.stderr,
        )
    with writing_corpus(folder, *langs, ("train", "test")) as new:
        wanted = table[ARCHIVE]
        archive = fetch(base, wanted, downloads_of(downloads, table, published))
        parts = read_archive(archive, langs, new)
        pairs = {"train": parts[TRAIN], "test": sum(parts[part] for part in TESTS)}
        if is_published:
            check_published(archive, pairs)
        for lang in langs:
            (new / f"{TRAIN}.{lang}").rename(new / f"train.{lang}")
            join_tests(new, lang)
        source: dict[str, Any] = {
            "corpus": "iwslt14",
            "published": is_published,
            "base": base,
            "licence": LICENCE if is_published else "that of the other data",
            "archives": [describe_archive(archive, wanted)],
            "train": {"name": TRAIN, "lines": pairs["train"]},
            "test": {
                "name": "+".join(part.partition(".")[2] for part in TESTS),
                "lines": pairs["test"],
                "parts": [{"part": part, "lines": parts[part]} for part in TESTS],
            },
        }
        for split in ("train", "test"):
            entry = source[split]
            print(
                f"iwslt14 {split}: {entry['name']}, {entry['lines']:,} pairs",
                file=sys.stderr,
                flush=True,
            )
        write_source(new, source)
    return source


def main() -> None:
    parser = corpus_parser(__doc__.split("\n\n", 1)[1], source="de", target="en")
    add_options(parser, f"where {ARCHIVE} is", BASE, DOWNLOADS, "20 MB")
    arguments = parser.parse_args()
    langs = (arguments.source_lang, arguments.target_lang)
    if set(langs) != {"en", "de"}:
        raise UserError(f"--source-lang {langs[0]} --target-lang {langs[1]}: must be de and en")
    get(arguments.folder, langs, arguments.mirror, arguments.downloads)


if __name__ == "__main__":
    run_main(main)
