"""Unpack the corpus beside this file into a folder, with source.json, which says what it is.

Each file is checked against SHA256SUMS before any of them gets its name in the folder.
"""

import argparse
import hashlib
import json
import lzma
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LANGS = ("en", "de")


def unpack(folder: Path) -> None:
    """Write every file of SHA256SUMS into ``folder``.

    Raises:
        SystemExit: a file is missing or damaged; nothing has got its name then.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary: dict[Path, Path] = {}
    source: dict[str, object] = {
        "corpus": "demo",
        "text": "LibreOffice Help 7.4, English and German",
        "licence": "MPL-2.0",
    }
    files = []
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
            files.append({"path": name, "checksum": f"sha256:{expected}"})
            split = name.partition(".")[0]
            source[split] = {"lines": content.count(b"\n")}
        # Last: text beside a description is the text that it describes.
        (folder / "source.json").unlink(missing_ok=True)
        temporary[folder / "source.json.tmp"] = folder / "source.json"
        text = json.dumps(source | {"files": files}, indent=2) + "\n"
        (folder / "source.json.tmp").write_text(text, encoding="utf-8")
        for path, target in temporary.items():
            path.replace(target)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="get.sh", description="Unpack the demo corpus into FOLDER.", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    for side, lang in zip(("source", "target"), LANGS, strict=True):
        parser.add_argument(f"--{side}-lang", choices=LANGS, default=lang, help=f"default {lang}")
    arguments = parser.parse_args()
    try:
        unpack(arguments.folder)
    except OSError as error:
        sys.exit(f"error: {error.filename or arguments.folder}: {error.strerror}")


if __name__ == "__main__":
    main()
