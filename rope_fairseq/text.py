"""Text to subword pieces and back: the one place where training, ``translate.sh`` and hub get it.

    raw line → clean → MosesPunctNormalizer → MosesTokenizer → sentencepiece BPE → pieces

``python -m rope_fairseq.text encode|decode --model FOLDER --lang L < IN > OUT`` does one line for
one line. The options stand in ``text.json`` beside the BPE model, so that nobody has to repeat
them. Whole corpora are the work of :mod:`rope_fairseq.corpus`.

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

from sacremoses import MosesDetokenizer
from sentencepiece import SentencePieceProcessor

from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.files import replacing
from rope_fairseq.lines import decode_lines, write_stream
from rope_fairseq.moses import FastNormalizer, FastTokenizer

logger = logging.getLogger(__name__)

OPTIONS_FILE = "text.json"
# The name under which fairseq's hub loader looks for it beside a checkpoint.
MODEL_FILE = "sentencepiece.bpe.model"
TOOLS = ("sacremoses", "sentencepiece")

SPACE_SYMBOL = "\u2581"
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
INVISIBLE = re.compile("[\u00ad\ufeff]")
MULTIDOT_MARKER = re.compile("DOT(?=MULTI)")
# Not the dollar: ``$A$1`` is a cell of a spreadsheet.
CURRENCY_AFTER_NUMBER = re.compile(r"(\d [€£¥])(?=[^\W\d_])")


def clean(line: str) -> str:
    """The changes listed at the head of this file; the result holds no line end of any kind."""
    line = INVISIBLE.sub("", UNSAFE.sub(" ", line)).replace(SPACE_SYMBOL, "_")
    return MULTIDOT_MARKER.sub("DOT ", unicodedata.normalize("NFC", line))


def join_pieces(pieces: str) -> str:
    """Sentencepiece pieces separated by spaces → tokens separated by spaces."""
    return pieces.replace(" ", "").replace(SPACE_SYMBOL, " ").strip()


@dataclass(frozen=True)
class Text:
    """How raw text becomes pieces and pieces become raw text.

    Args:
        source_lang, target_lang: language codes; they choose the rules of sacremoses, which
            treats a language that it does not know like English.
        normalize: make punctuation plain (MosesPunctNormalizer).
        escape: write ``& | < > ' " [ ]`` as entities between tokenizer and BPE, as Moses does.
        aggressive_dash_splits: ``a-b`` → ``a @-@ b``, as Moses does for WMT.
        model: the sentencepiece model; needed by :meth:`encode` only.
    """

    source_lang: str
    target_lang: str
    normalize: bool = True
    escape: bool = False
    aggressive_dash_splits: bool = False
    model: Path = Path(MODEL_FILE)

    def encode(self, line: str, lang: str) -> str:
        """Raw text → pieces joined by single spaces; an empty line stays empty."""
        return " ".join(self._processor.encode(self.tokenize(line, lang), out_type=str))

    def segment(self, lines: list[str]) -> list[str]:
        """Lines of tokens → lines of pieces joined by single spaces."""
        encoded = self._processor.encode(lines, out_type=str, num_threads=1)
        return [" ".join(pieces) for pieces in encoded]

    def vocabulary(self) -> list[str]:
        """The pieces of the BPE model, ``<unk>`` included."""
        processor = self._processor
        return [processor.id_to_piece(number) for number in range(processor.get_piece_size())]

    def decode(self, pieces: str, lang: str) -> str:
        """Pieces joined by spaces → raw text."""
        return self.detokenize(join_pieces(pieces), lang)

    def tokenize(self, line: str, lang: str) -> str:
        """Raw text → normalised tokens joined by single spaces."""
        self.check(lang)
        line = clean(line)
        if self.normalize:
            line = self._normalizers[lang].normalize(line)
        return self._tokenizers[lang].tokenize(
            line,
            aggressive_dash_splits=self.aggressive_dash_splits,
            escape=self.escape,
            return_str=True,
        )

    def detokenize(self, tokens: str, lang: str) -> str:
        """Tokens joined by spaces → raw text."""
        self.check(lang)
        line = self._detokenizers[lang].detokenize(tokens.split(), unescape=self.escape)
        return CURRENCY_AFTER_NUMBER.sub(r"\1 ", line)

    def save(self, folder: str | Path) -> None:
        """Write ``text.json`` into a folder and the BPE model beside it if it is not there yet."""
        target = Path(folder) / MODEL_FILE
        if self.model.resolve() != target.resolve():
            with open(self.model, "rb") as source, replacing(target) as stream:
                shutil.copyfileobj(source, stream)
        self.save_options(folder)

    def save_options(self, folder: str | Path) -> None:
        """Write ``text.json`` alone, which is enough for :meth:`tokenize`.

        The model's name is stored relative to the folder, which can therefore be moved.
        """
        values = self.options() | {"model": MODEL_FILE}
        values |= {tool: version(tool) for tool in TOOLS}
        with replacing(Path(folder) / OPTIONS_FILE) as stream:
            stream.write((json.dumps(values, indent=2) + "\n").encode("utf-8"))

    def options(self) -> dict[str, str | bool]:
        """Languages and options, without the model."""
        return {name: getattr(self, name) for name in OPTION_TYPES if name != "model"}

    @classmethod
    def load(cls, path: str | Path) -> "Text":
        """Read ``text.json`` (or the one in a folder).

        Another version of sacremoses or sentencepiece than the stored one is a warning.

        Raises:
            UserError: not JSON, a key is missing or unknown, or a value has the wrong type.
        """
        path = Path(path)
        if path.is_dir():
            path = path / OPTIONS_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not a JSON file ({error})") from None
        expected = OPTION_TYPES | dict.fromkeys(TOOLS, str)
        if not isinstance(values, dict):
            raise UserError(f"{path}: expected an object with the keys {', '.join(expected)}")
        for name in expected.keys() - values.keys():
            raise UserError(f"{path}: key {name!r} is missing")
        for name in values.keys() - expected.keys():
            raise UserError(f"{path}: unknown key {name!r}; known are {', '.join(expected)}")
        for name, kind in expected.items():
            if type(values[name]) is not kind:
                raise UserError(
                    f"{path}: key {name!r} has the value {values[name]!r}, not a {kind.__name__}"
                )
        for tool in TOOLS:
            stored = values.pop(tool)
            if stored != version(tool):
                logger.warning(
                    "%s was written with %s %s, but %s is installed: tokens may differ",
                    *(path, tool, stored, version(tool)),
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
    def _processor(self) -> SentencePieceProcessor:
        if not self.model.is_file():
            raise UserError(f"{self.model}: no such sentencepiece model")
        try:
            return SentencePieceProcessor(model_file=str(self.model))
        except RuntimeError:
            raise UserError(f"{self.model}: not a sentencepiece model") from None

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
