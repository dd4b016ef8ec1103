"""Tokenized and compound-split BLEU equal what is worked out by hand, without the code under test:
tokens written out in a table, and BLEU from n-grams counted here."""

import math
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from sacremoses import MosesDetokenizer, MosesTokenizer

from rope_fairseq.evaluation.metrics import all_scores, moses_tokens, split_compounds

AT = "##AT##-##AT##"
# Raw text, its Moses tokens (tokenizer.perl -l de), the same with compounds split (None: as
# they are), written by hand. Every line has an "und", which the hypotheses below replace.
LINES = [
    # Hyphens inside words, in chains, at edges, alone.
    (
        "Ein Drop-down-Menü und mehr.",
        "Ein Drop-down-Menü und mehr .",
        f"Ein Drop {AT} down {AT} Menü und mehr .",
    ),
    ("Über-Öl und Maß-Ärger", "Über-Öl und Maß-Ärger", f"Über {AT} Öl und Maß {AT} Ärger"),
    ("a-b-c und d", "a-b-c und d", f"a {AT} b-c und d"),
    ("a-b-c-d und aa-bb-cc", "a-b-c-d und aa-bb-cc", f"a {AT} b-c {AT} d und aa {AT} bb {AT} cc"),
    ("x--y und z", "x--y und z", f"x {AT} -y und z"),
    ("--lang-opt und ---x", "--lang-opt und ---x", f"- {AT} lang {AT} opt und - {AT} -x"),
    ("-a und b-", "-a und b-", None),
    ("a - b und c -- d", "a - b und c -- d", None),
    ("Ost- und Westseite, Nord-, Süd-", "Ost- und Westseite , Nord- , Süd-", None),
    (
        "Die (Ost-West-)Achse und mehr",
        "Die ( Ost-West- ) Achse und mehr",
        f"Die ( Ost {AT} West- ) Achse und mehr",
    ),
    ("A\u00a0-\u00a0B und C-D", "A - B und C-D", f"A - B und C {AT} D"),
    # Digits.
    ("Seite 10-20 und mehr", "Seite 10-20 und mehr", f"Seite 10 {AT} 20 und mehr"),
    ("3-4-5 und 10-20-30", "3-4-5 und 10-20-30", f"3 {AT} 4-5 und 10 {AT} 20 {AT} 30"),
    ("5,3-mal und 1.5-2.5", "5,3-mal und 1.5-2.5", f"5,3 {AT} mal und 1.5 {AT} 2.5"),
    # Quotes and apostrophes.
    (
        'Er sagte "ja-ja" und ging.',
        'Er sagte " ja-ja " und ging .',
        f'Er sagte " ja {AT} ja " und ging .',
    ),
    ('"E"-Mail und -"X"', '" E " -Mail und - " X "', None),
    (
        "Das ist's: A-1 und B-'2!",
        "Das ist ' s : A-1 und B- ' 2 !",
        f"Das ist ' s : A {AT} 1 und B- ' 2 !",
    ),
    # Entities stay text; each of their signs is a token.
    (
        "Ton&amp;Bild-Kanal und x",
        "Ton & amp ; Bild-Kanal und x",
        f"Ton & amp ; Bild {AT} Kanal und x",
    ),
    (
        "&lt;b-c&gt; und &quot;x-y&quot;",
        "& lt ; b-c & gt ; und & quot ; x-y & quot ;",
        f"& lt ; b {AT} c & gt ; und & quot ; x {AT} y & quot ;",
    ),
    (
        "a & b | c und <d-e> [f-g]",
        "a & b | c und < d-e > [ f-g ]",
        f"a & b | c und < d {AT} e > [ f {AT} g ]",
    ),
    # Unicode: no-break hyphen, dash, soft hyphen and a combining accent are tokens of their own.
    ("A\u2011B und C-D", "A \u2011 B und C-D", f"A \u2011 B und C {AT} D"),
    ("1990–1995 und A—Z-Liste", "1990 – 1995 und A — Z-Liste", f"1990 – 1995 und A — Z {AT} Liste"),
    (
        "Wort\u00adteil und Teil-Wort",
        "Wort \u00ad teil und Teil-Wort",
        f"Wort \u00ad teil und Teil {AT} Wort",
    ),
    (
        "U\u0308-Wagen und Ü-Wagen",
        "U \u0308 -Wagen und Ü-Wagen",
        f"U \u0308 -Wagen und Ü {AT} Wagen",
    ),
    # Perl reads bytes: it does not use up the one sign between two hyphens where that has several.
    ("A-ä-B und A-a-B", "A-ä-B und A-a-B", f"A {AT} ä {AT} B und A {AT} a-B"),
    ("д-ж-з und かな-カナ", "д-ж-з und かな-カナ", f"д {AT} ж {AT} з und かな {AT} カナ"),
    # sacremoses sets Han apart unless the language is Chinese or Japanese; Moses' own does not.
    ("漢字-仮名 und 中-日", "漢 字 - 仮 名 und 中 - 日", None),
    # Other signs.
    (
        "i-v@firma-nord.de und co",
        "i-v @ firma-nord.de und co",
        f"i {AT} v @ firma {AT} nord.de und co",
    ),
    ("Das und Dr. X-Y ist 1.", "Das und Dr. X-Y ist 1.", f"Das und Dr. X {AT} Y ist 1."),
    ("Dr. No-Name und so...", "Dr. No-Name und so ...", f"Dr. No {AT} Name und so ..."),
    ("A/B-Regel und C_D-E", "A / B-Regel und C _ D-E", f"A / B {AT} Regel und C _ D {AT} E"),
]


