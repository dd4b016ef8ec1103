"""Scores and weights by distance and by key, against loops over queries and keys."""

import pytest
import torch
from torch import Tensor

from rope_fairseq.position.relative import by_distance, by_key, distances, products, toeplitz

#: tgt_len, src_len: all at once, the last queries of a longer sentence, a step, one token.
LENGTHS = [(5, 5), (2, 2), (3, 7), (2, 6), (1, 6), (1, 1)]
CPU = torch.device("cpu")


def column(query: int, key: int, tgt_len: int, src_len: int) -> int:
    """Where the scores by distance of a query have that of ``key``: a query's position is counted
    in keys, the last query stands at the last key, and column 0 is the distance 1 − src_len."""
    position = src_len - tgt_len + query
    return key - position + src_len - 1


def scores_by_distance(tgt_len: int, src_len: int, *batch: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, tgt_len, src_len + tgt_len - 1)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def pick_by_key(scores: Tensor, src_len: int) -> Tensor:
    tgt_len = scores.size(-2)
    out = torch.full((*scores.shape[:-1], src_len), float("nan"), dtype=scores.dtype)
    for query in range(tgt_len):
        for key in range(src_len):
            out[..., query, key] = scores[..., query, column(query, key, tgt_len, src_len)]
    return out


def put_by_distance(weights: Tensor) -> Tensor:
    tgt_len, src_len = weights.shape[-2:]
    out = torch.zeros(*weights.shape[:-1], src_len + tgt_len - 1, dtype=weights.dtype)
    for query in range(tgt_len):
        for key in range(src_len):
            out[..., query, column(query, key, tgt_len, src_len)] = weights[..., query, key]
    return out


@pytest.mark.parametrize(("tgt_len", "src_len"), LENGTHS)
def test_each_column_is_the_distance_from_a_query_to_a_key(tgt_len, src_len):
    columns = distances(tgt_len, src_len, CPU)
    assert columns.dtype == torch.long
    assert columns.shape == (src_len + tgt_len - 1,)
    seen = set()
    for query in range(tgt_len):
        for key in range(src_len):
            where = column(query, key, tgt_len, src_len)
            assert columns[where] == key - (src_len - tgt_len + query)
            seen.add(where)
    assert seen == set(range(len(columns)))  # no column that nobody reads


@pytest.mark.parametrize(("tgt_len", "src_len"), LENGTHS)
@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_by_key_picks_each_querys_distances(tgt_len, src_len, batch):
    scores = scores_by_distance(tgt_len, src_len, *batch)
    assert torch.equal(by_key(scores, src_len), pick_by_key(scores, src_len))


@pytest.mark.parametrize(("tgt_len", "src_len"), LENGTHS)
@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_by_distance_puts_each_weight_at_its_distance_and_zero_elsewhere(tgt_len, src_len, batch):
    weights = torch.randn(*batch, tgt_len, src_len, dtype=torch.float64)
    out = by_distance(weights)
    assert torch.equal(out, put_by_distance(weights))
    assert torch.equal(by_key(out, src_len), weights)


@pytest.mark.parametrize(("tgt_len", "src_len"), LENGTHS)
def test_they_are_adjoint(tgt_len, src_len):
    """⟨by_key(s), w⟩ = ⟨s, by_distance(w)⟩: each is the gradient of the other."""
    scores = scores_by_distance(tgt_len, src_len, 2)
    weights = torch.randn(2, tgt_len, src_len, dtype=torch.float64)
    torch.testing.assert_close(
        (by_key(scores, src_len) * weights).sum(), (scores * by_distance(weights)).sum()
    )


def variants(tensor: Tensor) -> dict[str, Tensor]:
    """The same values [2, 3, rows, columns], differently placed in memory."""
    padded = torch.full((2, 4, tensor.size(2) + 1, tensor.size(3) + 2), float("nan")).double()
    padded[:, 1:, 1:, 1:-1] = tensor
    longer = torch.cat([torch.full_like(tensor[:1], float("nan")), tensor])
    return {
        "transposed": tensor.transpose(2, 3).contiguous().transpose(2, 3),
        "heads last": tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "heads first": tensor.transpose(0, 1).contiguous().transpose(0, 1),
        "cut out": padded[:, 1:, 1:, 1:-1],
        "later in its storage": longer[1:],
    }


