"""What a recipe says: the values of ``configs/recipes/NAME.yaml`` (read by
:mod:`rope_fairseq.recipe`)."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rope_fairseq.corpus.folder import SPLITS
from rope_fairseq.pieces import Pieces, SentencePiece, SubwordNmt


@dataclass(frozen=True)
class Average:
    """Which checkpoints are averaged: the last ``last``, one for each update or epoch saved."""

    last: int
    by: str


@dataclass(frozen=True)
class Clean:
    """What cleaning leaves out of the training text: pairs with more than ``max_tokens`` tokens on
    a side, pairs of which one side is more than ``max_ratio`` times as long as the other (None:
    any), second and later copies of a pair, pairs with a side that the test set has too. With
    ``valid_every`` N, every Nth pair that is kept is validation: the corpus has no other."""

    max_tokens: int
    max_ratio: float | None
    drop_duplicates: bool
    drop_test_overlap: bool
    valid_every: int | None = None

    def arguments(self) -> list[str]:
        """As options of ``rope_fairseq.corpus clean``."""
        words = ["--max-tokens", str(self.max_tokens)]
        if self.max_ratio is not None:
            words += ["--max-ratio", str(self.max_ratio)]
        if not self.drop_duplicates:
            words.append("--keep-duplicates")
        if self.drop_test_overlap:
            words.append("--drop-test-overlap")
        if self.valid_every is not None:
            words += ["--valid-every", str(self.valid_every)]
        return words


@dataclass(frozen=True)
class TextOptions:
    """How text becomes tokens, as in :class:`rope_fairseq.text.Text`, and whether the corpus is
    tokens already: these options are then those that it was made with."""

    lowercase: bool = False
    lowercase_tokens: bool = False
    normalize: bool = True
    escape: bool = False
    tokenized: bool = False

    def arguments(self) -> list[str]:
        """As options of ``rope_fairseq.corpus clean``."""
        given = {
            "--lowercase": self.lowercase,
            "--lowercase-tokens": self.lowercase_tokens,
            "--no-normalize": not self.normalize,
            "--escape": self.escape,
            "--tokenized": self.tokenized,
        }
        return [option for option, wanted in given.items() if wanted]


@dataclass(frozen=True)
class Recipe:
    """One recipe; the fields are the keys of its file.

    Args:
        name: the file's name without ``.yaml``.
        corpus: folder in data-prep/.
        source_lang, target_lang: language codes.
        vocab_size: pieces of the joint BPE model, ``<unk>`` included; None with ``merges``.
        merges: of subword-nmt's joint BPE; None with ``vocab_size``, which is sentencepiece's.
        config: file in configs/, without ``.yaml``.
        tokens_per_update: tokens of the longer side, padding included, in one update of all
            devices together.
        clean: what is left out of the training text.
        average: checkpoints to average.
        expected: kind of score → value; empty while nothing has been measured.
        overrides: changes of the config for this recipe, as for fairseq-hydra-train.
        text: how text becomes tokens.
    """

    name: str
    corpus: str
    source_lang: str
    target_lang: str
    vocab_size: int | None
    config: str
    tokens_per_update: int
    clean: Clean
    average: Average
    expected: Mapping[str, float]
    overrides: tuple[str, ...] = ()
    merges: int | None = None
    text: TextOptions = TextOptions()

    @property
    def pieces(self) -> type[Pieces]:
        """The kind of BPE."""
        return SentencePiece if self.merges is None else SubwordNmt

    def data_parts(self) -> list[str]:
        """What the corpus gives in both languages: train, valid, test, raw.test."""
        parts = [split for split in SPLITS if split != "valid" or self.clean.valid_every is None]
        return [*parts, "raw.test"] if self.text.tokenized else parts

    def scored(self) -> str:
        """What is translated and scored: ``distributed`` tokens, ``prepared`` ones where text that
        has lost its case was prepared here, else ``raw`` text."""
        if self.text.tokenized:
            return "distributed"
        lowercase = self.text.lowercase or self.text.lowercase_tokens
        return "prepared" if lowercase else "raw"

    def shell(self, changes: Sequence[str] = (), update_overrides: Sequence[str] = ()) -> str:
        """Shell assignments, one a line, quoted; lists become arrays of bash.

        Args:
            changes: how the recipe differs from its file.
            update_overrides: what ``--max-update`` adds to the overrides.
        """
        values = {
            "NAME": self.name,
            "CORPUS": self.corpus,
            "SOURCE_LANG": self.source_lang,
            "TARGET_LANG": self.target_lang,
            "VOCAB_SIZE": self.vocab_size or "",
            "MERGES": self.merges or "",
            "BPE_MODEL": self.pieces.model_file,
            "SCORED": self.scored(),
            "CONFIG": self.config,
            "TOKENS_PER_UPDATE": self.tokens_per_update,
            "AVERAGE_LAST": self.average.last,
            "AVERAGE_BY": self.average.by,
        }
        bpe = [] if self.merges is None else ["--bpe", self.pieces.name]
        arrays: dict[str, Sequence[str]] = {
            "DATA": self.data_parts(),
            "CLEAN": [*self.clean.arguments(), *self.text.arguments(), *bpe],
            "OVERRIDES": self.overrides,
            "MAX_UPDATE_OVERRIDES": update_overrides,
            "CHANGES": changes,
        }
        lines = [f"RECIPE_{key}={shlex.quote(str(value))}" for key, value in values.items()]
        lines += [f"RECIPE_{key}=({shlex.join(words)})" for key, words in arrays.items()]
        return "\n".join(lines)
