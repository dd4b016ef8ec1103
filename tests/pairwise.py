"""Self-attention with each position encoding, pair by pair in float64: the papers' formulas as they
are printed, with no tensor of distances, no shift and no kernel. For comparisons only."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Every parameter of an attention module, of its encoding and of what layers share, by name.
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """An encoding on one side of the model, by its own options."""

    encoding: str
    num_heads: int
    head_dim: int
    causal: bool
    max_distance: int = 3
    buckets: int = 8
    base: float = 10000.0
    layout: str = "interleaved"


def bucket(distance: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """The bucket of T5 (arXiv 1910.10683, section 2.1) of the distance key − query, in integers.

    Half of the buckets hold one distance each, up to ``exact``; the others grow by equal ratios up
    to ``max_distance``. The later half of all is for keys behind the query.
    """
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        length = abs(distance)
    else:
        length = max(-distance, 0)
    exact = buckets // 2
    if length < exact:
        return first + length
    steps = buckets - exact
    # The last step s < steps with length / exact ≥ (max_distance / exact)^(s / steps).
    step = 0
    while step < steps - 1 and (
        length**steps * exact ** (step + 1) >= max_distance ** (step + 1) * exact**steps
    ):
        step += 1
    return first + exact + step


def slopes(num_heads: int) -> list[float]:
    """The slopes of ALiBi (arXiv 2108.12409, section 3): 2^(−8h/n) for n heads, a power of two;
    else those of the power of two below, then every other slope of twice as many heads."""
    power = 2 ** (num_heads.bit_length() - 1)
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return first + [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * (num_heads - power), 2)]


def clip(distance: int, most: int) -> int:
    return max(-most, min(most, distance))


def row_of_distance(query: int, key: int, k: int) -> int:
    """δ(i, j) of DeBERTa (arXiv 2006.03654, equation 3)."""
    if query - key <= -k:
        return 0
    if query - key >= k:
        return 2 * k - 1
    return query - key + k


def part(matrix: Tensor, head: int, dim: int) -> Tensor:
    """The rows of a projection's weight that make one head: [head_dim, embed_dim]."""
    return matrix[head * dim : (head + 1) * dim]


def score_plain(s: Setting, p: Parameters, h: int, i: int, j: int, q: Tensor, k: Tensor) -> Tensor:
    return q @ k / math.sqrt(s.head_dim)


def score_shaw(s: Setting, p: Parameters, h: int, i: int, j: int, q: Tensor, k: Tensor) -> Tensor:
    """arXiv 1803.02155, equation 4: q_i·(k_j + a^K_ij) / √d."""
    row = clip(j - i, s.max_distance) + s.max_distance
    return q @ (k + p["key_embedding"][row]) / math.sqrt(s.head_dim)


