"""A small mirror of WMT14's archives, made of the demo corpus: for tests and for a look offline.

    miniature.py FOLDER [--pairs N] [--seed N]

The archives have the names, the members and the formats of the published ones, so that every step
of the recipe runs on them:

    wmt13/training-parallel-europarl-v7.tgz     training/europarl-v7.{cs,de,es,fr}-en.*
    wmt13/training-parallel-commoncrawl.tgz     commoncrawl.{cs,de,fr}-en.*, .annotation
    wmt14/training-parallel-nc-v9.tgz           training/news-commentary-v9.{cs,de,fr}-en.*
    wmt13/test.tgz                              test/newstest2013-src.{en,de}.sgm
    wmt14/test-full.tgz                         test-full/newstest2014-deen-{src,ref}.{en,de}.sgm
    archives.tsv                                sizes and hashes: says that this is other data

The text is software documentation (MPL-2.0, see data-prep/demo), not news and not parliament; the
other language pairs hold English on both sides. The same options give the same bytes (with the
same zlib).
"""

import random
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import without_fairseq  # noqa: F401

from rope_fairseq.corpus.miniature import make_from_command_line, plain, read_demo, write_mirror
from rope_fairseq.errors import UserError, run_main

PAIRS = 2000
# The shares of the published parts, roughly: 1.9, 2.4 and 0.2 million pairs.
SHARES = {"europarl": 0.42, "commoncrawl": 0.53}

Pair = tuple[str, str]  # English, German


def damage(pairs: list[Pair], rng: random.Random) -> list[Pair]:
    """Put one of each defect that crawled text has into pairs, in place of healthy ones."""
    kinds = [
        lambda en, de: (en.replace(" ", "\u2028", 1), de),  # line separator
        lambda en, de: (en, de.replace(" ", "\x85", 1)),  # next line
        lambda en, de: (en.replace(" ", "\r", 1), de),  # lone carriage return
        lambda en, de: (en, de.replace(" ", "\x0c", 1)),  # form feed
        lambda en, de: (en + "\x07", de + "\x00"),  # control characters
        lambda en, de: ("", de),  # an empty side
        lambda en, de: (en, " "),
        lambda en, de: (en, de[:3] + "\u00ad" + de[3:]),  # soft hyphen
        lambda en, de: (en, unicodedata.normalize("NFD", de + " Größe")),
        lambda en, de: (en, " ".join([de] * 20)),  # length ratio
        lambda en, de: (" ".join([en] * 60), " ".join([de] * 60)),  # too long
        lambda en, de: pairs[0],  # duplicates
        lambda en, de: pairs[0],
    ]
    places = rng.sample(range(1, len(pairs)), len(kinds))
    for place, kind in zip(places, kinds, strict=True):
        pairs[place] = kind(*pairs[place])
    return pairs


def sgm(lines: Sequence[str], pages: Sequence[str], opening: str, lang: str) -> bytes:
    """A test set as WMT writes it: a document for each page, its segments counted from 1.

    Args:
        opening: ``srcset`` or ``refset`` with its attributes.
        lang: the language in which the documents count as written.
    """
    kind = opening.split()[0]
    text = [f"<{opening}>"]
    for number, (line, page) in enumerate(zip(lines, pages, strict=True)):
        if number == 0 or page != pages[number - 1]:
            if number:
                text += ["</p>", "</doc>"]
            segment = 0
            text += [f'<doc sysid="ref" docid="{page}" genre="news" origlang="{lang}">', "<p>"]
        segment += 1
        text.append(f'<seg id="{segment}">{escape(line)}</seg>')
    text += ["</p>", "</doc>", f"</{kind}>"]
    return "".join(f"{line}\n" for line in text).encode()


def training_members(prefix: str, pairs: Sequence[Pair], others: Sequence[str]) -> dict[str, bytes]:
    """The members of one part: German–English among other pairs, in alphabetical order."""
    english = plain(en for en, _ in pairs[:10])
    members: dict[str, bytes] = {}
    for lang in sorted([*others, "de"]):
        first = plain(de for _, de in pairs) if lang == "de" else english
        second = plain(en for en, _ in pairs) if lang == "de" else english
        if prefix == "commoncrawl":
            count = second.count(b"\n")
            members[f"{prefix}.{lang}-en.annotation"] = b"http://www.example.org/\n" * count
        members[f"{prefix}.{lang}-en.{lang}"] = first
        members[f"{prefix}.{lang}-en.en"] = second
    return members


def test_members(split: str, count: int, year: int) -> dict[str, bytes]:
    """The members of a test set's archive, from the first lines of a split of the demo."""
    sides = {lang: read_demo(split, lang)[:count] for lang in ("en", "de")}
    pages = read_demo(split, "src")[:count]
    members = {}
    for lang, other in (("en", "de"), ("de", "en")):
        if year == 2013:
            opening = 'srcset setid="newstest2013" srclang="any"'
            members[f"test/newstest2013-src.{lang}.sgm"] = sgm(sides[lang], pages, opening, "en")
            continue
        source = f'srcset setid="newstest{year}" srclang="any"'
        reference = f'refset setid="newstest{year}" srclang="any" trglang="{other}"'
        folder = f"test-full/newstest{year}-deen"
        members[f"{folder}-src.{lang}.sgm"] = sgm(sides[lang], pages, source, "en")
        members[f"{folder}-ref.{other}.sgm"] = sgm(sides[other], pages, reference, "en")
    return members


def make(folder: Path, pairs: int, seed: int) -> None:
    """Write the mirror; its table comes last, so an unfinished mirror is refused.

    Raises:
        UserError: there are fewer pairs in the demo corpus, or too few for the parts.
    """
    demo = list(zip(read_demo("train", "en"), read_demo("train", "de"), strict=True))
    if not 40 <= pairs <= len(demo):
        raise UserError(f"--pairs {pairs}: must be from 40 to {len(demo)}")
    rng = random.Random(seed)
    chosen = [demo[index] for index in sorted(rng.sample(range(len(demo)), pairs))]
    first = round(pairs * SHARES["europarl"])
    second = first + round(pairs * SHARES["commoncrawl"])
    crawl = damage(chosen[first:second], rng)
    tests = max(10, min(500, pairs // 10))
    archives = {
        "wmt13/training-parallel-europarl-v7.tgz": training_members(
            "training/europarl-v7", chosen[:first], ("cs", "es", "fr")
        ),
        "wmt13/training-parallel-commoncrawl.tgz": training_members(
            "commoncrawl", crawl, ("cs", "fr")
        ),
        "wmt14/training-parallel-nc-v9.tgz": training_members(
            "training/news-commentary-v9", chosen[second:], ("cs", "fr")
        ),
        "wmt13/test.tgz": test_members("valid", tests, 2013),
        "wmt14/test-full.tgz": test_members("test", tests, 2014),
    }
    about = f"A miniature of WMT14, not the published data: {pairs} pairs, seed {seed}."
    write_mirror(folder, archives, about)


def main() -> None:
    make_from_command_line(__doc__, make, PAIRS)


if __name__ == "__main__":
    run_main(main)
