"""The joined, rotating projection against separate layers, out of place and by autograd."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from rope_fairseq.projection import project
from rope_fairseq.rotary import (
    LAYOUTS,
    RotarySpec,
    Rotation,
    dynamic_table,
    rotate_pairs,
    rotation_table,
)

HEAD_DIM = 6


def layers(count: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    torch.manual_seed(1)
    return [nn.Linear(10, 2 * HEAD_DIM, bias=bias, dtype=dtype) for _ in range(count)]


def rotation(layout: str, dim: int = HEAD_DIM, seq_len: int = 5, **scaling: Any) -> Rotation:
    spec = RotarySpec(dim, 50.0, **scaling)
    table = rotation_table(spec, seq_len + 3, torch.device("cpu"))[3:]
    return Rotation(table[:, None, None], layout)


def dynamic_rotation(layout: str) -> Rotation:
    """Of three sentences, each turned otherwise."""
    spec = RotarySpec(HEAD_DIM, 50.0, scaling="dynamic", original_max_positions=4)
    table = dynamic_table(spec, torch.tensor([2, 5, 9]), seq_len=5, offset=3)
    return Rotation(table[:, :, None, None], layout)


def separately(x, modules, turn):
    parts = [module(x).unflatten(2, (-1, HEAD_DIM)) for module in modules]
    if turn is not None:
        # [batch, seq_len, num_heads, head_dim]: the table's axis for the parts is not needed.
        turn = Rotation(turn.table.squeeze(-4), turn.layout)
        parts[:2] = [rotate_pairs(part, turn) for part in parts[:2]]
    return parts


CASES = [
    (3, layout, dim, bias) for layout in LAYOUTS for dim in (HEAD_DIM, 4) for bias in (True, False)
]
CASES += [(3, None, 0, True), (2, None, 0, True), (1, None, 0, False)]


@pytest.mark.parametrize(("count", "layout", "dim", "bias"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_separate_layers(count, layout, dim, bias, dtype):
    joined = layers(count, bias, dtype)
    apart = copy.deepcopy(joined)
    turn = rotation(layout, dim) if layout else None
    x = torch.randn(3, 5, 10, dtype=dtype)
    results = []
    for modules, function in ((joined, project), (apart, separately)):
        mine = x.clone().requires_grad_()
        # As the attention gets it: in fairseq's order, seen from the side.
        parts = (
            function(mine, modules, HEAD_DIM, turn)
            if function is project
            else function(mine, modules, turn)
        )
        sum((part * (number + 1)).square().sum() for number, part in enumerate(parts)).backward()
        gradients = [p.grad for module in modules for p in module.parameters()]
        results.append([*parts, mine.grad, *gradients])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-6  # the table is float32
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=1e-5)


YARN = dict(scaling="yarn", factor=40.0, original_max_positions=16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["yarn", "part of a head, yarn", "dynamic"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_gradients_of_scaled_rotations_are_those_of_autograd(layout, kind, dtype, tolerance):
    """yarn's rotation is not orthogonal: its transpose, and not its inverse, takes a gradient back.

    Both sides use one table, so that in float64 nothing is left but the order of sums.
    """
    if kind == "dynamic":
        turn = dynamic_rotation(layout)
    else:
        turn = rotation(layout, HEAD_DIM if kind == "yarn" else 4, **YARN)
        norms = turn.table.norm(dim=-1)
        torch.testing.assert_close(norms, torch.full_like(norms, 0.1 * math.log(40) + 1))
    modules = layers(3, dtype=dtype)
    x = torch.randn(3, 5, 10, dtype=dtype, requires_grad=True)
    weights = torch.randn(3, 3, 5, 2, HEAD_DIM, dtype=dtype)
    inputs = [x, *(p for module in modules for p in module.parameters())]
    results = []
    for parts in (project(x, modules, HEAD_DIM, turn), separately(x, modules, turn)):
        total = sum((w * part.square()).sum() for w, part in zip(weights, parts, strict=True))
        results.append([*parts, *torch.autograd.grad(total, inputs)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_an_unused_part_and_frozen_parameters_do_no_harm():
    modules = layers(3)
    modules[0].requires_grad_(False)
    x = torch.randn(2, 5, 10)  # needs no gradient
    _, key, _ = project(x, modules, HEAD_DIM, rotation("interleaved"))
    key.sum().backward()
    assert modules[0].weight.grad is None
    assert modules[1].weight.grad.any()
    assert not modules[2].weight.grad.any()


def test_autocast_computes_in_bfloat16_and_gives_float32_gradients():
    modules = layers(3)
    turn = rotation("interleaved")
    x = torch.randn(2, 5, 10, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        parts = project(x, modules, HEAD_DIM, turn)
    assert {part.dtype for part in parts} == {torch.bfloat16}
    sum(part.float().sum() for part in parts).backward()
    assert x.grad.dtype == modules[0].weight.grad.dtype == modules[0].bias.grad.dtype
    expected = separately(x, modules, turn)
    for actual, exact in zip(parts, expected, strict=True):
        torch.testing.assert_close(actual.float(), exact, atol=0.03, rtol=0.03)


def test_a_second_derivative_is_refused():
    x = torch.randn(2, 5, 10, requires_grad=True)
    (part,) = project(x, layers(1), HEAD_DIM, None)
    (gradient,) = torch.autograd.grad(part.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
