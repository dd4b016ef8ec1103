"""The chunked projection and loss: value, gradients, precision and memory against fairseq's own
criterion and against the definition, pair by pair."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from torch.utils._python_dispatch import TorchDispatchMode

from rope_fairseq.fused_loss import fused_label_smoothed_cross_entropy

PAD = 1
TOKENS, DIM, VOCAB = 13, 6, 17
EPSILONS = (0.0, 0.1)
PADDING = ("none", "some", "all")
# Smaller than the tokens (and no divisor of their number), a divisor, equal, larger.
CHUNKS = (4, 1, TOKENS, 50)
GRID = list(itertools.product(EPSILONS, PADDING, CHUNKS))


def data(padding="some", dtype=torch.float32, tokens=TOKENS, dim=DIM, vocab=VOCAB, seed=1):
    """Features, weight, bias (that require gradients) and targets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, dim), (vocab, dim), (vocab,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    target = torch.randint(PAD + 1, vocab, (tokens,), generator=generator)
    if padding == "all":
        target[:] = PAD
    elif padding == "some":
        target[[0, 3, 4, tokens - 1]] = PAD
    return [*(t.to(dtype).requires_grad_() for t in tensors), target]


def stock(features, weight, bias, target, epsilon, reduce=True):
    """fairseq's: the projection, ``utils.log_softmax`` (float32), ``label_smoothed_nll_loss``."""
    logits = F.linear(features, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    lprobs = F.log_softmax(logits, dim=-1, dtype=wide)
    return label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index=PAD, reduce=reduce)


def by_definition(features, weight, bias, target, epsilon):
    """A sum over pairs of token and word, with Python's numbers."""
    x, w, b = (tensor.tolist() for tensor in (features, weight, bias))
    words = list(zip(w, b, strict=True))
    loss = nll_loss = 0.0
    for row, word in zip(x, target.tolist(), strict=True):
        if word == PAD:
            continue
        logits = [math.fsum(map(math.prod, zip(row, v, strict=True))) + c for v, c in words]
        log_sum = math.log(math.fsum(map(math.exp, logits)))
        for v, logit in enumerate(logits):
            # Label smoothing: ε is shared out evenly among the words other than the target.
            share = 1 - epsilon if v == word else epsilon / (len(w) - 1)
            loss -= share * (logit - log_sum)
            nll_loss -= (v == word) * (logit - log_sum)
    return loss, nll_loss


def fused(features, weight, bias, target, epsilon, **options):
    return fused_label_smoothed_cross_entropy(
        features, weight, target, bias=bias, epsilon=epsilon, ignore_index=PAD, **options
    )


def gradients(loss, tensors):
    """Zero where there is none, as for a batch of padding alone."""
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


@pytest.mark.parametrize(("epsilon", "padding", "chunk"), GRID)
@pytest.mark.parametrize("with_bias", [False, True])
def test_value_and_gradients_are_those_of_fairseq(epsilon, padding, chunk, with_bias):
    features, weight, bias, target = data(padding)
    tensors = [features, weight, *([bias] if with_bias else [])]
    bias = bias if with_bias else None
    expected, expected_nll = stock(features, weight, bias, target, epsilon)
    loss, nll_loss, _, _ = fused(features, weight, bias, target, epsilon, chunk_size=chunk)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(nll_loss, expected_nll, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients(loss, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("epsilon", "padding", "chunk"), GRID)
def test_value_is_that_of_the_definition(epsilon, padding, chunk):
    inputs = data(padding, torch.float64)
    result = fused(*inputs, epsilon, chunk_size=chunk)
    expected = by_definition(*inputs, epsilon)
    assert (result.loss.item(), result.nll_loss.item()) == pytest.approx(
        expected, rel=1e-10, abs=1e-10
    )


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_gradients_are_those_of_finite_differences(epsilon, reduce):
    *tensors, target = data("some", torch.float64)

    def loss(*tensors):
        return fused(*tensors, target, epsilon, chunk_size=4, reduce=reduce).loss

    # It runs backward several times through one graph, too.
    assert torch.autograd.gradcheck(loss, tensors, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("epsilon", "padding", "chunk"), GRID)
def test_unreduced_losses_are_those_of_fairseq(epsilon, padding, chunk):
    *tensors, target = data(padding)
    expected, expected_nll = stock(*tensors, target, epsilon, reduce=False)
    result = fused(*tensors, target, epsilon, chunk_size=chunk, reduce=False)
    assert result.loss.shape == expected.shape == (TOKENS, 1)
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(result.nll_loss, expected_nll, rtol=1e-5, atol=2e-6)
    weights = torch.linspace(-1, 2, TOKENS).unsqueeze(1)
    ours = gradients((result.loss * weights).sum(), tensors)
    for one, other in zip(ours, gradients((expected * weights).sum(), tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)


def test_no_padding_index_means_that_every_token_counts():
    *tensors, target = data("some")
    result = fused_label_smoothed_cross_entropy(*tensors[:2], target, epsilon=0.1)
    lprobs = F.log_softmax(F.linear(*tensors[:2]), dim=-1)
    expected, _ = label_smoothed_nll_loss(lprobs, target, 0.1)
    torch.testing.assert_close(result.loss, expected.sum())


def test_logits_far_apart_neither_overflow_nor_vanish():
    features, weight, bias, target = data("none")
    with torch.no_grad():
        weight *= 1000  # losses of thousands: probabilities of e^-1000
    for epsilon in EPSILONS:
        expected, _ = stock(features, weight, bias, target, epsilon)
        loss = fused(features, weight, bias, target, epsilon, chunk_size=4).loss
        assert expected > 10_000
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for ours, theirs in zip(
            gradients(loss, (features, weight)),
            gradients(expected, (features, weight)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_the_gradient_of_a_tied_embedding_is_the_sum_of_both_uses():
    _, embedding, _, target = data()
    inputs = torch.arange(TOKENS) % VOCAB
    sums = []
    for loss_of in (stock, lambda *arguments: fused(*arguments, chunk_size=4)[:2]):
        features = F.embedding(inputs, embedding).tanh()
        (gradient,) = torch.autograd.grad(
            loss_of(features, embedding, None, target, 0.1)[0], embedding
        )
        sums.append(gradient)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-5, atol=2e-6)


def test_gradients_accumulate_and_scale():
    """--update-freq, with losses that mixed precision or a mean has scaled, and fairseq's dummy
    batch, whose loss is multiplied by 0 in place."""
    expected, ours = data(), data()
    for inputs, loss_of in ((expected, stock), (ours, lambda *a: fused(*a, chunk_size=4)[:2])):
        for factor in (1.0, 128.0, 0.0):
            loss = loss_of(*inputs, 0.1)[0]
            loss *= factor
            loss.backward()
    for one, other in zip(ours[:3], expected[:3], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-3)


def test_a_graph_can_be_kept_for_more_backwards():
    *tensors, target = data()
    loss = fused(*tensors, target, 0.1, chunk_size=4).loss
    for _ in range(3):
        loss.backward(retain_graph=True)
    for tensor, once in zip(
        tensors, gradients(stock(*tensors, target, 0.1)[0], tensors), strict=True
    ):
        torch.testing.assert_close(tensor.grad, 3 * once, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_refused():
    *tensors, target = data()
    loss = fused(*tensors, target, 0.1).loss
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, tensors[0], create_graph=True)


def test_correct_tokens_are_those_of_fairseq():
    *tensors, target = data("some", tokens=200)
    with torch.no_grad():
        target[10:100] = F.linear(*tensors)[10:100].argmax(1)  # a model that is often right
    result = fused(*tensors, target, 0.1, chunk_size=32, count_correct=True)
    mask = target.ne(PAD)
    right = F.linear(*tensors).argmax(1).eq(target) & mask
    assert (result.n_correct.item(), result.total.item()) == (right.sum(), mask.sum())
    assert 90 <= result.n_correct < result.total < 200
    assert fused(*tensors, target, 0.1)[2:] == (None, None)


class Spy(TorchDispatchMode):
    """The largest tensor that any operation gives, and the number of products of [TOKENS, DIM],
    [DIM, VOCAB] and [TOKENS, VOCAB] matrices."""

    def __init__(self):
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            rows, columns = args[-2:]
            self.products += rows.numel() * columns.size(1) == TOKENS * DIM * VOCAB
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", [True, False])
def test_never_more_than_a_chunk_of_logits(dtype, reduce):
    tokens, dim, vocab, chunk = 512, 4, 300, 16
    *tensors, target = data(tokens=tokens, dim=dim, vocab=vocab)
    with Spy() as spy:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = fused(*tensors, target, 0.1, chunk_size=chunk, reduce=reduce).loss
        loss.sum().backward()
    assert spy.largest == chunk * vocab > max(tokens * dim, vocab * dim)
    with Spy() as stocks:
        stock(*tensors, target, 0.1)
    assert stocks.largest == tokens * vocab


def test_padding_is_not_projected():
    *tensors, target = data("some", tokens=100)
    target[8:] = PAD
    with Spy() as spy:
        fused(*tensors, target, 0.1)
    assert spy.largest <= 8 * VOCAB


@pytest.mark.parametrize(
    ("needed", "products"),
    # One chunk: the projection, and one for each of the gradients of features and weight.
    [((True, True), 3), ((True, False), 2), ((False, True), 2), ((False, False), 1)],
)
def test_gradients_that_nobody_needs_are_not_worked_out(needed, products):
    features, weight, _, target = data("none")
    for tensor, need in zip((features, weight), needed, strict=True):
        tensor.requires_grad_(need)
    with Spy() as spy:
        fused(features, weight, None, target, 0.0)
    assert spy.products == products
    with Spy() as spy, torch.no_grad():
        loss = fused(features, weight, None, target, 0.0).loss
    assert spy.products == 1 and not loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [8, 2000])
def test_half_precision_is_near_float32(dtype, chunk):
    """As near as fairseq's own, which has float32 only from the logits on."""
    tensors = data("some", tokens=400, dim=32, vocab=200)
    tensors[0:2] = [t.detach().mul(0.3).to(dtype) for t in tensors[0:2]]
    exact = [t.double().requires_grad_() for t in tensors[:2]]
    rounded = [t.clone().requires_grad_() for t in tensors[:2]]
    target = tensors[3]
    expected, _ = stock(*exact, None, target, 0.1)
    loss = fused(*rounded, None, target, 0.1, chunk_size=chunk).loss
    assert loss.dtype == torch.float32
    unit = torch.finfo(dtype).eps
    assert loss.item() == pytest.approx(expected.item(), rel=unit / 4)
    for ours, exact_gradient in zip(
        gradients(loss, rounded), gradients(expected, exact), strict=True
    ):
        assert ours.dtype == dtype
        error = (ours - exact_gradient).norm() / exact_gradient.norm()
        assert error < unit


def test_parameters_of_float32_work_in_bfloat16():
    features, weight, _, target = data("some", tokens=400, dim=32, vocab=200)
    expected, _ = stock(features, weight, None, target, 0.1)
    plain = fused(features, weight, None, target, 0.1).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused(features, weight, None, target, 0.1).loss
    assert loss != plain and loss.item() == pytest.approx(expected.item(), rel=1e-3)
    theirs = gradients(expected, (features, weight))
    for ours, exact in zip(gradients(loss, (features, weight)), theirs, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() / exact.norm() < 2e-2


def test_sums_over_many_chunks_lose_no_bits_in_bfloat16():
    """One token a chunk: added up in bfloat16, 2,000 equal addends would stop growing at 256."""
    features, weight, _, target = data("none", tokens=2000)
    with torch.no_grad():
        features[:] = features[0]
        target[:] = target[0]
    found = []
    for size in (2000, 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = fused(features, weight, None, target, 0.1, chunk_size=size).loss
        found += gradients(loss, [weight])
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)


def test_float16_gradients_outlive_underflow_and_overflow():
    """Words that no target names have probabilities that float16 cannot hold; the loss scale, which
    comes only with backward, must still find their gradients. And tokens that all have the same
    target must not add up to infinity."""
    tokens, dim, vocab = 300, 8, 50
    features, weight, _, target = data("none", tokens=tokens, dim=dim, vocab=vocab)
    with torch.no_grad():
        features.abs_().mul_(0.1).add_(1)
        weight.mul_(0.1)
        weight[5] += 2.2  # every token's likeliest word by far
        target[:] = 7
    halves = [t.detach().half().requires_grad_() for t in (features, weight)]
    exact = [t.detach().double().requires_grad_() for t in halves]
    gradient = gradients(fused(*halves, None, target, 0.0).loss * 64, halves)[1]
    expected = gradients(stock(*exact, None, target, 0.0)[0] * 64, exact)[1]
    assert gradient.isfinite().all()
    rare = [word for word in range(vocab) if word not in (5, 7)]
    assert F.linear(*exact).softmax(dim=1)[:, rare].mean().half() == 0
    error = (gradient[rare] - expected[rare]).norm() / expected[rare].norm()
    assert error < 1e-2
