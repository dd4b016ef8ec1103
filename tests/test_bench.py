"""The benchmarks: what is measured is what they say, and the tables say what was measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bench, machine, plan, rounds, table, worker
from benchmarks.rounds import Worker, WorkerError
from benchmarks.shapes import EOS, Shape, of_tokens, pair
from tests.tiny import ROOT, call, run

QUICK = plan.make("quick", "cpu", bfloat16=True, threads=1, eole=False)
TRAINING, DECODING = (
    next(comparison for comparison in QUICK.comparisons if comparison.kind == kind)
    for kind in ("training", "decoding")
)


def specification(comparison: plan.Comparison, name: str, model: Path = Path("no")) -> dict:
    return plan.spec(comparison.systems[name], comparison.shape, "cpu", model)


def do(systems: dict, folder: Path, what: str, **command) -> dict:
    """A worker's answer, in this process."""
    return worker.answer(systems, {"do": what, "name": "it"} | command, folder)


def test_the_batch_has_the_stated_shape_and_no_padding():
    shape = of_tokens(plan.MINUTE, 100, 30)
    assert (shape.sentences, shape.tokens) == (3, 90)
    source, target, shifted = pair(shape)
    for tokens in (source, target):
        assert tokens.shape == (3, 30) and (tokens[:, -1] == EOS).all()
        assert tokens[:, :-1].min() > 3 and tokens.max() < plan.MINUTE.vocabulary
    assert not torch.equal(source, target) and torch.equal(pair(shape)[0], source)
    assert (shifted[:, 0] == EOS).all() and torch.equal(shifted[:, 1:], target[:, :-1])
    assert of_tokens(plan.MINUTE, 10, 30).sentences == 1
    assert Shape.from_json(json.loads(json.dumps(shape.as_json()))) == shape


def test_statistics_are_numpys():
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.3]
    low, median, high = np.percentile(values, [25, 50, 75])
    summary = rounds.spread(values)
    expected = {"median": median, "min": 1.0, "low": low, "high": high}
    assert summary == pytest.approx(expected)
    # Within rounds: 2, 0.5, 1 have the median 1; the ratio of the medians would be 0.4.
    assert rounds.ratios([2.0, 5.0, 1.0], [1.0, 10.0, 1.0])["median"] == 1
    assert rounds.ratios([2.0, 2.0, 10.0], [1.0, 5.0, 5.0])["median"] == 2


def test_systems_take_turns_in_an_order_that_moves_on():
    asked = []

    class Fake:
        def ask(self, do, name):
            asked.append(name)
            return {"seconds": float(len(asked))}

    seconds = rounds.interleave(dict.fromkeys("abc", Fake()), 4)
    assert "".join(asked) == "abcbcacababc"
    assert seconds == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}


def model_of(system) -> torch.nn.Module:
    return system.trainer.model if hasattr(system, "trainer") else system.model


def parameters_of(size: plan.Size) -> int:
    """Of a Transformer with shared embeddings and norms behind the layers, counted by hand."""
    dim = size.embed_dim
    attention, norm = 4 * (dim * dim + dim), 2 * dim
    ffn = 2 * dim * size.ffn_dim + size.ffn_dim + dim
    encoder, decoder = attention + ffn + 2 * norm, 2 * attention + ffn + 3 * norm
    return size.vocabulary * dim + size.layers * (encoder + decoder)


@pytest.mark.parametrize("name", TRAINING.systems)
def test_each_system_trains(name, tmp_path):
    """The updates are real ones, with dropout, of a model of the stated size."""
    with_dropout = QUICK.comparisons[1]
    comparison = with_dropout if name in with_dropout.systems else TRAINING
    systems: dict = {}
    built = do(systems, tmp_path, "build", spec=specification(comparison, name))
    assert built["parameters"] == parameters_of(plan.MINUTE)
    model = model_of(systems["it"][0])
    attentions = [
        module
        for path, module in model.named_modules()
        if path.endswith(("self_attn", "encoder_attn"))
    ]
    assert len(attentions) == 3
    for module in attentions:
        held = module.dropout_module.p if hasattr(module, "dropout_module") else module.dropout
        assert held == comparison.shape.attention_dropout

    before = [parameter.detach().clone() for parameter in model.parameters()]
    (kernels,) = do(systems, tmp_path, "kernels").values()
    assert model.training and any("attention" in k or "bmm" in k for k in kernels)
    for old, new in zip(before, model.parameters(), strict=True):
        assert not (new.requires_grad and torch.equal(old, new))
    assert do(systems, tmp_path, "run")["seconds"] > 0
    assert do(systems, tmp_path, "peak")["bytes"] > 2**20

    sources: list[torch.Tensor] = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: sources.append(next(iter(inputs.values()))), with_kwargs=True
    )
    do(systems, tmp_path, "small", shape=of_tokens(plan.MINUTE, 30, 30).as_json())
    assert len(sources[0]) == 1 < comparison.shape.sentences


