"""What prepared text is, in a file and in one line, so that a score can name its data.

    corpus:wmt14|pairs:4508785+3000+3003|vocab:37000|merges:36512|sha256:0123456789ab|sacremoses:…

* ``published:no``, after the corpus: the mirror says that its archives are not those published.
* ``pairs``: of train, valid and test, as they are trained and scored on.
* ``vocab``: pieces of the BPE model, ``<unk>`` included; ``merges``: those of more than one
  character, each of which is one merge of BPE. "37k" may mean either. A model of subword-nmt is its
  merges and has no vocabulary of its own: there ``dictionary`` is the number of fairseq's types.
* ``sha256``: the first 12 digits of the hash of what ``LC_ALL=C sha256sum {train,valid,test}.*``
  prints in the folder of the pieces, its lines sorted by file name.
"""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from rope_fairseq.corpus.folder import SPLITS
from rope_fairseq.corpus.rules import REPORT_FILE
from rope_fairseq.errors import UserError
from rope_fairseq.files import replacing
from rope_fairseq.manifest import describe_file
from rope_fairseq.text import Text
from rope_fairseq.version import __version__

HASH_DIGITS = 12
# <s>, <pad>, </s> and <unk>, which fairseq puts before the symbols of a dictionary file.
FAIRSEQ_SYMBOLS = 4

Record = dict[str, Any]


def sign_corpus(
    text: Path, tokens: Path, dictionary: Path, corpus: str, output: Path, source: Path | None
) -> Record:
    """Describe prepared text and write that as JSON.

    Args:
        text: folder with ``SPLIT.LANG`` in pieces, the BPE model and ``text.json``.
        tokens: folder that ``clean`` wrote, for its report.
        dictionary: a ``dict.LANG.txt`` that fairseq-preprocess made of the pieces.
        corpus: its name.
        output: the file to write.
        source: a JSON file that says where the raw text is from; taken over as it is.

    Returns:
        What is written; ``signature`` is the line.

    Raises:
        UserError: the name would break the line, or a file is not what it should be.
    """
    if not corpus or not set(corpus).isdisjoint("|:\n"):
        raise UserError(f"--corpus {corpus!r}: a name without | and : is needed")
    options = Text.load(text)
    langs = options.source_lang, options.target_lang
    sizes = options.pieces.sizes()
    names = [f"{split}.{lang}" for split in SPLITS for lang in langs]
    counts = {name: _count(text / name) for name in names}
    for split in SPLITS:
        source_lines, target_lines = (counts[f"{split}.{lang}"][0] for lang in langs)
        if source_lines != target_lines:
            raise UserError(
                f"{text}: {split} has {source_lines} and {target_lines} lines; encode it again"
            )
    hashes = {name: describe_file(text / name)["sha256"] for name in sorted(names)}
    listing = "".join(f"{value}  {name}\n" for name, value in hashes.items())
    record: Record = {
        "signature": "",
        "corpus": corpus,
        "languages": list(langs),
        "pairs": {split: counts[f"{split}.{langs[0]}"][0] for split in SPLITS},
        "pieces": {name: pieces for name, (_, pieces) in counts.items()},
        "vocabulary": {
            **sizes,
            "fairseq_dictionary": _count(dictionary)[0] + FAIRSEQ_SYMBOLS,
        },
        "sha256": {"all": hashlib.sha256(listing.encode("utf-8")).hexdigest(), "files": hashes},
        "text": options.options(),
        "cleaning": read_record(tokens / REPORT_FILE),
        "versions": {
            **options.versions(),
            "rope_fairseq": __version__,
            "python": platform.python_version(),
        },
        "source": None if source is None else read_record(source),
    }
    record["signature"] = signature_line(record)
    with replacing(output) as stream:
        stream.write((json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
    return record


def signature_line(record: Record) -> str:
    """The one line, in the style of sacrebleu's signatures."""
    vocabulary = record["vocabulary"]
    if "pieces" in vocabulary:
        sizes = {"vocab": vocabulary["pieces"], "merges": vocabulary["merges"]}
    else:
        sizes = {"merges": vocabulary["merges"], "dictionary": vocabulary["fairseq_dictionary"]}
    versions = {name: value for name, value in record["versions"].items() if name != "python"}
    fields = {
        "corpus": record["corpus"],
        **({"published": "no"} if (record["source"] or {}).get("published") is False else {}),
        "pairs": "+".join(str(record["pairs"][split]) for split in SPLITS),
        **sizes,
        "sha256": record["sha256"]["all"][:HASH_DIGITS],
    } | versions
    return "|".join(f"{name}:{value}" for name, value in fields.items())


def show(path: Path) -> str:
    """The line of a signature file, and below it what the line does not say.

    Raises:
        UserError: not a file that :func:`sign_corpus` wrote.
    """
    record = read_record(path)
    try:
        dropped = {
            f"{split} {rule}": count
            for split, counts in record["cleaning"]["pairs"].items()
            for rule, count in counts["dropped"].items()
            if count
        }
        facts = {
            "pieces": record["pieces"],
            "fairseq dictionary": record["vocabulary"]["fairseq_dictionary"],
            "text options": record["text"],
            "cleaning options": record["cleaning"]["options"],
            "pairs left out": dropped or "none",
            "versions": record["versions"],
            "source": record["source"] or "not stated",
        }
        lines = [f"{name}: {_in_words(value)}" for name, value in facts.items()]
        return "\n".join([record["signature"], *lines])
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not a file that `corpus signature` wrote") from None


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_in_words, value))
    return f"{value:,}" if type(value) is int else str(value)


def _count(path: Path) -> tuple[int, int]:
    """Lines of a file, and the pieces in it."""
    lines = pieces = 0
    with open(path, "rb") as stream:
        for line in stream:
            lines += 1
            pieces += line.count(b" ") + 1 if line != b"\n" else 0
    return lines, pieces


def read_record(path: Path) -> Record:
    """A JSON object; anything else is a :class:`UserError`."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}: expected a JSON object")
    return record
