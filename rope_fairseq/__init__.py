"""Rotary position embeddings for fairseq's Transformer: a plugin for ``--user-dir``."""

from rope_fairseq import compat, memory
from rope_fairseq.version import __version__

compat.apply()  # before anything else of fairseq is imported
memory.keep_freed_memory()

# Imported for what they register with fairseq: architectures, tokenizer, criterion, task.
from rope_fairseq import tokenizer  # noqa: E402, F401
from rope_fairseq.criterions import fused_label_smoothed_cross_entropy  # noqa: E402, F401
from rope_fairseq.models import rope_transformer  # noqa: E402, F401
from rope_fairseq.tasks import rope_translation  # noqa: E402, F401

__all__ = ["__version__"]
