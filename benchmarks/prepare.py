"""Time and memory of preparing a corpus, step by step.

    python benchmarks/prepare.py FOLDER [--source-lang en] [--target-lang de] [--vocab-size 37000]
        [--copies N] [--project-to WORDS] [--work DIR] [--json FILE]

FOLDER holds train, valid and test of both languages, plain or .xz; without it nothing is measured.
The commands are those of scripts/prepare.sh. ``--copies`` repeats the training text N times, with a
number before each line so that no pair is a duplicate, to see whether memory grows.

Memory is given twice: the largest of the processes (their peak resident size, as the kernel counts
it), and all processes of the step together (proportional size, looked at five times a second).

``--project-to`` is a number of words a side: the time of each step but ``bpe`` multiplied by the
ratio of words. That of ``bpe`` depends on the number of different words, which grows more slowly,
so that its product is too high. A projection is not a measurement.
"""

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SPLITS = ("train", "valid", "test")
INTERVAL = 0.2


def unpack(corpus: Path, names: list[str], folder: Path, copies: int) -> dict[str, int]:
    """Write plain text, the training text ``copies`` times, line by line: a process that this one
    starts would begin with the peak memory of this one. Returns the number of words in each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = dict.fromkeys(names, 0)
    for name in names:
        plain, packed = corpus / name, corpus / f"{name}.xz"
        if not plain.is_file() and not packed.is_file():
            sys.exit(f"skipped: {corpus} holds neither {name} nor {name}.xz")
        repeated = copies if name.startswith("train.") else 1
        with open(folder / name, "wb") as written:
            for copy in range(repeated):
                with open(plain, "rb") if plain.is_file() else lzma.open(packed) as stream:
                    for line in stream:
                        words[name] += len(line.split())
                        written.write(line if repeated == 1 else b"%d %b" % (copy, line))
    return words


def family(process: int) -> list[int]:
    """A process and all its descendants."""
    members = [process]
    for member in members:
        try:
            children = Path(f"/proc/{member}/task/{member}/children").read_text()
        except OSError:
            continue
        members += map(int, children.split())
    return members


def memory_together(process: int) -> int:
    """Proportional set size in bytes of a process and its descendants."""
    total = 0
    for member in family(process):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def measure(command: list[str]) -> dict[str, float]:
    """Run a command; seconds of wall clock and of all cores, bytes of memory."""
    start = time.monotonic()
    with open(os.devnull, "wb") as nothing:
        child = subprocess.Popen(command, stdout=nothing, cwd=ROOT, start_new_session=True)
    together = 0
    while True:
        process, status, usage = os.wait4(child.pid, os.WNOHANG)
        if process:
            break
        together = max(together, memory_together(child.pid))
        time.sleep(INTERVAL)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"failed with status {child.returncode}: {' '.join(command)}")
    return {
        "seconds": time.monotonic() - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "largest_process_bytes": usage.ru_maxrss * 1024,
        "all_processes_bytes": together,
    }


def commands(work: Path, source: str, target: str, vocab_size: int) -> dict[str, list[str]]:
    """The steps of scripts/prepare.sh after ``data``."""
    tool = [sys.executable, str(ROOT / "scripts" / "tool.py")]
    corpus = [*tool, "corpus"]
    data, tokens, text, binary = (str(work / name) for name in ("data", "tok", "text", "data-bin"))
    langs = ["--source-lang", source, "--target-lang", target]
    return {
        "clean": [*corpus, "clean", "--data", data, "--output", tokens, *langs],
        "bpe": [*corpus, "bpe", "--tokens", tokens, "--output", text]
        + ["--vocab-size", str(vocab_size)],
        "encode": [*corpus, "encode", "--tokens", tokens, "--model", text, "--output", text],
        "binarize": [*corpus, "binarize", "--text", text, "--output", binary],
        "sign": [*corpus, "signature", "--text", text, "--tokens", tokens, "--corpus", "benchmark"]
        + ["--dictionary", f"{binary}/dict.{source}.txt", "--output", str(work / "data.json")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--source-lang", default="en")
    parser.add_argument("--target-lang", default="de")
    parser.add_argument("--vocab-size", type=int, default=37000)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--project-to", type=float, metavar="WORDS")
    parser.add_argument("--work", type=Path, help="folder to keep (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    langs = args.source_lang, args.target_lang
    if not args.corpus.is_dir():
        sys.exit(f"skipped: there is no folder {args.corpus}")

    work = args.work or Path(tempfile.mkdtemp(prefix="benchmark-prepare-"))
    try:
        names = [f"{split}.{lang}" for split in SPLITS for lang in langs]
        in_files = unpack(args.corpus, names, work / "data", args.copies)
        words = {lang: in_files[f"train.{lang}"] for lang in langs}
        steps = {
            name: measure(command)
            for name, command in commands(work, *langs, args.vocab_size).items()
        }
        record: dict[str, Any] = json.loads((work / "data.json").read_text(encoding="utf-8"))
    finally:
        if args.work is None:
            shutil.rmtree(work)
    result = {
        "signature": record["signature"],
        "cleaning": record["cleaning"],
        "words": words,
        "cores": os.cpu_count(),
        "steps": steps,
    }
    ratio = None
    if args.project_to:
        ratio = args.project_to * len(langs) / sum(words.values())
        result["projected_seconds"] = {name: s["seconds"] * ratio for name, s in steps.items()}
    print(record["signature"])
    print(f"{sum(words.values()):,} words of raw text on both sides, {os.cpu_count()} cores")
    print("step       wall s   CPU s   largest MB   together MB" + "   projected min" * bool(ratio))
    for name, step in steps.items():
        sizes = (step["largest_process_bytes"] / 1e6, step["all_processes_bytes"] / 1e6)
        line = f"{name:<9}{step['seconds']:8.1f}{step['cpu_seconds']:8.1f}"
        line += f"{sizes[0]:13.0f}{sizes[1]:14.0f}"
        print(line + (f"{step['seconds'] * ratio / 60:16.1f}" if ratio else ""))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
