"""Compare translations of one test set with a baseline: scores, confidence intervals, p-values.

    python -m rope_fairseq.evaluation.compare --baseline a.de --hyp b.de --ref test.de \\
        --target-lang de

With ``--tokenized --raw-ref test.raw.de --text MODEL/text.json`` the files are tokens as a model
was trained on them.

The tests are those of :mod:`~rope_fairseq.evaluation.significance`, for sacreBLEU and chrF2, and
for tokenized BLEU where the files are tokens. Two
runs of one system that differ in their seed alone can come out different: the tests know the
spread over sentences, not that over trainings.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rope_fairseq.errors import Parser, run_main
from rope_fairseq.evaluation.read import read_beside, read_references, read_translation
from rope_fairseq.evaluation.significance import (
    DEFAULT_SEED,
    METHODS,
    PairedTest,
    of_text,
    of_tokens,
    paired_tests,
)
from rope_fairseq.evaluation.tokens import Tokens, add_token_options, given_tokens
from rope_fairseq.files import replacing


def compare_files(
    baseline: Path,
    hypotheses: Sequence[Path],
    reference: Path,
    language: str,
    *,
    methods: Sequence[str] = tuple(METHODS),
    trials: int | None = None,
    seed: int = DEFAULT_SEED,
    generate_output: bool = False,
    tokens: Tokens | None = None,
) -> list[PairedTest]:
    """Tests of translations against a baseline.

    Args:
        baseline, hypotheses: detokenized text or, all of them, fairseq-generate's output.
        reference: the raw reference, one sentence a line.
        language: the target language's code.
        methods: ``bootstrap``, ``randomization`` or both.
        trials, seed: see :func:`~rope_fairseq.evaluation.significance.paired_tests`.
        generate_output: whether the translations are fairseq-generate's output.
        tokens: translations and reference are tokens, and this is what else there is; without it
            they are text.

    Raises:
        UserError: a file is empty, or they do not belong together line by line.
    """
    references = read_references(reference)
    systems = [
        (str(path), read_translation(path, reference, len(references), generate_output))
        for path in (baseline, *hypotheses)
    ]
    if tokens is None:
        compared = of_text(systems, references, language)
    else:
        raw = read_beside(tokens.raw_reference, reference, len(references))
        texts = [(name, tokens.detokenize(lines, language)) for name, lines in systems]
        compared = [
            *of_tokens(systems, references),
            *of_text(texts, raw, language, tokens.lowercase),
        ]
    return [test for method in methods for test in paired_tests(compared, method, trials, seed)]


def format_test(test: PairedTest) -> str:
    """A test for the screen, the baseline first."""
    name = {"bootstrap": "paired bootstrap", "randomization": "approximate randomization"}
    lines = [f"{test.metric}, {name[test.method]}, {test.trials:,} trials, seed {test.seed}"]
    baseline = test.systems[0]
    for system in test.systems:
        interval = ""
        if system.mean is not None:
            interval = f"  95% {system.mean:.2f} ± {system.interval:.2f}"
        against = "  baseline"
        if system.p_value is not None:
            against = f"  {system.score - baseline.score:+.2f}  p = {system.p_value:.4f}"
        lines.append(f"  {system.score:6.2f}{interval}{against}  {system.name}")
    return "\n".join([*lines, f"  {test.signature}"])


def write_tests(path: Path, tests: Sequence[PairedTest], about: dict[str, str]) -> None:
    """Write tests as JSON, ``{"about": {…}, "tests": […]}``, every number to all digits."""
    content = {"about": about, "tests": [asdict(test) for test in tests]}
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def main() -> None:
    parser = Parser(
        prog="python -m rope_fairseq.evaluation.compare",
        description="Compare translations with a baseline by paired significance tests.",
    )
    parser.add_argument("--baseline", type=Path, required=True, metavar="FILE")
    parser.add_argument("--hyp", type=Path, required=True, nargs="+", metavar="FILE")
    parser.add_argument("--ref", type=Path, required=True, metavar="FILE", help="the raw reference")
    parser.add_argument("--target-lang", required=True, metavar="LANG")
    parser.add_argument("--method", choices=(*METHODS, "both"), default="both")
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="resamples or shuffles (default 1,000 for bootstrap, 10,000 for randomization)",
    )
    parser.add_argument(
        "--seed", type=int, default=DEFAULT_SEED, metavar="N", help=f"default {DEFAULT_SEED}"
    )
    parser.add_argument(
        "--generate-output",
        action="store_true",
        help="the translations are what fairseq-generate printed, not plain text",
    )
    add_token_options(parser, "--baseline, --hyp and --ref")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    arguments = parser.parse_args()

    logging.getLogger("sacrebleu").setLevel(logging.WARNING)
    tests = compare_files(
        arguments.baseline,
        arguments.hyp,
        arguments.ref,
        arguments.target_lang,
        methods=tuple(METHODS) if arguments.method == "both" else (arguments.method,),
        trials=arguments.trials,
        seed=arguments.seed,
        generate_output=arguments.generate_output,
        tokens=given_tokens(arguments),
    )
    if arguments.json is not None:
        about = {"reference": str(arguments.ref), "target_lang": arguments.target_lang}
        write_tests(arguments.json, tests, about)
    print("\n".join(format_test(test) for test in tests))


if __name__ == "__main__":
    run_main(main)
