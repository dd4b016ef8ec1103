"""BLEU by sentence length: where a system loses on long sentences, one number hides it.

Sentences are grouped by the number of words of the source if there is one (as in Bahdanau et al.,
2015, arXiv 1409.0473, and Luong et al., 2015), else of the reference (as compare-mt does; Neubig
et al., 2019). Words are what white space separates in the raw text: no tokenizer decides the
groups (:func:`bleu_by_lengths` takes lengths that were counted otherwise). Each group has its
corpus BLEU, sacreBLEU's with its defaults; their mean is not the BLEU of the whole, and in a group
of a few sentences the number means little: the count stands beside.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from rope_fairseq.errors import UserError
from rope_fairseq.evaluation.metrics import sacre_bleu_metric

DEFAULT_BOUNDS = (10, 20, 30, 40, 50, 60)


@dataclass(frozen=True)
class Bucket:
    """The sentences of some lengths.

    Args:
        by: what is counted: the words of the ``source`` or of the ``reference``, or ``source
            tokens``.
        shortest: the least number of them.
        longest: the largest number of them; None in the last bucket.
        sentences: how many sentences have such a length.
        value: their corpus BLEU in points out of 100; None without sentences.
        signature: sacreBLEU's; empty without sentences.
        length_ratio: sacreBLEU's tokens of the translations for each one of the references; None
            without sentences, and where an older version wrote it.
    """

    by: str
    shortest: int
    longest: int | None
    sentences: int
    value: float | None
    signature: str
    length_ratio: float | None = None

    @property
    def words(self) -> str:
        """``up to 10``, ``11–20``, ``21`` or ``over 60``."""
        if self.longest is None:
            return f"over {self.shortest - 1}"
        if self.shortest == 0:
            return f"up to {self.longest}"
        if self.shortest == self.longest:
            return str(self.longest)
        return f"{self.shortest}–{self.longest}"


def parse_bounds(text: str) -> tuple[int, ...]:
    """The largest lengths of all buckets but the last: ``10,20`` → (10, 20).

    Raises:
        UserError: they are not whole numbers above 0 in rising order.
    """
    if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        bounds = tuple(int(part) for part in text.split(","))
        if all(low < high for low, high in zip((0, *bounds), bounds, strict=False)):
            return bounds
    raise UserError(
        f"--buckets {text}: must be whole numbers above 0 in rising order, such as 10,20,30"
    )


def bucketed_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    language: str,
    sources: Sequence[str] | None = None,
    bounds: Sequence[int] = DEFAULT_BOUNDS,
    lowercase: bool = False,
) -> list[Bucket]:
    """BLEU of the sentences of each length.

    Args:
        hypotheses, references: detokenized text, the same number of lines.
        language: the target language's code.
        sources: the source text; without it the reference's words are counted.
        bounds: the largest number of words of all buckets but the last, rising.
        lowercase: ignore case.

    Returns:
        ``len(bounds) + 1`` buckets, empty ones included; an empty line has 0 words and belongs to
        the first.
    """
    by, counted = ("reference", references) if sources is None else ("source", sources)
    lengths = [len(line.split()) for line in counted]
    return bleu_by_lengths(hypotheses, references, language, lengths, by, bounds, lowercase)


def bleu_by_lengths(
    hypotheses: Sequence[str],
    references: Sequence[str],
    language: str,
    lengths: Sequence[int],
    by: str,
    bounds: Sequence[int],
    lowercase: bool = False,
) -> list[Bucket]:
    """:func:`bucketed_bleu` with one length for each line, counted by the caller.

    Args:
        by: what was counted.
    """
    members: list[list[int]] = [[] for _ in range(len(bounds) + 1)]
    for number, length in enumerate(lengths):
        members[bisect_left(bounds, length)].append(number)
    metric = sacre_bleu_metric(language, lowercase)
    buckets = []
    for index, numbers in enumerate(members):
        shortest = bounds[index - 1] + 1 if index else 0
        longest = bounds[index] if index < len(bounds) else None
        value, signature, ratio = None, "", None
        if numbers:
            chosen = [hypotheses[number] for number in numbers]
            score = metric.corpus_score(chosen, [[references[number] for number in numbers]])
            value, signature, ratio = score.score, str(metric.get_signature()), score.ratio
        buckets.append(Bucket(by, shortest, longest, len(numbers), value, signature, ratio))
    return buckets
