"""Time and memory of self-attention over the length of a sentence.

    python -m benchmarks.lengths --output JSON [--page PAGE] [--quick] [--rounds N]

One module of base size with rotary positions, one sentence, no padding: softmax attention by
torch's fused kernel, with explicit weights (which it needs for attention dropout), and linear
attention with each feature map; causal, as in a decoder that is trained, and bidirectional.

    time       forward and backward; all kinds and lengths of a direction are in one process and
               take turns. A turn is as many calls as make up the greatest length, and the mean of
               them is taken. Ratios are taken within rounds, to the shortest length of the kind
    memory     forward and backward in a process of its own: its peak resident memory during the
               call, minus what it held before, which is the program, parameters and input. What
               was resident and free is given back to the system first
    decoding   bytes of the state after some steps, and the time of a step early and late

The tables go between the marks in PAGE (see lengths_table.py), or to standard output. What fails
is left out and named there, and makes the exit status 1.

    --quick    minute sizes in one process, to see that everything runs; the numbers mean nothing
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import attention_system, bench, lengths_table, machine, plan
from benchmarks.plan import System
from benchmarks.rounds import Worker, WorkerError, interleave, ratios, spread
from benchmarks.shapes import Shape, Size
from rope_fairseq.errors import Parser, run_main
from rope_fairseq.feature_maps import FEATURE_MAPS
from rope_fairseq.files import replacing

Record = dict[str, Any]
#: What was found of one kind, by number of positions.
Cells = dict[int, Record]

#: The process that measures, by name; there is one at a time.
PROCESS = "attention"


@dataclass(frozen=True)
class Kind:
    """A kind of attention: its feature map, None for softmax, and the dropout of its weights."""

    feature_map: str | None = None
    attention_dropout: float = 0.0


SOFTMAX = "softmax"
KINDS = {SOFTMAX: Kind(), "softmax, explicit": Kind(attention_dropout=0.1)} | {
    f"linear, {name}": Kind(name) for name in FEATURE_MAPS
}
#: Without dropout, which decoding has not, explicit softmax attention is the other one.
DECODING = {name: kind for name, kind in KINDS.items() if not kind.attention_dropout}


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        lengths: of the calls, the shortest first.
        small: length of the call before the one whose memory is measured.
        steps: after how many the bytes of the state are counted.
        positions: at which steps are timed, the early one first.
        own_process: measure each memory in a process of its own.
    """

    size: Size = plan.BASE
    lengths: tuple[int, ...] = (1024, 8192)
    small: int = 64
    steps: tuple[int, ...] = (1, 1024, 4096)
    positions: tuple[int, int] = (128, 4096)
    rounds: int = 5
    own_process: bool = True

    def shape(self, kind: Kind, length: int) -> Shape:
        return Shape(self.size, 1, length, kind.attention_dropout)

    def training(self, kind: Kind, causal: bool, length: int, calls: int = 1) -> Record:
        arguments = {"feature_map": kind.feature_map, "causal": causal, "calls": calls}
        return spec("Training", arguments, self.shape(kind, length))

    def decoding(self, kind: Kind, position: int) -> Record:
        return spec("Decoding", {"feature_map": kind.feature_map}, self.shape(kind, position))


QUICK = Plan(plan.MINUTE, (64, 128), 8, (1, 16), (8, 64), rounds=2, own_process=False)


def spec(work: str, arguments: Record, shape: Shape) -> Record:
    return plan.spec(System("attention", work, arguments), shape, "cpu", Path())


def describe(causal: bool) -> str:
    return "causal" if causal else "bidirectional"


def peak_of_call(worker: Worker, name: str, spec: Record, small: Shape) -> int:
    """Bytes that one call needs beside what the process held before it.

    Args:
        small: shape of a call that comes first, for what any call leaves behind. After it the
            system gives back what is free, and the peak starts anew.
    """
    worker.ask("build", name, spec=spec)
    worker.ask("small", name, shape=small.as_json())
    before = worker.ask("peak", name)["bytes"]
    worker.ask("first", name)
    after: int = worker.ask("peak", name)["bytes"]
    return after - before


def measure_memory(run: bench.Bench, todo: Plan, causal: bool) -> dict[str, Cells]:
    """What each kind needs at each length; those that fail are left out."""
    found: dict[str, Cells] = {}
    for name, kind in KINDS.items():
        cells = found[name] = {}
        for length in todo.lengths:
            wanted = todo.training(kind, causal, length), todo.shape(kind, todo.small)
            try:
                worker = run.workers.get(PROCESS)
                cells[length] = {"bytes": peak_of_call(worker, name, *wanted)}
            except (WorkerError, OSError) as error:
                what = f"memory and time, {describe(causal)}, {length:,} positions"
                run.leave_out(what, name, error)
            finally:
                if todo.own_process:
                    run.workers.stop()
    return found


