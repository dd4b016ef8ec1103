"""rope_fairseq.schedule: checkpoints, updates and batches that a recipe makes of its config."""

from pathlib import Path

import pytest

from rope_fairseq.errors import UserError
from rope_fairseq.recipe import CONFIGS, RECIPES, load_recipe
from rope_fairseq.schedule import (
    batch_overrides,
    check_save_schedule,
    kept_by_schedule,
    override_key,
    read_config,
    updates_overrides,
)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("dataset.max_tokens=5", "dataset.max_tokens"),
        ("+model.x=", "model.x"),
        ("++model.x='a=b\nc'", "model.x"),
        ("hydra.run.dir=/a", "hydra.run.dir"),
        ("dataset.max_tokens", None),
        ("--lr=5", None),
        ("=5", None),
    ],
)
def test_the_key_of_an_override(override, key):
    assert override_key(override) == key


def test_a_config_is_read_with_its_overrides(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {dropout: 0.1}\ncheckpoint: {save_interval_updates: 5}\n")
    overrides = ["model.dropout=0", "+model.note=a: [", "hydra/job_logging=stdout"]
    assert read_config(path, overrides) == {
        "model.dropout": 0,
        "model.note": "a: [",  # no YAML, but Hydra may know what it is
        "checkpoint.save_interval_updates": 5,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("a: [1", "not a YAML file"),
        ("- a", "expected groups of options"),
        ("model: 3", "expected groups of options"),
        ("", "expected groups of options"),
    ],
)
def test_what_is_no_config_is_refused(content, message, tmp_path):
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=rf"c\.yaml: {message}"):
        read_config(path)


@pytest.mark.parametrize(
    ("options", "by", "kept"),
    [
        ({"save_interval_updates": 10, "keep_interval_updates": 3}, "update", 3),
        ({"save_interval_updates": 10, "keep_interval_updates": -1}, "update", None),
        ({"save_interval_updates": 10, "keep_interval_updates": 0}, "update", None),
        ({"save_interval_updates": 0, "keep_interval_updates": 3}, "update", 0),
        ({"keep_last_epochs": 4}, "epoch", 4),
        ({}, "epoch", None),
        ({"no_epoch_checkpoints": True}, "epoch", 0),
        ({"no_save": True}, "epoch", 0),
    ],
)
def test_the_number_that_a_save_schedule_keeps(options, by, kept):
    assert kept_by_schedule(options, by) == kept


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_keeps_the_checkpoints_that_it_averages(path: Path) -> None:
    recipe = load_recipe(path.stem)
    config = CONFIGS / f"{recipe.config}.yaml"
    last, by = recipe.average.last, recipe.average.by
    check_save_schedule(config, last, by, recipe.overrides)
    for keep in ("1", "x"):
        few = [f"checkpoint.keep_{name}={keep}" for name in ("interval_updates", "last_epochs")]
        with pytest.raises(UserError, match=f"keeps 1 checkpoints .* averages {last}|must be a wh"):
            check_save_schedule(config, last, by, few)


CONFIG = {"checkpoint.save_interval_updates": 100, "dataset.max_tokens": 3125}


@pytest.mark.parametrize(
    ("updates", "last", "by", "interval"),
    [
        (500, 5, "update", None),
        (1000, 5, "update", None),
        (499, 5, "update", 99),
        (20, 5, "update", 4),
        (5, 5, "update", 1),
        (3, 5, "epoch", None),
    ],
)
def test_fewer_updates_still_leave_the_checkpoints_to_average(updates, last, by, interval):
    expected = [f"optimization.max_update={updates}"]
    if interval is not None:
        expected.append(f"checkpoint.save_interval_updates={interval}")
        assert updates // interval >= last
    assert updates_overrides(CONFIG, updates, last, by) == expected


def test_fewer_updates_than_checkpoints_are_refused():
    with pytest.raises(UserError, match="--max-update 4: must be at least 5"):
        updates_overrides(CONFIG, 4, 5, "update")


@pytest.mark.parametrize(
    ("devices", "limit", "tokens", "update_freq"),
    [
        # WMT14: 25,000 tokens, 3,125 of them on a device.
        (1, None, 3125, 8),
        (2, None, 3125, 4),
        (3, None, 2777, 3),
        (8, None, 3125, 1),
        (16, None, 1562, 1),
        (8, 12500, 3125, 1),
        (1, 25000, 25000, 1),
        (1, 10000, 8333, 3),
        (25000, None, 1, 1),
    ],
)
def test_the_tokens_of_an_update_stay(devices, limit, tokens, update_freq):
    overrides = batch_overrides(CONFIG, 25000, devices, limit, ["model.dropout=0"])
    assert overrides == [
        f"dataset.max_tokens={tokens}",
        f"optimization.update_freq=[{update_freq}]",
    ]
    assert tokens <= (limit or 3125)
    # No more than the remainder of the division is lost.
    assert 0 <= 25000 - devices * tokens * update_freq < devices * update_freq


@pytest.mark.parametrize(
    ("config", "devices", "overrides", "message"),
    [
        (CONFIG, 1, ["dataset.max_tokens=5"], "override dataset.max_tokens=5: is computed"),
        (CONFIG, 1, ["++optimization.update_freq=[5]"], "say --tokens-per-update N"),
        (CONFIG, 2, ["distributed_training.distributed_world_size=4"], "say --devices N"),
        (CONFIG, 25001, [], "--devices 25001: more than the 25000 tokens"),
        ({}, 1, [], "the config has no dataset.max_tokens: say --max-tokens N"),
        ({"dataset.max_tokens": "4k"}, 1, [], "dataset.max_tokens=4k: must be a whole number"),
        ({"dataset.max_tokens": 0}, 1, [], "dataset.max_tokens=0: must be at least 1"),
    ],
)
def test_a_batch_that_cannot_be_computed_is_refused(config, devices, overrides, message):
    with pytest.raises(UserError, match=message):
        batch_overrides(config, 25000, devices, None, overrides)
