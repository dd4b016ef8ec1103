"""Print sample translations: source, reference and translation.

    python -m rope_fairseq.evaluation.samples --src test.en --ref test.de --hyp test.hyp.de

They are taken at even distances, whatever they look like.
"""

from collections.abc import Sequence
from pathlib import Path

from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.lines import read_lines


def sample_numbers(lines: int, samples: int) -> list[int]:
    """Indices (from 0) of ``samples`` lines in the middle of as many equal parts of ``lines``.

    They depend on nothing but the two counts: nobody has chosen them.
    """
    samples = min(samples, lines)
    return [lines * (2 * part + 1) // (2 * samples) for part in range(samples)]


def read_parallel(paths: Sequence[Path]) -> list[list[str]]:
    """The lines of files that must have the same number of lines, at least one."""
    texts = [list(read_lines(path)) for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if not text:
            raise UserError(f"{path}: empty")
        if len(text) != len(texts[0]):
            raise UserError(f"{path} has {len(text)} lines, but {paths[0]} has {len(texts[0])}")
    return texts


def shorten(line: str, longest: int = 300) -> str:
    """A line for the screen: an undertrained model repeats itself for hundreds of characters."""
    return line if len(line) <= longest else f"{line[:longest]} …"


def main() -> None:
    parser = Parser(
        prog="python -m rope_fairseq.evaluation.samples",
        description="Print sample translations.",
    )
    parser.add_argument("--src", type=Path, required=True, metavar="FILE")
    parser.add_argument("--ref", type=Path, required=True, metavar="FILE")
    parser.add_argument("--hyp", type=Path, required=True, metavar="FILE")
    parser.add_argument("--number", type=int, default=5, metavar="N", help="how many (default 5)")
    arguments = parser.parse_args()
    if arguments.number < 1:
        raise UserError(f"--number {arguments.number}: must be at least 1")

    texts = read_parallel([arguments.src, arguments.ref, arguments.hyp])
    for number in sample_numbers(len(texts[0]), arguments.number):
        print(f"line {number + 1}")
        for name, text in zip(("source", "reference", "translation"), texts, strict=True):
            print(f"  {name:<12} {shorten(text[number])}")


if __name__ == "__main__":
    run_main(main)
