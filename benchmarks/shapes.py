"""Sizes of models, and the random sentences that all systems are given."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

# fairseq's dictionary starts with these four; the other systems are told of the same numbers.
BOS, PAD, EOS, UNK = range(4)
BEAM = 4
DROPOUT = 0.1
LABEL_SMOOTHING = 0.1
CLIP_NORM = 1.0
LEARNING_RATE = 5e-4
ADAM_BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class Size:
    """A Transformer whose encoder and decoder are alike and whose embeddings are all shared."""

    embed_dim: int
    ffn_dim: int
    layers: int
    heads: int
    vocabulary: int
    """Symbols of the dictionary, the four special ones included."""


@dataclass(frozen=True)
class Shape:
    """What one call works on: a training step, or the translation of one batch."""

    size: Size
    sentences: int
    length: int
    """Tokens of a sentence, end of sentence included, on both sides; no padding."""
    attention_dropout: float = 0.0

    @property
    def tokens(self) -> int:
        return self.sentences * self.length

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Shape":
        return cls(**record | {"size": Size(**record["size"])})


def of_tokens(size: Size, tokens: int, length: int, attention_dropout: float = 0.0) -> Shape:
    """The batch of sentences of one length with at most ``tokens`` tokens a side, at least one."""
    return Shape(size, max(1, tokens // length), length, attention_dropout)


def sentences(shape: Shape, seed: int) -> Tensor:
    """Random tokens [sentences, length], int64, each row ending with the end of sentence."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.sentences, shape.length)
    tokens = torch.randint(UNK + 1, shape.size.vocabulary, size, generator=generator)
    tokens[:, -1] = EOS
    return tokens


def pair(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Source, target, and the decoder's input (the target behind the end of sentence, as fairseq
    starts it): [sentences, length] each."""
    source, target = sentences(shape, 1), sentences(shape, 2)
    return source, target, target.roll(1, dims=1)
