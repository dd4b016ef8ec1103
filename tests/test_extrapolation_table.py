"""The README's table and figure of long sentences: they say what is in results/."""

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import extrapolation, extrapolation_figure, extrapolation_table, table
from benchmarks.extrapolation import SYSTEMS, read
from rope_fairseq.analysis.figure import COLOURS
from tests.tiny import ROOT, call

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"


def made(system: tuple[str, str | None], *values: float | None, **changes) -> dict:
    buckets = [
        {
            "shortest": 32 * index + 1,
            "longest": 32 * index + 32,
            "sentences": 1234 if index == 0 else 0 if value is None else 9,
            "value": value,
            "length_ratio": None if value is None else 0.875 + index,
            "signature": SIGNATURE,
        }
        for index, value in enumerate(values)
    ]
    score = {"name": "sacreBLEU", "value": 5.0, "kind": "raw text", "signature": SIGNATURE}
    run = {
        "position_encoding": system[0],
        "scaling": system[1],
        "model_overrides": "{'model': 4}" if system[1] else None,
        "seed": 1,
        "updates": 3000,
        "data": "corpus:lengths",
        "commit": "abc",
        "hardware": "Abacus, 2 cores",
        "validation_loss": [[1500, 5.5], [3000, 4.125]],
        "scores": [score],
        "trained_source_tokens": 32,
        "longer_left_out": 7,
        "buckets": buckets,
    }
    return run | changes


def keep(folder: Path, run: dict) -> Path:
    name = "-".join(filter(None, (run["position_encoding"], run["scaling"])))
    path = folder / f"extrapolate-{name}.json"
    path.write_text(json.dumps(run))
    return path


def test_the_table_of_made_results(tmp_path):
    for run in (
        made(("rope", None), 20.0, 3.0, None),
        made(("rope", "ntk"), 19.999, 4.126, None),
        made(("none", None), 10.0, 0.5, None, commit=None, updates=30),
    ):
        keep(tmp_path, run)
    (tmp_path / "extrapolate-t5-seed2.json").write_text("{}")  # another seed's
    lines = extrapolation_table.render(read(tmp_path)).split("\n")
    assert lines[0] == "| encoding | 1–32 (n = 1,234) | 33–64 (n = 9) | 65–96 (n = 0) |"
    assert lines[2:11] == [
        "| `sinusoidal` | not run | not run | not run |",
        "| `rope` | **20.00** (0.88) | 3.00 (1.88) | – |",
        "| `rope`, scaled `linear` | not run | not run | not run |",
        # Best are all that are printed alike.
        "| `rope`, scaled `ntk` | **20.00** (0.88) | **4.13** (1.88) | – |",
        "| `rope`, scaled `dynamic` | not run | not run | not run |",
        "| `rope`, scaled `yarn` | not run | not run | not run |",
        "| `alibi` | not run | not run | not run |",
        "| `t5` | not run | not run | not run |",
        "| `none` | 10.00 (0.88) | 0.50 (1.88) | – |",
    ]
    said = "\n".join(lines[11:])
    for expected in (
        "trained on at most 32. ",
        f"sacreBLEU on raw text, `{SIGNATURE}`;",
        "7 longer test sentences are left out.",
        "3,000 updates (rope, rope, ntk); 30 updates (none); one seed (1), which",
        "`corpus:lengths`; commit abc (rope, rope, ntk); commit not recorded (none); Abacus, ",
        "Validation loss at the end: rope 4.125, none 4.125.",
        "with `--model-overrides` ntk `{'model': 4}`.",
    ):
        assert expected in said, said


def test_nothing_was_run_yet(tmp_path):
    text = extrapolation_table.render(read(tmp_path))
    assert text.count("| not run |") == len(SYSTEMS) == text.count("\n") - 1


def test_the_files_decide_what_is_written(tmp_path, monkeypatch, capsys):
    for module in (extrapolation_table, extrapolation_figure):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    page, figure = tmp_path / "page.md", tmp_path / "it.png"
    page.write_text("<!-- extrapolation: begin -->\nold\n<!-- extrapolation: end -->\n")

    def written(module=extrapolation_table, *words: Path) -> int:
        return call(module.main, *words)

    assert written(extrapolation_figure, figure) == 2 and not figure.exists()
    assert "run scripts/extrapolate.sh first" in capsys.readouterr().err
    keep(tmp_path, made(("t5", None), 2.0, 1.0))
    rope = keep(tmp_path, made(("rope", "yarn"), 2.5, None))
    # Not the same test set: a bucket of t5 has sentences.
    assert written(extrapolation_table, page) == 2
    assert "t5.json: is of other data or sentences than that of rope, yarn" in (
        capsys.readouterr().err
    )
    keep(tmp_path, made(("rope", "yarn"), 2.5, 1.5))
    assert written(extrapolation_table, page) == 0
    text = extrapolation_table.render(read(tmp_path))
    assert table.block(page.read_text(), "extrapolation") == text and "**2.50**" in text
    assert written() == 0 and capsys.readouterr().out == text + "\n"
    assert written(extrapolation_figure, figure) == 0
    with Image.open(figure) as image:
        assert image.format == "PNG" and image.width == 1200
        colours = image.convert("RGB").getcolors()
        assert colours is not None and len(colours) > 2
    assert figure.stat().st_size < 100_000

    for content, message in (
        (json.dumps(made(("rope", "ntk"), 1.0)), "is of position encoding rope, scaling ntk, seed"),
        (json.dumps({"position_encoding": "rope", "scaling": "yarn", "seed": 1}), "not written by"),
        ("[]", "not the record of a run"),
        ("{", "not a JSON file"),
    ):
        rope.write_text(content)
        for module, output in ((extrapolation_table, page), (extrapolation_figure, figure)):
            before = output.read_bytes()
            assert written(module, output) == 2
            error = capsys.readouterr().err
            assert message in error and error.count("\n") == 1 and error.startswith("error: ")
            assert output.read_bytes() == before
    assert written(extrapolation_table, page, page) == 2 and "usage: " in capsys.readouterr().err


def test_more_lines_than_colours_are_told_apart():
    systems = SYSTEMS + extrapolation.MORE
    runs = {system: made(system, 5.0, None, 1.0) for system in systems}
    (axes,) = extrapolation_figure.draw(runs).axes
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == len(systems) > len(COLOURS)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_result_says_that_it_is_that_system(system, tmp_path):
    keep(tmp_path, made(system, 1.0))
    assert list(read(tmp_path)) == [system]


def test_the_readme_says_what_was_measured():
    expected = extrapolation_table.render(read(ROOT / "results"))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table.block(page, "extrapolation") == expected
