"""A corpus whose test set is evenly of short and long sentences, to see what length costs.

Two text files, plain, .gz or .xz, line n of one the translation of line n of the other. The test
set is held out of them: the same number of pairs of each class of length, counted in words between
white space on the longer side. The validation set is given or held out of the shortest class. All
other pairs are the training text, whatever their length: how long a pair may be in training is a
matter of the config.
"""

import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import without_fairseq  # noqa: F401

from rope_fairseq.corpus.folder import SPLITS, check_languages, corpus_parser
from rope_fairseq.corpus.held_out import choose, show_sets, write_sets
from rope_fairseq.corpus.parallel import Pair, add_sets, check_files, given_sets, pairs_of
from rope_fairseq.errors import UserError, run_main

HELD_OUT = 250
# Words of the longest sentence of each class. With 4,000 BPE pieces, about 1.8 a word of English,
# sources lie in 1-32, 33-64, 65-96 and 97-128 tokens, several hundred in each. The classes are
# narrow at the long end, where an even sample of a wide one would be of its shortest sentences.
CLASSES = (16, 34, 48, 58, 80)
# A pair of which one side is longer is seldom a translation, and its length says little.
LARGEST_RATIO = 2


def class_of(pair: tuple[bytes, bytes], classes: Sequence[int]) -> int | None:
    """The number, from 0, of the class of a pair; None for one of no class."""
    shorter, longer = sorted(len(side.split()) for side in pair)
    if longer > min(LARGEST_RATIO * shorter, classes[-1]):
        return None
    return bisect_left(classes, longer) if longer else None


def class_names(classes: Sequence[int]) -> list[str]:
    """Such as 1-16, in words."""
    starts = [1, *(last + 1 for last in classes)]
    return [f"{first}-{last}" for first, last in zip(starts, classes, strict=False)]


def read_classes(text: str) -> tuple[int, ...]:
    """The numbers of ``--classes``.

    Raises:
        UserError: not whole numbers that rise.
    """
    if re.fullmatch(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", text):
        classes = tuple(map(int, text.split(",")))
        if list(classes) == sorted(set(classes)):
            return classes
    raise UserError(f"--classes {text}: must be rising whole numbers of words, such as 16,34,48")


def get(
    folder: Path,
    langs: tuple[str, str],
    given: dict[str, Pair],
    asked: int = HELD_OUT,
    classes: Sequence[int] = CLASSES,
) -> dict[str, Any]:
    """Write the corpus into ``folder``; returns its description, as source.json has it.

    Args:
        given: ``train`` → its two files; ``valid`` too, or it is held out.
        asked: test pairs of each class, and pairs of a validation set that is not given.
        classes: words of the longest sentence of each class, rising.

    Raises:
        UserError: a class has no pair that may be held out, or too much would be held out.
    """
    check_languages(*langs)
    outputs = [folder / f"{split}.{lang}" for split in SPLITS for lang in langs]
    check_files([path for files in given.values() for path in files], outputs)
    train = given["train"]
    made = [split for split in SPLITS if split not in given]
    lines = {split: sum(1 for _ in pairs_of(files)) for split, files in given.items()}
    totals = Counter(class_of(pair, classes) for pair in pairs_of(train))
    wanted = dict.fromkeys(range(len(classes)), asked)
    wanted[0] *= len(made)
    held_out = sum(min(totals[number], wanted[number]) for number in wanted)
    if asked < 1 or 2 * held_out > lines["train"]:
        raise UserError(
            f"--held-out {asked}: must be at least 1, and what is held out at most half of the "
            f"{lines['train']:,} pairs"
        )
    others = [files for split, files in given.items() if split != "train"]
    chosen = choose(
        train,
        others,
        lambda pair: class_of(pair, classes),
        {number: totals[number] for number in wanted},
        wanted,
        sys.maxsize,
    )
    # Of the shortest class, every second one for validation if there is no set for that.
    valid = [] if "valid" in given else chosen[0][1::2]
    goes_to = {number: "test" for numbers in chosen.values() for number in numbers}
    goes_to |= dict.fromkeys(valid, "valid")
    names = class_names(classes)
    sizes = {number: len(numbers) for number, numbers in chosen.items()}
    sizes[0] -= len(valid)
    for number, name in enumerate(names):
        if not sizes[number]:
            raise UserError(
                f"{train[0]} and {train[1]}: none of {totals[number]:,} pairs of {name} words is "
                "fit for the test set (both sides once in the corpus, clean UTF-8); change "
                "--classes"
            )
    about = {
        "corpus": "lengths",
        "licence": "yours to know",
        "test_pairs_by_words": {name: sizes[number] for number, name in enumerate(names)},
    }
    source = write_sets(folder, langs, given, lines, goes_to, about)
    print(show_sets(source, made), file=sys.stderr)
    counts = ", ".join(f"{name}: {sizes[number]:,}" for number, name in enumerate(names))
    print(f"lengths: test pairs by words of the longer side: {counts}", file=sys.stderr)
    return source


def main() -> None:
    parser = corpus_parser(__doc__)
    add_sets(parser, "train", "valid")
    parser.add_argument(
        "--held-out",
        type=int,
        default=HELD_OUT,
        metavar="N",
        help="test pairs of each class, or all that are fit if there are fewer; also the pairs of "
        "a validation set that is not given (default %(default)s)",
    )
    parser.add_argument(
        "--classes",
        default=",".join(map(str, CLASSES)),
        metavar="W1,W2,…",
        help="words of the longest sentence of each class (default %(default)s)",
    )
    arguments = parser.parse_args()
    langs = (arguments.source_lang, arguments.target_lang)
    given = given_sets(arguments, "train", "valid")
    classes = read_classes(arguments.classes)
    get(arguments.folder, langs, given, arguments.held_out, classes)


if __name__ == "__main__":
    run_main(main)
