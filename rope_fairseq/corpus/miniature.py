"""What small mirrors of published archives are made of: the demo's text, and archives whose bytes
depend on nothing but their members (and zlib)."""

import argparse
import gzip
import hashlib
import io
import lzma
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, cast

from rope_fairseq.corpus.mirror import TABLE
from rope_fairseq.errors import Parser, UserError
from rope_fairseq.files import replacing

DEMO = Path(__file__).resolve().parents[2] / "data-prep" / "demo"
MTIME = 1388534400  # 2014-01-01, for every member

Members = dict[str, bytes]  # name → content


def read_demo(split: str, side: str) -> list[str]:
    """Lines of the demo corpus; page names lose the tab between package and page."""
    path = DEMO / f"{split}.{side}.xz"
    try:
        text = lzma.decompress(path.read_bytes()).decode("utf-8")
    except (lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); get it again") from None
    return text.replace("\t", "/").rstrip("\n").split("\n")


def plain(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def write_archive(path: Path, members: Members) -> None:
    """A .tgz of regular files whose bytes depend on nothing but the members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(path) as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=cast(BinaryIO, packed), mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mtime = MTIME
            tar.addfile(info, io.BytesIO(content))


def write_mirror(folder: Path, archives: dict[str, Members], about: str) -> None:
    """Write the archives and then their table, so that an unfinished mirror is refused.

    Args:
        archives: path below ``folder`` → members.
        about: a line at the head of the table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / TABLE
    table.unlink(missing_ok=True)
    rows = [f"# {about}\n"]
    for path, members in archives.items():
        write_archive(folder / path, members)
        content = (folder / path).read_bytes()
        rows.append(f"{path}\t{len(content)}\tsha256:{hashlib.sha256(content).hexdigest()}\n")
    with replacing(table) as file:
        file.write("".join(rows).encode("ascii"))


def make_from_command_line(
    description: str, make: Callable[[Path, int, int], None], pairs: int
) -> None:
    """Call ``make(folder, pairs, seed)`` as the arguments of a program miniature.py say."""
    parser = Parser(
        prog="miniature.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--pairs", type=int, default=pairs, help=f"for training (default {pairs})")
    parser.add_argument("--seed", type=int, default=1, help="chooses the pairs (default 1)")
    arguments = parser.parse_args()
    make(arguments.folder, arguments.pairs, arguments.seed)
