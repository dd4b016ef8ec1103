"""Projection to the vocabulary and label-smoothed cross entropy in one, some tokens at a time.

Neither logits nor log-probabilities of all tokens are ever held, in forward or backward: the
gradient is worked out by hand, chunk by chunk, while a chunk's logits are there. The idea is that
of the fused linear cross entropy of Hsu et al., "Liger Kernel" (arXiv 2410.10989).

For one token with logits z over V words, target t and label smoothing ε, fairseq's loss
(``label_smoothed_nll_loss``) is, with ε' = ε / (V - 1),

    nll    = lse(z) - z_t
    smooth = V · lse(z) - Σ z
    loss   = (1 - ε - ε') · nll + ε' · smooth

and its gradient, as (1 - ε - ε') + V · ε' = 1,

    ∂loss/∂z = softmax(z) - ε' - (1 - ε - ε') · onehot(t).

The constant -ε' costs no pass over [chunk, V] numbers, and nor does Σ z: for features x and weight
rows w_v, Σ z is x · Σ w_v, and what -ε' adds to the gradients is a sum of the w_v or of the x.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Tokens that are projected at once, unless the caller says otherwise. With fewer, time goes to the
#: weight's gradient, which each chunk reads and writes; with more, to logits that leave the caches.
CHUNK_SIZE = 512

# float16 has no numbers below 6e-8, and few bits below 6e-5: ∂loss/∂z is multiplied by the first
# before it becomes float16; in its product with the features, a sum over tokens that must stay
# below float16's largest number, they are multiplied by the second. Powers of two cost no bit.
_HALF_SCALE = 2.0**8
_HALF_FEATURE_SCALE = 2.0**-5


class Losses(NamedTuple):
    """Sums over the tokens that are no padding; or, unreduced, one value a token [tokens, 1] with
    0 at padding, as fairseq has it. Losses are float32, for products in float64 float64."""

    #: Differentiable.
    loss: Tensor
    #: Without label smoothing; not differentiable.
    nll_loss: Tensor
    #: Tokens whose likeliest word is the target, and all; int64 scalars, None unless counted.
    n_correct: Tensor | None
    total: Tensor | None


def fused_label_smoothed_cross_entropy(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    epsilon: float = 0.0,
    ignore_index: int | None = None,
    reduce: bool = True,
    chunk_size: int = CHUNK_SIZE,
    count_correct: bool = False,
) -> Losses:
    """The label-smoothed cross entropy of ``F.linear(features, weight, bias)``.

    When nothing needs a gradient, none is worked out; nor are those of features or parameters that
    do not require one. The sum's gradient is worked out in forward, and backward only scales it. A
    second backward through the same graph takes the chunks once more, and so does the gradient of
    unreduced losses, where each token has a weight of its own. There is no second derivative.

    Args:
        features: [tokens, embed_dim].
        weight: [vocab, embed_dim].
        target: [tokens], of int64.
        bias: [vocab].
        epsilon: label smoothing.
        ignore_index: the target that stands for padding; such tokens are not even projected.
        reduce: whether to add up the tokens' losses.
        chunk_size: tokens at once, at least 1.

    The matrix products take the dtype of an active autocast, else that of ``features``. Below
    float32 the softmax, its logarithm and all sums over chunks are float32 nevertheless. Gradients
    have the dtype of what they belong to.
    """
    tokens = target.numel()
    kept = None
    if ignore_index is not None:
        kept = target.ne(ignore_index).nonzero().squeeze(1)
        if kept.numel() == tokens:
            kept = None
        else:
            features, target = features.index_select(0, kept), target.index_select(0, kept)
    device = features.device.type
    dtype = features.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    loss, nll_loss, n_correct = _FusedLoss.apply(
        features,
        weight,
        bias,
        target,
        _Settings(epsilon, reduce, chunk_size, dtype, count_correct),
        torch.is_grad_enabled(),
    )
    if not reduce:
        loss, nll_loss = loss.unsqueeze(1), nll_loss.unsqueeze(1)
        if kept is not None:
            zeros = loss.new_zeros(tokens, 1)
            loss, nll_loss = (zeros.index_copy(0, kept, values) for values in (loss, nll_loss))
    if not count_correct:
        return Losses(loss, nll_loss, None, None)
    return Losses(loss, nll_loss, n_correct, torch.full_like(n_correct, target.numel()))


class _Settings(NamedTuple):
    epsilon: float
    reduce: bool
    chunk_size: int
    dtype: torch.dtype
    count_correct: bool


class _Pass(NamedTuple):
    """What one pass over the tokens gives."""

    loss: Tensor  # [tokens], of the wide dtype
    nll_loss: Tensor  # [tokens], of the wide dtype
    n_correct: Tensor  # int64 scalar; 0 unless counted
    #: Those of features, weight and bias, of the wide dtype; None where not wanted.
    gradients: list[Tensor | None]


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: _Settings,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[:3] if grad_enabled else (False, False, False)
        now = wanted if settings.reduce else (False, False, False)
        result = _run(features, weight, bias, target, settings, now)
        if any(wanted):
            ctx.save_for_backward(features, weight, bias, target)
            ctx.settings = settings
            ctx.gradients = result.gradients if settings.reduce else None
        loss, nll_loss = result.loss, result.nll_loss
        if settings.reduce:
            loss, nll_loss = loss.sum(), nll_loss.sum()
        ctx.mark_non_differentiable(nll_loss, result.n_correct)
        return loss, nll_loss, result.n_correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("the fused loss has no second derivative; use fairseq's")
        features, weight, bias, target = ctx.saved_tensors
        settings = ctx.settings
        gradients, ctx.gradients = ctx.gradients, None  # handed over, and changed in place
        if gradients is None:
            scale = None if settings.reduce else grad
            wanted = ctx.needs_input_grad[:3]
            gradients = _run(features, weight, bias, target, settings, wanted, scale).gradients
        if settings.reduce and not (grad.device.type == "cpu" and grad.item() == 1):
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad)
        # Only now to a smaller dtype: the loss scale of mixed precision has come with ``grad``.
        of_features, of_weight, of_bias = (
            None if gradient is None else gradient.to(value.dtype)
            for gradient, value in zip(gradients, (features, weight, bias), strict=True)
        )
        return of_features, of_weight, of_bias, None, None, None


def _run(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    settings: _Settings,
    wanted: tuple[bool, bool, bool],
    scale: Tensor | None = None,
) -> _Pass:
    """Take all chunks: the losses, and those gradients of features, weight and bias that are
    ``wanted``, each token's multiplied by ``scale`` [tokens]."""
    epsilon, _, chunk_size, dtype, count_correct = settings
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tokens, vocab = target.numel(), weight.size(0)
    smoothing = epsilon / (vocab - 1)
    confidence = 1.0 - epsilon - smoothing
    with torch.autocast(features.device.type, enabled=False):
        x, w = features.to(dtype), weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        gradients = _Gradients(x, w, wide, wanted, smoothing, scale)

        size = min(chunk_size, tokens)
        logit_buffer = x.new_empty(size, vocab)
        prob_buffer = logit_buffer if dtype == wide else x.new_empty(size, vocab, dtype=wide)
        minus_confidence = x.new_full((size, 1), -confidence, dtype=wide)
        lse = x.new_empty(tokens, 1, dtype=wide)
        nll_loss = torch.empty_like(lse)
        n_correct = target.new_zeros(())
        for start in range(0, tokens, chunk_size):
            chunk = slice(start, min(start + chunk_size, tokens))
            ids = target[chunk].unsqueeze(1)
            logits, probs = logit_buffer[: len(ids)], prob_buffer[: len(ids)]  # [chunk, vocab]
            if b is None:
                torch.mm(x[chunk], w.t(), out=logits)
            else:
                torch.addmm(b, x[chunk], w.t(), out=logits)
            if count_correct:
                n_correct += logits.argmax(dim=1, keepdim=True).eq(ids).sum()
            if probs is not logits:
                probs.copy_(logits)
            largest, of_target = probs.amax(dim=1, keepdim=True), probs.gather(1, ids)
            torch.softmax(probs, dim=1, out=probs)
            # The likeliest word's probability is 1 / Σ exp(z - largest): never so small that its
            # logarithm would lose anything, and found faster than by a second exp or by argmax.
            lse[chunk] = largest - probs.amax(dim=1, keepdim=True).log_()
            nll_loss[chunk] = lse[chunk] - of_target
            if any(wanted):
                probs.scatter_add_(1, ids, minus_confidence[: len(ids)])
                gradients.add(chunk, logits, probs)

        logit_sum = (x.to(wide) @ w.sum(dim=0, dtype=wide)).unsqueeze(1)  # [tokens, 1]
        if b is not None:
            logit_sum += b.sum(dtype=wide)
        loss = confidence * nll_loss + smoothing * (vocab * lse - logit_sum)
        return _Pass(loss.squeeze(1), nll_loss.squeeze(1), n_correct, gradients.finish())


