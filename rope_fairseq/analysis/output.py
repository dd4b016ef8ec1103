"""``--output`` and ``--values``: a figure and the numbers in it, both whole or not at all."""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rope_fairseq.analysis.figure import require_matplotlib, save
from rope_fairseq.errors import UserError
from rope_fairseq.files import replacing


@dataclass(frozen=True)
class Outputs:
    """Files that are open for writing, None where they were not asked for."""

    figure: BinaryIO | None
    values: BinaryIO | None

    def draw(self, make: Callable[[], Any], colours: int = 64) -> None:
        """Write the figure that ``make`` returns, if one was asked for."""
        if self.figure is not None:
            save(make(), self.figure, colours)

    def write(self, rows: Iterable[Mapping[str, str | int | float]]) -> None:
        """Write rows, of the same columns each, as a tab-separated table with a header, every
        number to all digits."""
        if self.values is None:
            return
        columns: tuple[str, ...] = ()
        for row in rows:
            if not columns:
                columns = tuple(row)
                self.values.write(("\t".join(columns) + "\n").encode())
            cells = (row[column] for column in columns)
            line = "\t".join(cell if isinstance(cell, str) else repr(cell) for cell in cells)
            self.values.write((line + "\n").encode())


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`opened` reads."""
    parser.add_argument(
        "--output", type=Path, metavar="PNG", help="draw a figure (needs matplotlib)"
    )
    parser.add_argument(
        "--values", type=Path, metavar="TSV", help="write the numbers as a tab-separated table"
    )


@contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[Outputs]:
    """Open both files before the work begins; they appear when the block ends, not if it raises.

    Raises:
        UserError: matplotlib is missing, or both are one file.
        OSError: a file cannot be written.
    """
    figure, values = arguments.output, arguments.values
    if figure is not None:
        require_matplotlib()
        if values is not None and os.path.realpath(figure) == os.path.realpath(values):
            raise UserError(f"{values}: --output and --values name the same file")
    with ExitStack() as stack:
        yield Outputs(
            *(
                None if path is None else stack.enter_context(replacing(path))
                for path in (figure, values)
            )
        )
