"""Which sentence pairs are left out, and what is changed in those that stay.

Rules for training pairs; the first that a pair breaks is the one that counts it, in this order:

* ``not_utf8``: a side is not UTF-8.
* ``empty_side``: no text on a side after :func:`rope_fairseq.text.clean`.
* ``too_long``: more than ``max_tokens`` tokens (or words before tokenizing) on a side.
* ``long_word``: a token of more than 1,000 characters, the limit of Moses' clean-corpus-n.
* ``length_ratio``: one side has more than ``max_ratio`` times the tokens of the other.
* ``in_test_set``: a side equals, in tokens, that side of a test pair; only with
  ``drop_test_overlap``.
* ``duplicate``: an earlier pair has the same tokens on both sides; not with ``keep_duplicates``.

Of validation pairs, which serve the loss alone, those are left out that have an empty side, are too
long or hold such a long word.
No test pair is ever left out. Text that is not UTF-8 in either of them is an error.

What is changed in pairs that stay is listed in :data:`CHANGES`. The lines concerned are counted,
also those of pairs that a rule leaves out afterwards. Text that is tokens already is changed as
:func:`rope_fairseq.text.split_tokens` does it and in nothing else.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from rope_fairseq.corpus.blocks import Block
from rope_fairseq.corpus.duplicates import digest
from rope_fairseq.corpus.folder import SPLITS
from rope_fairseq.errors import UserError
from rope_fairseq.lines import decode_line
from rope_fairseq.pieces import SPACE_SYMBOL
from rope_fairseq.text import Text, split_tokens

REPORT_FILE = "cleaning.json"
RULES = (
    "not_utf8",
    "empty_side",
    "too_long",
    "long_word",
    "length_ratio",
    "in_test_set",
    "duplicate",
)
MAX_WORD_CHARACTERS = 1000

# What is changed inside a line: name → the text concerned, and a note for the user.
CHANGES = {
    "byte_order_mark": ("\ufeff", "byte order marks (U+FEFF): removed"),
    "soft_hyphen": ("\u00ad", "soft hyphens (U+00AD): removed"),
    "nul": ("\x00", "NUL characters: made a space"),
    "form_feed": ("\x0c", "form feeds: made a space, not a line end"),
    "carriage_return": ("\r", "carriage returns inside a line: made a space, not a line end"),
    "line_separator": (
        "[\x85\u2028\u2029]",
        "line separators (U+0085, U+2028, U+2029): made a space, not a line end",
    ),
    "control": ("[\x01-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]", "control characters: made a space"),
    "space_symbol": (SPACE_SYMBOL, f"{SPACE_SYMBOL} (U+2581), the BPE model's space: made a _"),
    "dotmulti": ("DOTMULTI", "DOTMULTI, which the tokenizer uses: made DOT MULTI"),
}
# Changes that no pattern finds.
OTHER_CHANGES = {
    "not_nfc": "characters written as letter and accent: composed (Unicode NFC)",
    "windows_line_end": "Windows line ends: made \\n",
    "no_final_newline": "no line end at the end of the file: added",
    "spaces": "spaces at an end of a line of tokens, or several between them: made one or none",
}
# What is changed in tokens too, of CHANGES.
OF_TOKENS = ("nul", "form_feed", "carriage_return", "line_separator", "control")
NOTES = {name: note for name, (_, note) in CHANGES.items()} | OTHER_CHANGES
PATTERNS = {name: re.compile(pattern) for name, (pattern, _) in CHANGES.items()}
ANY_PATTERN = re.compile("|".join(pattern for pattern, _ in CHANGES.values()))


# Scripts without spaces between words (Thai, Lao, Burmese, Khmer, kana, Han), where a sentence may
# be one token.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
)


def length(line: str) -> int:
    """Tokens of a line; where more of its characters are of a script without spaces, those."""
    return max(len(line.split()), len(UNSPACED.findall(line)))


@dataclass(frozen=True)
class Limits:
    """Options of cleaning.

    Args:
        max_tokens: longest side in Moses tokens; 0: no limit.
        max_ratio: largest ratio of the lengths of the sides, in tokens; 0: no limit.
        keep_duplicates: keep pairs that occurred before.
        drop_test_overlap: leave out pairs of which a side is in the test set.
    """

    max_tokens: int = 250
    max_ratio: float = 0.0
    keep_duplicates: bool = False
    drop_test_overlap: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise UserError(f"--max-tokens {self.max_tokens}: must be above 0, or 0 for no limit")
        if not (self.max_ratio == 0 or 1 <= self.max_ratio < float("inf")):
            raise UserError(f"--max-ratio {self.max_ratio}: must be at least 1, or 0 for no limit")

    def broken_before_tokenizing(self, *lines: str) -> str | None:
        """The rule that a pair of raw lines breaks, of ``empty_side`` and ``too_long``: tokenizing
        a line of a million words would take minutes."""
        counts = [length(line) for line in lines]
        if min(counts) == 0:
            return "empty_side"
        return "too_long" if 0 < self.max_tokens < max(counts) else None

    def broken(self, *lines: str) -> str | None:
        """The rule that a pair of lines of tokens breaks by itself, or None."""
        tokens = [line.split() for line in lines]
        shorter, longer = sorted(map(length, lines))
        if shorter == 0:
            return "empty_side"
        if 0 < self.max_tokens < longer:
            return "too_long"
        if any(max(map(len, side)) > MAX_WORD_CHARACTERS for side in tokens):
            return "long_word"
        return "length_ratio" if 0 < self.max_ratio < longer / shorter else None


@dataclass
class Changes:
    """For each kind of change and each file: how many lines, and the first of them."""

    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def add(self, kind: str, file: str, first: int, count: int = 1) -> None:
        entry = self.lines.setdefault(kind, {}).setdefault(file, [0, first])
        entry[0] += count

    def update(self, later: "Changes") -> None:
        """Add what was found in later lines."""
        for kind, files in later.lines.items():
            for file, (count, first) in files.items():
                self.add(kind, file, first, count)

    def notes(self) -> list[str]:
        """One line for each kind of change, in a fixed order."""
        notes = []
        for kind in NOTES:
            where = [
                f"{file} {count:,} line{'s' * (count > 1)}, the first is {first:,}"
                for file, (count, first) in self.lines.get(kind, {}).items()
            ]
            if where:
                notes.append(f"note: {NOTES[kind]} ({'; '.join(where)})")
        return notes


@dataclass
class Cleaned:
    """A block of pairs after cleaning.

    Args:
        tokens: lines of tokens of each side, of the pairs that are kept.
        digests: of the pairs that are kept; see :mod:`rope_fairseq.corpus.duplicates`.
        dropped: number of pairs by the rule that they break.
        changes: what was changed.
    """

    tokens: tuple[list[str], list[str]]
    digests: bytes
    dropped: Counter[str]
    changes: Changes

    def pairs_read(self) -> int:
        return len(self.tokens[0]) + self.dropped.total()


@dataclass(frozen=True)
class Cleaner:
    """Cleans blocks of a split; called in the worker processes.

    Args:
        text: languages and options.
        limits: what is left out.
        split: train, valid or test.
        files: the raw files of both sides, for messages.
        test_sides: digests of the lines of tokens of each side of the test set.
        tokenized: the text is tokens already.
    """

    text: Text
    limits: Limits
    split: str
    files: tuple[str, str]
    test_sides: tuple[frozenset[bytes], frozenset[bytes]] = (frozenset(), frozenset())
    tokenized: bool = False

    def __call__(self, block: Block) -> Cleaned:
        cleaned = Cleaned(([], []), b"", Counter(), Changes())
        digests = []
        for number, pair in enumerate(zip(*block.lines, strict=True), start=block.number):
            outcome = self._clean_pair(pair, number, cleaned.changes)
            if isinstance(outcome, str):
                cleaned.dropped[outcome] += 1
                continue
            for side, line in zip(cleaned.tokens, outcome, strict=True):
                side.append(line)
            if self.split == "train":
                digests.append(digest("\n".join(outcome).encode("utf-8")))
        cleaned.digests = b"".join(digests)
        return cleaned

    def _clean_pair(
        self, pair: tuple[bytes, ...], number: int, changes: Changes
    ) -> str | tuple[str, str]:
        """The tokens of both sides, or the rule that the pair breaks."""
        try:
            source, target = (
                decode_line(raw, file, number) for raw, file in zip(pair, self.files, strict=True)
            )
        except UserError:
            if self.split != "train":
                raise
            return "not_utf8"
        langs = self.text.source_lang, self.text.target_lang
        for raw, line, lang in zip(pair, (source, target), langs, strict=True):
            note_changes(raw, line, number, f"{self.split}.{lang}", changes, self.tokenized)
        limits = self.limits
        if self.split != "test" and (rule := limits.broken_before_tokenizing(source, target)):
            return rule
        if self.tokenized:
            tokens = split_tokens(source), split_tokens(target)
        else:
            tokens = self.text.tokenize(source, langs[0]), self.text.tokenize(target, langs[1])
        if self.split == "test":
            return tokens
        rule = limits.broken(*tokens)
        if self.split == "valid":
            return tokens if rule in (None, "length_ratio") else rule
        return rule or ("in_test_set" if self._in_test_set(tokens) else tokens)

    def _in_test_set(self, tokens: tuple[str, str]) -> bool:
        return any(
            side and digest(line.encode("utf-8")) in side
            for line, side in zip(tokens, self.test_sides, strict=True)
        )


def note_changes(
    raw: bytes, line: str, number: int, file: str, changes: Changes, tokenized: bool = False
) -> None:
    """Count what is changed in a line.

    Args:
        raw: the line with its end.
        line: as :func:`~rope_fairseq.lines.decode_line` gives it.
        number: its number, counted from 1.
        file: name of the file in the report.
        changes: gets the counts.
        tokenized: the text is tokens already.
    """
    kinds = []
    if ANY_PATTERN.search(line):
        possible = OF_TOKENS if tokenized else PATTERNS
        kinds = [kind for kind in possible if PATTERNS[kind].search(line)]
    # decode_line has taken it away.
    if number == 1 and raw.startswith(b"\xef\xbb\xbf") and "byte_order_mark" not in kinds:
        kinds.append("byte_order_mark")
    if not tokenized and not unicodedata.is_normalized("NFC", line):
        kinds.append("not_nfc")
    if tokenized and line and "" in line.split(" "):
        kinds.append("spaces")
    if raw.removesuffix(b"\n").endswith(b"\r"):
        kinds.append("windows_line_end")
    if not raw.endswith(b"\n"):
        kinds.append("no_final_newline")
    for kind in kinds:
        changes.add(kind, file, number)


@dataclass
class Report:
    """What cleaning did: the content of ``cleaning.json``.

    Args:
        limits: the options.
        read, kept: number of pairs of each split.
        dropped: number of pairs of each split by the rule that they break.
        changes: what was changed.
        words: running words (Moses tokens) of each side of train, and different ones of both.
        tokenized: whether the text was tokens already.
        valid_every: which of the training pairs that are kept became the validation set, or None.
    """

    limits: Limits
    tokenized: bool = False
    valid_every: int | None = None
    read: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)
    words: dict[str, int] = field(default_factory=dict)

    def add_split(self, split: str, read: int, dropped: Counter[str]) -> None:
        self.read[split] = read
        self.kept[split] = read - dropped.total()
        self.dropped[split] = {rule: dropped[rule] for rule in RULES}

    def take_valid(self, pairs: int) -> None:
        """Say that so many of the training pairs that are kept are the validation set instead."""
        self.add_split("valid", pairs, Counter())
        self.kept["train"] -= pairs

    def left_out(self, split: str) -> str:
        """The rules that dropped pairs, and how many."""
        return ", ".join(f"{rule} {n:,}" for rule, n in self.dropped[split].items() if n)

    def json(self) -> dict[str, object]:
        options = asdict(self.limits)
        if self.tokenized:
            options["tokenized"] = True
        if self.valid_every is not None:
            options["valid_every"] = self.valid_every
        return {
            "options": options,
            "pairs": {
                split: {
                    "read": self.read[split],
                    "kept": self.kept[split],
                    "dropped": self.dropped[split],
                }
                for split in SPLITS
            },
            "changes": {
                kind: {file: {"lines": n, "first": first} for file, (n, first) in files.items()}
                for kind, files in self.changes.lines.items()
            },
            "words": self.words,
        }

    def lines(self) -> Iterator[str]:
        """The report for people: a line for each split, a note for each kind of change."""
        for split in SPLITS:
            left_out = self.left_out(split)
            from_train = split == "valid" and self.valid_every is not None
            yield (
                f"{split}: {self.read[split]:,} pairs, {self.kept[split]:,} kept"
                + (f"; left out: {left_out}" if left_out else "")
                + (f"; 1 in {self.valid_every} of those kept of train" if from_train else "")
            )
        yield from self.changes.notes()
