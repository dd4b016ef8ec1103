"""What lies at another address than the published one: the same files, or said to be other data."""

import hashlib
from pathlib import Path

from rope_fairseq.corpus.download import read_small
from rope_fairseq.corpus.table import Wanted, parse_table
from rope_fairseq.errors import Parser, UserError

TABLE = "archives.tsv"


def table_of(base: str, published: dict[str, Wanted], home: str) -> dict[str, Wanted]:
    """What the files at ``base`` must be: by its own table if it has one, else as published.

    Args:
        base: a server or folder, as for :func:`~rope_fairseq.corpus.download.fetch`.
        published: path → what was published.
        home: where it was published. There is no such table there, and it is not asked: files that
            are here already need no network.

    Raises:
        UserError: its own table is damaged or lacks a file; names it.
    """
    content = None if base == home else read_small(base, TABLE)
    # Some servers answer with a page where there is no such file.
    if content is None or (base.startswith("http") and content.lstrip().startswith(b"<")):
        return published
    name = f"{base.rstrip('/')}/{TABLE}"
    table = parse_table(content.decode("utf-8", errors="replace"), name)
    missing = [path for path in published if path not in table]
    if missing:
        raise UserError(f"{name}: lacks {', '.join(missing)}")
    return {path: table[path] for path in published}


def downloads_of(downloads: Path, table: dict[str, Wanted], published: dict[str, Wanted]) -> Path:
    """Where files from a server are kept: other data beside the published files, not in their
    place."""
    if table == published:
        return downloads
    return downloads / hashlib.sha256(repr(table).encode()).hexdigest()[:12]


def add_options(parser: Parser, what: str, home: str, downloads: Path, size: str) -> None:
    """``--mirror`` and ``--downloads`` of a get.py.

    Args:
        what: what a mirror is, for the help.
        home: where the files were published, the default.
        downloads: the default folder, DIR/exp/downloads/CORPUS.
        size: of all files.
    """
    parser.add_argument(
        "--mirror",
        default=home,
        metavar="URL_OR_FOLDER",
        help=f"{what} (default {home}); with an {TABLE} of its own, other data",
    )
    parser.add_argument(
        "--downloads",
        type=Path,
        default=downloads,
        metavar="FOLDER",
        help=f"where what comes from a server is kept, {size} (default exp/downloads/"
        f"{downloads.name})",
    )
