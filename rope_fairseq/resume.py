"""Checkpoints from which a run goes on as if it had not been interrupted, and which lie evenly.

Each function takes a function of fairseq and returns the one that ``rope_fairseq.compat`` puts in
its place; the reasons are stated there.
"""

import importlib
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rope_fairseq.errors import UserError

logger = logging.getLogger(__name__)


def training_module() -> Any | None:
    """The module of fairseq-train, if it is loaded; with ``python -m fairseq_cli.train`` it is
    ``__main__``."""
    main: Any = sys.modules.get("__main__")
    if hasattr(main, "should_stop_early") and hasattr(main, "validate_and_save"):
        return main
    return sys.modules.get("fairseq_cli.train")


def early_stopping() -> Any:
    """The function whose attributes ``best`` and ``num_runs`` are fairseq's early stopping."""
    module: Any = training_module() or importlib.import_module("fairseq_cli.train")
    return module.should_stop_early


def keep_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    """``FairseqTask.get_batch_iterator`` whose batches are always those of a start in epoch 1."""

    def get_batch_iterator(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        epoch = kwargs.get("epoch", 1)
        made_once = (
            self.can_reuse_epoch_itr(dataset)
            and not kwargs.get("disable_iterator_cache", False)
            and not kwargs.get("update_epoch_batch_itr", False)
            and not getattr(self.cfg, "rebuild_batches", False)
        )
        if epoch == 1 or not made_once or dataset in self.dataset_to_epoch_iter:
            return original(self, dataset, *args, **kwargs)
        iterator = original(self, dataset, *args, **{**kwargs, "epoch": 1})
        dataset.set_epoch(epoch)
        iterator.epoch = epoch
        return iterator

    return get_batch_iterator


def store_position(original: Callable[..., Any]) -> Callable[..., Any]:
    """``EpochBatchIterator.state_dict`` that says of how many batches the epoch consists, and among
    how many devices they are dealt out."""

    def state_dict(self: Any) -> dict[str, Any]:
        counts = {"num_batches": len(self.frozen_batches), "num_shards": self.num_shards}
        return original(self) | counts

    return state_dict


def restore_position(original: Callable[..., Any]) -> Callable[..., Any]:
    """``EpochBatchIterator.load_state_dict`` that finds the place in the epoch again when devices
    or batches are others than before. It is the same place where the batches are the same and the
    devices divide those that were seen; else it lies up to a batch a device before it, or as far
    into the epoch by number of batches."""

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        position = state.get("iterations_in_epoch", 0)
        old = state.get("num_batches"), state.get("num_shards")
        new = len(self.frozen_batches), self.num_shards
        if position > 0 and None not in old and old != new:
            moved = position * old[1] * new[0] // (old[0] * new[1])
            logger.info(
                "epoch of %d batches on %d devices instead of %d on %d: going on at batch %d of "
                "each device instead of %d",
                *(*new, *old, moved, position),
            )
            state = {**state, "iterations_in_epoch": moved}
        original(self, state)

    return load_state_dict


def copy_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """``PathManager.copy`` that replaces the target when the copy is complete."""
    from fairseq.file_io import PathManager

    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if PathManager.path_requires_pathmanager(dst_path):
            return original(src_path, dst_path, overwrite=overwrite)
        temporary = f"{dst_path}.tmp"
        try:
            copied = original(src_path, temporary, overwrite=True)
            os.replace(temporary, dst_path)
        except OSError as error:
            raise _not_written(dst_path, error) from error
        return copied

    return copy


def save_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """``checkpoint_utils.torch_persistent_save`` that leaves nothing behind when the disk is full,
    and says which file it was."""

    def torch_persistent_save(obj: Any, filename: str, async_write: bool = False) -> None:
        try:
            original(obj, filename, async_write)
        except (OSError, RuntimeError) as error:
            # torch raises a RuntimeError of its own while it handles that of the system.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise _not_written(filename, cause) from error

    return torch_persistent_save


def _not_written(filename: str, error: OSError) -> OSError:
    """The same error with the checkpoint's name; its temporary file is removed."""
    Path(f"{filename}.tmp").unlink(missing_ok=True)
    return OSError(error.errno, error.strerror, filename)


class _InsideEpoch:
    """An epoch iterator that does not tell save_checkpoint that its epoch has ended."""

    def __init__(self, epoch_itr: Any) -> None:
        self._epoch_itr = epoch_itr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoch_itr, name)

    def end_of_epoch(self) -> bool:
        return False


