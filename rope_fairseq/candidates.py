"""The best next tokens of each hypothesis, without a second copy of the vocabulary."""

import torch
from torch import Tensor

#: Tokens in a block. The largest of each is found first (see :func:`top_k`).
BLOCK = 64


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest values of each row, in descending order, and where they stand.

    torch.topk copies all values with their indices. The k largest stand in those k blocks whose
    maxima are largest, so that nearly all values are read once and not copied. Among equal values
    the choice is arbitrary, as in torch.topk. A NaN counts as the largest value, as there.

    Args:
        x: [rows, width].
        k: at most ``width``.

    Returns:
        Values and indices, both [rows, k].
    """
    width = x.size(1)
    blocks = width // BLOCK
    if blocks < 2 * k:
        values, indices = x.topk(k)
        return values, indices
    whole = blocks * BLOCK
    # [rows, blocks, BLOCK]
    split = x[:, :whole].unflatten(1, (blocks, BLOCK))
    best = split.amax(2).topk(k, sorted=False).indices
    chosen = split.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    # What is behind the last whole block always takes part: [rows, k·BLOCK + rest].
    values, places = torch.cat((chosen, x[:, whole:]), dim=1).topk(k)
    in_block = places < k * BLOCK
    block = best.gather(1, places.div(BLOCK, rounding_mode="floor").clamp(max=k - 1))
    indices = torch.where(in_block, block * BLOCK + places % BLOCK, places + (whole - k * BLOCK))
    return values, indices


def best_of_beams(values: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` best continuations of each sentence.

    Args:
        values: [sentences, beams, k], the scores of the best tokens of each hypothesis.
        tokens: [sentences, beams, k], these tokens.

    Returns:
        Scores in descending order, tokens and numbers of hypotheses, all [sentences, count].
    """
    k = values.size(2)
    best, places = values.flatten(1).topk(count)
    return best, tokens.flatten(1).gather(1, places), places.div(k, rounding_mode="floor")
