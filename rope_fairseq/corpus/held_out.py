"""Pairs held out of a training text for validation and test.

Evenly spread, always the same ones for the same files, and only pairs of which neither side occurs
a second time, so that no test sentence stands in the training text.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rope_fairseq.corpus.folder import SPLITS, append_lines, write_source, writing_corpus
from rope_fairseq.corpus.parallel import Pair, describe, opened, pairs_of

# Candidates looked at for each pair that is wanted; bounds the memory.
CANDIDATES = 16
# Characters that a test set would keep and a training text loses.
UNWANTED = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufeff]")

#: The group of a pair, of which some number is held out; None for a pair that stays. Groups count
#: all pairs that have their property, fit to be held out or not.
GroupOf = Callable[[tuple[bytes, bytes]], int | None]


def key(line: bytes) -> bytes:
    """What makes two lines the same sentence: their words, whatever the spaces between them."""
    return hashlib.blake2b(b" ".join(line.split()), digest_size=16).digest()


def spread(total: int, wanted: int) -> list[int]:
    """``wanted`` different numbers below ``total``, evenly spread."""
    return [(2 * index + 1) * total // (2 * wanted) for index in range(wanted)]


def clean_words(line: bytes) -> int:
    """The words of a side that could stand in a test set; 0 for one that could not."""
    try:
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError:
        return 0
    return 0 if UNWANTED.search(text) else len(text.split())


def choose(
    train: Pair,
    others: Sequence[Pair],
    group_of: GroupOf,
    totals: Mapping[int, int],
    wanted: Mapping[int, int],
    longest: int,
) -> dict[int, list[int]]:
    """The numbers, from 0, of pairs of ``train`` that may be held out: for each group ``wanted`` of
    them, or all if there are fewer, evenly spread over the group, in ascending order.

    Memory is that of :data:`CANDIDATES` times ``wanted`` keys, however long the text is.

    Args:
        others: files of the sets that are not made here; no held-out side occurs in them either.
        totals: pairs of each group in ``train``.
        longest: words of the longest side that is fit.
    """
    ranks = {
        group: set(spread(totals[group], min(totals[group], CANDIDATES * wanted[group])))
        for group in wanted
    }
    seen: Counter[int] = Counter()
    candidates: dict[int, tuple[int, bytes, bytes]] = {}
    for number, pair in enumerate(pairs_of(train)):
        group = group_of(pair)
        if group is None:
            continue
        if seen[group] in ranks[group] and all(1 <= clean_words(s) <= longest for s in pair):
            candidates[number] = (group, key(pair[0]), key(pair[1]))
        seen[group] += 1
    occurs: tuple[dict[bytes, int], dict[bytes, int]] = (
        {keys[1]: 0 for keys in candidates.values()},
        {keys[2]: 0 for keys in candidates.values()},
    )
    for files in (train, *others):
        for pair in pairs_of(files):
            for side in (0, 1):
                digest = key(pair[side])
                if digest in occurs[side]:
                    occurs[side][digest] += 1
    fit: dict[int, list[int]] = {group: [] for group in wanted}
    for number, (group, *keys) in candidates.items():
        if occurs[0][keys[0]] == 1 and occurs[1][keys[1]] == 1:
            fit[group].append(number)
    return {
        group: [numbers[index] for index in spread(len(numbers), min(len(numbers), wanted[group]))]
        for group, numbers in fit.items()
    }


def write_sets(
    folder: Path,
    langs: tuple[str, str],
    given: Mapping[str, Pair],
    lines: Mapping[str, int],
    goes_to: Mapping[int, str],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the corpus: given sets as they are, but of ``train`` each pair to where it goes.

    Args:
        given: split → its two files; ``train`` at least. The other splits are made.
        lines: pairs of each given set.
        goes_to: number of a pair of ``train`` → the split it is held out for.
        about: what source.json says of the corpus as a whole.

    Returns:
        The description, as source.json has it.
    """
    made = [split for split in SPLITS if split not in given]
    sizes = Counter(goes_to.values())
    source = dict(about)
    with writing_corpus(folder, *langs) as new:
        for split, files in given.items():
            if split == "train" and made:
                continue
            for path, lang in zip(files, langs, strict=True):
                with opened(path) as text, open(new / f"{split}.{lang}", "wb") as output:
                    append_lines(output, text)
            source[split] = describe(files, lines[split])
        if made:
            divide(given["train"], goes_to, made, new, langs)
            source["train"] = describe(given["train"], lines["train"] - len(goes_to))
            for split in made:
                source[split] = {"held_out_of": "train", "lines": sizes[split]}
        write_source(new, source)
    return source


def show_sets(source: Mapping[str, Any], made: Sequence[str]) -> str:
    """A line about a description, for the terminal."""
    counts = ", ".join(f"{split} {source[split]['lines']:,}" for split in SPLITS)
    held = f"; held out of the training text: {' and '.join(made)}" if made else ""
    return f"{source['corpus']}: pairs: {counts}{held}"


def divide(
    train: Pair, goes_to: Mapping[int, str], made: Sequence[str], new: Path, langs: tuple[str, str]
) -> None:
    """Write each pair of ``train`` to the split that its number goes to, or to train."""
    outputs = {
        (split, side): open(new / f"{split}.{langs[side]}", "wb")
        for split in ("train", *made)
        for side in (0, 1)
    }
    try:
        for number, pair in enumerate(pairs_of(train)):
            split = goes_to.get(number, "train")
            for side in (0, 1):
                # The last line may lack its end, and need not be the last one where it goes.
                outputs[split, side].write(pair[side].removesuffix(b"\n") + b"\n")
    finally:
        for output in outputs.values():
            output.close()
