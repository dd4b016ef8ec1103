"""A small mirror of Multi30k, made of the demo corpus: for tests and for a look offline.

    miniature.py FOLDER [--pairs N] [--seed N]

The files have the names and formats of those of the repository multi30k/dataset, so that every step
of both recipes runs on them:

    data/task1/raw/{train,val,test_2016_flickr}.{en,de}.gz
    data/task1/tok/{train,val,test_2016_flickr}.lc.norm.tok.{en,de}     made of the raw ones
    archives.tsv                        sizes and hashes: says that this is other data

The text is software documentation (MPL-2.0, see data-prep/demo), not captions. The same options
give the same text.
"""

import gzip
import hashlib
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import without_fairseq  # noqa: F401

from rope_fairseq.corpus.miniature import make_from_command_line, plain, read_demo
from rope_fairseq.corpus.mirror import TABLE
from rope_fairseq.errors import UserError, run_main
from rope_fairseq.files import replacing
from rope_fairseq.text import Text

PAIRS = 2000
# As the published tokens were made.
TEXT = Text("en", "de", escape=True, lowercase=True)


def write(folder: Path, path: str, lines: list[str]) -> str:
    """Write one file, packed if its name says so; its row of the table."""
    content = plain(lines)
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(content, mtime=0) if path.endswith(".gz") else content
    with replacing(folder / path) as file:
        file.write(packed)
    return f"{path}\t{len(content)}\tsha256:{hashlib.sha256(content).hexdigest()}\n"


def make(folder: Path, pairs: int, seed: int) -> None:
    """Write the mirror; its table comes last, so an unfinished mirror is refused.

    Raises:
        UserError: there are fewer pairs in the demo corpus, or too few.
    """
    train = {lang: read_demo("train", lang) for lang in ("en", "de")}
    total = len(train["en"])
    if not 40 <= pairs <= total:
        raise UserError(f"--pairs {pairs}: must be from 40 to {total}")
    chosen = sorted(random.Random(seed).sample(range(total), pairs))
    others = max(10, min(500, pairs // 10))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TABLE).unlink(missing_ok=True)
    rows = [f"# A miniature of Multi30k, not the published data: {pairs} pairs, seed {seed}.\n"]
    for lang, lines in train.items():
        for name, raw in (
            ("train", [lines[number] for number in chosen]),
            ("val", read_demo("valid", lang)[:others]),
            ("test_2016_flickr", read_demo("test", lang)[:others]),
        ):
            tokens = [TEXT.tokenize(line, lang) for line in raw]
            rows.append(write(folder, f"data/task1/raw/{name}.{lang}.gz", raw))
            rows.append(write(folder, f"data/task1/tok/{name}.lc.norm.tok.{lang}", tokens))
    with replacing(folder / TABLE) as file:
        file.write("".join(rows).encode("ascii"))


def main() -> None:
    make_from_command_line(__doc__, make, PAIRS)


if __name__ == "__main__":
    run_main(main)