def test_each_system_translates(tmp_path):
    """To the forced length, which they check themselves; CTranslate2 after the export."""
    systems: dict = {}
    model = tmp_path / "model"
    for name in DECODING.systems:
        do(systems, tmp_path, "build", spec=specification(DECODING, name, model))
        if name == plan.EXPORTED_BY:
            do(systems, tmp_path, "export", to=str(model))
        do(systems, tmp_path, "first")
        assert do(systems, tmp_path, "run")["seconds"] > 0
    full = plan.decoding_systems(bfloat16=True, marian=True, threads=1)
    assert full.keys() == DECODING.systems.keys() | {plan.MARIAN}
    worker.build(plan.spec(full[plan.MARIAN], DECODING.shape, "cpu", model), tmp_path).run()


def test_a_wrong_length_is_an_error(tmp_path):
    system = worker.build(specification(DECODING, plan.STOCK), tmp_path)
    system.cfg.generation.min_len = system.cfg.generation.max_len_b = 7
    with pytest.raises(RuntimeError, match=r"hypotheses of \{8\} tokens instead of 31"):
        system.run()


def test_a_quick_run_from_end_to_end(tmp_path):
    """Through the command and its processes; stock fairseq runs without the plugin."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- it: begin -->\nold\n<!-- it: end -->\nafter\n")
    command = ("-m", "benchmarks.bench", "--quick", "--only", "decoding", "rotation")
    output = tmp_path / "it.json"
    done = run(
        *(bench.sys.executable, *command, "--output", output, "--page", page, "--rounds", "3"),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    assert [c["kind"] for c in record["comparisons"]] == ["decoding", "rotation"]
    systems = record["comparisons"][0]["systems"]
    assert systems.keys() == DECODING.systems.keys() and record["missing"] == []
    assert not systems[plan.STOCK]["plugin_loaded"] and systems[plan.ROPE]["plugin_loaded"]
    stock, rope = systems[plan.STOCK]["seconds"], systems[plan.ROPE]["seconds"]
    assert len(stock) == 3 and systems[plan.STOCK]["ratio"]["median"] == 1
    ratio = np.median(np.divide(rope, stock))
    assert systems[plan.ROPE]["ratio"]["median"] == pytest.approx(ratio, rel=1e-3)
    text = table.render(record)
    assert page.read_text() == f"before\n<!-- it: begin -->\n{text}\n<!-- it: end -->\nafter\n"


def test_what_fails_is_named(tmp_path):
    missing = Worker(bench.sys.executable, tmp_path / "log")
    try:
        spec = specification(TRAINING, plan.STOCK)
        options = [*spec["arguments"]["options"], "--no-such-option"]
        bad = spec | {"arguments": {"options": options}}
        with pytest.raises(WorkerError, match="exit status 2: .*no-such-option"):
            missing.ask("build", "it", spec=bad)
        with pytest.raises(WorkerError, match="No module named 'benchmarks.none_system'"):
            missing.ask("build", "it", spec=spec | {"kind": "none"})
        missing.process.kill()
        with pytest.raises(WorkerError, match="killed"):
            missing.ask("run", "it")
    finally:
        missing.stop()


def made() -> dict:
    """A measurement with round numbers."""
    one = {"median": 1.0, "min": 0.5, "low": 0.75, "high": 2.0}

    def times(factor: float) -> dict:
        return {name: value * factor for name, value in one.items()}

    def comparison(kind: str, size: plan.Size, systems: dict) -> dict:
        name = plan.size_name(size)
        shape = of_tokens(size, 300, 30)
        return bench.record(plan.Comparison(kind, name, shape, {})) | {"systems": systems}

    kernels = {"_scaled_dot_product_flash_attention_for_cpu": 18, "bmm": 2}
    stock = {"summary": one, "ratio": times(1), "kernels": kernels}
    rope = {"summary": times(0.9), "ratio": times(0.9), "kernels": kernels}
    return {
        "mode": "bench",
        "minutes": 9.5,
        "rounds": 7,
        "machine": {
            "processor": "Abacus",
            "flags": ["avx2"],
            "cores": 2,
            "threads": 2,
            "memory_gib": 8.0,
            "device": "cpu",
            "bfloat16": False,
            "versions": {"torch": "2.13.0"},
            "commit": "abc",
            "date": "2026-01-01",
            "load_before": {"average": 0.1, "busy": {}},
            "load_after": {"average": 2.0, "busy": {"cc (7)": 0.5}},
        },
        "missing": [
            {"what": "training: a", "system": "Marian", "why": "no such file"},
            {"what": "training: b", "system": "Marian", "why": "no such file"},
        ],
        "comparisons": [
            comparison(
                *("training", plan.BASE),
                {"stock": stock, "rope": rope | {"ratio_to_none": times(1.005)}},
            ),
            comparison("decoding", plan.BASE, {"stock": stock, plan.INT8: rope}),
            comparison("memory", plan.BASE, {"stock": {"bytes": 2**33, "ratio": 1.0}})
            | {"systems": {"rope": {"bytes": 2**32, "ratio": 0.5}}},
            comparison("rotation", plan.BASE, {"copy": {"summary": one, "ratio": times(1)}}),
        ],
    }


def test_the_tables_of_a_made_measurement():
    lines = table.render(made()).splitlines()
    assert lines[0] == (
        "Abacus (avx2), 2 cores, 2 threads, 8.0 GiB; torch 2.13.0; commit abc, 2026-01-01; "
        "9.5 minutes, 7 rounds; load average 0.10 before, 2.00 after."
    )
    for expected in (
        "**Other processes were computing, so the times are too long:** cc (7) 50%.",
        "Left out: Marian (training: a; training: b): no such file.",
        "| training step, base, 37k symbols, length 30 | ≤ 0.85 | 0.90 (0.68–1.80) | no |",
        "| the same, bfloat16 | ≤ 0.50 | not measured: no bfloat16 instructions on this processor "
        "|  |",
        "| training step, tiny, 10k symbols, length 30 | ≤ 0.70 | not measured |  |",
        "| `rope` over `none`, base, 37k symbols, length 30 | ≤ 1.01 | 1.00 (0.75–2.01) | yes |",
        "| peak memory of a step, base, 37k symbols, 4,096 tokens | ≤ 0.60 | 0.50 | yes |",
        "| CTranslate2, int8 | ≤ 0.36 | 0.90 (0.68–1.80) | no |",
        "| base, 37,000, 30, 300, 0 | rope | 0.900 (0.675–1.80) | 0.90 (0.68–1.80) | "
        "`_scaled_dot_product_flash_attention_for_cpu`, `bmm` |",
        "| 300 | rope | 4.00 | 0.50 |",
        # 10 sentences of 31 steps in 0.9 s
        "| CTranslate2 int8 | 0.900 (0.675–1.80) | 344 | 0.90 (0.68–1.80) |",
        "| copy | 100 (75.0–200) | 1.00 (0.75–2.00) |",
    ):
        assert expected in lines


@pytest.mark.parametrize(
    "name, page",
    [("bench", "README.md"), ("bench-full", "docs/speed.md"), ("bench-gpu", "docs/speed.md")],
)
def test_the_pages_say_what_was_measured(name, page):
    source = ROOT / "results" / f"{name}.json"
    expected = table.NOT_MEASURED
    if source.exists():
        expected = table.render(json.loads(source.read_text()))
    assert table.block((ROOT / page).read_text(encoding="utf-8"), name) == expected


def test_bfloat16_is_measured_where_the_processor_has_it(monkeypatch):
    for flags, expected in (("avx2 avx512f", False), ("avx2 amx_bf16", True)):
        monkeypatch.setattr(machine.hardware, "cpu_field", lambda name, flags=flags: flags)
        assert machine.has_bfloat16("cpu") is expected
        systems = plan.make("bench", "cpu", expected, 2, eole=False).comparisons[0].systems
        assert (plan.BFLOAT16 in systems) is expected


def test_the_plan_of_make_bench_is_what_was_asked_for():
    todo = plan.make("bench", "cpu", True, 2, eole=False)
    assert todo.rounds >= 7 and todo.memory.shape.tokens == 4080  # 136 sentences of 30
    where = [
        (c.kind, c.name, c.shape.size.vocabulary, c.shape.length, c.shape.attention_dropout)
        for c in todo.comparisons
    ]
    assert where == [
        *(("training", "base", 37000, 30, dropout) for dropout in (0.0, 0.1)),
        *(("training", "tiny", 10000, 30, dropout) for dropout in (0.0, 0.1)),
        *((kind, "base", 37000, 30, 0.0) for kind in ("decoding", "rotation", "encodings")),
    ]
    full = plan.make("full", "cpu", True, 2, eole=True).comparisons
    assert {c.shape.length for c in full} == {30, 100, 400}
    assert {c.shape.size.vocabulary for c in full} == {8000, 10000, 37000}
    assert all(plan.EOLE in c.systems for c in full if c.kind == "training")
    # Each target has a system to be measured.
    for target in table.TARGETS:
        assert any(
            (c.kind, c.name) == (target.kind, target.size) and target.system in c.systems
            for c in (*todo.comparisons, todo.memory)
        )


@pytest.mark.parametrize(
    "options, message",
    [
        (["--rounds", "1"], "--rounds 1: must be at least 2"),
        (["--device", "cuda"], "--device cuda: torch finds no GPU here; leave it out, or use cpu"),
        (["--only", "speed"], "argument --only: invalid choice: 'speed'"),
        (["--output", "/none/a.json"], "--output /none/a.json: its parent is no folder"),
        (["--page", str(ROOT / "setup.py")], "setup.py: no line '<!-- it: begin -->'"),
    ],
)
def test_wrong_options_are_one_line(options, message, tmp_path, capsys):
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert call(bench.main, "--quick", "--output", tmp_path / "it.json", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "it.json").exists()


def test_a_file_that_is_no_measurement_is_one_line(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["table", str(tmp_path / "a.json")])
        assert call(table.main, tmp_path / "a.json") == 2
    assert "a.json: not written by benchmarks.bench: KeyError" in capsys.readouterr().err
