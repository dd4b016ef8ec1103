"""Feature maps against the papers' formulas; Performer's random features."""

import math

import pytest
import torch

from rope_fairseq.feature_maps import build_feature_map, default_features, orthogonal_rows


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_elu_is_that_of_torch_and_keeps_small_features():
    x = numbers(50, 4) * 3
    features = build_feature_map("elu", 4)
    torch.testing.assert_close(features.key(x), torch.nn.functional.elu(x) + 1)
    assert features.key(torch.tensor([-50.0])).item() == pytest.approx(math.exp(-50), rel=1e-6)


@pytest.mark.parametrize("name", ["elu", "favor"])
def test_a_query_and_a_key_have_the_same_features_up_to_a_factor(name):
    features, x = build_feature_map(name, 4, {"favor": 10}.get(name)), numbers(50, 4)
    ratio = features.query(x) / features.key(x)
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    torch.testing.assert_close(features.query(x).amax(-1), torch.ones(50, dtype=torch.float64))


def test_random_features_estimate_the_softmax_kernel_without_bias():
    torch.manual_seed(0)
    d = 8
    q, k = numbers(6, d) / 2, numbers(6, d, seed=1) / 2
    features = build_feature_map("favor", d, 50_000)
    estimate = features.key(q) @ features.key(k).T / features.dim
    torch.testing.assert_close(estimate, (q @ k.T / math.sqrt(d)).exp(), rtol=0.15, atol=0)


def test_rows_are_orthogonal_in_blocks_and_as_long_as_gaussian_ones():
    torch.manual_seed(0)
    rows = orthogonal_rows(20, 8)
    assert rows.shape == (20, 8) and rows.dtype == torch.float32
    for start in (0, 8, 16):
        block = rows[start : start + 8]
        gram = block @ block.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-4, rtol=0)
    many = orthogonal_rows(16_000, 8)
    squares = many.square().sum(1)  # chi-squared with 8 degrees of freedom
    assert squares.mean().item() == pytest.approx(8, rel=0.03)
    assert squares.var().item() == pytest.approx(16, rel=0.1)
    torch.testing.assert_close(many.mean(0), torch.zeros(8), atol=0.05, rtol=0)


def test_the_projection_is_seeded_and_belongs_to_the_checkpoint():
    built = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        built.append(build_feature_map("favor", 4))
    one, same, other = built
    assert torch.equal(one.projection, same.projection)
    assert not torch.equal(one.projection, other.projection)
    assert not list(one.parameters())
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.projection, other.projection)


@pytest.mark.parametrize(("head_dim", "expected"), [(1, 8), (4, 8), (8, 24), (64, 272)])
def test_default_number_of_random_features(head_dim, expected):
    assert default_features(head_dim) == expected
    assert build_feature_map("favor", head_dim).dim == expected
