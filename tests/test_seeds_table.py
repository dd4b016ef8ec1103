"""The table and the figures of several encodings and seeds: they say what is in results/."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import seeds_figure, seeds_table, table
from benchmarks.encodings import SOURCES
from benchmarks.seeds import read
from rope_fairseq.analysis.figure import COLOURS
from tests.tiny import ROOT, call

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:none|smooth:exp|version:2.6.0"
KINDS = {
    "sacreBLEU": "raw reference",
    "tokenized BLEU": "tokens as distributed",
    "chrF2": "raw reference",
}


def made(encoding: str, seed: int, value: float, **changes) -> dict:
    scores = [
        {"name": name, "value": value + plus, "kind": kind, "signature": SIGNATURE}
        for plus, (name, kind) in enumerate(KINDS.items())
    ]
    buckets = [
        {
            "by": "source",
            "shortest": 10 * index,
            "longest": 10 * index + 9 if index < 2 else None,
            "sentences": count,
            "value": value - index if count else None,
            "signature": SIGNATURE if count else "",
            "length_ratio": 1.0 if count else None,
        }
        for index, count in enumerate((1234, 20, 0))
    ]
    run = {
        "recipe": "multi30k",
        "position_encoding": encoding,
        "seed": seed,
        "updates": 7000 + seed,
        "parameters": 2_600_000,
        "scores": scores,
        "buckets": buckets,
        "data": "corpus:multi30k|pairs:3+1+1|sha256:0123|rope_fairseq:0.1.0",
        "options": {
            "model.position_encoding": encoding,
            "common.seed": str(seed),
            "tokens_per_update": "8192",
        },
        "config": {"model.position_encoding": "rope", "common.seed": 1, "model.dropout": 0.3},
        "changes": f"common.seed={seed}; model.position_encoding={encoding}",
        "average": {"last": "10", "by": "epoch"},
        "devices": 1 if seed == 2 else 2,
        "batch": {"dataset.max_tokens": 4096, "optimization.update_freq": [2 if seed == 2 else 1]},
        "commit": "abc",
        "hardware": "Abacus, 2 cores",
        "validation_loss": [[300, 9.0], [3500, 4.125 + seed / 8], [7000, 5.5]],
        "stopped_by": "patience",
        "training_seconds": 3600.0 * seed,
    }
    return run | changes


def keep(folder: Path, *runs: dict) -> Path:
    for run in runs:
        name = f"{run['recipe']}-{run['position_encoding']}-seed{run['seed']}.json"
        (folder / name).write_text(json.dumps(run))
    return folder / name


def test_the_table_of_made_results(tmp_path):
    keep(tmp_path, *(made("sinusoidal", seed, 40 + seed) for seed in (1, 2, 10)))
    keep(tmp_path, *(made("rope", seed, value) for seed, value in ((1, 50.5), (2, 52), (3, 52.0))))
    keep(tmp_path, made("t5", 7, 41.005, stopped_by="max_update", commit=None, hardware=None))
    keep(tmp_path, made("rope", 1, 1, recipe="multi30k-raw"))  # another recipe's
    runs = read(tmp_path, "multi30k")
    assert {name: [run.seed for run in some] for name, some in runs.items()} == {
        "sinusoidal": [1, 2, 10],  # by number
        "rope": [1, 2, 3],
        "t5": [7],
    }
    lines = seeds_table.render("multi30k", runs, tmp_path.parent).split("\n")
    folder = tmp_path.name
    wu = "41.02 ([Wu et al. 2021](https://arxiv.org/abs/2105.14462))"

    def links(encoding: str, *seeds: int) -> str:
        each = (f"[{s}]({folder}/multi30k-{encoding}-seed{s}.json)" for s in seeds)
        return f"{len(seeds)}: {', '.join(each)}"

    not_run = "not run | not run |  | " + " | ".join(["not run"] * 5)
    assert lines[0] == (
        "| encoding | seeds | tokenized BLEU | published tokenized BLEU | sacreBLEU | chrF2 "
        "| validation loss | parameters | updates |"
    )
    assert lines[2:12] == [
        f"| `sinusoidal` | {links('sinusoidal', 1, 2, 10)} | 45.33 ± 4.93 | {wu} | 44.33 ± 4.93 "
        "| 46.33 ± 4.93 | 4.667 ± 0.617 | 2,600,000 | 7,001–7,010 |",
        f"| `learned` | {not_run} |",
        f"| `rope` | {links('rope', 1, 2, 3)} | 52.50 ± 0.87 |  | 51.50 ± 0.87 | 53.50 ± 0.87 "
        "| 4.375 ± 0.125 | 2,600,000 | 7,001–7,003 |",
        f"| `shaw` | {not_run} |",
        f"| `transformer-xl` | {not_run} |",
        f"| `t5` | {links('t5', 7)} | 42.01 |  | 41.01 | 43.01 | 5.000 | 2,600,000 | 7,007 |",
        *(f"| `{name}` | {not_run} |" for name in ("tupe", "deberta", "alibi", "none")),
    ]
    assert lines[13] == (
        "| against `sinusoidal` | of | difference | 95 % interval | p | in standard deviations |"
    )
    # By the formula that test_seeds.py tests; t5 has one seed and is not judged.
    assert lines[15] == "| `rope` | tokenized BLEU | +7.17 | -4.61 to +18.94 | 0.124 | +2.0 |"
    assert lines[16] == "| `rope` | validation loss | -0.292 | -1.746 to +1.163 | 0.501 | -0.7 |"
    assert lines[17] == "" and "from 3 seeds of an encoding and of `sinusoidal` on" in lines[18]
    said = "\n".join(lines[19:])
    for expected in (
        "; validation loss: the lowest of the run, bits a token, smoothed labels; less is better.",
        "of one seed the value. tokenized BLEU: tokens as distributed, `nrefs:1|",
        "Training ended by patience (sinusoidal 1, sinusoidal 2, sinusoidal 10, rope 1, rope 2, ",
        "ended by max_update (t5 7); 2 devices × 4,096 tokens × 1 batch (sinusoidal 1, ",
        "rope 3, t5 7); 1 device × 4,096 tokens × 2 batches (sinusoidal 2, rope 2); average of ",
        "of the last 10 checkpoints by epoch; hours: ",
        "sinusoidal 4.33 ± 4.93; rope 2.00 ± 1.00; t5 7.00; `corpus:multi30k|",
        "commit not recorded (t5 7); ",
        "hardware not recorded (t5 7).",
    ):
        assert expected in said, said


def test_every_number_stands_in_a_linked_file():
    """Of the README: the table can be traced from itself."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((results/[^)]*)\)", table.block(page, "multi30k")):
        assert (ROOT / target).is_file(), target


