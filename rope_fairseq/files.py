"""Files that are written whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rope_fairseq.errors import UserError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open ``path`` for writing so that readers see the old content or all of the new one.

    The bytes go to a temporary file in the same folder, which takes the place of ``path`` when the
    block ends and is removed when the block raises. A link stays and its target is replaced; what
    is no regular file, such as ``/dev/null`` or a pipe, is written to directly.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise UserError(f"{path}: is a folder; name a file to write")
    if target.exists() and not target.is_file():
        with open(target, "wb") as file:
            yield file
        return
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        # Name the file that the user asked for, not the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())  # mkstemp's own mode is 0600
            yield file
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
