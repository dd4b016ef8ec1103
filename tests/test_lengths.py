"""Self-attention over length: what is measured is what the tables say."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import attention_system, bench, lengths, lengths_table, plan, table
from benchmarks.rounds import Worker, WorkerError
from benchmarks.shapes import Shape
from tests.test_bench import made
from tests.tiny import ROOT, call

SHAPE = Shape(plan.MINUTE, 1, 24)

# A worker with a system that allocates as much as its shape says, in MiB. It has had more before,
# in blocks small enough for the C library to keep them and with some still in use behind them.
FAKE_WORKER = f"""#!{sys.executable}
import runpy, sys, types

class Fake:
    def __init__(self, shape, device):
        self.size = shape.length << 20
        blocks = [bytearray(10_000) for _ in range(9_000)]
        self.kept = blocks[-1:]

    def run_small(self, shape):
        from benchmarks.attention_system import settle
        bytearray(shape.length << 20)
        settle()

    def run(self):
        bytearray(b"x") * self.size  # written to, and freed at once

module = sys.modules["benchmarks.fake_system"] = types.ModuleType("fake_system")
module.Fake = Fake
sys.argv[:] = ["worker"]
runpy.run_module("benchmarks.worker", run_name="__main__")
"""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", lengths.KINDS)
def test_a_call_is_forward_and_backward_of_the_kind(name, causal):
    kind = lengths.KINDS[name]
    shape = lengths.QUICK.shape(kind, 24)
    system = attention_system.Training(shape, "cpu", kind.feature_map, causal, calls=3)
    x, module = system.x, system.module
    assert x.shape == (24, 1, 16) and module.training
    assert module.dropout_module.p == (0.1 if "explicit" in name else 0)
    seen: list[torch.Tensor] = []
    x.register_hook(seen.append)
    for parameter in module.parameters():
        parameter.register_hook(seen.append)
    system.run()
    assert len(seen) == 3 * (1 + 8)  # weights and biases of four projections
    assert all(tensor.grad is None for tensor in (x, *module.parameters()))

    # The first output sees the last input where the future is not masked.
    module.eval()
    first = attention_system.attend(module, x)[0].sum()
    (gradient,) = torch.autograd.grad(first, x)
    assert bool(gradient[-1].any()) is not causal


@pytest.mark.parametrize("name", lengths.DECODING)
def test_steps_start_from_the_same_state_each_time(name):
    """And the state is that of single steps."""
    feature_map = lengths.KINDS[name].feature_map
    system = attention_system.Decoding(SHAPE, "cpu", feature_map)
    found = []
    system.module.register_forward_hook(lambda *args: found.append(args[2][0]))
    system.run()
    system.run()
    steps = attention_system.STEPS
    assert len(found) == 2 * steps
    for once, again in zip(found[:steps], found[steps:], strict=True):
        assert torch.equal(once, again)
    state: dict = {}
    with torch.no_grad():
        for _ in range(SHAPE.length):
            last = attention_system.attend(system.module, system.x, state)
    assert torch.allclose(last, found[0], atol=1e-5)


def test_the_bytes_of_a_state():
    """Linear attention's do not grow; a softmax cache has room for half as many positions more."""

    def after(steps: int, feature_map: str | None = None) -> int:
        return attention_system.state_bytes(Shape(plan.MINUTE, 1, steps), feature_map)

    channels, head_dim = 16, 8
    assert after(1) == after(20) == 2 * 4 * 32 * channels
    assert after(101) == 2 * 4 * (100 * 3 // 2) * channels
    # Per head head_dim features: sums of them, and of their products with the values.
    assert after(1, "elu") == after(300, "elu") == 4 * channels * (1 + head_dim)


def test_the_memory_of_a_call_is_what_it_allocates(tmp_path):
    """Whatever the process had before: its peak, and what the C library keeps of it."""
    python = tmp_path / "python"
    python.write_text(FAKE_WORKER)
    python.chmod(0o755)
    worker = Worker(str(python), tmp_path / "log")
    try:
        for mebibytes in (40, 5):
            shape = Shape(plan.MINUTE, 1, mebibytes)
            spec = plan.spec(plan.System("fake", "Fake"), shape, "cpu", Path())
            small = Shape(plan.MINUTE, 1, 50)
            found = lengths.peak_of_call(worker, "it", spec, small)
            assert found / 2**20 == pytest.approx(mebibytes, abs=1)
    finally:
        worker.stop()


def test_a_quick_run_writes_the_tables(tmp_path):
    page, output = tmp_path / "page.md", tmp_path / "it.json"
    page.write_text("before\n<!-- it: begin -->\nold\n<!-- it: end -->\nafter\n")
    words = ("--quick", "--rounds", "3", "--output", output, "--page", page)
    assert call(lengths.main, *words) == 0
    record = json.loads(output.read_text())
    assert record["missing"] == [] and record["lengths"] == [64, 128]
    assert [(found["kind"], found["causal"]) for found in record["training"]] == [
        (name, causal) for causal in (True, False) for name in lengths.KINDS
    ]
    assert [found["kind"] for found in record["decoding"]] == list(lengths.DECODING)
    for found in record["training"]:
        first, last = found["at"]["64"], found["at"]["128"]
        assert first["time_ratio"]["high"] == 1 and last["bytes"] >= 0
        quotients = [a / b for a, b in zip(last["seconds"], first["seconds"], strict=True)]
        assert last["time_ratio"]["median"] == pytest.approx(sorted(quotients)[1])
        assert len(quotients) == 3 and min(last["seconds"]) > 0
    text = lengths_table.render(record)
    assert page.read_text() == f"before\n<!-- it: begin -->\n{text}\n<!-- it: end -->\nafter\n"


def test_ratios_are_to_the_shortest_length():
    cells: lengths.Cells = {
        8: lengths.timed([2.0, 4.0, 8.0], 2) | {"bytes": 30},
        16: lengths.timed([3.0, 2.0, 8.0], 1) | {"bytes": 45},
        32: {"bytes": 90},  # too slow to be timed, say
    }
    assert cells[8]["seconds"] == [1, 2, 4] and cells[8]["summary"]["median"] == 2
    lengths.add_ratios(cells, 8)
    assert [cell["memory_ratio"] for cell in cells.values()] == [1, 1.5, 3]
    assert cells[16]["time_ratio"]["median"] == 2  # of 3, 1, 2
    assert "time_ratio" not in cells[32]
    alone: lengths.Cells = {16: {"bytes": 45}}
    lengths.add_ratios(alone, 8)
    assert alone == {16: {"bytes": 45}}


def test_what_fails_is_left_out_and_named(tmp_path, monkeypatch):
    """Also of the times, which are then those of the rest."""

    def peak(worker, name, spec, small):
        if "explicit" in name and spec["shape"]["length"] == 128:
            raise WorkerError("killed, perhaps for want of memory")
        return 100 * spec["shape"]["length"]

    def interleave(workers, rounds):
        return {name: [1.0] * rounds for name in workers}

    class Idle:
        def get(self, name):
            return self

        def ask(self, do, name, **command):
            assert name != "softmax, explicit, 128"
            return {}

    monkeypatch.setattr(lengths, "peak_of_call", peak)
    monkeypatch.setattr(lengths, "interleave", interleave)
    run = bench.Bench("cpu", tmp_path)
    run.workers = Idle()  # type: ignore[assignment]
    found = lengths.measure_training(run, lengths.QUICK, True)
    assert {row["kind"]: list(row["at"]) for row in found} == {
        name: ["64"] if "explicit" in name else ["64", "128"] for name in lengths.KINDS
    }
    (left_out,) = run.missing
    assert left_out == {
        "what": "memory and time, causal, 128 positions",
        "system": "softmax, explicit",
        "why": "killed, perhaps for want of memory",
    }
    # A turn at 64 positions is two calls.
    assert found[0]["at"]["64"]["seconds"] == [0.5, 0.5]
    assert found[0]["at"]["128"]["time_ratio"]["median"] == 2


def measurement() -> dict:
    """A measurement with round numbers."""

    def cells(ratio: float, memory_ratio: float) -> dict:
        found: lengths.Cells = {
            1024: lengths.timed([0.01, 0.01], 1) | {"bytes": 2**24},
            8192: lengths.timed([0.01 * ratio, 0.01 * ratio], 1)
            | {"bytes": int(2**24 * memory_ratio)},
        }
        lengths.add_ratios(found, 1024)
        return lengths.as_json(found)

    explicit = cells(1, 1)
    del explicit["8192"]
    training = [
        {"kind": "softmax", "causal": True, "at": cells(40, 7)},
        {"kind": "softmax, explicit", "causal": True, "at": explicit},
        {"kind": "linear, elu", "causal": True, "at": cells(8.5, 9.5)},
        {"kind": "linear, favor", "causal": False, "at": cells(9.25, 8)},
    ]
    step: lengths.Cells = {
        128: lengths.timed([0.001, 0.001], 1),
        4096: lengths.timed([0.003, 0.003], 1),
    }
    lengths.add_ratios(step, 128)
    sizes = {"1": 2**17, "4096": 2**23}
    decoding = [{"kind": "softmax", "bytes": sizes, "at": lengths.as_json(step)}]
    lists = {"lengths": [1024, 8192], "training": training, "decoding": decoding}
    return made() | lists | {"size": {"embed_dim": 512, "heads": 8}}


def test_the_tables_of_a_made_measurement():
    lines = lengths_table.render(measurement()).split("\n")
    for expected in (
        "| time of a call, ms | 1,024 | 8,192 | 8,192 : 1,024 | ≤ 9 |",
        "| softmax, causal | 10.0 | 400 | 40.00 (40.00–40.00) |  |",
        "| softmax, explicit, causal | 10.0 | left out |  |  |",
        "| linear, elu, causal | 10.0 | 85.0 | 8.50 (8.50–8.50) | yes |",
        "| linear, favor, bidirectional | 10.0 | 92.5 | 9.25 (9.25–9.25) | no |",
        "| memory of a call, MiB | 1,024 | 8,192 | 8,192 : 1,024 | ≤ 9 |",
        "| softmax, explicit, causal | 16.0 | left out |  |  |",
        "| linear, elu, causal | 16.0 | 152 | 9.50 | no |",
        "| linear, favor, bidirectional | 16.0 | 128 | 8.00 | yes |",
        "| softmax | 128 | 8,192 | 1.00 | 3.00 | 3.00 (3.00–3.00) |",
    ):
        assert expected in lines
    assert any(line.startswith("Abacus (avx2), 2 cores") for line in lines)
    assert lines[-3].startswith("**Other processes were") and "Marian" in lines[-1]


def test_the_readme_says_what_was_measured():
    record = lengths_table.read_json(ROOT / "results" / "lengths.json")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table.block(page, "lengths") == lengths_table.render(record)


def test_what_make_bench_lengths_measures():
    todo = lengths.Plan()
    assert (todo.size, todo.lengths) == (plan.BASE, (1024, 8192))
    assert todo.rounds == 5 and todo.own_process
    assert list(lengths.KINDS) == [
        *("softmax", "softmax, explicit", "linear, elu", "linear, softmax", "linear, favor")
    ]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--rounds", "1"], "--rounds 1: must be at least 2"),
        (["--output", "/none/a.json"], "--output /none/a.json: its parent is no folder"),
        (["--page", str(ROOT / "setup.py")], "setup.py: no line '<!-- it: begin -->'"),
        (["--full"], "unrecognized arguments: --full"),
    ],
)
def test_wrong_options_are_one_line(options, message, tmp_path, capsys):
    assert call(lengths.main, "--quick", "--output", tmp_path / "it.json", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "it.json").exists()


def test_a_file_that_is_no_measurement_is_one_line(tmp_path, capsys, monkeypatch):
    source = tmp_path / "a.json"

    def written(*words: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["table", *map(str, words)])
        return call(lengths_table.main, *words)

    assert written(source) == 0 and capsys.readouterr().out == f"{table.NOT_MEASURED}\n"
    source.write_text("{}")
    assert written(source) == 2
    assert "a.json: not written by benchmarks.lengths: KeyError" in capsys.readouterr().err
    assert written() == 2 and "usage: " in capsys.readouterr().err
