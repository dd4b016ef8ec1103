"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rope_fairseq.errors import UserError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open ``path`` for writing so that readers see the old content or all of the new one.

    The bytes go to a temporary file in the same folder, which takes the place of ``path`` when the
    block ends and is removed when the block raises.
    """
    target = Path(path)
    if target.is_dir():
        raise UserError(f"{target}: is a folder; name a file to write")
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        file = open(temporary, "wb")
    except OSError as error:
        # Name the file that the user asked for, not the temporary one.
        raise OSError(error.errno, error.strerror, str(target)) from None
    try:
        with file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
