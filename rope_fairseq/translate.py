"""Translate raw text with fairseq-generate: one line out for one line in, in the same order.

    python -m rope_fairseq.translate MODEL [INPUT] [-o OUTPUT] [fairseq-generate options]

MODEL is a folder with averaged.pt, dict.*.txt, text.json and the model of BPE that it names, or a
checkpoint in such a folder. INPUT and OUTPUT default to standard input and output. Everything after
the first option that is not this tool's goes to fairseq-generate.

With ``--tokenized`` each line is tokens, as the training text was, and so is each translation: what
scores on a corpus' own tokens need.

With ``--engine ctranslate2`` MODEL is a folder that rope_fairseq.export has made, and the search is
that of rope_fairseq.ctranslate2_engine.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from rope_fairseq import ctranslate2_engine
from rope_fairseq.ctranslate2_engine import Exported
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.fairseq_engine import (
    CHECKPOINT,
    Model,
    generate,
    generate_command,
    limit_options,
    load_model,
)
from rope_fairseq.files import replacing
from rope_fairseq.generation import refuse_reserved, search_options
from rope_fairseq.hub import FAIRSEQ_LIMIT
from rope_fairseq.lines import decode_lines, read_lines, write_stream
from rope_fairseq.text import split_tokens

USAGE = "translate.sh MODEL [INPUT] [-o OUTPUT] [fairseq-generate options]"


def encode_lines(
    model: Model | Exported, lines: Sequence[str], name: str, tokenized: bool = False
) -> list[str]:
    """The pieces of each line, joined by spaces; "" for a line without any text.

    Args:
        model: names the text options and the model of BPE.
        lines: raw text without line ends, or tokens.
        name: what to call the text in messages.
        tokenized: the lines are tokens.

    Raises:
        UserError: lines have more tokens than the model takes; all of them are named (the first
            ten where there are more).
    """
    progress = tqdm(lines, desc="tokenize", unit=" lines", mininterval=_interval())
    if tokenized:
        pieces = [model.text.segment([split_tokens(line)])[0] for line in progress]
    else:
        pieces = [model.text.encode(line, model.text.source_lang) for line in progress]
    # A token more than pieces: the end of the sentence.
    lengths = {number: len(line.split()) + 1 for number, line in enumerate(pieces, 1)}
    too_long = {number: n for number, n in lengths.items() if n > model.longest_source}
    if too_long:
        named = [f"line {number}: {n:,} tokens" for number, n in too_long.items()]
        more = f" and {len(named) - 10:,} lines more" if len(named) > 10 else ""
        raise UserError(
            f"{name} {', '.join(named[:10])}{more}, more than "
            f"--max-source-positions {model.longest_source} (end of sentence included); "
            "split the line, or give a greater value; nothing was translated"
        )
    return pieces


def collect(numbered: Iterable[tuple[int, str]], count: int) -> list[str]:
    """Put hypotheses into the order of their numbers, 0 to ``count`` − 1, with progress shown.

    Raises:
        UserError: a number is missing, comes twice or is out of range.
    """
    hypotheses: dict[int, str] = {}
    with tqdm(total=count, desc="translate", unit=" lines", mininterval=_interval()) as progress:
        for number, pieces in numbered:
            if number in hypotheses or number >= count:
                raise UserError(f"the search gave sentence {number} twice or unasked")
            hypotheses[number] = pieces
            progress.update()
    missing = count - len(hypotheses)
    if missing:
        raise UserError(f"the search left {missing} of {count} sentences untranslated")
    return [hypotheses[number] for number in range(count)]


def translate_lines(
    model: Model | Exported,
    lines: Sequence[str],
    name: str,
    extra: Sequence[str],
    tokenized: bool = False,
) -> list[str]:
    """Translate raw lines to raw lines; a line without text stays an empty line.

    Args:
        model: what to translate with.
        lines: raw text without line ends.
        name: what to call the text in messages.
        extra: fairseq-generate's options for the search; an exported model has them already.
        tokenized: the lines are tokens, and so are the translations.
    """
    encoded = encode_lines(model, lines, name, tokenized)
    numbers = [number for number, pieces in enumerate(encoded) if pieces]
    translations = [""] * len(lines)
    if numbers:
        sources = [encoded[number] for number in numbers]
        found = (
            model.generate(sources)
            if isinstance(model, Exported)
            else generate(model, sources, extra)
        )
        hypotheses = collect(found, len(sources))
        for number, pieces in zip(numbers, hypotheses, strict=True):
            translations[number] = (
                model.text.join(pieces)
                if tokenized
                else model.text.decode(pieces, model.text.target_lang)
            )
    return translations


def _interval() -> float:
    """Seconds between two progress reports: a terminal redraws its line, a log grows."""
    return 0.1 if sys.stderr.isatty() else 10.0


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This tool's arguments and, apart from them, those of fairseq-generate.

    argparse alone would take the 5 of ``MODEL --beam 5`` for INPUT, so MODEL and INPUT are what
    stands before the first option.
    """
    parser = Parser(
        prog="translate.sh",
        usage=USAGE,
        description="Translate raw text, one line out for one line in. MODEL is a folder that "
        "average.sh has made, or a checkpoint in it.",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUTPUT",
        help="write here, all or nothing (default: standard output)",
    )
    parser.add_argument(
        "--max-source-positions",
        type=int,
        metavar="N",
        help="refuse lines of more tokens (default: what the model was trained with)",
    )
    parser.add_argument(
        "--tokenized", action="store_true", help="lines are tokens, in the input and in the output"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="take beam, length penalty … from the group generation of this fairseq config",
    )
    parser.add_argument(
        "--show-command",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="print the call of fairseq-generate for a model with fairseq's default limits, which "
        "need not exist, and stop",
    )
    parser.add_argument("--model-overrides", default="{}", metavar="DICT", help="as in fairseq")
    parser.add_argument(
        "--engine",
        choices=("fairseq", "ctranslate2"),
        default="fairseq",
        help="what searches; for ctranslate2 MODEL is a folder that rope_fairseq.export has made",
    )
    is_option = [len(word) > 1 and word.startswith("-") for word in argv]
    first = is_option.index(True) if True in is_option else len(argv)
    arguments, extra = parser.parse_known_args(argv[first:])
    positional = list(argv[:first])
    if not 1 <= len(positional) <= 2 or (extra and not extra[0].startswith("-")):
        raise UserError(f"usage: {USAGE}; MODEL and INPUT come before the options")
    refuse_reserved(extra)
    arguments.model = Path(positional[0])
    arguments.input = None if positional[1:] in ([], ["-"]) else Path(positional[1])
    return arguments, extra


