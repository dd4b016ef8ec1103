"""The decay curve equals the paper's sum, and its script writes the figure or nothing."""

import cmath
import runpy
import sys

import pytest
import torch

from rope_fairseq.rotary import RotarySpec
from tests.tiny import ROOT, run

SCRIPT = ROOT / "docs" / "decay.py"
DISTANCES = [0, 1, 2, 5, 17, 50, 100, 127, 200, 256]


@pytest.fixture(scope="module")
def relative_upper_bound():
    return runpy.run_path(str(SCRIPT))["relative_upper_bound"]


def reference(dim: int, base: float, distance: int) -> float:
    """(1/(d/2)) · Σ_{i=1}^{d/2} |Σ_{j=0}^{i-1} exp(1j·m·base^(-2j/d))|, each sum from its start."""
    half = dim // 2
    total = 0.0
    for i in range(1, half + 1):
        total += abs(sum(cmath.exp(1j * distance * base ** (-2 * j / dim)) for j in range(i)))
    return total / half


@pytest.mark.parametrize(("dim", "base"), [(128, 10000.0), (6, 50.0)])
def test_curve_is_the_papers_sum(relative_upper_bound, dim, base):
    bound = relative_upper_bound(RotarySpec(dim, base), torch.tensor(DISTANCES))
    assert bound.dtype == torch.float64
    expected = [reference(dim, base, distance) for distance in DISTANCES]
    assert bound.tolist() == pytest.approx(expected, rel=0, abs=1e-9)


@pytest.mark.parametrize("dim", [2, 64, 128])
def test_distance_zero_in_closed_form(relative_upper_bound, dim):
    # All factors are 1, so |S_i| = i.
    bound = relative_upper_bound(RotarySpec(dim), torch.tensor([0]))
    assert bound.tolist() == [(dim / 2 + 1) / 2]


def test_script_replaces_its_output_and_writes_nothing_else(tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "figure.png"
    output.write_text("old")
    result = run(sys.executable, SCRIPT, "--output", output, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    content = output.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in content[-12:]
    assert len(content) < 60 * 1024
    assert list(tmp_path.iterdir()) == [output]


def test_script_names_an_output_it_cannot_write(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(sys.executable, SCRIPT, "--output", tmp_path / "missing" / "figure.png")
    assert result.returncode == 2
    assert "missing/figure.png" in result.stderr and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
