"""Three views of rotary frequencies: the bound of the score, the sum of cosines, wavelengths.

All take theta_1, …, theta_{d/2} from :func:`frequencies`. YaRN's temperature multiplies all scores
alike, whatever the distance, and is left out.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rope_fairseq.rotary import RotarySpec, inverse_frequencies

# Angles that are held at a time: 16 MiB of them.
_BLOCK = 2**21


def frequencies(spec: RotarySpec, length: int | None = None) -> Tensor:
    """theta_i as the model rotates by them (see :func:`rope_fairseq.rotary.inverse_frequencies`).

    Args:
        spec: the rotation.
        length: the sentence's tokens L, for the scaling ``dynamic`` alone: it is ``ntk`` with the
            factor a·L/L0 − (a − 1), and ``none`` up to L0.

    Returns:
        Tensor [dim/2], float64, in radians a token.

    Raises:
        ValueError: the scaling is ``dynamic`` and ``length`` is None.
    """
    if spec.scaling != "dynamic":
        return inverse_frequencies(spec)
    if length is None:
        raise ValueError("scaling dynamic: needs the length of a sentence")
    assert spec.original_max_positions is not None
    excess = max(length - spec.original_max_positions, 0)
    factor = 1 + spec.factor * excess / spec.original_max_positions
    return inverse_frequencies(replace(spec, scaling="ntk", factor=factor))


def relative_upper_bound(theta: Tensor, distance: Tensor) -> Tensor:
    """How large attention scores can be at a relative distance, up to a factor of q and k alone.

    Source: Su et al., RoFormer, arXiv 2104.09864, section 3.4.3. By Abel summation the score
    Re Σ_i h_i·exp(1j·m·theta_i) is at most max_i |h_{i+1} − h_i| · Σ_i |S_i| (equations 35 to 37),
    where h_i is the complex product of the i-th pairs of q and k and S_i the sum of the first i
    of the d/2 factors exp(1j·m·theta_j). This is the second factor, divided by d/2.

    Args:
        theta: [pairs], float64.
        distance: [n], relative distances m in tokens, of any real dtype.

    Returns:
        Tensor [n], float64: the mean of |S_1|, …, |S_{d/2}|, which is (d/2 + 1)/2 at distance 0.
    """

    def bound(angle: Tensor) -> Tensor:
        partial_sums = torch.polar(torch.ones_like(angle), angle).cumsum(dim=-1)  # [block, pairs]
        return partial_sums.abs().mean(dim=-1)

    return _by_blocks(bound, theta, distance)


def mean_cosine(theta: Tensor, distance: Tensor) -> Tensor:
    """(1/(d/2)) · Σ_i cos(m·theta_i): the score of a query and a key all of whose pairs are alike,
    relative to distance 0.

    Source: Men et al., "Base of RoPE Bounds Context Length", arXiv 2405.14591, whose B is the sum
    (this times d/2): where it is below 0, a key that is like the query scores less, in the mean,
    than one that is not. Divided by d/2, curves of different d can be compared.

    Args:
        theta: [pairs], float64.
        distance: [n], relative distances m in tokens, of any real dtype.

    Returns:
        Tensor [n], float64, from −1 to 1, and 1 at distance 0.
    """
    return _by_blocks(lambda angle: angle.cos().mean(dim=-1), theta, distance)


def wavelengths(theta: Tensor) -> Tensor:
    """2π/theta_i, the tokens in which a pair turns once [pairs], float64."""
    return 2 * math.pi / theta


def _by_blocks(curve: Callable[[Tensor], Tensor], theta: Tensor, distance: Tensor) -> Tensor:
    """``curve`` of the angles [block, pairs] of some distances at a time, joined [n]."""
    blocks = distance.double().split(max(_BLOCK // len(theta), 1))
    return torch.cat([curve(torch.outer(block, theta)) for block in blocks])
