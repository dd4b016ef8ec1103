"""Tables of files to fetch: what each must be."""

import re
from dataclasses import dataclass

from rope_fairseq.errors import UserError


@dataclass(frozen=True)
class Wanted:
    """What a file must be.

    Args:
        path: where it lies below the base address, with ``/``.
        checksum: ``sha256:HEX`` or ``md5:HEX``; None if nobody published it.
        size: in bytes; None if nobody published it.
    """

    path: str
    checksum: str | None
    size: int | None = None


def parse_table(text: str, name: str) -> dict[str, Wanted]:
    """A table of files: a line each of path, size and checksum, separated by tabs.

    Lines that start with ``#`` are comments; a size or checksum ``-`` says that it is not known.

    Raises:
        UserError: a line is something else; names ``name`` and the line.
    """
    table: dict[str, Wanted] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(
            r"([\w.-]+(?:/[\w.-]+)*)\t(\d+|-)\t(sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}|-)", line
        )
        if not match or ".." in match[1].split("/") or match[1] in table:
            raise UserError(
                f"{name}:{number}: {line[:80]!r} is not a file's path, size in bytes and "
                "sha256:… or md5:… (- for one that is not known), separated by tabs, each path once"
            )
        size = None if match[2] == "-" else int(match[2])
        table[match[1]] = Wanted(match[1], None if match[3] == "-" else match[3], size)
    return table
