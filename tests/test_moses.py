"""rope_fairseq.moses: exactly the results of sacremoses, on real text and on nasty characters."""

import lzma
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from rope_fairseq.moses import FastNormalizer, FastTokenizer, needed_string
from rope_fairseq.text import clean

ROOT = Path(__file__).resolve().parent.parent
# Lines tried for each language; sacremoses takes 50 ms for one of Chinese.
LINES = {"en": 400, "de": 400, "fr": 200, "it": 100, "cs": 100, "fi": 100, "zh": 20, "xx": 100}

# Pieces of which the rules of sacremoses are made, and characters that lie at their edges.
NASTY = [
    *" \t\r\n\x00\x0b\x1c\x1f\x7f\x85\u00a0\u2028\u3000\ufeff",
    *".,;:!?()[]{}<>\"'`-–—_/\\%&|@#$€£*+=~^",
    *"„“”‘’‚´…«»°º§¡¿。、？「」",
    *"aAzZ09äßÉøſıǆ²½٣অক্漢字ひハ한\u0301\u0308\U0001f600",
    *("..", "...", ". . .", "''", "´´", "``", "DOTMULTI", "DOTDOTMULTI", "cm", "ºC", "nº\u00a0"),
    *("e.g.", "No.", "Nr.", "Mr.", "Art.", "1.000,50", "10 %", "10\u00a0000", "5,300", "s'", "l'"),
    *(
        "don't",
        "'s ",
        "a-b",
        "@-@",
        "www.x.org",
        " word ",
        " Wort",
        "THISISPROTECTED000",
        ".'",
        '."',
    ),
]


class Both:
    """sacremoses and ours, side by side."""

    def __init__(self, lang: str) -> None:
        self.normalizers = [
            (MosesPunctNormalizer(lang, norm_numbers=n), FastNormalizer(lang, norm_numbers=n))
            for n in (False, True)
        ]
        self.tokenizers = MosesTokenizer(lang), FastTokenizer(lang)

    def check(self, line: str) -> None:
        texts = {line}
        for theirs, ours in self.normalizers:
            expected = theirs.normalize(line)
            assert ours.normalize(line) == expected, repr(line)
            texts.add(expected)
        for text in texts:
            for options in ({"escape": False}, {"escape": True, "aggressive_dash_splits": True}):
                expected, found = (
                    tokenizer.tokenize(text, return_str=True, **options)
                    for tokenizer in self.tokenizers
                )
                assert found == expected, repr(text)


def nasty_lines(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choices(NASTY, k=rng.randint(0, 25)))


@pytest.mark.parametrize("lang", LINES)
def test_nasty_strings_give_what_sacremoses_gives(lang: str) -> None:
    both = Both(lang)
    for line in nasty_lines(LINES[lang], seed=1):
        both.check(line)
        both.check(clean(line))


@pytest.mark.parametrize("lang", ["en", "de"])
def test_the_demo_corpus_gives_what_sacremoses_gives(lang: str) -> None:
    both = Both(lang)
    packed = ROOT / "data-prep" / "demo" / f"train.{lang}.xz"
    for line in lzma.decompress(packed.read_bytes()).decode("utf-8").split("\n")[::25]:
        both.check(line)


@pytest.mark.parametrize("lang", ["en", "de"])
def test_messages_and_manuals_give_what_sacremoses_gives(lang: str) -> None:
    path = ROOT.parent / "shared" / "data" / "packages-ende" / f"train.{lang}.xz"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    both = Both(lang)
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as stream:
        for number, line in enumerate(stream):
            if number % 400 == 0:
                both.check(line)


@pytest.mark.parametrize("lang", LINES)
def test_a_string_is_known_that_each_rule_needs(lang: str) -> None:
    # Without it only speed is lost.
    for pattern, _ in MosesPunctNormalizer(lang, norm_numbers=False).substitutions:
        assert needed_string(pattern), pattern
