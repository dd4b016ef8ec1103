"""The cheap dropout masks: as probable as said, independent, reproducible, and their gradient."""

import pytest
import torch
import torch.nn.functional as F

from rope_fairseq.dropout import STEPS, Dropout, add_dropped, dropout, keep_mask


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p):
    torch.manual_seed(0)
    count = 2_000_003  # no multiple of the four elements that share a draw
    dropped = (~keep_mask(torch.Size([count]), p)).double().mean().item()
    # Five standard deviations, and the rounding to a multiple of 1 / STEPS.
    assert abs(dropped - p) < 5 * (p * (1 - p) / count) ** 0.5 + 0.5 / STEPS


def test_neighbours_and_lanes_are_independent():
    torch.manual_seed(0)
    keep = keep_mask(torch.Size([400_000]), 0.5).double() - 0.5
    for distance in (1, 2, 3, 4, 5, 8, 1024):
        correlation = (keep[:-distance] * keep[distance:]).mean() * 4
        assert abs(correlation) < 5 / 400_000**0.5
    for lane in range(4):
        assert abs(keep[lane::4].mean()) < 5 * 0.5 / 100_000**0.5


def test_what_is_kept_is_scaled_so_that_the_mean_stays():
    torch.manual_seed(0)
    x = torch.ones(1000, 1000)
    out = dropout(x, 0.1)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.9], abs=1e-4)
    assert out.mean().item() == pytest.approx(1, abs=5 * (0.1 / 0.9) ** 0.5 / 1000)


def test_a_seed_fixes_the_mask_and_the_next_one_differs():
    x = torch.ones(50, 7)
    torch.manual_seed(3)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_the_residual_sum_and_its_gradients(transposed, wide):
    x = torch.randn(6, 5, 4, dtype=wide, requires_grad=True)
    residual = torch.randn(6, 5, 4, dtype=wide, requires_grad=True)
    mine = x.transpose(0, 1) if transposed else x
    other = residual.transpose(0, 1) if transposed else residual
    torch.manual_seed(1)
    out = add_dropped(other, mine, 0.3)
    torch.manual_seed(1)
    mask = dropout(torch.ones_like(mine), 0.3).detach()
    torch.testing.assert_close(out, other + mine * mask)
    weights = torch.randn_like(out)
    actual = torch.autograd.grad((out * weights).sum(), (x, residual))
    expected = torch.autograd.grad(((other + mine * mask) * weights).sum(), (x, residual))
    torch.testing.assert_close(actual, expected)


def test_mixed_precision_adds_in_the_wider_dtype():
    residual = torch.randn(4, 8, requires_grad=True)
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    out = add_dropped(residual, x, 0.5)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert (residual.grad.dtype, x.grad.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("p", [0.0, 1e-5, 1.0])
def test_probabilities_at_the_ends_are_torchs_own(p):
    x, residual = torch.randn(9, 9), torch.randn(9, 9)
    torch.manual_seed(2)
    expected = F.dropout(x, p)
    torch.manual_seed(2)
    assert torch.equal(dropout(x, p), expected)
    torch.manual_seed(2)
    assert torch.equal(add_dropped(residual, x, p), residual + expected)


def test_the_module_acts_in_training_or_when_it_is_retained():
    module = Dropout(0.5, "Layer").eval()
    x = torch.ones(100)
    assert module(x) is x
    module.make_generation_fast_("name", retain_dropout=True, retain_dropout_modules=["Layer"])
    assert not torch.equal(module(x), x)
    assert not torch.equal(Dropout(0.5).train()(x), x)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_every_dropout_of_a_layer_acts_in_training_alone(small, pre_norm):
    options = {"encoder_normalize_before": pre_norm, "decoder_normalize_before": pre_norm}
    src, lengths = torch.tensor([[4, 5, 6, 2]]), torch.tensor([4])
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        model = small(**options, **{name: 0.5})
        assert torch.equal(model(src, lengths, src)[0], model(src, lengths, src)[0])
        model.train()
        assert not torch.equal(model(src, lengths, src)[0], model(src, lengths, src)[0])