def test_one_run_or_none():
    text = seeds_table.render("multi30k", {}, ROOT)
    lines = text.split("\n")
    assert len(lines) == 2 + len(SOURCES) and text.count("41.02") == 1
    assert lines[0].startswith("| encoding | seeds | tokenized BLEU | published tokenized BLEU |")
    raw = seeds_table.render("multi30k-raw", {}, ROOT)
    assert "41.02" not in raw and raw.startswith("| encoding | seeds | sacreBLEU | tokenized BLEU ")
    assert raw.count("not run") == len(SOURCES) * 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "corpus:multi30k|published:no|sha256:0123"}, "none"),
        (
            {"changes": "merges=500 (recipe: 10000); ++common.seed=1; model.dropout=0"},
            "merges=500 (recipe: 10000); model.dropout=0",
        ),
    ],
)
def test_another_experiment_has_no_published_value_beside_it(change, said, tmp_path):
    keep(tmp_path, made("rope", 1, 1.0, **change))
    text = seeds_table.render("multi30k", read(tmp_path, "multi30k"), tmp_path)
    assert "41.02" not in text and text.startswith("| encoding | seeds | sacreBLEU |")
    assert f"Changes of the recipe beside encoding and seed: {said}. Training ended" in text


def test_two_seeds_are_not_judged(tmp_path):
    for name in ("sinusoidal", "rope"):
        keep(tmp_path, *(made(name, seed, 40 + seed) for seed in (1, 2)))
    text = seeds_table.render("multi30k", read(tmp_path, "multi30k"), tmp_path)
    assert "Differences are judged from 3 seeds of an encoding and of `sinusoidal` on." in text
    assert "interval" not in text and "42.50 ± 0.71" in text


