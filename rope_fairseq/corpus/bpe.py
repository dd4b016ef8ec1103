"""One joint BPE model, trained on the words of both languages, and a corpus in its pieces.

Either kind (:mod:`rope_fairseq.pieces`) is trained by its own library, from the words and their
counts: sentencepiece to a number of pieces, subword-nmt to a number of merges.
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from rope_fairseq.corpus.blocks import Block, ordered_map, read_blocks
from rope_fairseq.corpus.folder import SPLITS
from rope_fairseq.corpus.staging import staging
from rope_fairseq.corpus.words import WORDS_FILE
from rope_fairseq.errors import UserError
from rope_fairseq.files import replacing
from rope_fairseq.lines import count_lines, progress
from rope_fairseq.pieces import SentencePiece, SubwordNmt
from rope_fairseq.text import OPTIONS_FILE, Text


def load_tokens_options(tokens: Path) -> Text:
    """Languages and text options that ``clean`` left in its folder.

    Raises:
        UserError: it left none.
    """
    if not (tokens / OPTIONS_FILE).is_file():
        raise UserError(
            f"{tokens}: holds no {OPTIONS_FILE}; name the folder that "
            "`python -m rope_fairseq.corpus clean` wrote"
        )
    return Text.load(tokens)


def train_bpe(
    tokens: Path, vocab_size: int | None, output: Path, merges: int | None = None
) -> None:
    """Train one BPE model on the words of both sides of the training text.

    The same counts give the same model, byte for byte. ``text.json`` is written beside the model.

    Memory grows with the number of different words, as both libraries hold them all, not with the
    number of sentences.

    Args:
        tokens: folder that ``clean`` wrote, with ``words.tsv`` and ``text.json``.
        vocab_size: sentencepiece's number of pieces, ``<unk>`` included.
        output: folder to write to; made if it is not there.
        merges: subword-nmt's number of merges, in place of ``vocab_size``.

    Raises:
        UserError: a size out of reach, or the text was prepared for the other kind of BPE.
    """
    if (vocab_size is None) == (merges is None):
        raise UserError("bpe: one of --vocab-size (sentencepiece) and --merges (subword-nmt)")
    text = load_tokens_options(tokens)
    asked = SentencePiece if merges is None else SubwordNmt
    if text.bpe != asked.name:
        given = "--vocab-size" if merges is None else "--merges"
        raise UserError(f"{given}: is for {asked.name}, but {tokens} was written for {text.bpe}")
    words = tokens / WORDS_FILE
    if merges is None:
        assert vocab_size is not None
        model = _sentencepiece_model(words, vocab_size)
    else:
        model = _subword_nmt_model(words, merges)
    with staging(output, "bpe") as folder:
        path = folder / asked.model_file
        with replacing(path) as written:
            written.write(model)
        replace(text, model=path).save(folder)


def _sentencepiece_model(words: Path, vocab_size: int) -> bytes:
    """sentencepiece cuts sentences into words and counts those before it trains, so that the pieces
    are the same as from the sentences."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    with open(words, encoding="utf-8", newline="\n") as stream:
        try:
            SentencePieceTrainer.train(
                sentence_iterator=(line.removesuffix("\n") for line in stream),
                input_format="tsv",
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                normalization_rule_name="identity",
                character_coverage=1.0,
                # fairseq has its own <s>, </s> and <pad>; sentencepiece's would be dead pieces of
                # the same names. <unk> it must have, but it never writes it.
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                # All words, however long: by default longer ones are left out without a note.
                input_sentence_size=0,
                shuffle_input_sentence=False,
                max_sentence_length=2**30,
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise UserError(_explain_vocab_size(vocab_size, str(error), words)) from None
    return model.getvalue()


def _subword_nmt_model(words: Path, merges: int) -> bytes:
    """What ``subword-nmt learn-bpe -s MERGES`` writes for the text of both sides: it counts words
    first, and takes the pair of the greatest (count, pair), whatever the order of the words.

    Merges of pairs that occur once are no use; subword-nmt stops before them.
    """
    from subword_nmt.learn_bpe import learn_bpe

    if merges < 1:
        raise UserError(f"merges {merges}: at least 1 is needed")
    codes = io.StringIO()
    # Its progress bar and its remarks are for a terminal.
    quiet = contextlib.redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO())
    with open(words, encoding="utf-8", newline="\n") as stream, quiet:
        with contextlib.suppress(ValueError):  # not a single pair
            learn_bpe((line.replace("\t", " ") for line in stream), codes, merges, is_dict=True)
    possible = codes.getvalue().count("\n") - 1
    if possible < merges:
        raise UserError(
            f"merges {merges}: the largest possible for the words of {words} is {possible}"
        )
    return codes.getvalue().encode("utf-8")


def _explain_vocab_size(vocab_size: int, message: str, words: Path) -> str:
    """One line for what sentencepiece's trainer says."""
    where = f"for the words of {words}"
    too_high = re.search(r"Vocabulary size too high .* value <= (\d+)", message)
    if too_high:
        return f"vocab_size {vocab_size}: the largest possible {where} is {too_high[1]}"
    too_low = re.search(r"smaller than required_chars. \d+ vs (\d+)", message)
    if too_low:
        return f"vocab_size {vocab_size}: the smallest possible {where} is {too_low[1]}"
    return f"vocab_size {vocab_size}: sentencepiece refuses it {where}: {message}"


def encode_corpus(tokens: Path, model: Path, output: Path, workers: int) -> None:
    """Write ``SPLIT.LANG`` in pieces for train, valid and test, line by line.

    Args:
        tokens: folder that ``clean`` wrote.
        model: folder with the BPE model and ``text.json``.
        output: folder to write to; made if it is not there.
        workers: number of processes.

    Raises:
        UserError: the text was not tokenized as the model's training text was.
    """
    text = Text.load(model)
    options = load_tokens_options(tokens)
    for name in options.options() | text.options():
        value, expected = getattr(options, name), getattr(text, name)
        if value != expected:
            raise UserError(
                f"{tokens} was written with {name} {value}, but the model in {model} is for "
                f"{name} {expected}"
            )
    text.segment([])  # a model that cannot be read is refused here, before anything is written
    with staging(output, "encode") as folder:
        for split in SPLITS:
            for lang in (text.source_lang, text.target_lang):
                file = tokens / f"{split}.{lang}"
                blocks = ordered_map(partial(_segment_block, text), read_blocks(file), workers)
                with open(folder / file.name, "wb") as stream:
                    for pieces in _progress(blocks, file):
                        stream.write(pieces)


def _progress(blocks: Iterator[bytes], file: Path) -> Iterator[bytes]:
    label = f"encode {file.name}"
    return progress(blocks, count_lines(file), label, size=lambda pieces: pieces.count(b"\n"))


def _segment_block(text: Text, block: Block) -> bytes:
    lines = [raw.decode("utf-8").removesuffix("\n") for raw in block.lines[0]]
    return "".join(f"{pieces}\n" for pieces in text.segment(lines)).encode("utf-8")