def save_at_every_interval(original: Callable[..., Any]) -> Callable[..., Any]:
    """``checkpoint_utils.save_checkpoint`` that writes checkpoint_E_U.pt at the end of an epoch
    too, and removes old ones there."""

    def save_checkpoint(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
        updates = trainer.get_num_updates()
        interval = cfg.save_interval_updates
        due = interval > 0 and updates > 0 and updates % interval == 0
        if due and cfg.no_epoch_checkpoints and epoch_itr.end_of_epoch():
            epoch_itr = _InsideEpoch(epoch_itr)
        return original(cfg, trainer, epoch_itr, val_loss)

    return save_checkpoint


def store_early_stopping(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.save_checkpoint`` with the state of early stopping."""

    def save_checkpoint(self: Any, filename: str, extra_state: dict[str, Any]) -> Any:
        state = early_stopping()
        extra_state["early_stopping"] = {
            "best": getattr(state, "best", None),
            "num_runs": getattr(state, "num_runs", 0),
        }
        return original(self, filename, extra_state)

    return save_checkpoint


def load_in_each_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.load_checkpoint`` as with ``--load-checkpoint-on-all-dp-ranks``."""

    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = self.cfg.checkpoint
        asked = options.load_checkpoint_on_all_dp_ranks
        options.load_checkpoint_on_all_dp_ranks = True
        try:
            return original(self, *args, **kwargs)
        finally:
            options.load_checkpoint_on_all_dp_ranks = asked

    return load_checkpoint


def restore_early_stopping(original: Callable[..., Any]) -> Callable[..., Any]:
    """``checkpoint_utils.load_checkpoint`` that restores it, and ends a run that is complete."""

    def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> tuple[Any, Any]:
        try:
            extra_state, epoch_itr = original(cfg, trainer, **kwargs)
        except UserError as error:
            raise UserError(f"{error}{_way_out(cfg)}") from error
        updates = trainer.get_num_updates()
        # Fine-tuning starts at update 0 and with its own count; so does --reset-meters.
        resumed = extra_state is not None and updates > 0 and not cfg.reset_meters
        saved = extra_state.get("early_stopping") if resumed else None
        if saved is not None and saved["best"] is not None:
            state = early_stopping()
            state.best, state.num_runs = saved["best"], saved["num_runs"]
        # A checkpoint named by --restore-file is a start for whatever the user wants next.
        own = extra_state is not None and cfg.restore_file == "checkpoint_last.pt"
        reason = _why_complete(trainer, cfg.patience, saved) if own else None
        if reason is not None:
            logger.info("training is complete at %d updates: %s", updates, reason)
            # fairseq trains while next_epoch_idx <= --max-epoch, which may be infinite.
            epoch_itr = SimpleNamespace(next_epoch_idx=math.nan)
        return extra_state, epoch_itr

    return load_checkpoint


def _way_out(cfg: Any) -> str:
    """How to go on without a checkpoint_last.pt that is damaged, after a semicolon."""
    if cfg.restore_file != "checkpoint_last.pt":
        return ""
    last = Path(cfg.save_dir) / cfg.restore_file
    others = [path for path in last.parent.glob("checkpoint*.pt") if path != last]
    if not others:
        return f"; remove it to train anew: rm {last}"
    newest = max(others, key=lambda path: path.stat().st_mtime)
    return f"; go on from the one before: cp {newest} {last}"


def _why_complete(trainer: Any, patience: int, saved: dict[str, Any] | None) -> str | None:
    """Why a run that is started again has nothing left to do, or None."""
    limits = trainer.cfg.optimization
    if trainer.get_num_updates() >= (limits.max_update or math.inf):
        return "--max-update is reached"
    if 0 < limits.stop_time_hours * 3600 < trainer.cumulative_training_time():
        return "--stop-time-hours is reached"
    if saved is not None and 0 < patience <= saved["num_runs"]:
        return "out of patience"
    return None
