"""Multi30k, task 1, English and German: captions of photos (called by get.sh).

Train, val and test_2016_flickr: 29,000, 1,014 and 1,000 pairs. The variant ``tok`` is what papers
score on: the distributed ``lc.norm.tok`` files, lower-cased, normalised, tokenized and escaped; the
raw test set goes beside it, as raw.test.LANG. The variant ``raw`` is the text that they were made
of.
"""

import gzip
import hashlib
import sys
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import without_fairseq  # noqa: F401

from rope_fairseq.corpus.download import local_folder, read_small
from rope_fairseq.corpus.folder import corpus_parser, write_source, writing_corpus
from rope_fairseq.corpus.mirror import TABLE, add_options, downloads_of, table_of
from rope_fairseq.corpus.table import Wanted, parse_table
from rope_fairseq.errors import UserError, run_main
from rope_fairseq.files import replacing

HERE = Path(__file__).resolve().parent
BASE = "https://raw.githubusercontent.com/multi30k/dataset/master"
DOWNLOADS = HERE.parent.parent / "exp" / "downloads" / "multi30k"
LICENCE = (
    "free for research; the photos described are Flickr's, under its terms; cite Elliott et al. "
    "(2016): https://github.com/multi30k/dataset"
)
TOK = "data/task1/tok/{}.lc.norm.tok.{}"
RAW = "data/task1/raw/{}.{}.gz"
# Our split → theirs.
SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
# Variant → part of our corpus → its file's path.
VARIANTS = {
    "tok": {
        **{split: TOK.replace("{}", name, 1) for split, name in SPLITS.items()},
        "raw.test": RAW.replace("{}", SPLITS["test"], 1),
    },
    "raw": {split: RAW.replace("{}", name, 1) for split, name in SPLITS.items()},
}
# The largest has two.
LARGEST_FILE = 64 << 20


def places(path: str) -> list[str]:
    """Where a file may lie below a base: as published or packed otherwise, in a copy of the
    repository or in one folder."""
    other = path.removesuffix(".gz") if path.endswith(".gz") else f"{path}.gz"
    return [path, other, path.rpartition("/")[2], other.rpartition("/")[2]]


def unpacked(content: bytes, name: str) -> bytes:
    """The text in a file, whose name may end in .gz."""
    if not name.endswith(".gz"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}: cannot be unpacked as .gz ({error})") from None


def wrong(content: bytes, wanted: Wanted) -> str | None:
    """Why a text is not the one that is wanted, or None."""
    if wanted.size is not None and len(content) != wanted.size:
        return f"has {len(content):,} bytes of text, not {wanted.size:,}"
    if wanted.checksum is None:
        return None
    algorithm, _, expected = wanted.checksum.partition(":")
    found = hashlib.new(algorithm, content).hexdigest()
    return None if found == expected else f"the {algorithm} of its text is {found}, not {expected}"


def find(base: str, wanted: Wanted) -> bytes:
    """The text of a file at ``base``, packed or not.

    Raises:
        UserError: it is not there, or is another text.
    """
    for place in places(wanted.path):
        content = read_small(base, place, LARGEST_FILE)
        if content is not None:
            name = f"{base.rstrip('/')}/{place}"
            text = unpacked(content, name)
            if reason := wrong(text, wanted):
                raise UserError(f"{name}: {reason}: damaged or another file")
            return text
    raise UserError(
        f"{base}: has no {wanted.path}, nor {', '.join(places(wanted.path)[1:])}; name another "
        "server or folder with --mirror"
    )


def fetch_text(base: str, wanted: Wanted, downloads: Path) -> bytes:
    """The text of a file: from ``downloads`` if it is there, else from ``base``; what comes from a
    server is kept."""
    kept = downloads / wanted.path.removesuffix(".gz")
    if local_folder(base) is not None:
        return find(base, wanted)
    if kept.is_file():
        text = kept.read_bytes()
        if not (reason := wrong(text, wanted)):
            return text
        print(f"{kept}: {reason}; fetching it again", file=sys.stderr, flush=True)
    print(f"fetching {base.rstrip('/')}/{wanted.path}", file=sys.stderr, flush=True)
    text = find(base, wanted)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with replacing(kept) as file:
        file.write(text)
    return text


def get(
    folder: Path, langs: tuple[str, str], variant: str, base: str, downloads: Path
) -> dict[str, Any]:
    """Write the corpus into ``folder``; returns its description, as source.json has it.

    Raises:
        UserError: a file is not there, or not what its table says.
    """
    parts = VARIANTS[variant]
    files = {part: {lang: path.format(lang) for lang in langs} for part, path in parts.items()}
    paths = [path for of_part in files.values() for path in of_part.values()]
    everything = parse_table((HERE / TABLE).read_text(encoding="ascii"), str(HERE / TABLE))
    published = {path: everything[path] for path in paths}
    table = table_of(base, published, BASE)
    source: dict[str, Any] = {
        "corpus": "multi30k",
        "variant": variant,
        "published": table == published,
        "base": base,
        "licence": LICENCE if table == published else "that of the other data",
        "files": [
            {"path": path, "size": table[path].size, "checksum": table[path].checksum}
            for path in paths
        ],
    }
    kept = downloads_of(downloads, table, published)
    if table != published:
        print(
            f"multi30k: {base} has a table of its own: this is NOT the published corpus, and a "
            "score on it is no Multi30k score",
            file=sys.stderr,
        )
    with writing_corpus(folder, *langs, list(parts)) as new:
        for part, of_part in files.items():
            for lang, path in of_part.items():
                text = fetch_text(base, table[path], kept)
                (new / f"{part}.{lang}").write_bytes(text)
            source[part] = {"name": SPLITS[part.removeprefix("raw.")], "lines": text.count(b"\n")}
            print(f"multi30k {part}: {source[part]['lines']:,} pairs", file=sys.stderr, flush=True)
        write_source(new, source)
    return source


def main() -> None:
    parser = corpus_parser(__doc__, source="en", target="de")
    parser.add_argument(
        "--variant",
        choices=list(VARIANTS),
        default="tok",
        help="tok: lower-cased tokens, as published; raw: the text (default %(default)s)",
    )
    add_options(
        parser,
        "a copy of the repository, or its files in one folder, as they are or as .gz",
        BASE,
        DOWNLOADS,
        "8 MB",
    )
    arguments = parser.parse_args()
    langs = (arguments.source_lang, arguments.target_lang)
    if set(langs) != {"en", "de"}:
        raise UserError(f"--source-lang {langs[0]} --target-lang {langs[1]}: must be en and de")
    get(arguments.folder, langs, arguments.variant, arguments.mirror, arguments.downloads)


if __name__ == "__main__":
    run_main(main)
