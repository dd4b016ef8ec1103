"""Score a translation against its raw reference, every score with its kind and signature.

    python -m rope_fairseq.evaluation.score --hyp test.hyp.de --ref test.de --target-lang de

Three numbers that must not be confused:

- **sacreBLEU**: detokenized translation against raw reference, tokenized by sacreBLEU's 13a
  (Post, 2018, arXiv 1804.08771). Comparable across papers that give the signature.
- **tokenized BLEU**: both sides tokenized by Moses' rules (sacremoses). Comparable only with
  scores on the same tokens; what papers before sacreBLEU printed.
- **chrF2**: F2 of character n-grams (Popović, 2015), on detokenized text.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacremoses import MosesTokenizer

from rope_fairseq.errors import UserError, run_main
from rope_fairseq.files import replacing
from rope_fairseq.lines import read_lines

# How sentencepiece and subword-nmt mark the pieces of a word.
_SUBWORD = re.compile("\u2581|@@ ")


@dataclass(frozen=True)
class Score:
    """One score: ``value`` in points out of 100, and what it takes to compute it again."""

    name: str
    value: float
    kind: str
    signature: str

    def __str__(self) -> str:
        return f"{self.name:<14}{self.value:6.2f}  {self.kind}\n{'':22}{self.signature}"


def sacre_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """sacreBLEU with its defaults, on detokenized text."""
    metric = BLEU()
    value = metric.corpus_score(hypotheses, [references]).score
    kind = "detokenized translation, raw reference"
    return Score("sacreBLEU", value, kind, str(metric.get_signature()))


def tokenized_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> Score:
    """BLEU on the Moses tokens of both sides, in the rules of ``language``."""
    tokenizer = MosesTokenizer(lang=language)

    def tokens(lines: Sequence[str]) -> list[str]:
        return [tokenizer.tokenize(line, return_str=True, escape=False) for line in lines]

    # force: sacreBLEU warns about tokenized input, which is what this score is about.
    metric = BLEU(tokenize="none", force=True)
    value = metric.corpus_score(tokens(hypotheses), [tokens(references)]).score
    kind = f"both sides tokenized by sacremoses {version('sacremoses')}, language {language}"
    return Score("tokenized BLEU", value, kind, str(metric.get_signature()))


def chrf2(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """chrF2 with sacreBLEU's defaults, on detokenized text."""
    metric = CHRF()
    value = metric.corpus_score(hypotheses, [references]).score
    kind = "detokenized translation, raw reference"
    return Score("chrF2", value, kind, str(metric.get_signature()))


def read_generate_output(path: Path, count: int) -> list[str]:
    """The detokenized hypotheses (``D-ID``) of fairseq-generate's output, in order of their ids.

    Args:
        path: what fairseq-generate printed, or its ``generate-test.txt``.
        count: how many sentences there are: the ids must be 0 … count-1, each once.

    Raises:
        UserError: an id is missing, there twice or too large, or the text is still in pieces.
    """
    hypotheses: dict[int, str] = {}
    for line in read_lines(path):
        match = re.fullmatch(r"D-(\d+)\t[^\t]*\t(.*)", line, re.DOTALL)
        if match is None:
            continue
        number = int(match[1])
        if number in hypotheses:
            raise UserError(f"{path}: id {number} is there twice; generate with --nbest 1")
        hypotheses[number] = match[2]
    missing = [number for number in range(count) if number not in hypotheses]
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of {count} sentences have no translation (no line D-ID), "
            f"the first is id {missing[0]}"
        )
    if len(hypotheses) > count:
        raise UserError(
            f"{path}: id {max(hypotheses)}, but the reference has only {count} lines (ids from 0)"
        )
    if sum(bool(_SUBWORD.search(text)) for text in hypotheses.values()) > count / 2:
        raise UserError(
            f"{path}: the D- lines are subword pieces, not text; give fairseq-generate the "
            "--bpe and --tokenizer that the data was made with"
        )
    return [hypotheses[number] for number in range(count)]


def score_files(
    hypothesis: Path, reference: Path, language: str, generate_output: bool = False
) -> list[Score]:
    """All scores of a translation.

    Args:
        hypothesis: detokenized text, one sentence a line, or fairseq-generate's output.
        reference: the raw reference, one sentence a line.
        language: the target language's code, for Moses' rules.
        generate_output: whether ``hypothesis`` is fairseq-generate's output.

    Raises:
        UserError: a file is empty, or the two do not belong together line by line.
    """
    references = list(read_lines(reference))
    if not references:
        raise UserError(f"{reference}: empty, there is nothing to score")
    if generate_output:
        hypotheses = read_generate_output(hypothesis, len(references))
    else:
        hypotheses = list(read_lines(hypothesis))
    if not hypotheses:
        raise UserError(f"{hypothesis}: empty, there is nothing to score")
    if len(hypotheses) != len(references):
        raise UserError(
            f"{hypothesis} has {len(hypotheses)} lines, but {reference} has {len(references)}"
        )
    return [
        sacre_bleu(hypotheses, references),
        tokenized_bleu(hypotheses, references, language),
        chrf2(hypotheses, references),
    ]


def write_scores(path: Path, scores: Sequence[Score]) -> None:
    """Write scores, to all their digits, as a JSON list."""
    text = json.dumps([asdict(score) for score in scores], indent=2, ensure_ascii=False)
    with replacing(path) as file:
        file.write(f"{text}\n".encode())


def read_scores(path: Path) -> list[Score]:
    """Scores that :func:`write_scores` has written."""
    try:
        return [Score(**score) for score in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a file of scores ({error})") from error


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rope_fairseq.evaluation.score",
        description="Score a translation against its raw reference.",
        allow_abbrev=False,
    )
    parser.add_argument("--hyp", type=Path, metavar="FILE", help="the translation")
    parser.add_argument("--ref", type=Path, metavar="FILE", help="the raw reference")
    parser.add_argument(
        "--target-lang", metavar="LANG", help="whose Moses rules to tokenize both sides by"
    )
    parser.add_argument(
        "--generate-output",
        action="store_true",
        help="--hyp is what fairseq-generate printed, not plain text",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores here too")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what --json has written")
    arguments = parser.parse_args()

    if arguments.show is not None:
        scores = read_scores(arguments.show)
    elif None in (arguments.hyp, arguments.ref, arguments.target_lang):
        raise UserError("--hyp, --ref and --target-lang are needed (or --show alone)")
    else:
        scores = score_files(
            arguments.hyp, arguments.ref, arguments.target_lang, arguments.generate_output
        )
    if arguments.json is not None:
        write_scores(arguments.json, scores)
    for score in scores:
        print(score)


if __name__ == "__main__":
    run_main(main)
