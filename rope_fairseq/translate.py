"""Translate raw text with fairseq-generate: one line out for one line in, in the same order.

    python -m rope_fairseq.translate MODEL [INPUT] [-o OUTPUT] [fairseq-generate options]

MODEL is a folder with averaged.pt, dict.*.txt, text.json and the model of BPE that it names, or a
checkpoint in such a folder. INPUT and OUTPUT default to standard input and output. Everything after
the first option that is not this tool's goes to fairseq-generate.

With ``--tokenized`` each line is tokens, as the training text was, and so is each translation: what
scores on a corpus' own tokens need.

With ``--engine ctranslate2`` MODEL is a folder that rope_fairseq.export has made, and the search is
that of rope_fairseq.ctranslate2_engine.

The source goes to fairseq-generate as a raw data set: pieces as text, which it looks up in the same
dictionary with the same code as fairseq-preprocess does.
"""

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rope_fairseq import ctranslate2_engine
from rope_fairseq.__main__ import user_dir
from rope_fairseq.checkpoint import load_checkpoint
from rope_fairseq.ctranslate2_engine import Exported
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.files import replacing
from rope_fairseq.generation import refuse_reserved, search_options
from rope_fairseq.hub import (
    FAIRSEQ_LIMIT,
    MAX_TOKENS,
    check_dictionaries,
    check_family,
    raised_limits,
    trained_limits,
)
from rope_fairseq.lines import decode_lines, read_lines, write_lines, write_stream
from rope_fairseq.text import OPTIONS_FILE, Text, split_tokens

CHECKPOINT = "averaged.pt"
USAGE = "translate.sh MODEL [INPUT] [-o OUTPUT] [fairseq-generate options]"


@dataclass(frozen=True)
class Model:
    """A checkpoint and what stands beside it: dictionaries, text options and BPE model."""

    checkpoint: Path
    text: Text
    longest_source: int
    """In tokens, end of sentence included."""
    overrides: Mapping[str, Any]
    """Of the model's options: what the user asks for, and what sources of that length need."""
    generate_options: tuple[str, ...]
    """The same for fairseq-generate."""

    @property
    def folder(self) -> Path:
        return self.checkpoint.parent

    def dictionary(self, lang: str) -> Path:
        return self.folder / f"dict.{lang}.txt"


def load_model(path: Path, max_source_positions: int | None, model_overrides: str) -> Model:
    """Find and check a model's files.

    Args:
        path: the model's folder, or a checkpoint in it.
        max_source_positions: see :func:`rope_fairseq.hub.raised_limits`.
        model_overrides: a Python dict as text, as for fairseq-generate.

    Raises:
        UserError: a file is missing or does not belong to the checkpoint.
    """
    if (path / ctranslate2_engine.WEIGHTS_FILE).is_file():
        raise UserError(f"{path}: an exported model; say --engine ctranslate2")
    checkpoint = path / CHECKPOINT if path.is_dir() else path
    for needed in (checkpoint, checkpoint.parent / OPTIONS_FILE):
        _check_there(needed)
    text = Text.load(checkpoint.parent)
    _check_there(text.model)
    if ":" in str(checkpoint):
        raise UserError(f"{checkpoint}: fairseq takes ':' for a list of models; rename the folder")
    state = load_checkpoint(checkpoint)
    check_family(checkpoint, state)
    check_dictionaries(checkpoint, state, checkpoint.parent, text)
    trained = trained_limits(state)
    longest = trained["max_source_positions"]
    if max_source_positions is not None:
        longest = max_source_positions
    overrides = raised_limits(checkpoint, state, longest) | parse_overrides(model_overrides)
    # The task of fairseq-generate has limits of its own beside the model's.
    limits = {name: overrides.get(name, limit) for name, limit in trained.items()}
    return Model(checkpoint, text, longest, overrides, limit_options(limits, overrides))


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{path}: no such file; MODEL is a folder that average.sh has made")


def limit_options(limits: Mapping[str, int], overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """fairseq-generate's options for the longest sentences, in tokens, of each side.

    Args:
        limits: ``max_source_positions`` and ``max_target_positions``.
        overrides: of the model's options.
    """
    return (
        *(f"--{name.replace('_', '-')}={limit}" for name, limit in limits.items()),
        f"--model-overrides={overrides}",
        f"--max-tokens={max(MAX_TOKENS, limits['max_source_positions'])}",
    )


def parse_overrides(text: str) -> dict[str, Any]:
    """The value of ``--model-overrides``."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"--model-overrides {text}: must be a Python dict, such as {{'a': 1}}")
    return value


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


def generate(model: Model, sources: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Run fairseq-generate on encoded, non-empty sources.

    Args:
        model: what to translate with.
        sources: pieces joined by spaces.
        extra: fairseq-generate's options for the search.

    Returns:
        The best hypothesis for each source, as pieces joined by spaces.

    Raises:
        UserError: fairseq-generate fails, or does not give one hypothesis for each source.
    """
    source_lang, target_lang = model.text.source_lang, model.text.target_lang
    with tempfile.TemporaryDirectory(prefix="rope_fairseq-") as temporary:
        data = Path(temporary)
        for lang in (source_lang, target_lang):
            shutil.copyfile(model.dictionary(lang), data / f"dict.{lang}.txt")
        write_lines(data / f"test.{source_lang}-{target_lang}.{source_lang}", sources)
        languages = (source_lang, target_lang)
        command = generate_command(
            temporary, model.checkpoint, languages, [*model.generate_options, *extra]
        )
        return collect(_hypotheses(command), len(sources))


def collect(numbered: Iterable[tuple[int, str]], count: int) -> list[str]:
    """Put hypotheses into the order of their numbers, 0 to ``count`` − 1, with progress shown."""
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


def generate_command(
    data: str, checkpoint: Path, languages: tuple[str, str], options: Sequence[str]
) -> list[str]:
    """The call of fairseq-generate on a folder with a raw data set."""
    return [
        *(sys.executable, "-u", "-m", "fairseq_cli.generate", data),
        *("--user-dir", str(user_dir()), "--task", "rope_translation", "--path", str(checkpoint)),
        *("--source-lang", languages[0], "--target-lang", languages[1]),
        *("--gen-subset", "test", "--dataset-impl", "raw", "--no-progress-bar"),
        *options,
    ]


def _hypotheses(command: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Run a fairseq-generate command; its hypotheses (``H-ID``) as they come."""
    environment = os.environ | {"PYTHONUTF8": "1"}
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                for line in decode_lines(process.stdout, "fairseq-generate"):
                    match = re.fullmatch(r"H-(\d+)\t[^\t]*\t(.*)", line, re.DOTALL)
                    if match is not None:
                        yield int(match[1]), match[2]
            except BaseException:
                process.kill()
                raise
        if process.returncode < 0:
            raise UserError(f"fairseq-generate was killed by signal {-process.returncode}")
        if process.returncode:
            errors.seek(0)
            said = [line.strip() for line in errors.read().decode(errors="replace").split("\n")]
            last = next((line for line in reversed(said) if line), "it said nothing")
            # A message may have several lines; the one that names the error says most.
            named = (line for line in reversed(said) if re.match(r"error: |[\w.]+Error: ", line))
            reason = next(named, last)[:300]
            raise UserError(
                f"fairseq-generate failed with status {process.returncode}: "
                f"{reason.removeprefix('error: ')}"
            )


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
        if isinstance(model, Exported):
            hypotheses = collect(model.generate(sources), len(sources))
        else:
            hypotheses = generate(model, sources, extra)
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