def main() -> None:
    arguments, extra = parse_arguments(sys.argv[1:])
    configured = search_options(arguments.config)
    refuse_reserved(configured)
    extra = configured + extra
    if arguments.show_command is not None:
        if arguments.engine != "fairseq":
            raise UserError(f"--show-command: --engine {arguments.engine} calls no command")
        languages = (arguments.show_command[0], arguments.show_command[1])
        limits = dict.fromkeys(("max_source_positions", "max_target_positions"), FAIRSEQ_LIMIT)
        command = generate_command(
            "ENCODED_TEXT",
            arguments.model / CHECKPOINT,
            languages,
            [*limit_options(limits, {}), *extra],
        )
        print(shlex.join(["python", *command[1:]]))
        return
    limit, overrides = arguments.max_source_positions, arguments.model_overrides
    model: Model | Exported
    if arguments.engine == "ctranslate2":
        if overrides != "{}":
            raise UserError(f"--model-overrides {overrides}: give it to rope_fairseq.export")
        model = ctranslate2_engine.load(arguments.model, limit, extra)
    else:
        model = load_model(arguments.model, limit, overrides)
    if arguments.input is None:
        name = "standard input"
        lines = list(decode_lines(sys.stdin.buffer, name))
    else:
        name = str(arguments.input)
        lines = list(read_lines(arguments.input))
    tokenized = arguments.tokenized
    if arguments.output is None:
        write_stream(sys.stdout.buffer, translate_lines(model, lines, name, extra, tokenized))
    else:
        with replacing(arguments.output) as file:
            write_stream(file, translate_lines(model, lines, name, extra, tokenized))


if __name__ == "__main__":
    run_main(main)
