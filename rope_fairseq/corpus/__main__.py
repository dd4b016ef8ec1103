"""The steps of scripts/prepare.sh from raw text to fairseq's binary data.

python -m rope_fairseq.corpus clean      DATA → TOK: SPLIT.LANG cleaned, normalised, tokenized (or
                                         only split, where it is tokens already);
                                         words.tsv, cleaning.json (report), text.json (options)
python -m rope_fairseq.corpus bpe        TOK/words.tsv → TEXT: BPE model, text.json
python -m rope_fairseq.corpus encode     TOK → TEXT: SPLIT.LANG in pieces
python -m rope_fairseq.corpus binarize   TEXT → DATA_BIN: what fairseq-preprocess makes of it
python -m rope_fairseq.corpus signature  what the prepared text is: counts, hash, versions
"""

import logging
from pathlib import Path

from rope_fairseq.corpus.bpe import encode_corpus, train_bpe
from rope_fairseq.corpus.clean import clean_corpus
from rope_fairseq.corpus.folder import check_languages
from rope_fairseq.corpus.rules import Limits
from rope_fairseq.corpus.signature import show, sign_corpus
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.pieces import KINDS, SentencePiece
from rope_fairseq.text import Text


def _parser() -> Parser:
    parser = Parser(prog="python -m rope_fairseq.corpus")
    commands = parser.add_subparsers(dest="command", required=True)
    clean = commands.add_parser("clean", help="raw text → tokens, words and a report")
    bpe = commands.add_parser("bpe", help="words → joint BPE model")
    encode = commands.add_parser("encode", help="tokens → pieces")
    binarize = commands.add_parser("binarize", help="pieces → fairseq's binary data")
    sign = commands.add_parser("signature", help="say what the prepared text is")

    clean.add_argument("--data", required=True, type=Path, help="folder of SPLIT.LANG")
    clean.add_argument("--output", required=True, type=Path, help="folder of tokens to write")
    clean.add_argument("--source-lang", required=True)
    clean.add_argument("--target-lang", required=True)
    clean.add_argument(
        "--max-tokens",
        type=int,
        default=Limits.max_tokens,
        help="longest side of a pair in Moses tokens; 0: no limit (default %(default)s)",
    )
    clean.add_argument(
        "--max-ratio",
        type=float,
        default=Limits.max_ratio,
        help="largest ratio of the lengths of the sides; 0: no limit (default 0)",
    )
    for option, what in (
        ("--keep-duplicates", "keep pairs that occurred before"),
        ("--drop-test-overlap", "leave out pairs of which a side is in the test set"),
        ("--no-normalize", "leave punctuation as it is"),
        ("--lowercase", "make all letters small, before tokenizing"),
        ("--lowercase-tokens", "make all letters small, after tokenizing"),
        ("--escape", "entities, as Moses does"),
        ("--aggressive-dash-splits", "a-b → a @-@ b"),
        ("--tokenized", "the corpus is tokens already, made with these options: split at spaces"),
    ):
        clean.add_argument(option, action="store_true", help=what)
    clean.add_argument(
        "--valid-every",
        type=int,
        metavar="N",
        help="make every Nth training pair that is kept validation; there is no valid.LANG then",
    )
    clean.add_argument(
        "--bpe",
        choices=list(KINDS),
        default=SentencePiece.name,
        help="the kind of BPE to come (default %(default)s)",
    )

    for command in (bpe, encode, sign):
        command.add_argument(
            "--tokens", required=command is not sign, type=Path, help="folder that clean wrote"
        )
    for command in (bpe, encode):
        command.add_argument("--output", required=True, type=Path, help="folder to write to")
    bpe.add_argument("--vocab-size", type=int, help="sentencepiece: pieces, <unk> included")
    bpe.add_argument("--merges", type=int, help="subword-nmt: merges")
    encode.add_argument("--model", required=True, type=Path, help="folder that bpe wrote")
    binarize.add_argument("--text", required=True, type=Path, help="folder that encode wrote")
    binarize.add_argument("--output", required=True, type=Path, help="folder to write to")
    for command in (clean, encode, binarize):
        command.add_argument("--workers", type=int, default=2, help="processes (default 2)")

    sign.add_argument("--text", type=Path, help="folder that encode wrote")
    sign.add_argument("--dictionary", type=Path, help="dict.LANG.txt of fairseq-preprocess")
    sign.add_argument("--corpus", help="the corpus' name")
    sign.add_argument("--source", type=Path, help="JSON file that says where the data is from")
    sign.add_argument("--output", type=Path, help="JSON file to write")
    sign.add_argument("--show", type=Path, metavar="FILE", help="print what such a file holds")
    return parser


def main() -> None:
    args = _parser().parse_args()
    if getattr(args, "workers", 1) < 1:
        raise UserError(f"--workers {args.workers}: at least 1 is needed")
    source = {"clean": "data", "encode": "tokens", "binarize": "text"}.get(args.command)
    if source is not None and args.output.resolve() == getattr(args, source).resolve():
        raise UserError(f"--output {args.output}: is --{source} as well; name another folder")
    if args.command == "clean":
        check_languages(args.source_lang, args.target_lang)
        text = Text(
            source_lang=args.source_lang,
            target_lang=args.target_lang,
            normalize=not args.no_normalize,
            escape=args.escape,
            aggressive_dash_splits=args.aggressive_dash_splits,
            lowercase=args.lowercase,
            lowercase_tokens=args.lowercase_tokens,
            bpe=args.bpe,
        )
        limits = Limits(
            max_tokens=args.max_tokens,
            max_ratio=args.max_ratio,
            keep_duplicates=args.keep_duplicates,
            drop_test_overlap=args.drop_test_overlap,
        )
        report = clean_corpus(
            text,
            args.data,
            args.output,
            limits,
            args.workers,
            tokenized=args.tokenized,
            valid_every=args.valid_every,
        )
        for line in report.lines():
            print(line)
    elif args.command == "bpe":
        train_bpe(args.tokens, args.vocab_size, args.output, args.merges)
    elif args.command == "encode":
        encode_corpus(args.tokens, args.model, args.output, args.workers)
    elif args.command == "binarize":
        # Importing fairseq, which takes seconds, logs what only its speech tasks need.
        logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
        from rope_fairseq.corpus.binarize import binarize

        for line in binarize(args.text, args.output, args.workers):
            print(line)
    elif args.show is not None:
        print(show(args.show))
    else:
        needed = ("text", "tokens", "dictionary", "corpus", "output")
        for name in needed:
            if getattr(args, name) is None:
                raise UserError(f"signature: --{name} is missing; it is needed without --show")
        record = sign_corpus(**{name: getattr(args, name) for name in (*needed, "source")})
        print(record["signature"])


if __name__ == "__main__":
    run_main(main)