def score_transformer_xl(
    s: Setting, p: Parameters, h: int, i: int, j: int, q: Tensor, k: Tensor
) -> Tensor:
    """arXiv 1901.02860, section 3.3: (q_i + u)·k_j + (q_i + v)·W_kR R_{i−j}, over √d."""
    embed_dim = s.num_heads * s.head_dim
    angles = [(i - j) * 10000 ** (-2 * c / embed_dim) for c in range(embed_dim // 2)]
    sinusoid = torch.tensor(
        [math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64
    )
    r = part(p["projection.weight"], h, s.head_dim) @ sinusoid
    content = (q + p["content_bias"][h]) @ k
    return (content + (q + p["position_bias"][h]) @ r) / math.sqrt(s.head_dim)


def score_t5(s: Setting, p: Parameters, h: int, i: int, j: int, q: Tensor, k: Tensor) -> Tensor:
    """arXiv 1910.10683, section 2.1; the scores are divided by √d here, as in all encodings."""
    row = bucket(j - i, not s.causal, s.buckets, s.max_distance)
    return q @ k / math.sqrt(s.head_dim) + p["bucket_bias"][row, h]


def score_tupe(s: Setting, p: Parameters, h: int, i: int, j: int, q: Tensor, k: Tensor) -> Tensor:
    """TUPE-R (arXiv 2006.15595, section 3.1): (q_i·k_j + (p_i U_Q)·(p_j U_K)) / √(2d) + b_{j−i}."""

    def position(index: int) -> Tensor:
        x = p["embedding.weight"][index]
        centred = x - x.mean()
        normed = centred / torch.sqrt((centred**2).mean() + 1e-5)
        return normed * p["norm.weight"] + p["norm.bias"]

    query = part(p["query_projection.weight"], h, s.head_dim) @ position(i)
    key = part(p["key_projection.weight"], h, s.head_dim) @ position(j)
    row = bucket(j - i, not s.causal, s.buckets, s.max_distance)
    return (q @ k + query @ key) / math.sqrt(2 * s.head_dim) + p["buckets.bucket_bias"][row, h]


def score_deberta(
    s: Setting, p: Parameters, h: int, i: int, j: int, q: Tensor, k: Tensor
) -> Tensor:
    """arXiv 2006.03654, equations 3 and 4: content to content, content to position, position to
    content, over √(3d)."""
    key = part(p["key_projection.weight"], h, s.head_dim)
    query = part(p["query_projection.weight"], h, s.head_dim)
    ahead = p["distance_embedding"][row_of_distance(i, j, s.max_distance)]
    back = p["distance_embedding"][row_of_distance(j, i, s.max_distance)]
    return (q @ k + q @ (key @ ahead) + k @ (query @ back)) / math.sqrt(3 * s.head_dim)


def score_alibi(s: Setting, p: Parameters, h: int, i: int, j: int, q: Tensor, k: Tensor) -> Tensor:
    """arXiv 2108.12409, section 3, with |i − j| where the paper has only keys up to the query."""
    return q @ k / math.sqrt(s.head_dim) - slopes(s.num_heads)[h] * abs(i - j)


def score_rope(s: Setting, p: Parameters, h: int, i: int, j: int, q: Tensor, k: Tensor) -> Tensor:
    """arXiv 2104.09864, equation 12: each pair of channels is a complex number, and the score is
    Re Σ_c q_c k_c* e^{i(m−n)θ_c}, over √d."""
    channels = torch.arange(s.head_dim // 2, dtype=torch.float64)
    theta = s.base ** (-2 * channels / s.head_dim)
    turn = torch.polar(torch.ones_like(theta), (i - j) * theta)
    if s.layout == "half":
        pairs = [x.view(2, -1).T.contiguous() for x in (q, k)]
    else:
        pairs = [x.view(-1, 2) for x in (q, k)]
    complex_q, complex_k = map(torch.view_as_complex, pairs)
    return (complex_q * complex_k.conj() * turn).real.sum() / math.sqrt(s.head_dim)


Score = Callable[[Setting, Parameters, int, int, int, Tensor, Tensor], Tensor]

#: e_ij of head h, from the encoding's options, all parameters, h, i, j, q_i and k_j.
SCORES: dict[str, Score] = {
    "none": score_plain,
    "rope": score_rope,
    "shaw": score_shaw,
    "transformer-xl": score_transformer_xl,
    "t5": score_t5,
    "tupe": score_tupe,
    "deberta": score_deberta,
    "alibi": score_alibi,
}


def value_of(s: Setting, p: Parameters, i: int, j: int, v: Tensor) -> Tensor:
    """What a query takes of a key: v_j, and a^V_ij with Shaw's (equation 3)."""
    if s.encoding == "shaw":
        return v + p["value_embedding"][clip(j - i, s.max_distance) + s.max_distance]
    return v


def pairwise(
    s: Setting, p: Parameters, x: Tensor, key_padding_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The whole attention module, for the tokens that are not padding.

    Args:
        p: parameters in float64.
        x: [seq_len, batch, embed_dim], float64.
        key_padding_mask: [batch, seq_len], True at padding. Positions are counted without it.

    Returns:
        The output [tokens, embed_dim] and the weights [tokens, num_heads, seq_len] of all tokens
        of the first sentence, then of the second, and so on.
    """
    outputs, all_weights = [], []
    q, k, v = (
        (x @ p[f"{n}_proj.weight"].T + p[f"{n}_proj.bias"]).unflatten(2, (s.num_heads, -1))
        for n in "qkv"
    )
    for b, row in enumerate(key_padding_mask.tolist()):
        columns = [column for column, padding in enumerate(row) if not padding]
        for i, query in enumerate(columns):
            heads, weights = [], []
            for h in range(s.num_heads):
                seen = [(j, n) for j, n in enumerate(columns) if j <= i or not s.causal]
                scores = [
                    SCORES[s.encoding](s, p, h, i, j, q[query, b, h], k[n, b, h]) for j, n in seen
                ]
                alpha = torch.stack(scores).softmax(0)
                values = [value_of(s, p, i, j, v[n, b, h]) for j, n in seen]
                heads.append(sum(a * value for a, value in zip(alpha, values, strict=True)))
                by_column = torch.zeros(len(row), dtype=torch.float64)
                weights.append(by_column.index_put((torch.tensor([n for _, n in seen]),), alpha))
            z = torch.cat(heads)
            outputs.append(p["out_proj.weight"] @ z + p["out_proj.bias"])
            all_weights.append(torch.stack(weights))
    return torch.stack(outputs), torch.stack(all_weights)
