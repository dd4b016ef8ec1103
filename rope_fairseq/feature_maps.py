"""Feature maps of linear attention: how queries and keys become non-negative features.

softmax(q·k) is replaced by a product φ(q)·ϕ(k) of features that are computed for queries and keys
apart, so that the sum over keys can be done once for all queries. No fairseq here.

A factor that a query has alone stands above and below the bar of equation 19 of RoFormer, and
cancels: it is chosen so that the largest feature of a query is 1, with softmax at least 1/d.
Exponents of a key are limited to ±60, where a feature saturates: sums of 10⁹ of them stay finite
and above 0 in float32. All is computed in float32, in float64 for float64 input.
"""

import math

import torch
from torch import Tensor, nn

FEATURE_MAPS = ("elu", "softmax", "favor")

#: The largest exponent of a key's feature, and minus the smallest.
LARGEST_EXPONENT = 60.0


class FeatureMap(nn.Module):
    """Features of the queries and keys of heads of ``head_dim`` channels.

    Attributes:
        dim: number of features.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def query(self, x: Tensor) -> Tensor:
        """φ: [..., head_dim] -> [..., dim], not negative, float32 or float64."""
        raise NotImplementedError

    def key(self, x: Tensor) -> Tensor:
        """ϕ: [..., head_dim] -> [..., dim], not negative, float32 or float64."""
        raise NotImplementedError


class EluFeatures(FeatureMap):
    """φ(x) = ϕ(x) = elu(x) + 1, channel by channel (Katharopoulos et al. 2020, arXiv 2006.16236,
    equation 7)."""

    def query(self, x: Tensor) -> Tensor:
        features = self.key(x)
        return features / features.detach().amax(dim=-1, keepdim=True)

    def key(self, x: Tensor) -> Tensor:
        x = _wide(x)
        # Not elu(x) + 1, which is 0 below x = −17: e^x − 1 has no room for e^x.
        return torch.where(x > 0, x + 1, x.clamp(-LARGEST_EXPONENT, 0).exp())


class SoftmaxFeatures(FeatureMap):
    """φ(q) = softmax of a query's channels, ϕ(k) = exp(k), channel by channel: RoFormer's section
    3.3, after Shen et al. 2018 (arXiv 1812.01243), who divide each channel of the keys by its own
    sum over positions instead."""

    def query(self, x: Tensor) -> Tensor:
        return _wide(x).softmax(dim=-1)

    def key(self, x: Tensor) -> Tensor:
        return _wide(x).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()


class FavorFeatures(FeatureMap):
    """Performer's positive random features (FAVOR+; Choromanski et al. 2021, arXiv 2009.14794,
    lemma 1): φ(x) = ϕ(x) = exp(ωᵢ·x − |x|²/2), i = 1..dim, of x = q or k divided by d^(1/4).

    The mean of φ(q)·ϕ(k) over ω ~ N(0, I) is exp(q·k/√d). The ωᵢ are orthogonal in blocks of d
    (section 2.4), with the lengths of vectors from N(0, I); they are drawn by torch's generator,
    which ``--seed`` seeds, and stay as they are: a buffer, saved in checkpoints. The generator is
    put back, so that parameters begin as they would without them.

    Args:
        head_dim: d.
        dim: number of features; by default :func:`default_features`.
    """

    projection: Tensor

    def __init__(self, head_dim: int, dim: int | None = None) -> None:
        super().__init__(dim or default_features(head_dim))
        self.scale = head_dim**-0.25
        with torch.random.fork_rng(devices=[]):
            # Not the very numbers that the next parameter begins with.
            torch.manual_seed(int(torch.randint(2**62, ())))
            self.register_buffer("projection", orthogonal_rows(self.dim, head_dim))

    def query(self, x: Tensor) -> Tensor:
        exponent = self._products(_wide(x) * self.scale)
        return exponent.sub_(exponent.detach().amax(dim=-1, keepdim=True)).exp_()

    def key(self, x: Tensor) -> Tensor:
        x = _wide(x) * self.scale
        exponent = self._products(x).sub_(x.square().sum(dim=-1, keepdim=True) / 2)
        return exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp_()

    def _products(self, x: Tensor) -> Tensor:
        """ωᵢ·x: [..., head_dim] -> [..., dim]."""
        return torch.matmul(x, self.projection.to(x.dtype).t())


def default_features(head_dim: int) -> int:
    """d·ln d, rounded up to a multiple of 8, of which parts can be rotated: Performer's theorem 4
    asks for an order of d·log d."""
    return max(8, 8 * math.ceil(head_dim * math.log(head_dim) / 8))


def orthogonal_rows(count: int, dim: int) -> Tensor:
    """Random vectors [count, dim], float32: each from N(0, I), any ``dim`` in succession
    orthogonal to each other."""
    blocks = -(-count // dim)
    q, r = torch.linalg.qr(torch.randn(blocks, dim, dim, dtype=torch.float64))
    # The signs of r's diagonal make q uniform over all rotations and reflections.
    directions = (q * r.diagonal(dim1=1, dim2=2).sign()[:, None]).transpose(1, 2)
    lengths = torch.randn(blocks, dim, dim, dtype=torch.float64).norm(dim=2, keepdim=True)
    return (directions * lengths).flatten(0, 1)[:count].float()


def build_feature_map(name: str, head_dim: int, features: int | None = None) -> FeatureMap:
    """The feature map ``name`` of :data:`FEATURE_MAPS`.

    Args:
        features: number of features, for ``favor`` only.
    """
    if name == "favor":
        return FavorFeatures(head_dim, features)
    return {"elu": EluFeatures, "softmax": SoftmaxFeatures}[name](head_dim)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
