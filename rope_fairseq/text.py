"""Text to subword pieces and back: the one place where training, ``translate.sh`` and hub get it.

    raw line → clean → MosesPunctNormalizer → (lower case) → MosesTokenizer → BPE → pieces

``python -m rope_fairseq.text encode|decode --model FOLDER --lang L < IN > OUT`` does one line for
one line. The options stand in ``text.json`` beside the BPE model, so that nobody has to repeat
them. Whole corpora are the work of :mod:`rope_fairseq.corpus`, BPE that of
:mod:`rope_fairseq.pieces`.

What is changed before tokenizing, and why:

* Control characters (C0, DEL, C1) and the separators U+2028 and U+2029 become a space.
  sacremoses deletes some of them, which joins the words around them (``a\\rb`` → ``ab``), and
  readers that take them for line ends would shift a corpus.
* Soft hyphens (U+00AD) go: they mark where a word may be broken, and sacremoses would break it
  there into three tokens. So does U+FEFF, the byte order mark that is left inside a file when
  files are joined; as a character it has been deprecated since Unicode 3.2.
* ``▁`` (U+2581) becomes ``_``: sentencepiece writes a space as ``▁``, so a literal one would come
  back as a space.
* NFC: sacremoses takes a combining accent for a symbol and splits it off its letter.
* ``DOTMULTI`` in the text is broken up (``DOT MULTI``): sacremoses writes ``..`` as
  ``DOTDOTMULTI`` in between and would turn the literal into dots.

Lower-casing stands where Multi30k's own scripts have it, after normalising and before tokenizing:
abbreviations such as ``Dr.`` are then no longer known, and their full stop is a token; that of a
sentence is none where another follows on the line (``end. then``). fairseq's script for IWSLT14
lower-cases the tokens instead: ``lowercase_tokens``.

Which switches of sacremoses are set differently from its defaults:

* ``norm_numbers=False``: the normaliser turns ``10 000`` written with a no-break space into
  ``10.000`` (English) or ``10,000`` (German), which is another number in that language.
* ``escape=False`` and with it ``unescape=False``: the detokenizer's default would turn an entity
  that belongs to the text, such as ``&amp;`` in a manual of HTML, into the character.

What is repaired after detokenizing: sacremoses glues a currency sign to the next word, also where
the sign follows its number, as in German (``5 € und`` → ``5 €und``).

What the detokenizer cannot restore:

* The missing space, or the space, around symbols that the tokenizer sets apart: ``a/b``,
  ``Ctrl+C`` and ``a_b`` come back as ``a / b``, ``Ctrl + C`` and ``a _ b``, ``https://x.org/a`` as
  ``https: / / x.org / a``, ``&amp;`` as ``& amp;``. (sacreBLEU's 13a tokenizer sets ASCII symbols
  apart as well: only the entities change its BLEU.)
* The side of a single quote (``John's 'quoted' word`` → ``John's' quoted 'word``) and of a double
  quote after an unbalanced one.
* Runs of spaces; and what the normaliser makes plain: typographic quotes, dashes and ellipses, and
  in English the comma or full stop after a closing quote, which moves inside it.
"""

import json
import logging
import re
import shutil
import sys
import unicodedata
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sacremoses import MosesDetokenizer

from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.files import replacing
from rope_fairseq.lines import decode_lines, write_stream
from rope_fairseq.moses import FastNormalizer, FastTokenizer
from rope_fairseq.pieces import KINDS, SPACE_SYMBOL, Pieces, SentencePiece

logger = logging.getLogger(__name__)

OPTIONS_FILE = "text.json"
# Of the kind of BPE that is the default.
MODEL_FILE = SentencePiece.model_file

UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
INVISIBLE = re.compile("[\u00ad\ufeff]")
MULTIDOT_MARKER = re.compile("DOT(?=MULTI)")
# Not the dollar: ``$A$1`` is a cell of a spreadsheet.
CURRENCY_AFTER_NUMBER = re.compile(r"(\d [€£¥])(?=[^\W\d_])")