class _Gradients:
    """Gradients of features, weight and bias, added up over the chunks in the wide dtype.

    Args:
        x: features [tokens, embed_dim], of the dtype of the matrix products.
        w: weight [vocab, embed_dim], of the same dtype.
        wide: float64 for float64, else float32.
        wanted: which of the three to work out.
        smoothing: ε'.
        scale: [tokens], what to multiply the tokens' gradients by.
    """

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        wide: torch.dtype,
        wanted: tuple[bool, bool, bool],
        smoothing: float,
        scale: Tensor | None,
    ) -> None:
        self.x, self.w, self.scale = x, w, scale
        self.logit_scale, self.feature_scale = 1.0, 1.0
        if x.dtype == torch.float16:
            self.logit_scale, self.feature_scale = _HALF_SCALE, _HALF_FEATURE_SCALE
        # They begin with what -ε' adds, and hold the true gradients times these scales.
        tokens, vocab = len(x), len(w)
        factors = x.new_ones(tokens, dtype=wide) if scale is None else scale.to(wide)
        self.of_x = self.of_w = self.of_b = None
        if wanted[0]:
            row_sum = w.sum(dim=0, dtype=wide)  # [embed_dim]
            self.of_x = torch.outer(factors, row_sum * (-smoothing * self.logit_scale))
        if wanted[1]:
            self.w_scale = self.logit_scale * self.feature_scale
            feature_sum = factors @ x.to(wide)  # [embed_dim]
            self.of_w = (feature_sum * (-smoothing * self.w_scale)).repeat(vocab, 1)
            # What one chunk adds, where the product itself cannot add it.
            self.addend = torch.empty_like(w) if x.dtype != wide else None
        if wanted[2]:
            self.of_b = (factors.sum() * -smoothing).repeat(vocab)

    def add(self, chunk: slice, logits: Tensor, grad: Tensor) -> None:
        """Add a chunk's: ``grad`` [chunk, vocab], of the wide dtype, is ∂loss/∂z + ε'; ``logits``
        is room for it in the dtype of the products. Both may be overwritten."""
        if self.scale is not None:
            grad.mul_(self.scale[chunk].unsqueeze(1))
        if self.of_b is not None:
            self.of_b += grad.sum(dim=0)
        if logits is not grad:
            torch.mul(grad, self.logit_scale, out=logits)
        if self.of_x is not None:
            if logits is grad:
                self.of_x[chunk].addmm_(grad, self.w)
            else:
                self.of_x[chunk] += logits @ self.w
        if self.of_w is not None:
            if self.addend is None:
                self.of_w.addmm_(logits.t(), self.x[chunk])
            else:
                torch.mm(logits.t(), self.x[chunk] * self.feature_scale, out=self.addend)
                self.of_w += self.addend

    def finish(self) -> list[Tensor | None]:
        if self.x.dtype == torch.float16:
            if self.of_x is not None:
                self.of_x /= self.logit_scale
            if self.of_w is not None:
                self.of_w /= self.w_scale
        return [self.of_x, self.of_w, self.of_b]
