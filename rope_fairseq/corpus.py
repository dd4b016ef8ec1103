"""A parallel corpus on disk: checked, freed of empty training pairs, segmented with one joint BPE.

A corpus is a folder of ``train|valid|test.LANG``, one sentence a line, line n of one side
translating line n of the other.
"""

import io
import multiprocessing
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path

from sentencepiece import SentencePieceTrainer

from rope_fairseq.errors import UserError
from rope_fairseq.files import replacing
from rope_fairseq.lines import count_lines, encode_line, progress, read_lines
from rope_fairseq.text import MODEL_FILE, Text

SPLITS = ("train", "valid", "test")

# Lines handed to the worker processes at a time: bounds what is held in memory.
BLOCK_LINES = 50_000
CHUNK_LINES = 250


def count_pairs(source: Path, target: Path) -> int:
    """Number of sentence pairs in two files.

    Raises:
        UserError: the files are empty or differ in their number of lines.
    """
    source_lines, target_lines = count_lines(source), count_lines(target)
    if source_lines != target_lines:
        raise UserError(
            f"{source} has {source_lines} lines but {target} has {target_lines}: "
            "line n of one must translate line n of the other"
        )
    if source_lines == 0:
        raise UserError(f"{source} and {target} are empty: at least one sentence pair is needed")
    return source_lines


def _split_files(text: Text, folder: Path, split: str) -> tuple[Path, Path]:
    return folder / f"{split}.{text.source_lang}", folder / f"{split}.{text.target_lang}"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"output {folder}: there is a file of that name, not a folder") from None


def train_bpe(text: Text, data: Path, vocab_size: int, output: Path) -> None:
    """Train one BPE model on both sides of the training text, normalised and tokenized.

    Every sentence is used, in the order of the files, on one thread: the same text gives the same
    model, byte for byte. ``text.json`` is written beside the model.

    Args:
        text: languages and options; its own model path is not used.
        data: folder with ``train.LANG`` of both languages.
        vocab_size: number of pieces, ``<unk>`` included.
        output: folder to write to; made if it is not there.

    Raises:
        UserError: empty or unequal files, or a vocabulary size out of reach.
    """
    files = _split_files(text, data, "train")
    pairs = count_pairs(*files)
    _make_folder(output)

    unreadable: list[UserError] = []

    def sentences() -> Iterator[str]:
        for file, lang in zip(files, (text.source_lang, text.target_lang), strict=True):
            try:
                for line in progress(read_lines(file), pairs, f"tokenize {file.name} for BPE"):
                    yield text.tokenize(line, lang)
            except UserError as error:  # sentencepiece would make it a RuntimeError of its own
                unreadable.append(error)
                raise

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            character_coverage=1.0,
            # fairseq has its own <s>, </s> and <pad>; sentencepiece's would be dead pieces of the
            # same names. <unk> it must have, but it never writes it.
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            # All sentences, however long: by default longer ones are left out without a word.
            input_sentence_size=0,
            shuffle_input_sentence=False,
            max_sentence_length=2**30,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if unreadable:
            raise unreadable[0] from None
        raise UserError(_explain_vocab_size(vocab_size, str(error), files)) from None
    with replacing(output / MODEL_FILE) as stream:
        stream.write(model.getvalue())
    replace(text, model=output / MODEL_FILE).save(output)


def _explain_vocab_size(vocab_size: int, message: str, files: tuple[Path, Path]) -> str:
    """One line for what sentencepiece's trainer says."""
    where = f"for the text of {files[0]} and {files[1]}"
    too_high = re.search(r"Vocabulary size too high .* value <= (\d+)", message)
    if too_high:
        return f"vocab_size {vocab_size}: the largest possible {where} is {too_high[1]}"
    too_low = re.search(r"smaller than required_chars. \d+ vs (\d+)", message)
    if too_low:
        return f"vocab_size {vocab_size}: the smallest possible {where} is {too_low[1]}"
    if "!sentences_.empty()" in message:
        return f"{files[0]} and {files[1]} hold no text: every line is empty"
    return f"vocab_size {vocab_size}: sentencepiece refuses it {where}: {message}"


_worker_text: Text


def _start_worker(text: Text) -> None:
    global _worker_text
    _worker_text = text


def _encode_pair(pair: tuple[str, str]) -> tuple[str, str]:
    text = _worker_text
    return text.encode(pair[0], text.source_lang), text.encode(pair[1], text.target_lang)


def encode_pairs(
    text: Text, pairs: Iterable[tuple[str, str]], workers: int
) -> Iterator[tuple[str, str]]:
    """Encode pairs of lines with several processes; their order is kept."""
    pairs = iter(pairs)
    # Forked, not spawned: a spawned process would run scripts/tool.py again.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, _start_worker, (text,)) as pool:
        while block := list(islice(pairs, BLOCK_LINES)):
            yield from pool.map(_encode_pair, block, chunksize=CHUNK_LINES)


def write_pairs(source: Path, target: Path, pairs: Iterable[tuple[str, str]]) -> int:
    """Write two files line by line; both appear under their names only when complete.

    Returns:
        The number of pairs written.
    """
    count = 0
    with replacing(source) as source_stream, replacing(target) as target_stream:
        for source_line, target_line in pairs:
            source_stream.write(encode_line(source_line))
            target_stream.write(encode_line(target_line))
            count += 1
    return count


def encode_corpus(text: Text, data: Path, output: Path, workers: int) -> None:
    """Write ``SPLIT.LANG`` in pieces for train, valid and test.

    In train, a pair with no text on one side is dropped from both sides and counted on standard
    error. In valid and test every line is kept, so that line n stays line n.

    Raises:
        UserError: unequal or empty files, text that is not UTF-8, or no training pair left.
    """
    totals = {split: count_pairs(*_split_files(text, data, split)) for split in SPLITS}
    _make_folder(output)
    for split, total in totals.items():
        files = _split_files(text, data, split)
        raw = zip(*map(read_lines, files), strict=True)
        pairs = progress(encode_pairs(text, raw, workers), total, f"encode {split}")
        if split == "train":
            pairs = (pair for pair in pairs if pair[0] and pair[1])
        kept = write_pairs(*_split_files(text, output, split), pairs)
        if kept == 0:
            raise UserError(f"{files[0]} and {files[1]}: every pair has an empty side")
        if kept < total:
            print(f"{split}: dropped {total - kept} pairs with an empty side", file=sys.stderr)
