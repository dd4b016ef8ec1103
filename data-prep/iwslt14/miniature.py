"""A small mirror of IWSLT14's archive, made of the demo corpus: for tests and for a look offline.

    miniature.py FOLDER [--pairs N] [--seed N]

The archive has the name, the members and the formats of the published one, so that every step of
the recipe runs on it:

    de-en.tgz       de-en/train.tags.de-en.{de,en}, train.en, README,
                    IWSLT14.{TED.dev2010,TEDX.dev2012,TED.tst2010,…}.de-en.{de,en}.xml
    archives.tsv    size and hash: says that this is other data

The text is software documentation (MPL-2.0, see data-prep/demo), not talks. The same options give
the same bytes (with the same zlib).
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import without_fairseq  # noqa: F401

from rope_fairseq.corpus.miniature import (
    Members,
    make_from_command_line,
    plain,
    read_demo,
    write_mirror,
)
from rope_fairseq.errors import UserError, run_main

PAIRS = 2000
TALK = 20  # lines of a talk
TESTS = ("TED.dev2010", "TED.tst2010", "TED.tst2011", "TED.tst2012", "TEDX.dev2012")
KINDS = {
    "de": ("srcset", 'srclang="german"'),
    "en": ("refset", 'srclang="german" trglang="english" refid="ref"'),
}

Pair = tuple[str, str]  # German, English


def trap(pairs: list[Pair], rng: random.Random) -> list[Pair]:
    """Put into pairs, in place of others, what preparing must get right: each line stays a line,
    and each limit of cleaning is met on both of its sides."""
    traps = [
        ("", ""),  # left out by cleaning, not before
        (" ", "An empty German side."),
        ("\ufeff", "A byte order mark alone."),
        ("eins zwei\rdrei", "one two\rthree"),
        ("eins zwei\u2028drei", "one two\u2028three"),
        ("eins\u00a0zwei drei\tvier", "one\u00a0two three\tfour"),
        ("Fragen &amp; Antworten &lt;b&gt;", "Questions &amp; answers &lt;b&gt;"),
        ("Das ist Johns Buch.", "That\u2019s John's book."),
        ("Ende. Dann kam Dr. Weiss. Er ging.", "The end. Then Dr. White came. He went."),
        ("eins zwei", "one two three"),  # a ratio of 1.5: stays
        ("eins zwei", "one two three four"),
        ("eins zwei drei vier fünf", "one two three"),
        (" ".join(["eins"] * 175), " ".join(["one"] * 175)),  # stays
        (" ".join(["eins"] * 176), " ".join(["one"] * 176)),
        ("x" * 1000, "y" * 1000),  # stays
        ("x" * 1001, "y" * 1001),
        ("ein <b>fettes</b> Wort", "a <b>bold</b> word"),
        ("| a |", "| b |"),
        pairs[0],  # a duplicate: stays
    ]
    places = rng.sample(range(1, len(pairs)), len(traps))
    for place, pair in zip(places, traps, strict=True):
        pairs[place] = pair
    return pairs


def head(number: int, page: str) -> list[str]:
    """What stands before the text of the talk that begins with line ``number``, on either side."""
    return [
        f"<url>http://www.example.org/talks/{page}</url>",
        "<keywords>talks, software, help</keywords>",
        f"<talkid>{number // TALK + 1}</talkid>",
    ]


def train_tags(lines: Sequence[str], pages: Sequence[str]) -> bytes:
    """The training text as WIT3 writes it: talk after talk, the first two lines of each being its
    title and its description."""
    text: list[str] = []
    for number, (line, page) in enumerate(zip(lines, pages, strict=True)):
        if number % TALK == 0:
            text += [*head(number, page), f"<title>{line}</title>"]
        else:
            text.append(f"<description>{line}</description>" if number % TALK == 1 else line)
    return plain(text)


def xml(part: str, lines: Sequence[str], pages: Sequence[str], lang: str) -> bytes:
    """A side of a test set as WIT3 writes it: talks, the segments of each counted from 1, with a
    space before and after the text."""
    kind, languages = KINDS[lang]
    text = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        "<mteval>",
        f'<{kind} setid="iwslt2014-{part}" {languages}>',
    ]
    for number, (line, page) in enumerate(zip(lines, pages, strict=True)):
        if number % TALK == 0:
            text += ["</doc>"] if number else []
            text += [f'<doc docid="{number}" genre="lectures">', *head(number, page)]
            text += ["<title>Not a segment</title>", "<description>Nor this one</description>"]
        text.append(f'<seg id="{number % TALK + 1}"> {line} </seg>')
    text += ["</doc>", f"</{kind}>", "</mteval>"]
    return plain(text)


def test_sets(count: int) -> Members:
    """The members of the test sets, ``count`` pairs each, from the demo's own test set."""
    sides = {lang: read_demo("test", lang) for lang in ("de", "en")}
    # What the script changes, and what it leaves as it is.
    sides["de"][0] = "Fragen &amp; Antworten, \u201ewie geht\u2019s\u201c"
    sides["en"][0] = "Questions &amp; answers, it\u2019s"
    sides["de"][1], sides["en"][1] = "eins zwei\r", "one\u2028two"
    pages = read_demo("test", "src")
    members = {}
    for number, part in enumerate(TESTS):
        chosen = slice(number * count, (number + 1) * count)
        for lang in ("de", "en"):
            name = f"de-en/IWSLT14.{part}.de-en.{lang}.xml"
            members[name] = xml(part, sides[lang][chosen], pages[chosen], lang)
    return members


def make(folder: Path, pairs: int, seed: int) -> None:
    """Write the mirror; its table comes last, so an unfinished mirror is refused.

    Raises:
        UserError: there are fewer pairs in the demo corpus, or too few for the traps.
    """
    demo = list(zip(read_demo("train", "de"), read_demo("train", "en"), strict=True))
    pages = read_demo("train", "src")
    if not 40 <= pairs <= len(demo):
        raise UserError(f"--pairs {pairs}: must be from 40 to {len(demo)}")
    rng = random.Random(seed)
    start = rng.randrange(len(demo) - pairs + 1)
    chosen = trap(demo[start : start + pairs], rng)
    talks = pages[start : start + pairs]
    german, english = ([pair[side] for pair in chosen] for side in (0, 1))
    members = {
        **test_sets(max(4, min(100, pairs // 50))),
        "de-en/README": b"A miniature: software documentation in the format of IWSLT14.\n",
        "de-en/train.en": plain(english),
        "de-en/train.tags.de-en.de": train_tags(german, talks),
        "de-en/train.tags.de-en.en": train_tags(english, talks),
    }
    about = f"A miniature of IWSLT14, not the published data: {pairs} pairs, seed {seed}."
    write_mirror(folder, {"de-en.tgz": members}, about)


def main() -> None:
    make_from_command_line(__doc__, make, PAIRS)


if __name__ == "__main__":
    run_main(main)
