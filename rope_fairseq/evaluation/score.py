"""Score a translation against its raw reference, every score with its kind and signature.

    python -m rope_fairseq.evaluation.score --hyp test.hyp.de --ref test.de --target-lang de

With ``--tokenized --raw-ref test.raw.de --text MODEL/text.json`` both files are tokens as a model
was trained on them, and the raw reference comes beside.

The scores are those of :mod:`~rope_fairseq.evaluation.metrics`, BLEU by sentence length that of
:mod:`~rope_fairseq.evaluation.buckets`. A byte order mark and the carriage returns of Windows line
ends are not part of the text; otherwise the numbers are those of sacreBLEU's own command.
"""

from collections.abc import Sequence
from pathlib import Path

from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.evaluation.buckets import DEFAULT_BOUNDS, bucketed_bleu, parse_bounds
from rope_fairseq.evaluation.comet_score import comet_score
from rope_fairseq.evaluation.metrics import all_scores, scores_of_tokens
from rope_fairseq.evaluation.read import read_beside, read_references, read_translation
from rope_fairseq.evaluation.report import Report, parse_about, read_report, write_report
from rope_fairseq.evaluation.tokens import Tokens, add_token_options, given_tokens


def score_files(
    hypothesis: Path,
    reference: Path,
    language: str,
    *,
    source: Path | None = None,
    generate_output: bool = False,
    bounds: Sequence[int] = DEFAULT_BOUNDS,
    comet: str | None = None,
    tokens: Tokens | None = None,
) -> Report:
    """All scores of a translation.

    Args:
        hypothesis: detokenized text, one sentence a line, or fairseq-generate's output.
        reference: the raw reference, one sentence a line.
        language: the target language's code, for Moses' rules.
        source: the raw source, one sentence a line; its lengths make the buckets.
        generate_output: whether ``hypothesis`` is fairseq-generate's output.
        bounds: see :func:`~rope_fairseq.evaluation.buckets.bucketed_bleu`.
        comet: a COMET model's name or path; needs ``source``.
        tokens: ``hypothesis`` and ``reference`` are tokens, and this is what else there is; without
            it they are text.

    Raises:
        UserError: a file is empty, or they do not belong together line by line.
    """
    if comet is not None and source is None:
        raise UserError(f"--comet {comet}: needs the source text, --src FILE")
    references = read_references(reference)
    hypotheses = read_translation(hypothesis, reference, len(references), generate_output)
    sources = None if source is None else read_beside(source, reference, len(references))
    lowercase = False
    if tokens is None:
        scores = all_scores(hypotheses, references, language)
    else:
        lowercase = tokens.lowercase
        both = hypotheses, references
        # From here on, what people read.
        references = read_beside(tokens.raw_reference, reference, len(references))
        hypotheses = tokens.detokenize(hypotheses, language)
        scores = scores_of_tokens(*both, hypotheses, references, language, lowercase)
    if comet is not None and sources is not None:
        scores.append(comet_score(sources, hypotheses, references, comet))
    buckets = bucketed_bleu(hypotheses, references, language, sources, bounds, lowercase)
    return Report(scores, buckets)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m rope_fairseq.evaluation.score",
        description="Score a translation against its raw reference.",
    )
    parser.add_argument("--hyp", type=Path, metavar="FILE", help="the translation")
    parser.add_argument("--ref", type=Path, metavar="FILE", help="the raw reference")
    parser.add_argument(
        "--target-lang", metavar="LANG", help="whose Moses rules to tokenize both sides by"
    )
    parser.add_argument(
        "--src", type=Path, metavar="FILE", help="the raw source: its lengths make the buckets"
    )
    parser.add_argument(
        "--generate-output",
        action="store_true",
        help="--hyp is what fairseq-generate printed, not plain text",
    )
    add_token_options(parser, "--hyp and --ref")
    parser.add_argument(
        "--buckets",
        metavar="N,N,…",
        help="largest numbers of words of the groups that BLEU by length is given for "
        f"(default {','.join(map(str, DEFAULT_BOUNDS))})",
    )
    parser.add_argument(
        "--comet",
        metavar="MODEL",
        help="COMET as well, by this model (a name is downloaded, a path is not); needs --src "
        "and unbabel-comet",
    )
    parser.add_argument(
        "--about",
        nargs="+",
        action="extend",
        metavar="NAME=VALUE",
        help="stored and printed with the scores",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores here too")
    parser.add_argument("--quiet", action="store_true", help="write --json and print no scores")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="print what --json has written; goes alone"
    )
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.show is not None:
        others = vars(arguments) | {"show": None}
        if any(others.values()):
            raise UserError(f"--show {arguments.show}: goes alone, without other options")
        print(read_report(arguments.show))
        return
    if None in (arguments.hyp, arguments.ref, arguments.target_lang):
        raise UserError("--hyp, --ref and --target-lang are needed (or --show alone)")
    if arguments.quiet and arguments.json is None:
        raise UserError("--quiet: needs --json FILE, or the scores are lost")
    tokens = given_tokens(arguments)
    about = parse_about(arguments.about or [])
    bounds = DEFAULT_BOUNDS if arguments.buckets is None else parse_bounds(arguments.buckets)
    report = score_files(
        arguments.hyp,
        arguments.ref,
        arguments.target_lang,
        source=arguments.src,
        generate_output=arguments.generate_output,
        bounds=bounds,
        comet=arguments.comet,
        tokens=tokens,
    )
    report = Report(report.scores, report.buckets, about)
    if arguments.json is not None:
        write_report(arguments.json, report)
    if not arguments.quiet:
        print(report)


if __name__ == "__main__":
    run_main(main)
