"""Is one system better than another, or was it the choice of test sentences?

Paired bootstrap resampling (Koehn, 2004) and approximate randomization (Riezler and Maxwell,
2005), both by sacreBLEU's own code, with one repair. The p-value is the share of trials whose
difference is *at least* as large as the observed one. sacreBLEU counts those that are larger: two
equal translations then come out different with p = 1/(trials + 1), and so do two that differ in a
single sentence, since under randomization every trial has the observed difference. Where no trial
ties with the observed difference the p-values are those of ``sacrebleu --paired-bs`` and
``--paired-ar`` on the same seed.

Nothing is corrected for comparing several systems with one baseline.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray
from sacrebleu import significance
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from rope_fairseq.errors import UserError
from rope_fairseq.evaluation.metrics import sacre_bleu_metric, token_bleu_metric

# Method → sacreBLEU's name for it and its number of trials.
METHODS = {"bootstrap": ("bs", 1_000), "randomization": ("ar", 10_000)}
DEFAULT_SEED = 12345
# sacreBLEU keeps all trials in memory, up to 70 bytes for each sentence of each: 7 GB.
MOST_SENTENCES = 100_000_000
# Scores are in points out of 100: below this a difference is rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class System:
    """One system's result in a test.

    Args:
        name: its file.
        score: on the whole test set, in points out of 100.
        mean, interval: mean and half the width of the 95% confidence interval of the score over
            the bootstrap's resamples; None under randomization.
        p_value: of the difference from the baseline, two-sided; None for the baseline.
    """

    name: str
    score: float
    mean: float | None
    interval: float | None
    p_value: float | None


@dataclass(frozen=True)
class Compared:
    """Translations of one test set in the form that a metric is for.

    Args:
        name: the metric's, as in :mod:`~rope_fairseq.evaluation.metrics`.
        systems: names and translations, the baseline first.
        references: in the same form.
    """

    name: str
    metric: BLEU | CHRF
    systems: Sequence[tuple[str, Sequence[str]]]
    references: Sequence[str]


def of_text(
    systems: Sequence[tuple[str, Sequence[str]]],
    references: Sequence[str],
    language: str,
    lowercase: bool = False,
) -> list[Compared]:
    """Detokenized translations by sacreBLEU and by chrF2.

    Args:
        references: the raw reference.
        language: the target language's code.
        lowercase: ignore case; the signatures say ``case:lc``.
    """
    metrics: dict[str, BLEU | CHRF] = {
        "sacreBLEU": sacre_bleu_metric(language, lowercase),
        "chrF2": CHRF(lowercase=lowercase),
    }
    return [Compared(name, metric, systems, references) for name, metric in metrics.items()]


def of_tokens(
    systems: Sequence[tuple[str, Sequence[str]]], references: Sequence[str]
) -> list[Compared]:
    """Tokens as they are, by tokenized BLEU."""
    return [Compared("tokenized BLEU", token_bleu_metric(), systems, references)]


@dataclass(frozen=True)
class PairedTest:
    """One metric under one test, the baseline first among the systems."""

    metric: str
    method: str
    trials: int
    seed: int
    signature: str
    systems: list[System]


def _p_value(differences: NDArray[numpy.float64], observed: float) -> float:
    """The share of trials at least as extreme as ``observed``, which counts as one of them."""
    extreme = int(numpy.sum(differences >= observed - _ROUNDING))
    return (extreme + 1) / (len(differences) + 1)


@contextmanager
def _repaired_sacrebleu(seed: int) -> Iterator[None]:
    """Within it sacreBLEU uses ``seed``, which it takes from the environment only, and our
    :func:`_p_value`."""
    stated = os.environ.get("SACREBLEU_SEED")
    original = significance._compute_p_value
    os.environ["SACREBLEU_SEED"] = str(seed)
    significance._compute_p_value = _p_value  # type: ignore[assignment]
    try:
        yield
    finally:
        significance._compute_p_value = original
        if stated is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = stated


def paired_tests(
    compared: Sequence[Compared],
    method: str,
    trials: int | None = None,
    seed: int = DEFAULT_SEED,
) -> list[PairedTest]:
    """Compare systems with the first of them, by one metric after the other.

    Args:
        compared: what to compare, of one number of sentences; see :func:`of_text`.
        method: ``bootstrap`` or ``randomization``.
        trials: how many resamples or shuffles; default 1,000 or 10,000.
        seed: at least 1: sacreBLEU takes 0 for no seed.

    Raises:
        UserError: an option is out of range.
    """
    short, default = METHODS[method]
    trials = default if trials is None else trials
    if trials < 1:
        raise UserError(f"--trials {trials}: must be at least 1")
    sentences = len(compared[0].references)
    if trials * sentences > MOST_SENTENCES:
        raise UserError(
            f"--trials {trials}: at most {MOST_SENTENCES // sentences} for "
            f"{sentences} sentences (sacreBLEU keeps all trials in memory)"
        )
    if seed < 1:
        raise UserError(f"--seed {seed}: must be at least 1")
    tests = []
    # One metric at a time: sacreBLEU returns the results under names of its own.
    for one in compared:
        with _repaired_sacrebleu(seed):
            test = significance.PairedTest(
                list(one.systems),
                {one.name: one.metric},
                [one.references],
                test_type=short,
                n_samples=trials,
            )
            signatures, results = test()
        ((own_name, signature),) = signatures.items()
        members = [
            _system(system, result)
            for (system, _), result in zip(one.systems, results[own_name], strict=True)
        ]
        tests.append(PairedTest(one.name, method, trials, seed, str(signature), members))
    return tests


def _system(name: str, result: Any) -> System:
    """sacreBLEU's result, with numpy's numbers as Python's, which JSON knows."""
    mean, interval, p_value = (
        None if value is None else float(value)
        for value in (result.mean, result.ci, result.p_value)
    )
    return System(name, float(result.score), mean, interval, p_value)
