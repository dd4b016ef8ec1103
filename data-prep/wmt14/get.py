"""WMT14 English-German: archives to raw text (called by get.sh).

Training text: Europarl v7, Common Crawl and News Commentary v9, in this order, as published. Not
v12, which fairseq's own script takes by default. Validation: newstest2013; test: newstest2014, all
3,003 sentences (``wmt14/full``); both through sacrebleu's own code, so the reference is the text
that sacrebleu scores against (it makes every run of white space one space).
"""

import sys
import tarfile
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import without_fairseq  # noqa: F401

from rope_fairseq.corpus.download import fetch
from rope_fairseq.corpus.folder import (
    append_lines,
    corpus_parser,
    write_source,
    writing_corpus,
)
from rope_fairseq.corpus.mirror import TABLE, add_options, downloads_of, table_of
from rope_fairseq.corpus.table import Wanted, parse_table
from rope_fairseq.corpus.test_sets import TestSet, published_test_set, write_test_set
from rope_fairseq.errors import UserError, run_main

HERE = Path(__file__).resolve().parent
BASE = "https://www.statmt.org"
DOWNLOADS = HERE.parent.parent / "exp" / "downloads" / "wmt14"
LICENCE = (
    "free for research; cite WMT14 and the authors of each part: "
    "https://www.statmt.org/wmt14/translation-task.html"
)


@dataclass(frozen=True)
class Part:
    """A part of the training text: its archive, and in it the member of each language."""

    name: str
    archive: str
    member: str

    def members(self, langs: tuple[str, str]) -> dict[str, str]:
        """Member → language."""
        return {self.member.format(lang): lang for lang in langs}


PARTS = (
    Part(
        "Europarl v7",
        "wmt13/training-parallel-europarl-v7.tgz",
        "training/europarl-v7.de-en.{}",
    ),
    Part("Common Crawl", "wmt13/training-parallel-commoncrawl.tgz", "commoncrawl.de-en.{}"),
    Part(
        "News Commentary v9",
        "wmt14/training-parallel-nc-v9.tgz",
        "training/news-commentary-v9.de-en.{}",
    ),
)
# Our split → sacrebleu's name, and the one of the text itself.
TEST_SETS = {"valid": ("wmt13", "newstest2013"), "test": ("wmt14/full", "newstest2014")}


def published_table(test_sets: dict[str, TestSet]) -> dict[str, Wanted]:
    """The archives as published: training from the table beside this file, tests from sacrebleu."""
    table = parse_table((HERE / TABLE).read_text(encoding="ascii"), str(HERE / TABLE))
    return table | {test_set.archive.path: test_set.archive for test_set in test_sets.values()}


def append_part(part: Part, archive: Path, outputs: dict[str, BinaryIO]) -> int:
    """Append a part to the file of each language, reading its archive once, as a stream.

    Args:
        outputs: language → file.

    Returns:
        The number of lines, the same on both sides.

    Raises:
        UserError: the archive is damaged, lacks a member, or the members differ in length.
    """
    first, second = outputs
    members = part.members((first, second))
    lines: dict[str, int] = {}
    try:
        with tarfile.open(archive, mode="r|gz") as tar:
            for info in tar:
                if info.name not in members or not info.isreg():
                    continue
                stream = tar.extractfile(info)
                assert stream is not None  # a regular file has content
                lang = members[info.name]
                if lang in lines:
                    raise UserError(f"{archive}: holds {info.name} twice")
                lines[lang] = append_lines(outputs[lang], stream)
                if len(lines) == len(members):
                    break
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{archive}: damaged ({error}); get it again") from None
    for member, lang in members.items():
        if lang not in lines:
            raise UserError(f"{archive}: has no {member}, or is damaged before it")
    if lines[first] != lines[second]:
        counts = " but ".join(f"{member} has {lines[lang]:,}" for member, lang in members.items())
        raise UserError(
            f"{archive}: {counts} lines: line n of one must translate line n of the other"
        )
    return lines[first]


def get(folder: Path, langs: tuple[str, str], base: str, downloads: Path) -> dict[str, Any]:
    """Write the corpus into ``folder``; returns its description, as source.json has it."""
    test_sets = {split: published_test_set(name, *langs) for split, (name, _) in TEST_SETS.items()}
    published = published_table(test_sets)
    table = table_of(base, published, BASE)
    downloads = downloads_of(downloads, table, published)
    is_published = table == published
    source: dict[str, Any] = {
        "corpus": "wmt14",
        "published": is_published,
        "base": base,
        "licence": LICENCE if is_published else "that of the other data",
        "archives": [],
        "train": [],
    }
    if not is_published:
        print(
            f"wmt14: {base} has a table of its own: this is NOT the published corpus, and a score "
            "on it is no WMT14 score",
            file=sys.stderr,
        )
    with writing_corpus(folder, *langs) as new:
        # Everything is fetched before anything is unpacked: what is missing shows early.
        archives = {path: fetch(base, wanted, downloads) for path, wanted in table.items()}
        for path, archive in archives.items():
            size = archive.stat().st_size
            source["archives"].append(
                {"path": path, "size": size, "checksum": table[path].checksum}
            )
        with ExitStack() as stack:
            outputs: dict[str, BinaryIO] = {
                lang: stack.enter_context(open(new / f"train.{lang}", "wb")) for lang in langs
            }
            for part in PARTS:
                lines = append_part(part, archives[part.archive], outputs)
                source["train"].append({"part": part.name, "lines": lines})
                print(f"wmt14 train: {part.name}, {lines:,} pairs", file=sys.stderr, flush=True)
        for split, test_set in test_sets.items():
            archive = archives[test_set.archive.path]
            outputs_of = (new / f"{split}.{langs[0]}", new / f"{split}.{langs[1]}")
            lines = write_test_set(test_set, archive, outputs_of, new / "sacrebleu")
            name, title = TEST_SETS[split]
            source[split] = {"name": title, "sacrebleu": name, "lines": lines}
            print(f"wmt14 {split}: {title}, {lines:,} pairs", file=sys.stderr, flush=True)
        write_source(new, source)
    return source


def main() -> None:
    parser = corpus_parser(__doc__.split("\n\n", 1)[1], source="en", target="de")
    add_options(parser, "where the archives are", BASE, DOWNLOADS, "1.7 GB")
    arguments = parser.parse_args()
    langs = (arguments.source_lang, arguments.target_lang)
    if set(langs) != {"en", "de"}:
        raise UserError(f"--source-lang {langs[0]} --target-lang {langs[1]}: must be en and de")
    get(arguments.folder, langs, arguments.mirror, arguments.downloads)


if __name__ == "__main__":
    run_main(main)