SCORES = made("rope", 1, 5.0)["scores"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": "corpus:multi30k|pairs:3+1+1|sha256:4567"}, "data: corpus:multi30k|pairs:3+1+1|"),
        ({"options": {"tokens_per_update": "4096"}}, "tokens_per_update is 4096, there 8192"),
        ({"options": {"tokens_per_update": "8192", "x.y": "1"}}, "x.y is 1, there not set"),
        ({"config": {"model.dropout": 0.1}}, "model.dropout is 0.1, there 0.3"),
        ({"average": {"last": "5", "by": "epoch"}}, "last is 5, there 10"),
        ({"batch": {"dataset.max_tokens": 2048}}, "tokens of a batch: 2048, there 4096"),
        ({"scores": SCORES[:2]}, "scores: "),
        (
            {"scores": [{**SCORES[0], "signature": "other"}, *SCORES[1:]]},
            "'raw reference', 'other'",
        ),
        ({"scores": [{**SCORES[0], "kind": "lower case"}, *SCORES[1:]]}, "'lower case'"),
        ({"buckets": []}, "lengths: "),
        ({"stopped_by": "stop_time_hours"}, "end by time: True, there False"),
    ],
)
def test_runs_that_are_not_alike_are_not_mixed(change, message, tmp_path, capsys):
    keep(tmp_path, made("sinusoidal", 1, 40.0))
    path = keep(tmp_path, made("rope", 2, 41.0, **change))
    assert call(seeds_table.main, "multi30k", "--results", tmp_path) == 2
    error = capsys.readouterr().err
    expected = f"error: {path}: not of one table with multi30k-sinusoidal-seed1.json: "
    assert error.startswith(expected) and message in error and error.count("\n") == 1
    # Where they were made, and by which version, may differ.
    keep(tmp_path, made("rope", 2, 41.0, commit="d", hardware="Brain", stopped_by="max_update"))
    assert call(seeds_table.main, "multi30k", "--results", tmp_path) == 0


def test_the_files_decide_what_is_written(tmp_path, capsys):
    kept, page = tmp_path / "kept", tmp_path / "page.md"
    kept.mkdir()
    page.write_text("a\n<!-- multi30k: begin -->\nold\n<!-- multi30k: end -->\nb\n")
    words = ("multi30k", "--results", kept)

    def written(*more: str | Path) -> int:
        return call(seeds_table.main, *words, *more)

    assert written(page) == 0
    assert page.read_text().count("not run") == len(SOURCES) * 8
    keep(kept, *(made(name, seed, 40.0 + seed) for name in SOURCES for seed in (1, 2, 3)))
    assert written(page) == 0
    text = seeds_table.render("multi30k", read(kept, "multi30k"), tmp_path)
    assert table.block(page.read_text(), "multi30k") == text and "(kept/multi30k-rope-" in text
    assert written() == 0 and "| `rope` | 3: [1](" in capsys.readouterr().out

    before, rope = page.read_bytes(), kept / "multi30k-rope-seed1.json"
    for content, message in (
        (json.dumps(made("t5", 1, 5.0)), "is of recipe multi30k, position encoding t5, seed 1"),
        (json.dumps(made("rope", 2, 5.0)), "position encoding rope, seed 2"),
        ('{"recipe": "multi30k", "position_encoding": "rope", "seed": 1}', "not written by scri"),
        ("[]", "not the record of a run"),
        ("{", "not a JSON file"),
    ):
        rope.write_text(content)
        for main, more in ((seeds_table.main, (page,)), (seeds_figure.main, ("--output", kept))):
            assert call(main, *words, *more) == 2
            error = capsys.readouterr().err
            assert message in error and error.count("\n") == 1 and error.startswith("error: ")
        assert page.read_bytes() == before and not list(kept.glob("*.png"))
    assert call(seeds_table.main, "multi3k", "--results", kept) == 2
    assert "recipe 'multi3k': there is no" in capsys.readouterr().err
    assert call(seeds_table.main, "multi30k", "--results", tmp_path / "no") == 2
    assert "no: no such folder" in capsys.readouterr().err
    page.write_text("no marks\n")
    rope.unlink()
    assert written(page) == 2 and "page.md: no line '<!-- multi30k: begin -->'" in (
        capsys.readouterr().err
    )


