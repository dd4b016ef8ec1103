"""Shared by all tests: one thread (the machine has few cores), and small models."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import build_model

import rope_fairseq  # noqa: F401  (registers the models)
from tests.tiny import SHARED_FOLDER

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """The first process makes the folder that all share; those that it starts find its name."""
    if not hasattr(config, "workerinput"):
        os.environ[SHARED_FOLDER] = tempfile.mkdtemp(prefix="rope_fairseq-test-")


# The longest first, in this order: one process would be busy with them long after the others.
SLOW_FILES = (
    "test_frontends.py",
    "test_readme.py",
    "test_pipeline.py",
    "test_prepare.py",
    "test_train_script.py",
    "test_bad_input.py",
    "test_fused_criterion.py",
    "test_translate.py",
    "test_encodings_script.py",
    "test_table_script.py",
    "test_distributed.py",
    "test_generator.py",
    "test_bench.py",
    "test_invariants.py",
    "test_packaging.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[SHARED_FOLDER], ignore_errors=True)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a test does to the environment, the next one does not see: fairseq's loading processes
    leave PYTHONWARNINGS in it, with which commands do not start by fork (see forkserver.py)."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


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
