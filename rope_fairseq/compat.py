"""Runtime patches of fairseq and torch: what a current Python and torch need to run fairseq, and
fairseq defects that lose data.

Each patch states its reason and the versions that need it; tests/test_compat.py shows each at
work. ``apply()`` is called when the package is imported and may be called again.
"""

import argparse
import ast
import atexit
import contextlib
import functools
import itertools
import logging
import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pickle import UnpicklingError
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import torch

from rope_fairseq import distributed, resume
from rope_fairseq.checkpoint import damage, refusal
from rope_fairseq.errors import UserError, describe
from rope_fairseq.precision import BF16_MEANS_TPU
from rope_fairseq.version import __version__


def apply() -> None:
    """Apply every patch; a second call changes nothing."""
    silence_start_up_notices()
    allow_checkpoint_classes()
    read_options_as_data()
    keep_last_batch()
    write_checkpoints_whole()
    name_damaged_checkpoints()
    train_together()
    go_on_where_it_was()
    load_checkpoint_in_each_process()
    save_at_every_interval()
    end_loading_at_exit()
    guard_user_dir()
    show_user_errors_in_one_line()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of ``owner.name``, once."""
    original = getattr(owner, name)
    if getattr(original, "_rope_fairseq_patch", False):
        return
    patched: Any = functools.wraps(original)(make(original))
    patched._rope_fairseq_patch = True
    is_static = isinstance(vars(owner).get(name), staticmethod)
    setattr(owner, name, staticmethod(patched) if is_static else patched)


def silence_start_up_notices() -> None:
    """What every command would say before its first own word, and what no user can act on.

    fairseq was written for Hydra 1.0 and Hydra ≥ 1.1 warns of that in some twenty lines; importing
    fairseq logs that tensorboardX, which only its speech tasks need, is missing. 0.12.3.
    """
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    logging.getLogger("hydra").setLevel(logging.WARNING)
    # Registering the tokenizer imports text.py before ``python -m rope_fairseq.text`` runs it.
    warnings.filterwarnings("ignore", message=r"'rope_fairseq\.\w+' found in sys\.modules")
    hydra = r"(?s).*(hydra|version_base|ConfigStore schema|strict flag|package header)"
    warnings.filterwarnings("ignore", message=hydra, category=UserWarning)


def allow_checkpoint_classes() -> None:
    """torch ≥ 2.6 loads only tensors and plain data unless told of more (``weights_only``). A
    fairseq-train checkpoint holds its options as an ``argparse.Namespace`` and, after validation
    with ``--eval-bleu``, the n-gram counts as NumPy arrays of numbers. All of these hold data and
    run nothing. Needed for torch ≥ 2.6 with every fairseq."""
    rebuild = np.empty(0).__reduce__()[0]  # NumPy's function for arrays, wherever it lives
    numbers = [type(np.dtype(kind)) for kind in (np.int64, np.int32, np.float64, np.float32)]
    allowed: list[Any] = [argparse.Namespace, np.ndarray, np.dtype, *numbers]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # NumPy 2 and 1
        allowed.append((rebuild, f"{module}._reconstruct"))
    torch.serialization.add_safe_globals(allowed)


def read_options_as_data() -> None:
    """``utils.eval_str_list`` and its sisters run option strings as Python code. Those strings are
    also read from a checkpoint (``adaptive_softmax_cutoff``), which may come from anywhere: they
    are parsed as literals here. 0.12.3 and main.

    fairseq's other model families (fconv, wav2vec, …) call ``eval`` themselves; our own tools
    refuse their checkpoints (see :func:`rope_fairseq.hub.check_family`).
    """
    from fairseq import utils

    def literal(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise UserError(f"option value {value!r}: must be a Python literal") from None

    def eval_str_list(x: Any, type: Callable[[Any], Any] = float) -> Any:
        if x is None:
            return None
        x = literal(x)
        return [type(item) for item in x] if isinstance(x, Iterable) else [type(x)]

    def eval_str_dict(x: Any, type: Any = dict) -> Any:
        return literal(x)

    def eval_bool(x: Any, default: bool = False) -> bool:
        return bool(literal(x)) if isinstance(x, str) else default

    for function in (eval_str_list, eval_str_dict, eval_bool):
        _replace(utils, function.__name__, functools.partial(lambda new, original: new, function))


def keep_last_batch() -> None:
    """``data_utils.batch_by_size`` drops the last batch when its size is no multiple of
    ``--required-batch-size-multiple`` (default 8): up to seven sentences vanish from
    fairseq-generate, validation and training. fairseq issues 5036, 5094 and 5351; 0.12.3 and main.

    Batches are made one after another from ``indices`` in order, so the lost ones are its tail.
    Training batches change too, by that one batch.
    """
    from fairseq.data import data_utils

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> list[Any]:
            if not isinstance(indices, np.ndarray):
                indices = np.fromiter(indices, dtype=np.int64, count=-1)
            if len(indices) == 0:
                return []  # the original fails with an IndexError
            batches = original(indices, *args, **kwargs)
            kept = sum(len(batch) for batch in batches)
            # With fixed_shapes, batches hold other numbers of sentences by design.
            fixed_shapes = kwargs.get("fixed_shapes", args[5] if len(args) > 5 else None)
            if kept < len(indices) and fixed_shapes is None:
                batches = [*batches, indices[kept:]]
            return batches

        return batch_by_size

    _replace(data_utils, "batch_by_size", make)


def write_checkpoints_whole() -> None:
    """Two ways of fairseq to spoil a checkpoint. 0.12.3 and main:

    - It writes checkpoint_E_U.pt under a temporary name but copies it to checkpoint_last.pt and
      checkpoint_best.pt in place: killed meanwhile, it leaves a truncated checkpoint_last.pt, and
      the run cannot be resumed.
    - When a checkpoint cannot be written (full disk), it tries again twice, each time behind what
      the try before has written to the same file, and prints a traceback that names no file.
    """
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    _replace(PathManager, "copy", resume.copy_whole)
    _replace(checkpoint_utils, "_torch_persistent_save", lambda original: torch.save)
    _replace(checkpoint_utils, "torch_persistent_save", resume.save_whole)


def name_damaged_checkpoints() -> None:
    """A truncated checkpoint ends fairseq in a traceback that does not name the file, of which
    ``--path`` may hold several. 0.12.3 and main."""
    from fairseq import checkpoint_utils

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(path, *args, **kwargs)
            except (UnpicklingError, RuntimeError, EOFError) as error:
                raise damage(path, error) from error

        return load_checkpoint_to_cpu

    _replace(checkpoint_utils, "load_checkpoint_to_cpu", make)


def train_together() -> None:
    """Under torchrun on CPUs, or with one GPU a machine, fairseq trains as many models as there are
    processes, in one folder; asked for several on CPUs, it divides by the number of GPUs. And tasks
    that srun or mpirun started train apart unless told how to find each other. 0.12.3 and main.

    fairseq-hydra-train loads the plugin only when training has begun in a single process; the
    processes are connected then.
    """
    from fairseq.distributed import utils as distributed_utils

    def wrap_call_main(original: Callable[..., Any]) -> Callable[..., Any]:
        def call_main(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> Any:
            # For several processes fairseq looks for a TPU before it builds the model, which would
            # say this too.
            if cfg.common.bf16 and cfg.common.tpu and find_spec("torch_xla") is None:
                raise UserError(BF16_MEANS_TPU)
            # The other commands may well run several times side by side.
            if "validate_and_save" in getattr(main, "__globals__", {}):
                join(cfg)
                distributed.refuse_apart(cfg.distributed_training)
            return original(cfg, main, **kwargs)

        return call_main

    def wrap_add_defaults(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_defaults(cfg: Any) -> None:
            original(cfg)
            if not torch.distributed.is_initialized() and join(cfg) is not None:
                if torch.cuda.is_available() and not cfg.common.cpu:
                    torch.cuda.set_device(cfg.distributed_training.device_id)
                distributed_utils.distributed_init(cfg)
            distributed.refuse_apart(cfg.distributed_training)

        return add_defaults

    def join(cfg: Any) -> distributed.Launch | None:
        devices = torch.cuda.device_count()
        cpu = cfg.common.cpu or not devices
        launch = distributed.join(cfg.distributed_training, cpu, devices)
        if launch is not None:
            distributed.end_with_torchrun()
        return launch

    _replace(distributed_utils, "call_main", wrap_call_main)
    module = resume.training_module()
    if module is not None:  # what its main() calls right after it has loaded the plugin
        _replace(module, "add_defaults", wrap_add_defaults)


def go_on_where_it_was() -> None:
    """A run that is resumed trains otherwise than the run that was not interrupted. 0.12.3 and
    main:

    - Sentences are put into batches once, when training starts, with the seed plus the number of
      the epoch: a run resumed in epoch 5 has other batches. Here they are always those of a start
      in epoch 1. Iterators that fairseq makes anew for each epoch (sharded data,
      ``rebuild_batches``) stay.
    - The place in an epoch is a number of batches of each device: with more devices it may lie
      beyond the end ("dataloader mismatch"), with fewer too early. It is converted.
    - ``--patience`` keeps its best value and its count in memory only. They go into
      ``extra_state["early_stopping"]`` of each checkpoint.
    - A run that is started again after its end (``--max-update`` or ``--stop-time-hours`` reached,
      or out of patience) makes one update more. Here it trains no further.
    """
    from fairseq import checkpoint_utils
    from fairseq.data.iterators import EpochBatchIterator
    from fairseq.tasks import FairseqTask
    from fairseq.trainer import Trainer

    _replace(FairseqTask, "get_batch_iterator", resume.keep_batches)
    _replace(EpochBatchIterator, "state_dict", resume.store_position)
    _replace(EpochBatchIterator, "load_state_dict", resume.restore_position)
    _replace(Trainer, "save_checkpoint", resume.store_early_stopping)
    _replace(checkpoint_utils, "load_checkpoint", resume.restore_early_stopping)


def load_checkpoint_in_each_process() -> None:
    """Of several processes, fairseq has one read the checkpoint and send it to the others as a
    pickle with omegaconf's classes, which torch ≥ 2.6 refuses there: no run of several devices
    could go on. Here each reads the file, as with fairseq's own option. 0.12.3 and main."""
    from fairseq.trainer import Trainer

    _replace(Trainer, "load_checkpoint", resume.load_in_each_process)


