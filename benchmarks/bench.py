"""Time and memory of stock fairseq, this plugin and others, in one run.

    python -m benchmarks.bench --output JSON [--page PAGE] [--full | --quick] [--device cuda]
        [--only PART …] [--rounds N]

Systems take turns, each in a process of its own, so that a slow moment of the machine hits all of
them; ratios are taken within rounds. The tables go between the marks in PAGE (see table.py), or to
standard output. A system that cannot be built or fails is left out and named there, and makes the
exit status 1.

    --full    longer sentences, a small vocabulary, bfloat16 on any processor, Eole
    --quick   minute models, to see that everything runs; the numbers mean nothing
    --only    training, memory, decoding, rotation or encodings; encodings is done only where it
              is named: all position encodings, for the README's table (see encodings_table.py)
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT, encodings_table, machine, plan, table
from benchmarks.plan import Comparison, System
from benchmarks.rounds import Worker, WorkerError, Workers, interleave, ratios, spread
from benchmarks.shapes import of_tokens
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.files import replacing

PARTS = ("training", "memory", "decoding", "rotation")
ONLY_NAMED = ("encodings",)
EOLE_PACKAGES = ("eole==0.6.4", "aiohttp")
SMALL_TOKENS = 60


class Bench:
    """One run: its processes, and what it has found.

    Attributes:
        missing: systems that were left out, and why.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.missing: list[dict[str, str]] = []
        self.workers = Workers(folder)

    def leave_out(self, what: str, system: str, error: Exception) -> None:
        self.missing.append({"what": what, "system": system, "why": str(error)})
        print(f"left out: {system} ({what}): {error}", file=sys.stderr)

    def worker(self, workers: Workers, name: str, system: System) -> Worker:
        return workers.get(system.process or name, plan.python_of(system, sys.executable))

    def build(self, comparison: Comparison, model: Path) -> dict[str, dict[str, Any]]:
        """Build all systems of a comparison; what each says of itself."""
        built = {}
        for name, system in comparison.systems.items():
            try:
                worker = self.worker(self.workers, name, system)
                spec = plan.spec(system, comparison.shape, self.device, model)
                facts = worker.ask("build", name, spec=spec)
                if comparison.kind == "decoding" and name == plan.EXPORTED_BY:
                    worker.ask("export", name, to=str(model))
                # The first call, not timed: it warms up, and finds what fails.
                first = "kernels" if comparison.kind in plan.TRAININGS else "first"
                built[name] = facts | worker.ask(first, name)
            except (WorkerError, OSError) as error:
                self.leave_out(describe(comparison), name, error)
        return built

    def compare(self, comparison: Comparison, rounds: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            built = self.build(comparison, Path(folder) / "model")
        workers = {
            name: self.worker(self.workers, name, comparison.systems[name]) for name in built
        }
        seconds = interleave(workers, rounds) if workers else {}
        reference = next(iter(comparison.systems))
        systems = {}
        for name, values in seconds.items():
            systems[name] = {"seconds": [round(value, 6) for value in values]}
            systems[name] |= {"summary": spread(values)} | built[name]
            if reference in seconds:
                systems[name]["ratio"] = ratios(values, seconds[reference])
        if NONE_AND_ROPE <= seconds.keys():
            systems[plan.ROPE]["ratio_to_none"] = ratios(seconds[plan.ROPE], seconds[plan.NONE])
        found = record(comparison) | {"systems": systems}
        if comparison.kind == "encodings" and workers:  # one process for all
            name, shared = next(iter(workers.items()))
            found["peak_bytes"] = shared.ask("peak", name)["bytes"]
        return found

    def measure_memory(self, comparison: Comparison) -> dict[str, Any]:
        """The peak of a process that does two updates: a small one, which makes the optimizer's
        state, and one of ``comparison.shape``. Imports and parameters are part of it."""
        small = of_tokens(comparison.shape.size, SMALL_TOKENS, comparison.shape.length)
        systems = {}
        for name, system in comparison.systems.items():
            workers = Workers(self.folder)
            try:
                worker = self.worker(workers, name, system)
                spec = plan.spec(system, comparison.shape, self.device, self.folder)
                worker.ask("build", name, spec=spec)
                worker.ask("small", name, shape=small.as_json())
                worker.ask("first", name)
                systems[name] = worker.ask("peak", name)
            except (WorkerError, OSError) as error:
                self.leave_out(describe(comparison), name, error)
            finally:
                workers.stop()
        reference = systems.get(next(iter(comparison.systems)))
        if reference:
            for found in systems.values():
                found["ratio"] = found["bytes"] / reference["bytes"]
        return record(comparison) | {"systems": systems}


NONE_AND_ROPE = {plan.NONE, plan.ROPE}


def record(comparison: Comparison) -> dict[str, Any]:
    shape = comparison.shape
    return {
        "kind": comparison.kind,
        "size": comparison.name,
        "tokens": shape.tokens,
        "shape": shape.as_json(),
    }


def describe(comparison: Comparison) -> str:
    shape = comparison.shape
    where = f"{comparison.name}, {shape.size.vocabulary:,} symbols, length {shape.length}"
    return f"{comparison.kind}: {where}, attention dropout {shape.attention_dropout:g}"


def make_eole() -> None:
    """Install Eole into ``build/eole``, with torch of our version, unless it is there.

    Raises:
        WorkerError: pip has failed; the message is its last line.
    """
    folder = ROOT / "build" / "eole"
    if (folder / "complete").exists():
        return
    version = torch.__version__.partition("+")[0]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", f"torch=={version}"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *EOLE_PACKAGES]):
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().split("\n")
            raise WorkerError(f"{' '.join(command[:4])}: {lines[-1]}")
    (folder / "complete").touch()


def check(args: Any) -> None:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; leave it out, or use cpu")
    if args.rounds is not None and args.rounds < 2:
        raise UserError(f"--rounds {args.rounds}: must be at least 2")
    if not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: its parent is no folder")
    if args.page:
        try:
            table.block(args.page.read_text(encoding="utf-8"), args.output.stem)
        except UserError as error:
            raise UserError(f"--page {args.page}: {error}") from None


def run(args: Any, mode: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    facts = machine.describe(args.device)
    bfloat16 = facts["bfloat16"] or mode != "bench"
    bench, eole = Bench(args.device, folder), mode == "full"
    if eole:
        try:
            make_eole()
        except WorkerError as error:
            bench.leave_out("installation", plan.EOLE, error)
            eole = False
    todo = plan.make(mode, args.device, bfloat16, facts["threads"], eole)
    parts = args.only or PARTS
    found: list[dict[str, Any]] = []
    load = machine.load()
    start = time.monotonic()
    try:
        for comparison in todo.comparisons:
            if comparison.kind in parts:
                begin = time.monotonic()
                found.append(bench.compare(comparison, args.rounds or todo.rounds))
                print(f"{time.monotonic() - begin:6.0f} s  {describe(comparison)}", file=sys.stderr)
    finally:
        bench.workers.stop()
    if "memory" in parts:
        begin = time.monotonic()
        found.append(bench.measure_memory(todo.memory))
        print(f"{time.monotonic() - begin:6.0f} s  {describe(todo.memory)}", file=sys.stderr)
    facts |= {"load_before": load, "load_after": machine.load()}
    result = {
        "mode": mode,
        "machine": facts,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "rounds": args.rounds or todo.rounds,
        "missing": bench.missing,
        "comparisons": found,
    }
    return result, bench.missing


def main() -> None:
    parser = Parser(prog="python -m benchmarks.bench", description=__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--full", action="store_true")
    group.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS + ONLY_NAMED, metavar="PART")
    parser.add_argument("--rounds", type=int, help="default: 7 on a CPU, 15 on a GPU")
    parser.add_argument("--output", type=Path, required=True, metavar="JSON")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    mode = "full" if args.full else "quick" if args.quick else "bench"
    check(args)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result, missing = run(args, mode, Path(folder))
    with replacing(args.output) as file:
        file.write((json.dumps(result, indent=1) + "\n").encode())
    pages = [args.page] if args.page else []
    show = encodings_table.show if args.only == ["encodings"] else table.show
    show(args.output, pages)
    if missing:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_main(main)