@pytest.mark.parametrize(("tgt_len", "src_len"), [(5, 5), (3, 7), (1, 6)])
def test_memory_layout_does_not_matter(tgt_len, src_len):
    scores = scores_by_distance(tgt_len, src_len, 2, 3)
    for name, variant in variants(scores).items():
        assert torch.equal(variant, scores)
        assert torch.equal(by_key(variant, src_len), pick_by_key(scores, src_len)), name
    weights = torch.randn(2, 3, tgt_len, src_len, dtype=torch.float64)
    for name, variant in variants(weights).items():
        assert torch.equal(by_distance(variant), put_by_distance(weights)), name
    alike = scores[:1, :1].expand(2, 3, -1, -1)  # one memory for all heads
    assert torch.equal(by_key(alike, src_len), pick_by_key(alike, src_len))
    alike = weights[:1, :1].expand(2, 3, -1, -1)
    assert torch.equal(by_distance(alike), put_by_distance(alike))


@pytest.mark.parametrize(("tgt_len", "src_len"), LENGTHS)
def test_by_key_is_a_view_without_two_elements_at_one_address(tgt_len, src_len):
    scores = scores_by_distance(tgt_len, src_len, 2, 3)
    view = by_key(scores, src_len)
    assert view.untyped_storage().data_ptr() == scores.untyped_storage().data_ptr()
    addresses = {
        view[b, h, query, key].data_ptr()
        for b in range(2)
        for h in range(3)
        for query in range(tgt_len)
        for key in range(src_len)
    }
    assert len(addresses) == view.numel()
    expected = pick_by_key(scores, src_len) * 2  # so it may be changed in place
    assert torch.equal(view.mul_(2), expected)


@pytest.mark.parametrize(("tgt_len", "src_len"), [(4, 4), (2, 5), (1, 4)])
@pytest.mark.parametrize(
    "layout", ["contiguous", "transposed", "heads first", "later in its storage", "expanded"]
)
def test_gradients(tgt_len, src_len, layout):
    scores = scores_by_distance(tgt_len, src_len, 1, 2, seed=1)
    weights = torch.randn(1, 2, tgt_len, src_len, dtype=torch.float64)

    def placed(tensor: Tensor) -> Tensor:
        if layout == "transposed":
            return tensor.mT.clone(memory_format=torch.contiguous_format).mT
        if layout == "heads first":
            return tensor.expand(2, -1, -1, -1).transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "later in its storage":
            return torch.cat([tensor[:, :1], tensor], dim=1)[:, 1:]
        return tensor.expand(3, -1, -1, -1) if layout == "expanded" else tensor.clone()

    for function, tensor in (
        (lambda x: by_key(placed(x), src_len), scores),
        (lambda x: by_distance(placed(x)), weights),
    ):
        tensor.requires_grad_()
        assert torch.autograd.gradcheck(function, (tensor,))
        assert torch.autograd.gradgradcheck(function, (tensor,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_moved_as_they_are(dtype):
    scores = scores_by_distance(3, 5, 2).to(dtype)
    out = by_key(scores, 5)
    assert out.dtype == dtype
    assert torch.equal(out, pick_by_key(scores, 5))
    assert torch.equal(by_distance(out.clone()), put_by_distance(out))


@pytest.mark.parametrize(("tgt_len", "src_len"), LENGTHS)
@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_toeplitz_repeats_each_distances_value(tgt_len, src_len, batch):
    values = scores_by_distance(tgt_len, src_len, *batch)[..., 0, :].requires_grad_()
    out = toeplitz(values, tgt_len, src_len)
    assert out.shape == (*batch, tgt_len, src_len)
    for query in range(tgt_len):
        for key in range(src_len):
            expected = values[..., column(query, key, tgt_len, src_len)]
            assert torch.equal(out[..., query, key], expected)
    assert torch.autograd.gradcheck(lambda x: toeplitz(x, tgt_len, src_len), (values,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_are_of_each_vector_and_row_head_by_head(dtype):
    vectors = torch.randn(2, 3, 4, 5).to(dtype)
    rows = torch.randn(3, 6, 5, dtype=torch.float64)
    out = products(vectors, rows)
    assert out.dtype == dtype
    assert out.shape == (2, 3, 4, 6)
    for b, h, t, c in torch.cartesian_prod(*map(torch.arange, out.shape)).tolist():
        expected = vectors[b, h, t].double() @ rows[h, c].to(dtype).double()
        tolerance = dict(atol=0.05, rtol=0.01) if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(out[b, h, t, c].double(), expected, **tolerance)
