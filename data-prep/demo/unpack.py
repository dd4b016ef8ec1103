"""Unpack the corpus beside this file into a folder: ``unpack.py FOLDER``.

Each file is checked against SHA256SUMS before any of them gets its name in the folder.
"""

import hashlib
import lzma
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def unpack(folder: Path) -> None:
    """Write every file of SHA256SUMS into ``folder``.

    Raises:
        SystemExit: a file is missing or damaged; nothing has got its name then.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary: dict[Path, Path] = {}
    try:
        for line in (HERE / "SHA256SUMS").read_text(encoding="ascii").splitlines():
            expected, name = line.split()
            packed = HERE / f"{name}.xz"
            try:
                content = lzma.decompress(packed.read_bytes())
            except (lzma.LZMAError, EOFError) as error:
                raise SystemExit(f"error: {packed}: damaged ({error}); get it again") from None
            if hashlib.sha256(content).hexdigest() != expected:
                raise SystemExit(f"error: {packed}: not the file of SHA256SUMS; get it again")
            temporary[folder / f"{name}.tmp"] = folder / name
            (folder / f"{name}.tmp").write_bytes(content)
        for source, target in temporary.items():
            source.replace(target)
    finally:
        for source in temporary:
            source.unlink(missing_ok=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: unpack.py FOLDER")
    try:
        unpack(Path(sys.argv[1]))
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
