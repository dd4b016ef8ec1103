"""The step ``clean``: raw text to tokens, without the pairs that should not be trained on."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from rope_fairseq.corpus.blocks import ordered_map, read_blocks
from rope_fairseq.corpus.duplicates import DuplicateFinder, digest
from rope_fairseq.corpus.folder import SPLITS
from rope_fairseq.corpus.rules import REPORT_FILE, Cleaned, Cleaner, Limits, Report
from rope_fairseq.corpus.staging import staging
from rope_fairseq.corpus.words import WORDS_FILE, WordCounter, merge_counts
from rope_fairseq.errors import UserError
from rope_fairseq.lines import count_lines, progress
from rope_fairseq.text import Text

LINES_AT_A_TIME = 20_000

Pair = tuple[Path, Path]


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


def clean_corpus(
    text: Text,
    data: Path,
    output: Path,
    limits: Limits,
    workers: int,
    *,
    tokenized: bool = False,
    valid_every: int | None = None,
) -> Report:
    """Write the tokens of train, valid and test, the words of train with their counts, the options
    and the report; all appear together.

    Args:
        text: languages and options; its model is not used.
        data: folder with ``SPLIT.LANG``.
        output: folder to write to; made if it is not there.
        limits: which pairs are left out; see :mod:`rope_fairseq.corpus.rules`.
        workers: number of processes.
        tokenized: the text is tokens already and is only split at its spaces.
        valid_every: of the training pairs that are kept, this one and each such one after it are
            the validation set (fairseq's scripts for IWSLT14 take every 23rd); then ``data`` needs
            no ``valid``, and what is there is not read.

    Raises:
        UserError: unequal or empty files, valid or test is not UTF-8, or no pair is left.
    """
    if valid_every is not None and valid_every < 2:
        raise UserError(f"--valid-every {valid_every}: at least 2 is needed")
    splits = [split for split in SPLITS if split != "valid" or valid_every is None]
    totals = {split: count_pairs(*_pair(data, split, text)) for split in splits}
    report = Report(limits, tokenized, valid_every)
    with staging(output, "clean") as folder:
        scratch = folder / "scratch"
        scratch.mkdir()
        test_sides: tuple[frozenset[bytes], frozenset[bytes]] = (frozenset(), frozenset())
        # Train last: it may need the test set, and an error in the small files shows at once.
        for split in reversed(splits):
            raw = _pair(data, split, text)
            names = (str(raw[0]), str(raw[1]))
            cleaner = Cleaner(text, limits, split, names, test_sides, tokenized)
            blocks = progress(
                ordered_map(cleaner, read_blocks(*raw), workers),
                *(totals[split], f"clean {split}", Cleaned.pairs_read),
            )
            finder = DuplicateFinder(scratch / split, totals[split])
            written = _pair(scratch if split == "train" else folder, split, text)
            dropped = _write_tokens(blocks, written, finder, report)
            if split == "train":
                if not limits.keep_duplicates:
                    dropped["duplicate"] = finder.mark(scratch / "duplicates")
                marks, valid = scratch / "duplicates", _pair(folder, "valid", text)
                report.words = _finish_train(written, marks, folder, workers, valid_every, valid)
            report.add_split(split, totals[split], dropped)
            if report.kept[split] == 0:
                raise UserError(
                    f"{raw[0]} and {raw[1]}: no pair is left; left out: {report.left_out(split)}"
                )
            if split == "train" and valid_every is not None:
                pairs = report.kept["train"] // valid_every
                if not pairs:
                    raise UserError(
                        f"--valid-every {valid_every}: only {report.kept['train']} training pairs "
                        f"are kept of {raw[0]} and {raw[1]}; a smaller number leaves a validation "
                        "set"
                    )
                report.take_valid(pairs)
            if split == "test" and limits.drop_test_overlap:
                test_sides = _digests(written[0]), _digests(written[1])
        text.save_options(folder)
        content = json.dumps(report.json(), indent=2, ensure_ascii=False) + "\n"
        (folder / REPORT_FILE).write_text(content, encoding="utf-8")
    return report


def _pair(folder: Path, split: str, text: Text) -> Pair:
    return folder / f"{split}.{text.source_lang}", folder / f"{split}.{text.target_lang}"


def _write_tokens(
    blocks: Iterator[Cleaned], files: Pair, finder: DuplicateFinder, report: Report
) -> Counter[str]:
    """Write the pairs that are kept; the number of the others by rule."""
    dropped: Counter[str] = Counter()
    with ExitStack() as stack:
        streams = [stack.enter_context(open(file, "wb")) for file in files]
        for block in blocks:
            for stream, lines in zip(streams, block.tokens, strict=True):
                stream.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
            if block.digests:
                finder.add(block.digests)
            dropped += block.dropped
            report.changes.update(block.changes)
    return dropped


def _finish_train(
    files: Pair,
    duplicates: Path,
    folder: Path,
    workers: int,
    valid_every: int | None,
    valid: Pair,
) -> dict[str, int]:
    """Copy both sides of train without the duplicates to ``folder`` and write ``words.tsv``.

    Args:
        files: tokens of both sides, in a scratch folder.
        duplicates: one byte a pair, 1 for a duplicate; need not exist.
        valid_every: which lines go to ``valid`` instead, where they are not words of train.

    Returns:
        Running words of each side, different words of both.
    """

    def copy(sides: Pair) -> tuple[int, list[Path]]:
        file, held_out = sides
        words, running, number = WordCounter(file.parent, f"{file.name}.words"), 0, 0
        with ExitStack() as stack:
            lines = stack.enter_context(open(file, "rb"))
            marks = stack.enter_context(open(duplicates, "rb")) if duplicates.exists() else None
            copied = stack.enter_context(open(folder / file.name, "wb"))
            chosen = stack.enter_context(open(held_out, "wb")) if valid_every else None
            while some := list(islice(lines, LINES_AT_A_TIME)):
                if marks is not None:
                    repeated = marks.read(len(some))
                    some = [line for line, mark in zip(some, repeated, strict=True) if not mark]
                if chosen is not None and valid_every is not None:
                    first = valid_every - 1 - number % valid_every
                    number += len(some)
                    chosen.writelines(some[first::valid_every])
                    del some[first::valid_every]
                content = b"".join(some)
                copied.write(content)
                running += words.add(content)
        return running, words.close()

    # A process for each side.
    (source, source_counts), (target, target_counts) = ordered_map(
        copy, zip(files, valid, strict=True), min(workers, 2)
    )
    with open(folder / WORDS_FILE, "wb") as stream:
        different = merge_counts([*source_counts, *target_counts], stream)
    return {files[0].name: source, files[1].name: target, "different": different}


def _digests(file: Path) -> frozenset[bytes]:
    """Digests of the lines that are not empty, as Cleaner makes them."""
    with open(file, "rb") as stream:
        return frozenset(digest(line[:-1]) for line in stream if line != b"\n")
