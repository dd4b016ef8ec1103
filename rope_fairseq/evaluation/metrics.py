"""The scores of a translation against its raw reference, each with its kind and signature.

Four numbers that must not be confused:

- **sacreBLEU**: detokenized translation against raw reference, tokenized by sacreBLEU: 13a, and
  its own tokenizer for Chinese, Japanese and Korean (Post, 2018, arXiv 1804.08771). Comparable
  across papers that give the signature.
- **tokenized BLEU**: both sides tokenized by Moses' rules (sacremoses). Comparable only with
  scores on the same tokens; what papers before sacreBLEU printed.
- **compound-split BLEU**: the same tokens with the hyphens inside words set apart, as
  tensor2tensor's ``get_ende_bleu.sh`` does; what Vaswani et al. (2017) and its successors printed
  for English-German, usually 0.7 to 1 above sacreBLEU.
- **chrF2**: F2 of character n-grams (Popović, 2015), on detokenized text.

Of a model of lower-cased or of distributed tokens (:func:`scores_of_tokens`), tokenized BLEU is on
its own tokens, as its papers print it, and the others ignore case.

All are sacreBLEU's own code. ``multi-bleu.perl``, which the older papers ran, computes the same
BLEU from the same tokens, except that it does not smooth: it prints 0 where not a single 4-gram
matches.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacremoses import MosesTokenizer

from rope_fairseq.errors import UserError

_HYPHEN_IN_A_WORD = re.compile(rb"(\S)-(\S)")
_DETOKENIZED = "detokenized translation, raw reference"
_IGNORING_CASE = ", case ignored"


@dataclass(frozen=True)
class Score:
    """One score and what it takes to compute it again.

    Args:
        name: which score.
        value: in points out of 100, except COMET's.
        kind: what was compared, on which tokens.
        signature: sacreBLEU's, or what stands for it.
        digits: how many digits after the point are printed; ``value`` has them all.
    """

    name: str
    value: float
    kind: str
    signature: str
    digits: int = 2

    def __str__(self) -> str:
        return f"{self.name:<20}{self.value:7.{self.digits}f}  {self.kind}\n{'':29}{self.signature}"


def sacre_bleu_metric(language: str, lowercase: bool = False) -> BLEU:
    """sacreBLEU's BLEU with its defaults for a target language.

    Args:
        language: the target language's code.
        lowercase: ignore case; the signature says ``case:lc``.

    Raises:
        UserError: sacreBLEU's tokenizer for the language is not installed (Japanese, Korean).
    """
    try:
        return BLEU(lowercase=lowercase, trg_lang=language)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"--target-lang {language}: sacreBLEU's tokenizer for it is not installed; "
            f'pip install "sacrebleu[{language}]"'
        ) from error


def sacre_bleu(
    hypotheses: Sequence[str], references: Sequence[str], language: str, lowercase: bool = False
) -> Score:
    """sacreBLEU with its defaults, but for case, on detokenized text."""
    metric = sacre_bleu_metric(language, lowercase)
    value = metric.corpus_score(hypotheses, [references]).score
    kind = _DETOKENIZED + _IGNORING_CASE * lowercase
    return Score("sacreBLEU", value, kind, str(metric.get_signature()))


def moses_tokens(lines: Sequence[str], language: str) -> list[str]:
    """The Moses tokens of each line, joined by single spaces.

    As ``tokenizer.perl -l LANGUAGE`` without further switches, but ``& | < > ' " [ ]`` are not
    written as entities: each is one token or at the same place in a token either way, so that no
    n-gram is counted differently. sacremoses follows Moses as it was until November 2018, when
    the papers' scores were made: since then (mosesdecoder pull request 204) the last full stop of
    a line is always a token, while here it stays with an abbreviation or a number (``ist 1.``).
    It departs from either in setting each Han character apart unless the language is Chinese or
    Japanese, and each Hangul unless it is Korean.
    """
    tokenizer = MosesTokenizer(lang=language)
    return [tokenizer.tokenize(line, return_str=True, escape=False) for line in lines]


def split_compounds(tokens: str) -> str:
    """Set the hyphens inside words apart: ``rich-text`` → ``rich ##AT##-##AT## text``.

    The substitution of tensor2tensor's ``get_ende_bleu.sh``, which perl makes in bytes, in one pass
    from left to right. It does not look twice at what it has matched, so that around a part of one
    byte only the first of two hyphens is split: ``a-b-c`` → ``a ##AT##-##AT## b-c``, but
    ``a-ä-c`` → ``a ##AT##-##AT## ä ##AT##-##AT## c``, and ``x--y`` → ``x ##AT##-##AT## -y``.
    Digits are split as letters are; hyphens at the edge of a word, dashes and the no-break hyphen
    stay.
    """
    return _HYPHEN_IN_A_WORD.sub(rb"\1 ##AT##-##AT## \2", tokens.encode()).decode()


def token_bleu_metric() -> BLEU:
    """sacreBLEU's BLEU on tokens as they are."""
    # force: sacreBLEU warns about tokenized input, which is what these scores are about.
    return BLEU(tokenize="none", force=True)


