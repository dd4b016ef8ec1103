"""Is a step of the pipeline done, with these inputs, these options and these tools?

A step is done when its manifest says so and its outputs are still what the manifest says; that an
output exists proves nothing (the run may have been killed). The manifest is written last.

    python -m rope_fairseq.manifest check --file F --input PATH… --option K=V… --output PATH…
    python -m rope_fairseq.manifest write --file F --input PATH… --option K=V… --output PATH…
    python -m rope_fairseq.manifest current --file F

``check`` exits with 0 when the step is done, else with 1 and one line on standard output that says
why; then it also notes in ``F.started`` what the step starts from. A line that begins with
``interrupted`` means that the last run started from exactly the same and did not finish, so a step
that can continue may do so. ``write`` refuses when an input has changed since. ``current``
refuses unless the step is finished and what it read in the work folder is still the same; it
changes nothing. 2: usage error.
"""

import hashlib
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.files import replacing
from rope_fairseq.version import __version__

ROOT = Path(__file__).resolve().parent.parent

# What each tool may be installed as; fairseq has several distributions of one package.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "fairseq": ("ve-fairseq", "fairseq-fixed", "fairseq"),
    "sentencepiece": ("sentencepiece",),
    "subword-nmt": ("subword-nmt",),
    "sacremoses": ("sacremoses",),
    "sacrebleu": ("sacrebleu",),
}

Record = dict[str, Any]


def tool_versions() -> dict[str, str]:
    """Version of Python, of this package and of each tool that can change a result."""
    versions = {"python": platform.python_version(), "rope_fairseq": __version__}
    for tool, names in DISTRIBUTIONS.items():
        versions[tool] = "not installed"
        for name in names:
            try:
                versions[tool] = f"{name} {version(name)}"
                break
            except PackageNotFoundError:
                continue
    return versions


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file's content."""
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"size": os.fstat(stream.fileno()).st_size, "sha256": digest}


def describe(paths: list[Path], base: Path, what: str) -> dict[str, dict[str, Any]]:
    """Size and sha256 of files, and of all files in folders.

    Names are relative to the work folder or the project, so that both can be moved.

    Args:
        paths: files and folders.
        base: the work folder.
        what: "input" or "output", for messages.

    Raises:
        UserError: a path does not exist.
    """
    described = {}
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            files = [path]
        else:
            raise UserError(f"{what} {path}: no such file or folder")
        for file in files:
            described[_name(file, base)] = describe_file(file)
    return described


def _name(file: Path, base: Path) -> str:
    absolute = Path(os.path.abspath(file))
    for folder in (base, ROOT):
        if absolute.is_relative_to(folder):
            return absolute.relative_to(folder).as_posix()
    return absolute.as_posix()


def work_folder(manifest: Path) -> Path:
    """The work folder of WORK/manifests/STEP.json."""
    return Path(os.path.abspath(manifest)).parent.parent


def start_record(manifest: Path, inputs: list[Path], options: dict[str, str]) -> Record:
    """What a step starts from: its inputs, options and tools."""
    return {
        "inputs": describe(inputs, work_folder(manifest), "input"),
        "options": options,
        "versions": tool_versions(),
    }


def difference(old: Record, new: Record) -> str | None:
    """One line that names the first difference between two start records, or None."""
    for part, singular in (("options", "option"), ("inputs", "input"), ("versions", "version of")):
        before, after = old.get(part, {}), new[part]
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) == after.get(name):
                continue
            if part == "inputs":
                change = "is new" if name not in before else "changed"
                return f"input {name} {change if name in after else 'is gone'}"
            values = (before.get(name, "not set"), after.get(name, "not set"))
            return f"{singular} {name} was {values[0]}, is {values[1]}"
    return None


def output_difference(recorded: dict[str, Any], outputs: list[Path], base: Path) -> str | None:
    """One line that names the first output that is not as recorded, or None."""
    for path in outputs:
        if not path.exists():
            return f"output {_name(path, base)} is missing"
    present = describe(outputs, base, "output")
    for name in sorted(recorded.keys() | present.keys()):
        if name not in present:
            return f"output {name} is missing"
        if name not in recorded:
            return f"output {name} is not from this step"
        if recorded[name] != present[name]:
            return f"output {name} changed"
    return None


def check(
    manifest: Path, inputs: list[Path], options: dict[str, str], outputs: list[Path]
) -> str | None:
    """Why a step must run, in one line, or None when it is done.

    When it must run, its old manifest is removed and ``MANIFEST.started`` is written.
    """
    record = start_record(manifest, inputs, options)
    reason = _why(manifest, record, outputs)
    if reason is not None:
        _write_json(_started(manifest), record)
        manifest.unlink(missing_ok=True)
    return reason


def _why(manifest: Path, record: Record, outputs: list[Path]) -> str | None:
    old, started = _read(manifest), _read(_started(manifest))
    if old is not None:
        reason = difference(old, record)
        return reason or output_difference(old.get("outputs", {}), outputs, work_folder(manifest))
    if started is None:
        return "not run yet"
    reason = difference(started, record)
    return "interrupted, same inputs and options" if reason is None else reason


def write(manifest: Path, inputs: list[Path], options: dict[str, str], outputs: list[Path]) -> None:
    """Record that a step is done.

    Raises:
        UserError: an output is missing, or an input is not what it was at :func:`check`.
    """
    record = start_record(manifest, inputs, options)
    started = _read(_started(manifest))
    change = difference(started, record) if started else None
    if change:
        raise UserError(f"{change} while {manifest.stem} was running; run it again")
    record["outputs"] = describe(outputs, work_folder(manifest), "output")
    _write_json(manifest, record)
    _started(manifest).unlink(missing_ok=True)


def check_current(manifest: Path) -> None:
    """Refuse what a later step would build on an unfinished or outdated one.

    Raises:
        UserError: the step is not finished, or an input in the work folder has changed since.
    """
    record, work, step = _read(manifest), work_folder(manifest), manifest.stem
    if record is None:
        raise UserError(f"{work}: the step {step} is not finished there; run its script first")
    for name, recorded in record["inputs"].items():
        path = work / name
        # The names of inputs elsewhere are absolute or those of files of the project.
        elsewhere = not path.exists() and (ROOT / name).exists()
        if not elsewhere and (not path.is_file() or describe_file(path) != recorded):
            raise UserError(
                f"{path} is not what the step {step} ran on; run its script again first"
            )


def _write_json(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    with replacing(path) as stream:
        stream.write(content.encode("utf-8"))


def _started(manifest: Path) -> Path:
    return manifest.with_name(f"{manifest.name}.started")


def _read(path: Path) -> Record | None:
    """A JSON object, or None when there is none that can be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _parse_options(pairs: list[str]) -> dict[str, str]:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f"--option {pair!r}: expected NAME=VALUE")
        options[name] = value
    return options


def main() -> None:
    parser = Parser(prog="python -m rope_fairseq.manifest")
    parser.add_argument("action", choices=("check", "write", "current"))
    parser.add_argument("--file", type=Path, required=True, help="WORK/manifests/STEP.json")
    for name in ("--input", "--output"):
        parser.add_argument(name, type=Path, nargs="+", action="extend", default=[])
    parser.add_argument("--option", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    if args.action == "current":
        check_current(args.file)
        return
    options = _parse_options(args.option)
    if args.action == "write":
        write(args.file, args.input, options, args.output)
        return
    reason = check(args.file, args.input, options, args.output)
    if reason is not None:
        print(reason)
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