def save_at_every_interval() -> None:
    """With ``--save-interval-updates`` and ``--no-epoch-checkpoints`` fairseq writes no
    checkpoint_E_U.pt where update U happens to end an epoch: one is missing among the last N, and
    an average takes an older one in its place. 0.12.3 and main."""
    from fairseq import checkpoint_utils

    _replace(checkpoint_utils, "save_checkpoint", resume.save_at_every_interval)


def end_loading_at_exit() -> None:
    """Batches are prepared ahead in a daemon thread. A run that ends inside an epoch
    (``--max-update``) leaves it at work while Python shuts down, and now and then the process dies
    of it after its last checkpoint: "terminate called without an active exception", status 134.
    The thread is told to stop at exit, and waited for. 0.12.3 and main, with torch's C++ threads.
    """
    from fairseq.data import iterators

    consumers: weakref.WeakSet[Any] = weakref.WeakSet()
    stopping = threading.Event()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any) -> None:
            consumers.add(self)
            self._source = itertools.takewhile(lambda _: not stopping.is_set(), self._source)
            original(self)

        return run

    def stop() -> None:
        stopping.set()
        deadline = time.monotonic() + 10
        for consumer in list(consumers):
            while consumer.is_alive() and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    consumer._queue.get_nowait()  # makes room for a put that waits
                consumer.join(0.01)

    if not getattr(iterators.BackgroundConsumer.run, "_rope_fairseq_patch", False):
        atexit.register(stop)
    _replace(iterators.BackgroundConsumer, "run", make)


