"""The analysis commands on rotations: curves equal the paper's sums, and are written or not at
all."""

import cmath
import csv
import math
import sys

import pytest
import torch

from rope_fairseq.analysis.__main__ import main
from rope_fairseq.analysis.curves import (
    frequencies,
    mean_cosine,
    relative_upper_bound,
    wavelengths,
)
from rope_fairseq.rotary import RotarySpec, dynamic_table
from tests.tiny import ROOT, call, run

DISTANCES = [0, 1, 2, 5, 17, 50, 100, 127, 200, 256]
YARN = RotarySpec(64, scaling="yarn", factor=4.0, original_max_positions=250)
DYNAMIC = RotarySpec(64, 500.0, scaling="dynamic", factor=2.0, original_max_positions=100)
CASES = [
    (RotarySpec(128), None),
    (RotarySpec(6, 50.0), None),
    (RotarySpec(64, 500000.0), None),
    (RotarySpec(64, scaling="linear", factor=8.0), None),
    (RotarySpec(32, 777.0, scaling="ntk", factor=3.0), None),
    (YARN, None),
    (DYNAMIC, 150),
    (DYNAMIC, 100),
    (DYNAMIC, 60),
]


def theta(spec: RotarySpec, length: int | None) -> list[float]:
    """The frequencies by the formulas of README's table, pair by pair."""
    d, base, factor = spec.dim, spec.base, spec.factor
    original = spec.original_max_positions
    if spec.scaling == "ntk":
        base *= factor ** (d / (d - 2))
    if spec.scaling == "dynamic" and length > original:
        base *= (factor * length / original - (factor - 1)) ** (d / (d - 2))
    unscaled = [base ** (-2 * j / d) for j in range(d // 2)]
    if spec.scaling == "linear":
        return [value / factor for value in unscaled]
    if spec.scaling == "yarn":
        # Pairs that turn more than 32 times are kept, less than once divided; whole ends.
        low, high = (
            rounded(d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)))
            for rounded, turns in ((math.floor, 32), (math.ceil, 1))
        )
        low = max(low, 0)
        ramp = [min(max((j - low) / (high - low), 0), 1) for j in range(d // 2)]
        return [t * (1 - r) + t / factor * r for t, r in zip(unscaled, ramp, strict=True)]
    return unscaled


def bound(angles: list[float], distance: int) -> float:
    """(1/(d/2)) · Σ_{i=1}^{d/2} |Σ_{j=0}^{i-1} exp(1j·m·theta_j)|, each sum from its start."""
    total = 0.0
    for i in range(1, len(angles) + 1):
        total += abs(sum(cmath.exp(1j * distance * angles[j]) for j in range(i)))
    return total / len(angles)


@pytest.mark.parametrize(("spec", "length"), CASES, ids=str)
def test_curves_are_the_papers_sums(spec, length):
    expected = theta(spec, length)
    found = frequencies(spec, length)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    decay = relative_upper_bound(found, torch.tensor(DISTANCES))
    assert decay.dtype == torch.float64
    assert decay.tolist() == pytest.approx([bound(expected, m) for m in DISTANCES], rel=0, abs=1e-9)
    cosines = [sum(math.cos(m * t) for t in expected) / len(expected) for m in DISTANCES]
    found_cosines = mean_cosine(found, torch.tensor(DISTANCES))
    assert found_cosines.tolist() == pytest.approx(cosines, rel=0, abs=1e-9)
    lambdas = [2 * math.pi / t for t in expected]
    assert wavelengths(found).tolist() == pytest.approx(lambdas, rel=1e-12)


def test_dynamic_frequencies_are_those_that_the_model_rotates_by():
    table = dynamic_table(DYNAMIC, torch.tensor([150]), 300, 0)[0]
    angle = torch.outer(torch.arange(300.0, dtype=torch.float64), frequencies(DYNAMIC, 150))
    assert torch.allclose(table, torch.stack((angle.cos(), angle.sin()), -1).float(), atol=1e-6)


def test_dynamic_scaling_needs_a_length():
    with pytest.raises(ValueError, match="length"):
        frequencies(DYNAMIC, None)


@pytest.mark.parametrize("dim", [2, 64, 128])
def test_closed_forms(dim):
    found = frequencies(RotarySpec(dim))
    zero = torch.tensor([0])
    assert relative_upper_bound(found, zero).tolist() == [(dim / 2 + 1) / 2]  # |S_i| = i
    assert mean_cosine(found, zero).tolist() == [1]
    exact = [2 * math.pi * 10000 ** (2 * j / dim) for j in range(dim // 2)]
    assert wavelengths(found).tolist() == pytest.approx(exact, rel=1e-14)


def test_one_pair_turns_by_a_radian_a_token():
    found = frequencies(RotarySpec(2, 3.0))
    distance = torch.tensor(DISTANCES)
    # |exp(1j·m)| = 1 at any distance, and the mean of one cosine is the cosine.
    assert relative_upper_bound(found, distance).tolist() == pytest.approx([1] * 10, abs=1e-15)
    expected = [math.cos(m) for m in DISTANCES]
    assert mean_cosine(found, distance).tolist() == pytest.approx(expected, abs=1e-15)


def test_blocks_of_long_curves_join():
    found = frequencies(RotarySpec(64))
    distance = torch.arange(70_000)  # more than a block of 64 channels holds
    for curve in (relative_upper_bound, mean_cosine):
        assert torch.equal(curve(found, distance)[-9:], curve(found, distance[-9:]))


def rows(path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_values_are_written_to_all_digits(tmp_path, capsys):
    output = tmp_path / "decay.tsv"
    words = ("--base", "10000,500000", "--dim", "8", "--scaling", "none,linear", "--factor", "4")
    assert call(main, "decay", *words, "--longest", "20", "--values", output) == 0
    table = rows(output)
    assert len(table) == 2 * 2 * 21
    for row in table:
        assert row["original_max_positions"] == row["length"] == ""
        factor = float(row["factor"] or 1)
        assert (factor == 4) == (row["scaling"] == "linear")
        spec = RotarySpec(8, float(row["base"]), scaling=row["scaling"], factor=factor)
        distance = torch.tensor([int(row["distance"])])
        assert float(row["bound"]) == relative_upper_bound(frequencies(spec), distance).item()
    assert {row["base"] for row in table} == {"10000.0", "500000.0"}
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and "base 500000" in printed[-1] and "2.5 at distance 0" in printed[0]


def test_cosines_say_where_they_first_fall_below_zero(tmp_path, capsys):
    output = tmp_path / "cosines.tsv"
    assert call(main, "cosines", "--dim", "2,64", "--longest", "9", "--values", output) == 0
    values = [float(row["mean_cosine"]) for row in rows(output)]
    assert values[:10] == pytest.approx([math.cos(m) for m in range(10)], abs=1e-15)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "base 10000, d = 2: below 0 first at distance 2"  # cos 2 < 0 < cos 1
    assert second == "base 10000, d = 64: not below 0 up to distance 9"


def test_wavelengths_mark_pairs_that_never_turn(tmp_path, capsys):
    output = tmp_path / "wavelengths.tsv"
    words = ("wavelengths", "--dim", "4", "--base", "100", "--values", output)
    # 2π and 20π tokens: one pair completes its turn in 62 tokens, both in 63.
    for length, count in ((6, 2), (62, 1), (63, 0)):
        assert call(main, *words, "--original-max-positions", length) == 0
        assert f"{count} of 2 pairs" in capsys.readouterr().out
    table = rows(output)
    assert [int(row["pair"]) for row in table] == [1, 2]
    assert [float(row["theta"]) for row in table] == pytest.approx([1, 0.1])
    assert [float(row["wavelength"]) for row in table] == pytest.approx([2 * math.pi, 20 * math.pi])
    assert float(table[1]["turns"]) == pytest.approx(63 / (20 * math.pi))
    assert call(main, *words) == 0
    assert "turns" not in rows(output)[0] and "of 2 pairs" not in capsys.readouterr().out


SCALED = ("--scaling", "none,linear,ntk,yarn", "--factor", "4", "--original-max-positions", "250")


@pytest.mark.parametrize(
    "words",
    [
        ("decay",),
        ("decay", "--scaling", "dynamic", "--original-max-positions", "50", "--length", "90"),
        ("cosines", "--base", "100,10000", "--dim", "32,64"),
        ("wavelengths", *SCALED),
        ("wavelengths", "--dim", "2"),
        ("wavelengths", "--base", "0.5", "--original-max-positions", "3"),
    ],
)
def test_figures_replace_their_file_and_write_nothing_else(tmp_path, words, capsys):
    pytest.importorskip("matplotlib")
    output = tmp_path / "figure.png"
    output.write_text("old")
    assert call(main, *words, "--output", output) == 0
    content = output.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in content[-12:]
    assert len(content) < 80 * 1024
    assert list(tmp_path.iterdir()) == [output]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("decay", "--base", "-1"), "base -1.0"),
        (("decay", "--base", "nan"), "base nan"),
        (("decay", "--base", "x"), "--base: 'x'"),
        (("decay", "--base", ""), "--base: ''"),
        (("cosines", "--dim", "7"), "rotated dimension 7"),
        (("wavelengths", "--dim", "0"), "rotated dimension 0"),
        (("decay", "--scaling", "best"), "scaling best"),
        (("decay", "--scaling", "linear"), "--factor"),
        (("decay", "--scaling", "linear", "--factor", "0.5"), "factor 0.5"),
        (("decay", "--factor", "2"), "--factor 2"),
        (("decay", "--scaling", "linear", "--factor", "1e308"), "too small"),
        (("decay", "--base", "5e-324"), "too large"),
        (("decay", "--scaling", "yarn", "--factor", "2"), "original_max_positions"),
        (("decay", "--original-max-positions", "9"), "--original-max-positions 9"),
        (("wavelengths", "--original-max-positions", "0"), "original_max_positions 0"),
        (("decay", "--length", "9"), "--length 9"),
        (("decay", "--scaling", "dynamic", "--original-max-positions", "9"), "--length"),
        (
            (
                *("decay", "--scaling", "dynamic", "--original-max-positions", "9"),
                *("--length", "0"),
            ),
            "--length 0",
        ),
        (("cosines", "--longest", "0"), "--longest 0"),
        (("decay", "--dim", "100000000000"), "--dim: must be at most 65,536"),
        (
            ("wavelengths", "--original-max-positions", "1" + "0" * 400),
            "--original-max-positions: must be at most 1,000,000,000",
        ),
        (
            ("decay", "--scaling", "dynamic", "--original-max-positions", "1"),
            "--scaling dynamic: needs --length",
        ),
        (
            (
                *("decay", "--scaling", "dynamic", "--original-max-positions", "1"),
                *("--length", "1" + "0" * 400),
            ),
            "--length: must be at most",
        ),
        (("cosines", "--longest", "1000001"), "--longest 1000001"),
        (("decay", "--dim", "2,4,6,8,10,12,14,16,18"), "9 curves"),
        ((), "command"),
    ],
)
def test_bad_options_are_one_line(tmp_path, capsys, words, named):
    output = ["--output", tmp_path / "a.png", "--values", tmp_path / "a.tsv"] if words else []
    assert call(main, *words, *output) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert named in captured.err
    assert captured.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--output", "--values"])
def test_an_output_that_cannot_be_written_is_one_line(tmp_path, capsys, option):
    other = {"--output": "--values", "--values": "--output"}[option]
    for path in (tmp_path / "missing" / "figure", tmp_path):
        assert call(main, "decay", option, path, other, tmp_path / "good") == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and str(path) in captured.err
        assert list(tmp_path.iterdir()) == []


def test_figure_and_values_in_one_file_are_refused(tmp_path, capsys):
    path = tmp_path / "both"
    assert call(main, "decay", "--output", path, "--values", path) == 2
    assert capsys.readouterr().err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(main, "decay", "--output", tmp_path / "figure.png") == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "[figures]" in captured.err
    assert call(main, "decay", "--values", tmp_path / "decay.tsv") == 0  # numbers need none
    assert [path.name for path in tmp_path.iterdir()] == ["decay.tsv"]


def test_curves_need_no_fairseq(tmp_path):
    script = ROOT / "scripts" / "tool.py"
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:]; "
        "runpy.run_path(sys.argv[0]); assert 'fairseq' not in sys.modules"
    )
    words = ("analysis", "decay", "--values", tmp_path / "decay.tsv")
    result = run(sys.executable, "-c", code, script.parent, script, *words, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert len(rows(tmp_path / "decay.tsv")) == 257
    refused = run(sys.executable, script, "analysis", "attention", tmp_path, tmp_path / "decay.tsv")
    assert refused.returncode == 2 and "python -m rope_fairseq.analysis" in refused.stderr
    assert refused.stderr.count("\n") == 1
