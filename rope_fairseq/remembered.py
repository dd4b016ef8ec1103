"""Answers about a tensor's contents, kept with it.

All layers of a model ask the same about one mask or one order of rows, and on a GPU each answer
waits for all that was computed before. No fairseq here.
"""

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

Answer = TypeVar("Answer")


def remembered(tensor: Tensor, question: Hashable, answer: Callable[[], Answer]) -> Answer:
    """What ``answer()`` gives for ``tensor``, from memory where ``question`` was asked before and
    the tensor was not written to since."""
    version = None if tensor.is_inference() else tensor._version
    answers = tensor.__dict__.setdefault("_remembered", {})
    if (question, version) not in answers:
        answers[question, version] = answer()
    kept: Answer = answers[question, version]
    return kept
