"""The kinds of subword BPE: how each cuts tokens into pieces and joins pieces to tokens.

``sentencepiece`` marks the beginning of a word (``▁Drop - down`` → ``▁Drop ▁- ▁do wn``),
``subword_nmt`` every piece but a word's last (``Drop - do@@ wn``). The names are those of fairseq's
option ``--bpe``.
"""

import io
import re
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rope_fairseq.errors import UserError

SPACE_SYMBOL = "\u2581"
SEPARATOR = "@@"


class Pieces(ABC):
    """A model of BPE.

    Args:
        model: its file; needed by all but :meth:`join`.
    """

    name: ClassVar[str]
    """fairseq's ``--bpe``."""
    distribution: ClassVar[str]
    """The package whose version decides the pieces."""
    model_file: ClassVar[str]
    """The name under which fairseq's hub loader looks for the model beside a checkpoint."""

    def __init__(self, model: Path) -> None:
        self.model = model

    @abstractmethod
    def segment(self, lines: list[str]) -> list[str]:
        """Lines of tokens → lines of pieces joined by single spaces.

        Raises:
            UserError: the model's file is missing or damaged.
        """

    @staticmethod
    @abstractmethod
    def join(pieces: str) -> str:
        """Pieces separated by spaces → tokens separated by spaces."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """``merges``: how many the model has. ``pieces``: its vocabulary, where it has one."""


class SentencePiece(Pieces):
    name = "sentencepiece"
    distribution = "sentencepiece"
    model_file = "sentencepiece.bpe.model"

    def segment(self, lines: list[str]) -> list[str]:
        encoded = self._processor.encode(lines, out_type=str, num_threads=1)
        return [" ".join(pieces) for pieces in encoded]

    @staticmethod
    def join(pieces: str) -> str:
        return pieces.replace(" ", "").replace(SPACE_SYMBOL, " ").strip()

    def vocabulary(self) -> list[str]:
        """The pieces of the model, ``<unk>`` included."""
        processor = self._processor
        return [processor.id_to_piece(number) for number in range(processor.get_piece_size())]

    def sizes(self) -> dict[str, int]:
        vocabulary = self.vocabulary()
        merges = sum(len(piece) > 1 for piece in vocabulary if piece != "<unk>")
        return {"pieces": len(vocabulary), "merges": merges}

    @cached_property
    def _processor(self) -> Any:
        from sentencepiece import SentencePieceProcessor

        if not self.model.is_file():
            raise UserError(f"{self.model}: no such sentencepiece model")
        try:
            return SentencePieceProcessor(model_file=str(self.model))
        except RuntimeError:
            raise UserError(f"{self.model}: not a sentencepiece model") from None


class SubwordNmt(Pieces):
    """The original BPE of Sennrich et al. (2016, arXiv 1508.07909): the model is a list of merges,
    in the order in which they are made. Characters that it has never seen stay as they are.

    A token that itself ends in ``@@`` is joined to the next one; Moses' tokenizer makes none.
    """

    name = "subword_nmt"
    distribution = "subword-nmt"
    model_file = "bpecodes"

    def segment(self, lines: list[str]) -> list[str]:
        bpe = self._bpe
        return [bpe.segment(line) for line in lines]

    @staticmethod
    def join(pieces: str) -> str:
        # As fairseq does it: pieces that end in the middle of a word lose their mark too.
        return f"{pieces} ".replace(f"{SEPARATOR} ", "").rstrip()

    def sizes(self) -> dict[str, int]:
        return {"merges": self._text.count("\n") - 1}

    @cached_property
    def _text(self) -> str:
        """The file: its version, then a merge a line."""
        if not self.model.is_file():
            raise UserError(f"{self.model}: no such file of subword-nmt merges")
        try:
            text = self.model.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            text = ""
        # subword-nmt itself ends the process on a bad line, and takes a file without the first for
        # one of another format.
        if not re.fullmatch(r"#version: 0\.2\n([^ \n]+ [^ \n]+\n)+", text):
            raise UserError(f"{self.model}: not a file that `subword-nmt learn-bpe` wrote")
        return text

    @cached_property
    def _bpe(self) -> Any:
        from subword_nmt.apply_bpe import BPE

        return BPE(io.StringIO(self._text, newline="\n"), separator=SEPARATOR)


KINDS: dict[str, type[Pieces]] = {kind.name: kind for kind in (SentencePiece, SubwordNmt)}