def _bleu_of_tokens(
    name: str, hypotheses: Sequence[str], references: Sequence[str], kind: str
) -> Score:
    metric = token_bleu_metric()
    value = metric.corpus_score(hypotheses, [references]).score
    return Score(name, value, kind, str(metric.get_signature()))


def token_bleus(
    hypotheses: Sequence[str], references: Sequence[str], language: str
) -> tuple[Score, Score]:
    """BLEU on the Moses tokens of both sides in the rules of ``language``, and the same with
    compounds split."""
    hyp = moses_tokens(hypotheses, language)
    ref = moses_tokens(references, language)
    kind = f"both sides tokenized by sacremoses {version('sacremoses')}, language {language}"
    return _both_token_bleus(hyp, ref, kind)


def _both_token_bleus(
    hypotheses: Sequence[str], references: Sequence[str], kind: str
) -> tuple[Score, Score]:
    tokenized = _bleu_of_tokens("tokenized BLEU", hypotheses, references, kind)
    hyp = [split_compounds(line) for line in hypotheses]
    ref = [split_compounds(line) for line in references]
    return tokenized, _bleu_of_tokens("compound-split BLEU", hyp, ref, f"{kind}, compounds split")


def chrf2(hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Score:
    """chrF2 with sacreBLEU's defaults, but for case, on detokenized text."""
    metric = CHRF(lowercase=lowercase)
    value = metric.corpus_score(hypotheses, [references]).score
    kind = _DETOKENIZED + _IGNORING_CASE * lowercase
    return Score("chrF2", value, kind, str(metric.get_signature()))


def all_scores(hypotheses: Sequence[str], references: Sequence[str], language: str) -> list[Score]:
    """sacreBLEU, tokenized BLEU, compound-split BLEU and chrF2, in this order."""
    return [
        sacre_bleu(hypotheses, references, language),
        *token_bleus(hypotheses, references, language),
        chrf2(hypotheses, references),
    ]


def scores_of_tokens(
    hypotheses: Sequence[str],
    references: Sequence[str],
    texts: Sequence[str],
    raw_references: Sequence[str],
    language: str,
    lowercase: bool,
) -> list[Score]:
    """The scores of :func:`all_scores` where the model's tokens are those to score.

    Args:
        hypotheses, references: tokens; nothing is done to them.
        texts: the hypotheses, detokenized.
        raw_references: the references as people read them.
        language: the target language's code.
        lowercase: whether the scores on detokenized text ignore case.
    """
    kind = f"tokens of the corpus{', lower-cased' if lowercase else ''}, as the model has them"
    return [
        sacre_bleu(texts, raw_references, language, lowercase),
        *_both_token_bleus(hypotheses, references, kind),
        chrf2(texts, raw_references, lowercase),
    ]
