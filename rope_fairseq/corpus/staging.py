"""Several files that appear together, when all are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rope_fairseq.errors import UserError


@contextmanager
def staging(folder: Path, step: str) -> Iterator[Path]:
    """A temporary folder whose files are moved to ``folder`` when the block ends.

    When the block raises, ``folder`` stays as it was. Folders in the temporary one are scratch
    space: they are not moved. What a killed run left is removed by the next one.

    Args:
        folder: made if it is not there.
        step: name of the step that writes the files.

    Raises:
        UserError: ``folder`` is a file.
        OSError: always with the name of a file or folder, a full disk too.
    """
    temporary = folder / f".{step}.tmp"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"output {error.filename}: there is a file of that name") from None
    shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        yield temporary
        for file in sorted(temporary.iterdir()):
            if file.is_file():
                os.replace(file, folder / file.name)
    except OSError as error:
        if error.filename is None:  # a write, of which Python does not say where
            raise OSError(error.errno, error.strerror, str(folder)) from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
