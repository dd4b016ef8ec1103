"""One joint BPE model, trained on the words of both languages, and a corpus in its pieces."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from sentencepiece import SentencePieceTrainer

from rope_fairseq.corpus.blocks import Block, ordered_map, read_blocks
from rope_fairseq.corpus.folder import SPLITS
from rope_fairseq.corpus.staging import staging
from rope_fairseq.corpus.words import WORDS_FILE
from rope_fairseq.errors import UserError
from rope_fairseq.files import replacing
from rope_fairseq.lines import count_lines, progress
from rope_fairseq.text import MODEL_FILE, OPTIONS_FILE, Text


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


def train_bpe(tokens: Path, vocab_size: int, output: Path) -> None:
    """Train one BPE model on the words of both sides of the training text.

    sentencepiece cuts sentences into words and counts those before it trains, so that the pieces
    are the same as from the sentences. The same counts give the same model, byte for byte.
    ``text.json`` is written beside the model.

    Memory grows with the number of different words, as sentencepiece holds them all, not with the
    number of sentences.

    Args:
        tokens: folder that ``clean`` wrote, with ``words.tsv`` and ``text.json``.
        vocab_size: number of pieces, ``<unk>`` included.
        output: folder to write to; made if it is not there.

    Raises:
        UserError: a vocabulary size out of reach.
    """
    text = load_tokens_options(tokens)
    words = tokens / WORDS_FILE
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
    with staging(output, "bpe") as folder:
        with replacing(folder / MODEL_FILE) as written:
            written.write(model.getvalue())
        replace(text, model=folder / MODEL_FILE).save(folder)


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
    options, expected = load_tokens_options(tokens).options(), text.options()
    for name, value in options.items():
        if value != expected[name]:
            raise UserError(
                f"{tokens} was written with {name} {value}, but the model in {model} is for "
                f"{name} {expected[name]}"
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
