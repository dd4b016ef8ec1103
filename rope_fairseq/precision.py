"""The precision in which a model computes, whatever the precision of its parameters.

fairseq's ``--bf16`` casts the parameters and, in its trainer, switches to a TPU. Computing under
autocast instead keeps parameters, optimizer and checkpoints in float32. So does a lower precision
inside the products of float32 matrices alone, in which nothing else is rounded. No fairseq here.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

COMPUTE_DTYPES = ("float32", "bfloat16")
#: Those of torch.set_float32_matmul_precision. On a CPU with AMX or AVX512-BF16, ``medium`` rounds
#: the operands to bfloat16 and adds up in float32; on CUDA ``high`` and ``medium`` mean TF32.
MATMUL_PRECISIONS = ("highest", "high", "medium")
#: oneDNN sets a product up anew for each new shape, which takes several times as long as a small
#: product itself, and by default keeps the last 1,024. The batches of an epoch have some thousands.
_KEPT_PRODUCTS = 16384

BF16_MEANS_TPU = "--bf16: fairseq means a TPU by it; leave it out and say --compute-dtype bfloat16"


def computing_in(compute_dtype: str, x: Tensor) -> AbstractContextManager[object]:
    """The context in which matrix products take their operands in ``compute_dtype``.

    Args:
        compute_dtype: one of :data:`COMPUTE_DTYPES`. ``float32`` changes nothing: an autocast of
            the caller acts as ever.
        x: an operand. Where it is not float32, the model was cast as a whole (``.half()``), and
            nothing is changed either.
    """
    if compute_dtype == "bfloat16" and x.dtype == torch.float32:
        return torch.autocast(x.device.type, torch.bfloat16)
    return nullcontext()


_before: str | None = None
"""What the process had before a model began to train with another precision; None: none does."""


def train_with(precision: str) -> None:
    """Set the precision of products of float32 matrices, which torch has for the whole process."""
    global _before
    if _before is None:
        _before = torch.get_float32_matmul_precision()
        # Read when oneDNN keeps its first product; no effect afterwards.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_PRODUCTS))
    torch.set_float32_matmul_precision(precision)


def train_no_more() -> None:
    """Restore what was before :func:`train_with`."""
    global _before
    if _before is not None:
        torch.set_float32_matmul_precision(_before)
        _before = None


def products_are_changed() -> bool:
    """Whether :func:`train_with` has set the precision. Asking torch itself fails where a program
    has used its newer switches, and cannot be compiled."""
    return _before is not None


@contextmanager
def full_matmul_precision() -> Iterator[None]:
    """Products of float32 matrices in float32, for the whole process, between
    :func:`train_with` and :func:`train_no_more`."""
    now = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(now)