def measure_times(
    run: bench.Bench, todo: Plan, specs: Mapping[tuple[str, int], Record], what: str
) -> dict[tuple[str, int], list[float]]:
    """Seconds of each call of the systems, all in one process; those that fail are left out.

    Args:
        specs: by kind and number of positions.
    """
    workers = {}
    for (kind, positions), wanted in specs.items():
        name = f"{kind}, {positions}"
        try:
            worker = run.workers.get(PROCESS)
            worker.ask("build", name, spec=wanted)
            worker.ask("first", name)
            workers[name] = worker
        except (WorkerError, OSError) as error:
            run.leave_out(f"{what}, {positions:,} positions", kind, error)
    try:
        seconds = interleave(workers, todo.rounds) if workers else {}
    except WorkerError as error:  # the process is gone, and with it all that was in it
        run.leave_out(what, "all kinds", error)
        seconds = {}
    finally:
        if todo.own_process:
            run.workers.stop()
    names = {key: f"{key[0]}, {key[1]}" for key in specs}
    return {key: seconds[name] for key, name in names.items() if name in seconds}


def timed(values: Sequence[float], calls: int) -> Record:
    """Raw seconds of one call, of measurements of ``calls`` each, and their spread."""
    seconds = [round(value / calls, 9) for value in values]
    return {"seconds": seconds, "summary": spread(seconds)}


def add_ratios(cells: Cells, first: int) -> None:
    """Add to each cell the ratios of what it has to what the one of ``first`` has."""
    reference = dict(cells.get(first, {}))
    for cell in cells.values():
        if "bytes" in cell and reference.get("bytes"):  # of minute sizes nothing may be seen
            cell["memory_ratio"] = cell["bytes"] / reference["bytes"]
        if "seconds" in cell and "seconds" in reference:
            cell["time_ratio"] = ratios(cell["seconds"], reference["seconds"])


def measure_training(run: bench.Bench, todo: Plan, causal: bool) -> list[Record]:
    """Time and memory of a direction, a record for each kind."""
    # First memory: what is too large ends a process that holds nothing else.
    found = measure_memory(run, todo, causal)
    longest = todo.lengths[-1]
    specs = {
        (name, length): todo.training(KINDS[name], causal, length, longest // length)
        for name, cells in found.items()
        for length in cells
    }
    times = measure_times(run, todo, specs, f"time, {describe(causal)}")
    for (name, length), values in times.items():
        found[name][length] |= timed(values, longest // length)
    for cells in found.values():
        add_ratios(cells, todo.lengths[0])
    return [{"kind": name, "causal": causal, "at": as_json(found[name])} for name in found]


def measure_decoding(run: bench.Bench, todo: Plan) -> list[Record]:
    """Bytes of the state, and times of a step, of each kind."""
    specs = {
        (name, position): todo.decoding(kind, position)
        for name, kind in DECODING.items()
        for position in todo.positions
    }
    times = measure_times(run, todo, specs, "decoding")
    found = []
    for name, kind in DECODING.items():
        cells = {
            position: timed(times[name, position], attention_system.STEPS)
            for position in todo.positions
            if (name, position) in times
        }
        add_ratios(cells, todo.positions[0])
        sizes = {
            str(steps): attention_system.state_bytes(todo.shape(kind, steps), kind.feature_map)
            for steps in todo.steps
        }
        found.append({"kind": name, "bytes": sizes, "at": as_json(cells)})
    return found


def as_json(cells: Cells) -> dict[str, Record]:
    return {str(number): cell for number, cell in cells.items()}


def measure(todo: Plan, folder: Path) -> Record:
    """All of it: the record that becomes the JSON file."""
    facts, load = machine.describe("cpu"), machine.load()
    run, start = bench.Bench("cpu", folder), time.monotonic()
    try:
        training = [
            found for causal in (True, False) for found in measure_training(run, todo, causal)
        ]
        decoding = measure_decoding(run, todo)
    finally:
        run.workers.stop()
    return {
        "mode": "lengths" if todo.own_process else "quick",
        "machine": facts | {"load_before": load, "load_after": machine.load()},
        "minutes": round((time.monotonic() - start) / 60, 1),
        "rounds": todo.rounds,
        "missing": run.missing,
        "size": asdict(todo.size),
        "lengths": todo.lengths,
        "training": training,
        "decoding": decoding,
    }


def main() -> None:
    parser = Parser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--output", type=Path, required=True, metavar="JSON")
    parser.add_argument("--page", type=Path)
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    bench.check(args)
    todo = QUICK if args.quick else Plan()
    if args.rounds is not None:
        todo = replace(todo, rounds=args.rounds)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        record = measure(todo, Path(folder))
    with replacing(args.output) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())
    lengths_table.show(args.output, [args.page] if args.page else [])
    if record["missing"]:
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
