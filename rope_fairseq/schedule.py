"""What a recipe makes of its config: the checkpoints that training keeps, the number of updates,
and batches of the same size whatever the number of devices.

Overrides are Hydra's, ``group.key=value``, as fairseq-hydra-train takes them.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rope_fairseq.errors import UserError

#: KEY=VALUE, with Hydra's + for a key that the config lacks and ++ for one that it may have.
OVERRIDE = re.compile(r"\+{0,2}(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)

MAX_TOKENS = "dataset.max_tokens"
UPDATE_FREQ = "optimization.update_freq"
MAX_UPDATE = "optimization.max_update"
WORLD_SIZE = "distributed_training.distributed_world_size"
INTERVAL = "checkpoint.save_interval_updates"


def override_key(override: str) -> str | None:
    """``group.key`` of an override, or None when it is none."""
    match = OVERRIDE.fullmatch(override)
    return match["key"] if match else None


def read_config(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a file of configs/ by ``group.key``, after overrides.

    Raises:
        UserError: it does not exist or is no mapping of groups.
    """
    try:
        groups = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"config {path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a YAML file ({error})") from None
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise UserError(f"{path}: expected groups of options, such as 'checkpoint:'")
    values = {f"{group}.{key}": groups[group][key] for group in groups for key in groups[group]}
    for override in overrides:
        match = OVERRIDE.fullmatch(override)
        if match is not None:
            try:
                values[match["key"]] = yaml.safe_load(match["value"])
            except yaml.YAMLError:
                values[match["key"]] = match["value"]  # Hydra's grammar is not YAML's
    return values


def _whole(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key, default)
    if type(value) is not int:
        raise UserError(f"{key}={value}: must be a whole number")
    return value


def kept_by_schedule(checkpoint_options: Mapping[str, Any], by: str) -> int | None:
    """How many checkpoints a run's options keep of the kind averaged ``by`` update or epoch.

    Args:
        checkpoint_options: fairseq's options of the group ``checkpoint``.

    Returns:
        0 if such checkpoints are not written at all, None if all of them stay.
    """
    if by == "update":
        written = _whole(checkpoint_options, "save_interval_updates", 0) > 0
        limit = _whole(checkpoint_options, "keep_interval_updates", -1)
    else:
        written = not checkpoint_options.get("no_epoch_checkpoints", False)
        limit = _whole(checkpoint_options, "keep_last_epochs", -1)
    if checkpoint_options.get("no_save", False) or not written:
        return 0
    # fairseq removes old ones only where the limit is above 0.
    return limit if limit > 0 else None


def check_save_schedule(path: Path, last: int, by: str, overrides: Sequence[str]) -> None:
    """Refuse a training that keeps fewer checkpoints than are averaged, before it starts.

    Args:
        path: the config.
        last, by: the checkpoints to average, as in a recipe.
        overrides: all that the training is given.

    Raises:
        UserError: there is no such config, or too few are kept.
    """
    values = read_config(path, overrides)
    group = "checkpoint."
    kept = kept_by_schedule(
        {key.removeprefix(group): values[key] for key in values if key.startswith(group)}, by
    )
    if kept is not None and kept < last:
        keys = {
            "update": "checkpoint.save_interval_updates and checkpoint.keep_interval_updates",
            "epoch": "checkpoint.no_epoch_checkpoints and checkpoint.keep_last_epochs",
        }
        raise UserError(
            f"{path}: keeps {kept} checkpoints by {by}, but the recipe averages {last}; "
            f"change {keys[by]}"
        )


def updates_overrides(values: Mapping[str, Any], updates: int, last: int, by: str) -> list[str]:
    """Overrides that end training after ``updates`` with as many checkpoints as are averaged.

    The distance between checkpoints stays the config's unless there would be too few of them; then
    it becomes as large as it can be.

    Args:
        values: the config, see :func:`read_config`.
        updates: ``--max-update``.
        last, by: the checkpoints to average.

    Raises:
        UserError: fewer updates than checkpoints to average.
    """
    overrides = [f"{MAX_UPDATE}={updates}"]
    interval = _whole(values, INTERVAL, 0)
    if by == "update" and interval > 0:
        if updates < last:
            raise UserError(
                f"--max-update {updates}: must be at least {last}, the number of checkpoints that "
                "the recipe averages"
            )
        if updates // interval < last:
            overrides.append(f"{INTERVAL}={updates // last}")
    return overrides


def batch_overrides(
    values: Mapping[str, Any],
    tokens_per_update: int,
    devices: int,
    max_tokens: int | None,
    overrides: Sequence[str],
) -> list[str]:
    """Overrides that keep the tokens of an update for this number of devices.

    Each device takes ``update_freq`` batches of at most ``max_tokens`` an update; as few batches as
    fit into memory, and all of the same limit, so that devices × update_freq × max_tokens is
    tokens_per_update, less the remainder of the division.

    Args:
        values: the config, see :func:`read_config`.
        tokens_per_update: tokens, padding included, of the longer side (fairseq counts so).
        devices: processes that train together.
        max_tokens: tokens that one device can hold in a batch; None for the config's.
        overrides: the user's, which may not set what is computed here.

    Raises:
        UserError: an override sets the batch or the number of devices; no limit is known; more
            devices than tokens.
    """
    for override in overrides:
        if override_key(override) in (MAX_TOKENS, UPDATE_FREQ):
            raise UserError(
                f"override {override}: is computed from the tokens of an update; say "
                "--tokens-per-update N for all devices together, --max-tokens N for one"
            )
        if override_key(override) == WORLD_SIZE:
            raise UserError(f"override {override}: say --devices N")
    if max_tokens is None:
        if MAX_TOKENS not in values:
            raise UserError(f"the config has no {MAX_TOKENS}: say --max-tokens N")
        max_tokens = _whole(values, MAX_TOKENS, 0)
    if max_tokens < 1:
        raise UserError(f"{MAX_TOKENS}={max_tokens}: must be at least 1")
    if devices > tokens_per_update:
        raise UserError(f"--devices {devices}: more than the {tokens_per_update} tokens per update")
    update_freq = -(-tokens_per_update // (devices * max_tokens))
    per_batch = tokens_per_update // (devices * update_freq)
    return [f"{MAX_TOKENS}={per_batch}", f"{UPDATE_FREQ}=[{update_freq}]"]
