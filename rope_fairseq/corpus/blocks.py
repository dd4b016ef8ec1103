"""Files in blocks of whole lines, worked on by several processes, in bounded memory."""

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rope_fairseq.errors import UserError

# Of all files together. At this size sending a block costs next to nothing beside tokenizing it,
# and a process holds few megabytes.
BLOCK_BYTES = 2**20
# Blocks that are at work or wait for it, for each process: none is ever idle.
BLOCKS_PER_WORKER = 2
PR_SET_PDEATHSIG = 1  # linux/prctl.h

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Block:
    """The same lines of one or more files.

    Args:
        number: number of the first line, counted from 1.
        lines: one list for each file: its lines as bytes, with their ends.
    """

    number: int
    lines: tuple[list[bytes], ...]


def read_blocks(*paths: Path) -> Iterator[Block]:
    """Blocks of about :data:`BLOCK_BYTES` of files that have the same number of lines."""
    with ExitStack() as stack:
        rows = zip(*(stack.enter_context(open(path, "rb")) for path in paths), strict=True)
        number, size = 1, 0
        block: list[tuple[bytes, ...]] = []
        for row in rows:
            block.append(row)
            size += sum(map(len, row))
            if size >= BLOCK_BYTES:
                yield Block(number, tuple(map(list, zip(*block, strict=True))))
                number, size, block = number + len(block), 0, []
        if block:
            yield Block(number, tuple(map(list, zip(*block, strict=True))))


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """``map`` with several processes. The results keep the order of the items, of which few are in
    memory at a time.

    Args:
        function: may be anything callable: the processes inherit it, it is not pickled.
        workers: number of processes; with 1, this one does the work.

    Raises:
        UserError: a process was killed from outside.
        Exception: what ``function`` raises.
    """
    if workers == 1:
        yield from map(function, items)
        return
    pending: deque[Future[R]] = deque()
    # Forked, not spawned: a spawned process would run scripts/tool.py again.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, fork, _start_worker, (function, os.getpid()))
    try:
        for item in items:
            pending.append(pool.submit(_work, item))
            if len(pending) > BLOCKS_PER_WORKER * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"one of the {workers} worker processes was killed, perhaps for want of memory; "
            "run again, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_function: Callable[[Any], Any]


def _start_worker(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    # A worker would wait for its parent for ever, and keep the lock of the work folder that it has
    # inherited, when the parent is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _work(item: Any) -> Any:
    return _function(item)