@pytest.mark.parametrize(("raw", "tokens", "split"), LINES)
def test_tokens_are_those_written_by_hand(raw, tokens, split):
    assert moses_tokens([raw], "de") == [tokens]
    assert split_compounds(tokens) == (split or tokens)


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of Papineni et al. (2002) on tokens between spaces, precisions as fractions."""
    log_precision = 0.0
    for order in range(1, 5):
        matched = total = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            counts = [
                Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))
                for words in (hypothesis.split(" "), reference.split(" "))
            ]
            matched += (counts[0] & counts[1]).total()
            total += counts[0].total()
        log_precision += math.log(Fraction(matched, total)) / 4
    lengths = [sum(line.count(" ") + 1 for line in side) for side in (hypotheses, references)]
    shorter = min(0.0, 1 - lengths[1] / lengths[0])
    return 100 * math.exp(log_precision + shorter)


@pytest.mark.parametrize(("found", "new"), [(" und ", " oder "), (" und mehr", ""), ("", "")])
def test_bleu_equals_n_grams_counted_on_the_tokens_written_by_hand(found, new):
    """Hypotheses in which every second line has ``new`` in the place of ``found``."""
    sides = []
    for column in range(3):
        texts = [line[column] or line[1] for line in LINES]
        changed = [
            text.replace(found, new) if number % 2 else text for number, text in enumerate(texts)
        ]
        # One sentence for another: unlike texts, of other lengths.
        changed[0], changed[3] = changed[3], changed[0]
        sides.append((changed, texts))
    _, tokenized, split, _ = all_scores(*sides[0], "de")
    assert tokenized.value == pytest.approx(bleu(*sides[1]), rel=1e-12)
    assert split.value == pytest.approx(bleu(*sides[2]), rel=1e-12)
    assert 20 < tokenized.value < 100 and split.value != pytest.approx(tokenized.value, abs=0.1)


def test_the_two_are_told_apart_by_name_and_kind():
    lines = ["Ein Drop-down-Menü und mehr."]
    _, tokenized, split, _ = all_scores(lines, lines, "de")
    assert (tokenized.name, split.name) == ("tokenized BLEU", "compound-split BLEU")
    assert "language de" in tokenized.kind and "compounds split" not in tokenized.kind
    assert split.kind == f"{tokenized.kind}, compounds split"
    assert "tok:none" in split.signature


def random_lines(count: int, alphabet: str) -> list[str]:
    rng = random.Random(1)
    return ["".join(rng.choices(alphabet, k=rng.randint(0, 12))) for _ in range(count)]


@pytest.mark.skipif(shutil.which("perl") is None, reason="needs perl")
def test_compounds_are_split_as_tensor2tensors_perl_splits_them():
    lines = [line[1] for line in LINES] + random_lines(3000, "aaü1-----  .&")
    command = ["perl", "-ple", r"s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g"]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", check=True)
    assert [split_compounds(line) for line in lines] == done.stdout.split("\n")[:-1]


@pytest.mark.parametrize("language", ["de", "en", "fr"])
def test_no_n_gram_depends_on_mosess_entities(language):
    """tokenizer.perl writes some signs as entities; scored are the signs themselves."""
    tokenizer, unescape = MosesTokenizer(language), MosesDetokenizer(language).unescape_xml
    lines = random_lines(2000, "ab1---''\"\"&|<>[];. ") + [line[0] for line in LINES]
    for line, tokens in zip(lines, moses_tokens(lines, language), strict=True):
        escaped = split_compounds(tokenizer.tokenize(line, return_str=True))
        words = split_compounds(tokens).split()
        assert [unescape(word) for word in escaped.split()] == words
