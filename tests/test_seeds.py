"""rope_fairseq.evaluation.seeds: mean, spread, and Welch's test, by formulas of their own."""

import math

import pytest
from scipy import integrate, stats

from rope_fairseq.evaluation.seeds import Summary, summary, welch

# 3 and 4 values of unequal spread; means 41 and 40.
A, B = [40.0, 41.0, 42.0], [39.5, 40.5, 40.5, 39.5]


def test_mean_and_sample_standard_deviation():
    assert summary([41.02]) == Summary(1, 41.02, None)
    assert summary(A) == Summary(3, 41.0, 1.0)
    assert summary([1.0, 2.0]).std == pytest.approx(math.sqrt(0.5))


def test_welch_by_its_formula():
    """Welch 1947: t = d / √(s²/n + s²/m), degrees of freedom by Welch and Satterthwaite; p by
    integrating the density of t."""
    found = welch(A, B)
    assert found is not None
    a, b = 1.0 / 3, (4 * 0.25 / 3) / 4
    error, freedom = math.sqrt(a + b), (a + b) ** 2 / (a**2 / 2 + b**2 / 3)
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))

    def tail(t: float) -> float:
        density = lambda x: scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)  # noqa: E731
        return integrate.quad(density, t, math.inf)[0]

    assert found.difference == pytest.approx(1.0)
    assert found.p == pytest.approx(2 * tail(1 / error))
    assert found.high - found.difference == pytest.approx(found.difference - found.low)
    assert tail((found.high - found.difference) / error) == pytest.approx(0.025)
    pooled = math.sqrt((2 * 1.0 + 3 * (4 * 0.25 / 3)) / 5)
    assert found.in_std == pytest.approx(1 / pooled)


def test_the_sign_is_that_of_the_system():
    found, turned = welch(B, A), welch(A, B)
    assert found is not None and turned is not None
    assert (found.difference, found.low, found.high) == pytest.approx(
        (-turned.difference, -turned.high, -turned.low)
    )
    assert found.p == pytest.approx(turned.p)


def test_the_interval_holds_the_true_difference_as_often_as_it_says():
    rng = stats.norm(0, 1)
    values = rng.rvs((400, 6), random_state=1)
    tests = [welch([5 + v for v in row[:3]], list(row[3:])) for row in values]
    held = sum(test is not None and test.low <= 5 <= test.high for test in tests)
    assert 0.92 < held / 400 < 0.99
    assert sum(test is not None and test.p < 0.05 for test in tests) > 380  # five apart is far


@pytest.mark.parametrize("few", [[], [41.0], [41.0, 42.0]])
def test_fewer_than_three_values_are_not_judged(few):
    assert welch(A, few) is None and welch(few, A) is None


def test_values_that_are_all_equal():
    same, other = welch([4.0] * 3, [4.0] * 3), welch([5.0] * 3, [4.0] * 3)
    assert same is not None and (same.difference, same.p, same.in_std) == (0.0, 1.0, None)
    assert other is not None and (other.low, other.high, other.p) == (1.0, 1.0, 0.0)
