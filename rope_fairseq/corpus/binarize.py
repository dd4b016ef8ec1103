"""Text in pieces → fairseq's binary data: the files of fairseq-preprocess, byte for byte, in a
twentieth of its time.

    python -m rope_fairseq.corpus binarize --text TEXT --output DATA_BIN

does what this does, but for the log::

    fairseq-preprocess --source-lang S --target-lang T --joined-dictionary --destdir DATA_BIN
        --trainpref TEXT/train --validpref TEXT/valid --testpref TEXT/test
    cp TEXT/text.json TEXT/sentencepiece.bpe.model DATA_BIN   # or TEXT/bpecodes

fairseq-preprocess takes some 10 µs for each piece, twice: it calls ``tell`` after each line,
``Counter.update`` for each piece and sets single elements of tensors. For the 4.5 million pairs of
WMT14 that is about an hour on two cores. tests/test_binarize.py compares the files.
"""

import struct
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import (
    MMapIndexedDataset,
    _dtype_header_code,
    best_fitting_int_dtype,
    data_file_path,
    index_file_path,
)

from rope_fairseq.corpus.blocks import Block, ordered_map, read_blocks
from rope_fairseq.corpus.folder import SPLITS
from rope_fairseq.corpus.staging import staging
from rope_fairseq.errors import UserError
from rope_fairseq.lines import count_lines, progress
from rope_fairseq.text import Text

PADDING_FACTOR = 8  # of the dictionary; fairseq-preprocess' default


@dataclass
class Numbered:
    """A block of lines as numbers of the dictionary.

    Args:
        numbers: of all lines, each with ``</s>`` at its end, in the type of the ``.bin`` file.
        sizes: length of each line, ``</s>`` included; int32.
        unknown: pieces that are not in the dictionary.
    """

    numbers: bytes
    sizes: bytes
    unknown: int

    def lines(self) -> int:
        return len(self.sizes) // 4


def binarize(text_folder: Path, output: Path, workers: int) -> list[str]:
    """Write dictionaries and binary data of all splits, and copies of BPE model and ``text.json``.

    Memory grows by 12 bytes for each line of the longest file, its place in the index.

    Args:
        text_folder: with ``SPLIT.LANG`` in pieces, ``text.json`` and the BPE model.
        output: folder to write to; made if it is not there.
        workers: number of processes.

    Returns:
        A line about each file.

    Raises:
        UserError: the training text is empty.
    """
    text = Text.load(text_folder)
    source, target = text.source_lang, text.target_lang
    dictionary = build_dictionary(
        [text_folder / f"train.{lang}" for lang in (source, target)], workers
    )
    lines = []
    with staging(output, "binarize") as folder:
        for lang in (source, target):
            dictionary.save(str(folder / f"dict.{lang}.txt"))
            for split in SPLITS:
                prefix = folder / f"{split}.{source}-{target}.{lang}"
                lines.append(
                    binarize_file(text_folder / f"{split}.{lang}", prefix, dictionary, workers)
                )
        text.save(folder)
    return [f"dictionary: {len(dictionary):,} types", *lines]


def build_dictionary(files: list[Path], workers: int) -> Dictionary:
    """The dictionary of all pieces in some files, as fairseq builds it.

    Raises:
        UserError: there are none.
    """
    counts: Counter[str] = Counter()
    for file in files:
        blocks = ordered_map(_count_pieces, read_blocks(file), workers)
        for block_counts in blocks:
            counts.update(block_counts)
    if not counts:
        raise UserError(f"{' and '.join(map(str, files))}: no piece in them; encode the text again")
    dictionary = Dictionary()
    for piece, count in counts.items():
        dictionary.add_symbol(piece, count)
    # Sorts by count, then by piece.
    dictionary.finalize(padding_factor=PADDING_FACTOR)
    return dictionary


def _count_pieces(block: Block) -> Counter[str]:
    return Counter(b"".join(block.lines[0]).decode("utf-8").split())


def binarize_file(file: Path, prefix: Path, dictionary: Dictionary, workers: int) -> str:
    """Write PREFIX.bin and PREFIX.idx; a line about the file."""
    dtype = best_fitting_int_dtype(len(dictionary))
    number = partial(_number_pieces, dictionary.indices, dictionary.unk(), dictionary.eos(), dtype)
    blocks = progress(
        ordered_map(number, read_blocks(file), workers),
        *(count_lines(file), f"binarize {file.name}", Numbered.lines),
    )
    sizes, unknown = array("i"), 0
    with open(data_file_path(str(prefix)), "wb") as stream:
        for block in blocks:
            stream.write(block.numbers)
            sizes.frombytes(block.sizes)
            unknown += block.unknown
    write_index(Path(index_file_path(str(prefix))), np.frombuffer(sizes, dtype=np.int32), dtype)
    total = sum(sizes)
    return (
        f"{file.name}: {len(sizes):,} sentences, {total:,} pieces, {unknown / max(total, 1):.3%} "
        "unknown"
    )


def _number_pieces(
    indices: dict[str, int], unk: int, eos: int, dtype: type, block: Block
) -> Numbered:
    numbers: list[int] = []
    sizes: list[int] = []
    unknown = 0
    for raw in block.lines[0]:
        pieces = raw.decode("utf-8").split()
        line = [indices.get(piece, unk) for piece in pieces]
        unknown += sum(number == unk for number in line)
        numbers += line
        numbers.append(eos)
        sizes.append(len(line) + 1)
    return Numbered(
        np.array(numbers, dtype=dtype).tobytes(), np.array(sizes, dtype=np.int32).tobytes(), unknown
    )


def write_index(
    path: Path, sizes: "np.ndarray[tuple[int], np.dtype[np.int32]]", dtype: type
) -> None:
    """An ``.idx`` file as ``MMapIndexedDataset.Index.writer`` writes it, from arrays: its lists of
    Python integers take ten times the memory."""
    ends = np.cumsum(sizes, dtype=np.int64) * np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    with open(path, "wb") as stream:
        stream.write(MMapIndexedDataset.Index._HDR_MAGIC)
        stream.write(struct.pack("<QBQ", 1, _dtype_header_code(dtype), len(sizes)))
        stream.write(sizes.tobytes())
        stream.write(pointers.tobytes())
