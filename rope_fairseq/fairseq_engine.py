"""Translate with fairseq-generate: the model that it loads, and its search.

The source goes to fairseq-generate as a raw data set: pieces as text, which it looks up in the same
dictionary with the same code as fairseq-preprocess does.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_fairseq import ctranslate2_engine
from rope_fairseq.__main__ import user_dir
from rope_fairseq.checkpoint import load_checkpoint
from rope_fairseq.errors import UserError
from rope_fairseq.hub import (
    MAX_TOKENS,
    check_dictionaries,
    check_family,
    raised_limits,
    trained_limits,
)
from rope_fairseq.lines import decode_lines, write_lines
from rope_fairseq.text import OPTIONS_FILE, Text

CHECKPOINT = "averaged.pt"


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


def generate(
    model: Model, sources: Sequence[str], extra: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Run fairseq-generate on encoded, non-empty sources.

    Args:
        model: what to translate with.
        sources: pieces joined by spaces.
        extra: fairseq-generate's options for the search.

    Yields:
        The number of a source and its best hypothesis, as pieces joined by spaces.

    Raises:
        UserError: fairseq-generate fails.
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
        yield from _hypotheses(command)


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
