"""BLEU by sentence length: who belongs where, and that each group's BLEU is sacreBLEU's."""

import pytest
from sacrebleu.metrics.bleu import BLEU

from rope_fairseq.errors import UserError
from rope_fairseq.evaluation.buckets import (
    DEFAULT_BOUNDS,
    Bucket,
    bleu_by_lengths,
    bucketed_bleu,
    parse_bounds,
)
from rope_fairseq.evaluation.report import Report
from rope_fairseq.evaluation.score import score_files


def words(count: int, first: int = 0) -> str:
    return " ".join(f"w{number}" for number in range(first, first + count))


def test_sentences_stand_in_the_group_of_their_length():
    lengths = [0, 1, 9, 10, 11, 20, 21, 30, 40, 41, 50, 60, 61, 500]
    references = [words(length) for length in lengths]
    buckets = bucketed_bleu(references, references, "de")
    assert [(b.shortest, b.longest, b.sentences) for b in buckets] == [
        (0, 10, 4),
        (11, 20, 2),
        (21, 30, 2),
        (31, 40, 1),
        (41, 50, 2),
        (51, 60, 1),
        (61, None, 2),
    ]
    labels = ["up to 10", "11–20", "21–30", "31–40", "41–50", "51–60", "over 60"]
    assert [bucket.words for bucket in buckets] == labels
    assert {bucket.by for bucket in buckets} == {"reference"}
    assert [round(bucket.value, 9) for bucket in buckets] == [100] * 7


def test_words_are_what_any_white_space_separates():
    lines = ["a\u00a0b  c\td\u2028e ", "a-b-c, d."]
    counts = [b.sentences for b in bucketed_bleu(lines, lines, "de", bounds=[2, 4, 5])]
    assert counts == [1, 0, 1, 0]
    labels = [b.words for b in bucketed_bleu(lines, lines, "de", bounds=[2, 4, 5])]
    assert labels == ["up to 2", "3–4", "5", "over 5"]


def test_each_groups_bleu_is_sacrebleus_on_its_sentences():
    references = [words(12, number) for number in range(6)] + [words(3, 50), words(4, 60)]
    hypotheses = [line.replace("w5", "x").replace("w62", "y") for line in references]
    short, long, none = bucketed_bleu(hypotheses, references, "de", bounds=[10, 20])
    metric = BLEU()
    assert short.value == metric.corpus_score(hypotheses[6:], [references[6:]]).score
    assert long.value == metric.corpus_score(hypotheses[:6], [references[:6]]).score
    assert 0 < short.value < 100 and 0 < long.value < 100 and short.value != long.value
    assert short.signature == long.signature == str(metric.get_signature())
    assert none == Bucket("reference", 21, None, 0, None, "")


def test_the_sources_words_are_counted_if_there_is_a_source(tmp_path):
    texts = {"hyp": [words(3), words(3)], "ref": [words(3), words(3)], "src": ["a", words(15)]}
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    files = (tmp_path / "hyp", tmp_path / "ref", "de")
    report = score_files(*files, source=tmp_path / "src", bounds=[10])
    assert [(b.by, b.sentences) for b in report.buckets] == [("source", 1), ("source", 1)]
    report = score_files(*files, bounds=[10])
    assert [(b.by, b.sentences) for b in report.buckets] == [("reference", 2), ("reference", 0)]


def test_an_empty_group_is_printed_without_a_score():
    buckets = bucketed_bleu(["a b c d"] * 1234, ["a b c d"] * 1234, "de", bounds=[10])
    assert str(Report([], buckets)).split("\n") == [
        "sacreBLEU by the number of words of the reference",
        "  up to 10           100.00  1,234 sentences",
        "  over 10                 –  0 sentences",
    ]


def test_bounds_are_read_and_wrong_ones_refused():
    assert parse_bounds("10,20,30,40,50,60") == DEFAULT_BOUNDS
    assert parse_bounds("5") == (5,)
    wrong = ("", "0", "0,10", "10,10", "20,10", "10,", "a", "-5", "1.5", "10 20", "٣", "9" * 5000)
    for text in wrong:
        with pytest.raises(UserError, match=r"^--buckets .*rising order, such as 10,20,30$"):
            parse_bounds(text)


def test_lengths_may_be_counted_by_the_caller():
    references = [words(8, 10 * number) for number in range(4)]
    hypotheses = [*references[:2], words(4, 20), words(4, 30)]
    first, second, over = bleu_by_lengths(
        hypotheses, references, "de", [32, 33, 64, 65], "source tokens", [32, 64]
    )
    assert [(b.shortest, b.longest, b.sentences) for b in (first, second, over)] == [
        (0, 32, 1),
        (33, 64, 2),
        (65, None, 1),
    ]
    assert first.by == "source tokens" and first.value == pytest.approx(100)
    assert second.value == BLEU().corpus_score(hypotheses[1:3], [references[1:3]]).score
    # Tokens of the translations for each of the references: 8 + 4 of 8 + 8.
    assert [b.length_ratio for b in (first, second, over)] == [1, 0.75, 0.5]
