"""Shared by all tests: one thread (the machine has few cores), and small models."""

import argparse
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import build_model

import rope_fairseq  # noqa: F401  (registers the models)

torch.set_num_threads(1)


class TinyTask:
    """What a model asks of its task: two dictionaries and a configuration."""

    def __init__(self, symbols: int = 32) -> None:
        dictionary = Dictionary()
        for number in range(symbols):
            dictionary.add_symbol(f"w{number}")
        self.source_dictionary = self.target_dictionary = dictionary
        self.cfg = argparse.Namespace(load_alignments=False)


SMALL = dict(
    encoder_embed_dim=32,
    encoder_ffn_embed_dim=48,
    encoder_layers=2,
    encoder_attention_heads=4,
    decoder_layers=2,
    decoder_attention_heads=4,
    dropout=0.0,
)


def build_small(arch: str = "rope_transformer", seed: int = 1, **options: Any) -> Any:
    """A model of a few thousand parameters, in evaluation mode, dropout 0."""
    torch.manual_seed(seed)
    settings = {**SMALL, **options}
    return build_model(argparse.Namespace(_name=arch, **settings), TinyTask()).eval()


@pytest.fixture
def small() -> Any:
    return build_small
