"""Read translations, references and sources that belong together line by line."""

import re
import sys
from pathlib import Path

from rope_fairseq.errors import UserError
from rope_fairseq.lines import read_lines

# How sentencepiece and subword-nmt mark the pieces of a word.
_SUBWORD = re.compile("\u2581|@@ ")


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


def read_references(path: Path) -> list[str]:
    """The raw reference, one sentence a line, at least one."""
    references = list(read_lines(path))
    if not references:
        raise UserError(f"{path}: empty, there is nothing to score")
    return references


def read_beside(path: Path, reference: Path, count: int) -> list[str]:
    """The lines of a file that must be the ``count`` lines of ``reference``, in another form."""
    lines = list(read_lines(path))
    if not lines:
        raise UserError(f"{path}: empty, there is nothing to score")
    if len(lines) != count:
        raise UserError(f"{path} has {len(lines)} lines, but {reference} has {count}")
    return lines


def read_translation(
    path: Path, reference: Path, count: int, generate_output: bool = False
) -> list[str]:
    """Detokenized text, one sentence a line, or fairseq-generate's output.

    Empty translations are scored as they are, with a note on standard error: they are what an
    interrupted or misread run looks like.
    """
    if generate_output:
        hypotheses = read_generate_output(path, count)
    else:
        hypotheses = read_beside(path, reference, count)
    empty = sum(not text.strip() for text in hypotheses)
    if empty:
        print(f"note: {path}: {empty} of {count} translations are empty", file=sys.stderr)
    return hypotheses
