"""The README's table of all encodings: measured as it says, and says what was measured."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bench, encodings_table, plan, table, worker
from benchmarks.encodings import SOURCES
from rope_fairseq.position import ENCODINGS
from tests.test_bench import made, parameters_of
from tests.tiny import ROOT, call

WITHOUT_PARAMETERS = {"sinusoidal", "rope", "alibi", "none"}
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"


def of_kind(mode: str, kind: str) -> plan.Comparison:
    todo = plan.make(mode, "cpu", bfloat16=False, threads=1, eole=False)
    (found,) = [comparison for comparison in todo.comparisons if comparison.kind == kind]
    return found


def test_all_encodings_are_compared_and_sinusoidal_is_1():
    assert list(SOURCES) == (
        "sinusoidal learned rope shaw transformer-xl t5 tupe deberta alibi none".split()
    )
    assert set(ENCODINGS) == set(SOURCES)
    compared = of_kind("bench", "encodings")
    assert list(compared.systems) == list(SOURCES)
    shape = compared.shape
    assert (compared.name, shape.size.vocabulary, shape.tokens) == ("base", 37000, 4080)
    assert (shape.length, shape.attention_dropout) == (30, 0)
    for name, system in compared.systems.items():
        assert system.arguments["options"] == [
            "--criterion=fused_label_smoothed_cross_entropy",
            "--arch=rope_transformer",
            f"--position-encoding={name}",
        ]
        assert system.process == "encodings"  # ten processes would need three times the memory
    assert "encodings" not in bench.PARTS  # only where it is named


@pytest.mark.parametrize("name", SOURCES)
def test_each_encoding_trains(name, tmp_path):
    compared = of_kind("quick", "encodings")
    spec = plan.spec(compared.systems[name], compared.shape, "cpu", Path("no"))
    systems: dict = {}

    def do(what: str, **command) -> dict:
        return worker.answer(systems, {"do": what, "name": name} | command, tmp_path)

    extra = do("build", spec=spec)["parameters"] - parameters_of(plan.MINUTE)
    assert extra == 0 if name in WITHOUT_PARAMETERS else extra > 0
    (kernels,) = do("kernels").values()
    assert kernels and do("run")["seconds"] > 0
    assert systems[name][0].trainer.cfg.model.position_encoding == name


def test_a_quick_run_writes_the_table(tmp_path, monkeypatch):
    few = plan.only(plan.encoding_systems(), "sinusoidal", "learned", "none")
    monkeypatch.setattr(plan, "encoding_systems", lambda: few)
    page, output = tmp_path / "page.md", tmp_path / "it.json"
    page.write_text("before\n<!-- it: begin -->\nold\n<!-- it: end -->\nafter\n")
    words = ("--quick", "--only", "encodings", "--output", output, "--page", page)
    assert call(bench.main, *words) == 0
    record = json.loads(output.read_text())
    assert [comparison["kind"] for comparison in record["comparisons"]] == ["encodings"]
    systems = record["comparisons"][0]["systems"]
    assert record["comparisons"][0]["peak_bytes"] > 2**27
    assert list(systems) == list(few) and systems["sinusoidal"]["ratio"]["high"] == 1
    assert all(len(system["seconds"]) == record["rounds"] == 2 for system in systems.values())
    # 1,024 positions a side, a row of padding and fairseq's offset included.
    assert systems["learned"]["parameters"] - systems["none"]["parameters"] == 2 * 1026 * 16
    text = encodings_table.render(record, {})
    assert page.read_text() == f"before\n<!-- it: begin -->\n{text}\n<!-- it: end -->\nafter\n"
    assert "| 32,832 |" in text


def system(parameters: int, *ratio: float) -> dict:
    low, median, high = ratio
    return {
        "parameters": parameters,
        "ratio": {"low": low, "median": median, "high": high, "min": low},
    }


def measurement() -> dict:
    systems = {
        "sinusoidal": system(63_000_000, 1, 1, 1),
        "shaw": system(63_012_345, 1.55, 1.61, 1.7),
        "t5": system(63_000_512, 1.5, 1.6, 1.65),
        "none": system(63_000_000, 0.97, 0.985, 1.01),
    }
    compared = of_kind("bench", "encodings")
    return made() | {"comparisons": [bench.record(compared) | {"systems": systems}]}


def short(value: float, **changes) -> dict:
    names = (("sacreBLEU", "raw reference"), ("tokenized BLEU", "tokens"))
    scores = [
        {"name": name, "value": value, "kind": kind, "signature": SIGNATURE} for name, kind in names
    ]
    run = {"scores": scores, "updates": 1500, "data": "corpus:demo", "commit": "abc"}
    return run | changes


def test_the_table_of_made_results():
    runs = {"shaw": short(14.436), "none": short(9.0)}
    text = encodings_table.render(measurement(), runs)
    lines = text.split("\n")
    shaw = "Shaw et al. 2018, [1803.02155](https://arxiv.org/abs/1803.02155)"
    tupe = "Ke et al. 2021, [2006.15595](https://arxiv.org/abs/2006.15595) (TUPE-R)"
    assert [line.split("`")[1] for line in lines[2:12]] == list(SOURCES)
    for expected in (
        "| encoding | source | extra parameters | step time, sinusoidal = 1 "
        "| BLEU of a short demo training |",
        f"| `shaw` | {shaw} | 12,345 | **1.61 (1.55–1.70)** | 14.44 |",
        f"| `tupe` | {tupe} | not run | not run | not run |",
        "Step: base, 37,000 symbols, 4,080 tokens in sentences of 30, attention dropout 0; median "
        "and quartiles of the ratios within rounds. **Bold**: above 1.60.",
        "**Other processes were computing, so the times are too long:** cc (7) 50%.",
        f"BLEU: sacreBLEU, raw reference, `{SIGNATURE}`; 1,500 updates; one seed (1); "
        "`corpus:demo`; commit abc.",
    ):
        assert expected in lines
    assert "| 512 | 1.60 (1.50–1.65) | not run |" in text
    assert "| 0 | 0.98 (0.97–1.01) | 9.00 |" in text
    assert lines[13].startswith("Step: ") and lines[15].startswith("Abacus (avx2), 2 cores")
    assert lines[-3].startswith("Left out: Marian") and "Bold" not in encodings_table.render(
        None, runs
    )


def test_nothing_was_run_yet():
    text = encodings_table.render(None, {})
    assert text.count("| not run | not run | not run |") == len(SOURCES) == text.count("\n") - 1
    # A measurement without the model to subtract has times only.
    record = measurement()
    del record["comparisons"][0]["systems"]["none"]
    assert "| not run | **1.61 (1.55–1.70)** | not run |" in encodings_table.render(record, {})


def test_runs_that_differ_are_named():
    runs = {"rope": short(1, updates=3000, commit=None), "t5": short(2), "none": short(3)}
    assert encodings_table.about_bleu(runs)[0] == (
        f"BLEU: sacreBLEU, raw reference, `{SIGNATURE}`; 3,000 updates (rope); "
        "1,500 updates (t5, none); one seed (1); `corpus:demo`; commit not recorded (rope); "
        "commit abc (t5, none)."
    )


def test_the_readme_says_what_was_measured():
    record = encodings_table.read_json(ROOT / "results" / "encodings.json")
    expected = encodings_table.render(record, encodings_table.read_short(ROOT / "results"))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table.block(page, "encodings") == expected


def test_the_files_decide_what_is_written(tmp_path, monkeypatch, capsys):
    """Read beside each other, and a file that is not what its name says is one line."""
    monkeypatch.setattr(encodings_table, "RESULTS", tmp_path)
    rope = tmp_path / "short-rope-seed1.json"
    rope.write_text(json.dumps(short(7) | {"position_encoding": "rope", "seed": 1}))
    (tmp_path / "short-t5-seed2.json").write_text("{}")  # another seed's
    page = tmp_path / "page.md"
    page.write_text("<!-- encodings: begin -->\n\n<!-- encodings: end -->\n")

    def written(*pages: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["table", *map(str, pages)])
        return call(encodings_table.main, *pages)

    assert written(page) == 0
    text = encodings_table.render(None, encodings_table.read_short(tmp_path))
    assert table.block(page.read_text(), "encodings") == text and text.count("| 7.00 |") == 1
    assert written() == 0 and capsys.readouterr().out == text + "\n"

    for content, message in (
        ('{"position_encoding": "t5", "seed": 1}', "is of position encoding t5, seed 1"),
        ('{"position_encoding": "rope", "seed": 1}', "was not written by its script: KeyError"),
        ("[]", "not the record of a run"),
        ("{", "not a JSON file"),
    ):
        rope.write_text(content)
        assert written(page) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and error.startswith("error: ")
        assert table.block(page.read_text(), "encodings") == text
    rope.unlink()
    (tmp_path / "encodings.json").write_text("{}")
    assert written(page) == 2 and "was not written" in capsys.readouterr().err
    assert written(page, page) == 2 and "usage: " in capsys.readouterr().err