def test_the_figures(tmp_path, capsys):
    words = ("multi30k", "--results", tmp_path, "--output", tmp_path)
    assert call(seeds_figure.main, *words) == 2
    assert "run scripts/table.sh first" in capsys.readouterr().err
    keep(tmp_path, made("none", 1, 40.0))
    keep(tmp_path, *(made(name, seed, 40.0 + seed) for name in SOURCES for seed in (1, 2, 3)))
    assert call(seeds_figure.main, *words) == 0
    for name in ("curves", "lengths"):
        figure = tmp_path / f"multi30k-{name}.png"
        with Image.open(figure) as image:
            assert image.format == "PNG" and image.width == 1200
            assert len(image.convert("RGB").getcolors() or []) > 10
        assert figure.stat().st_size < 150_000

    runs = read(tmp_path, "multi30k")
    (axes,) = seeds_figure.draw_curves(runs).axes
    assert len(axes.lines) == 3 * len(SOURCES)
    # Updates below a tenth of the highest are left out.
    assert list(axes.lines[0].get_xdata()) == [3500, 7000]
    assert list(axes.lines[0].get_ydata()) == [4.25, 5.5]
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == len(SOURCES) > len(COLOURS)

    (axes,) = seeds_figure.draw_lengths(runs).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [
        "up to 9\n(1,234)",
        "10–19\n(20)",
    ]
    assert axes.get_xlabel() == "words of the source (sentences)"
    assert seeds_figure.by_length(runs["rope"]) == [(41.0, 42.0, 43.0), (40.0, 41.0, 42.0), None]


def test_equal_values_have_no_bar(tmp_path):
    """Their sum, rounded, divided by their number is more: (x + x + x) / 3 for this x."""
    keep(tmp_path, *(made("rope", seed, 6.7182122056201) for seed in (1, 2, 3)))
    runs = read(tmp_path, "multi30k")
    low, mean, high = seeds_figure.by_length(runs["rope"])[0] or (0, 0, 0)
    assert low == mean == high < (low + low + low) / 3
    (axes,) = seeds_figure.draw_lengths(runs).axes
    bars = axes.containers[0].lines[2][0].get_segments()
    assert [bar[:, 1].tolist() for bar in bars][0] == pytest.approx([low, low])


@pytest.mark.parametrize(
    ("counts", "shown", "label"),
    [
        ((19, 1234, 3), ["10–19\n(1,234)"], "sentences; 22 longer or shorter left out"),
        # Of so small a test set there is nothing else to show.
        ((19, 0, 3), ["up to 9\n(19)", "over 19\n(3)"], "sentences"),
    ],
)
def test_buckets_of_a_few_sentences_are_not_drawn(counts, shown, label, tmp_path):
    run = made("rope", 1, 40.0)
    for bucket, count in zip(run["buckets"], counts, strict=True):
        bucket |= {"sentences": count, "value": 40.0 if count else None}
    keep(tmp_path, run)
    (axes,) = seeds_figure.draw_lengths(read(tmp_path, "multi30k")).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == shown
    assert axes.get_xlabel() == f"words of the source ({label})"


def test_the_readme_says_what_was_measured():
    expected = seeds_table.render("multi30k", read(ROOT / "results", "multi30k"), ROOT)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table.block(page, "multi30k") == expected
