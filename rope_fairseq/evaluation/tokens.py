"""Translations that are tokens, as a model has them, and not text: how they are scored as both."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rope_fairseq.errors import UserError
from rope_fairseq.text import Text


@dataclass(frozen=True)
class Tokens:
    """What it takes to score tokens: the raw reference, and how tokens are made of text."""

    raw_reference: Path
    text: Text

    @property
    def lowercase(self) -> bool:
        """Whether case is lost, so that scores on text must ignore it."""
        return self.text.lowercase or self.text.lowercase_tokens

    def detokenize(self, lines: Sequence[str], language: str) -> list[str]:
        """The text of each line of tokens."""
        return [self.text.detokenize(line, language) for line in lines]


def add_token_options(parser: ArgumentParser, files: str) -> None:
    """The options ``--tokenized``, ``--raw-ref`` and ``--text``.

    Args:
        files: the options whose files are tokens with them.
    """
    parser.add_argument(
        "--tokenized",
        action="store_true",
        help=f"{files} are tokens as those of training; needs --raw-ref and --text",
    )
    parser.add_argument(
        "--raw-ref", type=Path, metavar="FILE", help="the raw reference, where --ref is tokens"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="the model's text.json: how to detokenize"
    )


def given_tokens(arguments: Namespace) -> Tokens | None:
    """What the options of :func:`add_token_options` say; None where the files are text.

    Raises:
        UserError: one is there without the others, or the text.json cannot be read.
    """
    with_tokens = arguments.raw_ref is not None, arguments.text is not None
    if with_tokens != (arguments.tokenized, arguments.tokenized):
        raise UserError("--tokenized, --raw-ref FILE and --text FILE go together")
    return Tokens(arguments.raw_ref, Text.load(arguments.text)) if arguments.tokenized else None