def clean(line: str) -> str:
    """The changes listed at the head of this file; the result holds no line end of any kind."""
    line = INVISIBLE.sub("", UNSAFE.sub(" ", line)).replace(SPACE_SYMBOL, "_")
    return MULTIDOT_MARKER.sub("DOT ", unicodedata.normalize("NFC", line))


def split_tokens(line: str) -> str:
    """A line that is tokens already → the same, separated by single spaces.

    Nothing else is changed, but that control characters and line separators, which would shift a
    corpus or vanish in it, are spaces here as well.
    """
    return " ".join(token for token in UNSAFE.sub(" ", line).split(" ") if token)


@dataclass(frozen=True)
class Text:
    """How raw text becomes pieces and pieces become raw text.

    Args:
        source_lang, target_lang: language codes; they choose the rules of sacremoses, which
            treats a language that it does not know like English.
        normalize: make punctuation plain (MosesPunctNormalizer).
        escape: write ``& | < > ' " [ ]`` as entities between tokenizer and BPE, as Moses does.
        aggressive_dash_splits: ``a-b`` → ``a @-@ b``, as Moses does for WMT.
        lowercase: make all letters small before tokenizing.
        lowercase_tokens: make them small afterwards.
        bpe: the kind of BPE, one of :data:`rope_fairseq.pieces.KINDS`.
        model: the model of BPE; needed by :meth:`encode` and :meth:`segment` only.
    """

    source_lang: str
    target_lang: str
    normalize: bool = True
    escape: bool = False
    aggressive_dash_splits: bool = False
    lowercase: bool = False
    lowercase_tokens: bool = False
    bpe: str = SentencePiece.name
    model: Path = Path(MODEL_FILE)

    def encode(self, line: str, lang: str) -> str:
        """Raw text → pieces joined by single spaces; an empty line stays empty."""
        return self.segment([self.tokenize(line, lang)])[0]

    def segment(self, lines: list[str]) -> list[str]:
        """Lines of tokens → lines of pieces joined by single spaces."""
        return self.pieces.segment(lines)

    def join(self, pieces: str) -> str:
        """Pieces joined by spaces → tokens joined by spaces."""
        return self.pieces.join(pieces)

    def decode(self, pieces: str, lang: str) -> str:
        """Pieces joined by spaces → raw text."""
        return self.detokenize(self.join(pieces), lang)

    @cached_property
    def pieces(self) -> Pieces:
        """The BPE; its model is read at first use."""
        return KINDS[self.bpe](self.model)

    def tokenize(self, line: str, lang: str) -> str:
        """Raw text → normalised tokens joined by single spaces."""
        self.check(lang)
        line = clean(line)
        if self.normalize:
            line = self._normalizers[lang].normalize(line)
        if self.lowercase:
            line = line.lower()
        tokens: str = self._tokenizers[lang].tokenize(
            line,
            aggressive_dash_splits=self.aggressive_dash_splits,
            escape=self.escape,
            return_str=True,
        )
        return tokens.lower() if self.lowercase_tokens else tokens

    def detokenize(self, tokens: str, lang: str) -> str:
        """Tokens joined by spaces → raw text."""
        self.check(lang)
        line = self._detokenizers[lang].detokenize(tokens.split(), unescape=self.escape)
        return CURRENCY_AFTER_NUMBER.sub(r"\1 ", line)

    def save(self, folder: str | Path) -> None:
        """Write ``text.json`` into a folder and the BPE model beside it if it is not there yet."""
        target = Path(folder) / self.pieces.model_file
        if self.model.resolve() != target.resolve():
            with open(self.model, "rb") as source, replacing(target) as stream:
                shutil.copyfileobj(source, stream)
        self.save_options(folder)

    def save_options(self, folder: str | Path) -> None:
        """Write ``text.json`` alone, which is enough for :meth:`tokenize`.

        The model's name is stored relative to the folder, which can therefore be moved.
        """
        values = self.options() | {"model": self.pieces.model_file} | self.versions()
        with replacing(Path(folder) / OPTIONS_FILE) as stream:
            stream.write((json.dumps(values, indent=2) + "\n").encode("utf-8"))

    def options(self) -> dict[str, str | bool]:
        """Languages and options, without the model; those of :data:`OPTIONAL` only where they are
        not the default."""
        values = {name: getattr(self, name) for name in OPTION_TYPES if name != "model"}
        return {
            name: value
            for name, value in values.items()
            if name not in OPTIONAL or value != OPTIONAL[name]
        }

    def versions(self) -> dict[str, str]:
        """What decides tokens and pieces: each tool's name as a distribution, and its version."""
        return {tool: version(tool) for tool in ("sacremoses", self.pieces.distribution)}

    @classmethod
    def load(cls, path: str | Path) -> "Text":
        """Read ``text.json`` (or the one in a folder).

        Another version of a tool than the stored one is a warning.

        Raises:
            UserError: not JSON, a key is missing or unknown, or a value has the wrong type.
        """
        path = Path(path)
        if path.is_dir():
            path = path / OPTIONS_FILE
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not a JSON file ({error})") from None
        if not isinstance(stored, dict):
            raise UserError(f"{path}: expected an object with the keys {', '.join(OPTION_TYPES)}")
        values: dict[str, Any] = OPTIONAL | stored
        if values["bpe"] not in list(KINDS):
            known = " or ".join(map(repr, KINDS))
            raise UserError(f"{path}: key 'bpe' has the value {values['bpe']!r}, not {known}")
        tools = ("sacremoses", KINDS[values["bpe"]].distribution)
        expected = OPTION_TYPES | dict.fromkeys(tools, str)
        for name in expected.keys() - values.keys():
            raise UserError(f"{path}: key {name!r} is missing")
        for name in values.keys() - expected.keys():
            raise UserError(f"{path}: unknown key {name!r}; known are {', '.join(expected)}")
        for name, kind in expected.items():
            if type(values[name]) is not kind:
                raise UserError(
                    f"{path}: key {name!r} has the value {values[name]!r}, not a {kind.__name__}"
                )
        for tool in tools:
            written = values.pop(tool)
            if written != version(tool):
                logger.warning(
                    "%s was written with %s %s, but %s is installed: tokens may differ",
                    *(path, tool, written, version(tool)),
                )
        return cls(**values | {"model": path.parent / values["model"]})

    def check(self, lang: str) -> None:
        """Refuse a language that is not one of the two."""
        if lang not in (self.source_lang, self.target_lang):
            raise UserError(
                f"language {lang!r} is not one of this model's, "
                f"{self.source_lang!r} and {self.target_lang!r}"
            )

    @cached_property
    def _normalizers(self) -> dict[str, FastNormalizer]:
        return {
            lang: FastNormalizer(lang, norm_numbers=False)
            for lang in (self.source_lang, self.target_lang)
        }

    @cached_property
    def _tokenizers(self) -> dict[str, FastTokenizer]:
        return {lang: FastTokenizer(lang) for lang in (self.source_lang, self.target_lang)}

    @cached_property
    def _detokenizers(self) -> dict[str, MosesDetokenizer]:
        return {lang: MosesDetokenizer(lang) for lang in (self.source_lang, self.target_lang)}


# What text.json holds of a Text, with the JSON type of each value.
OPTION_TYPES: dict[str, type] = {
    field.name: bool if field.type is bool else str for field in fields(Text)
}
# Those that it holds only where they are not these: it was a file without them at first.
OPTIONAL: dict[str, str | bool] = {
    "lowercase": False,
    "lowercase_tokens": False,
    "bpe": SentencePiece.name,
}


def _parser() -> Parser:
    parser = Parser(prog="python -m rope_fairseq.text")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("encode", "raw text → pieces"), ("decode", "pieces → raw text")):
        command = commands.add_parser(name, help=f"{what}, standard input to standard output")
        command.add_argument("--model", required=True, help="folder with text.json")
        command.add_argument("--lang", required=True, help="language of the text")
    return parser


def main() -> None:
    args = _parser().parse_args()
    text = Text.load(args.model)
    text.check(args.lang)
    convert = text.encode if args.command == "encode" else text.decode
    lines = decode_lines(sys.stdin.buffer, "standard input")
    write_stream(sys.stdout.buffer, (convert(line, args.lang) for line in lines))


if __name__ == "__main__":
    run_main(main)