def guard_user_dir() -> None:
    """``--user-dir any/path/rope_fairseq`` with the package already imported from elsewhere (an
    installed copy): fairseq refuses any other path. The same version is the same plugin; another
    version would leave one of the two silently unused, so it is refused by name. 0.12.3 and main.
    """
    from fairseq import utils

    package = __name__.rpartition(".")[0]

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def import_user_module(args: Any) -> None:
            path = getattr(args, "user_dir", None)
            loaded = sys.modules.get(package)
            if path is not None and loaded is not None:
                path = os.path.abspath(path)
                if os.path.basename(path) == package and not _is_same_folder(path, loaded):
                    version = _version_at(path)
                    if version != __version__:
                        raise UserError(
                            f"--user-dir {path}: {package} {version or 'without a version'} there, "
                            f"but {__version__} is loaded from {loaded.__path__[0]}; "
                            "use one of them only"
                        )
                    return
            original(args)

        return import_user_module

    _replace(utils, "import_user_module", make)


def _is_same_folder(path: str, module: ModuleType) -> bool:
    return any(os.path.realpath(path) == os.path.realpath(known) for known in module.__path__)


def _version_at(path: str) -> str | None:
    """``__version__`` of a copy of this package, read without importing it."""
    try:
        with open(os.path.join(path, "version.py"), encoding="utf-8") as file:
            for line in file:
                if line.startswith("__version__"):
                    return line.partition("=")[2].strip().strip("\"'")
    except OSError:
        pass
    return None


def show_user_errors_in_one_line() -> None:
    """Errors that the user can mend leave fairseq's commands as one line, without the traceback,
    which says nothing to the user: a :class:`UserError`, a file that is missing or cannot be
    read, a checkpoint that is refused or does not fit the model. Exit status 1, as for any
    exception. Hydra prints half a traceback of its own unless it is told to let errors through.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    previous = sys.excepthook
    if getattr(previous, "_rope_fairseq_patch", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = _in_one_line(error)
        if line is None:
            previous(kind, error, trace)
        else:
            print(f"error: {line}", file=sys.stderr)

    hook._rope_fairseq_patch = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _in_one_line(error: BaseException) -> str | None:
    if isinstance(error, UserError | OSError):
        return describe(error)
    text = str(error)
    if isinstance(error, UnpicklingError) and "weights_only" in text:
        return refusal(error)
    if isinstance(error, RuntimeError) and "in loading state_dict" in text:
        first = " ".join(text.split("\n")[1:2]).strip()[:300]
        return f"the checkpoint does not fit the model or the dictionaries: {first}"
    return None
