"""Your own corpus: any two text files, line n of one the translation of line n of the other.

Files may be plain, .gz or .xz. Without --valid or --test, pairs are held out of the training text
for them: evenly spread, always the same ones for the same files, and only pairs of which neither
side occurs a second time, so that no test sentence stands in the training text. They are from the
same documents as the training text all the same; a test set of other documents says more.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import without_fairseq  # noqa: F401

from rope_fairseq.corpus.folder import SPLITS, check_languages, corpus_parser
from rope_fairseq.corpus.held_out import CANDIDATES, choose, show_sets, write_sets
from rope_fairseq.corpus.parallel import Pair, add_sets, check_files, given_sets, pairs_of
from rope_fairseq.errors import UserError, run_main

HELD_OUT = 1000
# Without --held-out, each set is at most this part of all pairs.
LARGEST_PART = 0.05
# A held-out sentence is one that people would write: not longer.
LONGEST = 100  # words


def choose_any(train: Pair, others: Sequence[Pair], total: int, wanted: int) -> list[int]:
    """The numbers of ``wanted`` pairs of ``train``, of any kind, to hold out.

    Raises:
        UserError: too few pairs may be held out; says how many.
    """
    found = choose(train, others, lambda pair: 0, {0: total}, {0: wanted}, LONGEST)[0]
    if len(found) < wanted:
        raise UserError(
            f"{train[0]} and {train[1]}: {wanted} pairs are wanted for validation and test, but of "
            f"{min(total, CANDIDATES * wanted):,} looked at only {len(found):,} are fit (both "
            f"sides once in the corpus, 1 to {LONGEST} words, clean UTF-8); lower --held-out or "
            "give --valid and --test"
        )
    return found


def held_out_size(asked: int | None, total: int, sets: int, train: Path) -> int:
    """How many pairs each of ``sets`` sets gets.

    Raises:
        UserError: the corpus is too small for that.
    """
    if asked is None:
        size = min(HELD_OUT, int(total * LARGEST_PART))
        if size < 1:
            raise UserError(
                f"{train}: {total} pairs are too few to hold any out; give --valid and --test"
            )
        return size
    if asked < 1 or 2 * asked * sets > total:
        raise UserError(
            f"--held-out {asked}: must be at least 1, and what is held out at most half of the "
            f"{total:,} pairs"
        )
    return asked


def get(
    folder: Path, langs: tuple[str, str], given: dict[str, Pair], asked: int | None = None
) -> dict[str, Any]:
    """Write the corpus into ``folder``; returns its description, as source.json has it.

    Args:
        given: split → its two files; ``train`` at least.
        asked: pairs to hold out for each split that is not given.
    """
    check_languages(*langs)
    made = [split for split in SPLITS if split not in given]
    if asked is not None and not made:
        raise UserError("--held-out: nothing is held out when --valid and --test are given")
    outputs = [folder / f"{split}.{lang}" for split in SPLITS for lang in langs]
    check_files([path for files in given.values() for path in files], outputs)
    lines = {split: sum(1 for _ in pairs_of(files)) for split, files in given.items()}
    train = given["train"]
    goes_to: dict[int, str] = {}
    if made:
        size = held_out_size(asked, lines["train"], len(made), train[0])
        others = [files for split, files in given.items() if split != "train"]
        chosen = choose_any(train, others, lines["train"], size * len(made))
        goes_to = {number: made[index % len(made)] for index, number in enumerate(chosen)}
    about = {"corpus": "own", "licence": "yours to know"}
    source = write_sets(folder, langs, given, lines, goes_to, about)
    print(show_sets(source, made), file=sys.stderr)
    return source


def main() -> None:
    parser = corpus_parser(__doc__)
    add_sets(parser, *SPLITS)
    parser.add_argument(
        "--held-out",
        type=int,
        metavar="N",
        help=f"pairs for each set that is not given (default {HELD_OUT:,}, but at most "
        f"{LARGEST_PART:.0%}".replace("%", "%%")
        + " of all)",
    )
    arguments = parser.parse_args()
    given = given_sets(arguments, *SPLITS)
    langs = (arguments.source_lang, arguments.target_lang)
    get(arguments.folder, langs, given, arguments.held_out)


if __name__ == "__main__":
    run_main(main)
