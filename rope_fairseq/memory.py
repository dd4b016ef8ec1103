"""The C library's memory of this process. No fairseq here."""

import ctypes
import os

# Numbers of glibc's <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
#: Blocks of up to so many bytes are kept for the next one.
LARGEST_KEPT = 1 << 28


def keep_freed_memory() -> bool:
    """Keep large blocks that were freed, rather than give them back to the system.

    glibc takes every block over 32 MiB, and at first over 128 KiB, anew from the system, which
    fills it with zeros page by page when it is first written. A training step on a CPU frees and
    takes hundreds of such blocks, which at base size is some 4 % of its time. What a process keeps
    is at most what it held at its peak.

    Returns:
        Whether it was done: not without glibc, and not where the environment says otherwise
        (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` or ``GLIBC_TUNABLES``).
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
