"""rope_fairseq.resume: a run goes on as if it had not been interrupted."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.file_io import PathManager
from omegaconf import OmegaConf

from rope_fairseq import resume

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")

BATCHES = 25


class Numbers(torch.utils.data.Dataset):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 1000


def iterator(devices: int, rank: int = 0, batches: int = BATCHES) -> Any:
    """An epoch of batches of one number each, dealt out to the devices."""
    sampler = [[number] for number in range(batches)]
    return EpochBatchIterator(
        Numbers(), collate_fn=list, batch_sampler=sampler, num_shards=devices, shard_id=rank
    )


def seen(itr: Any, update_freq: int, updates: int | None = None) -> list[int]:
    """The numbers in the next ``updates`` (None: until the epoch ends) of one device."""
    grouped = GroupedIterator(itr.next_epoch_itr(), update_freq)
    taken = [next(grouped) for _ in range(len(grouped) - grouped.n if updates is None else updates)]
    return [number for update in taken for batch in update for number in batch]


@pytest.mark.parametrize("before", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("after", [(1, 4), (2, 2), (4, 1)])
def test_other_devices_go_on_with_the_same_batches(before, after):
    """Two updates of four batches are made, then the rest of the epoch, whatever the devices."""
    parts, states = [], []
    for rank in range(before[0]):
        itr = iterator(before[0], rank)
        parts += seen(itr, before[1], 2)
        states.append(itr.state_dict())
    assert len(parts) == 8
    for rank in range(after[0]):
        itr = iterator(after[0], rank)
        itr.load_state_dict(states[0])
        parts += seen(itr, after[1])
    assert sorted(parts) == list(range(BATCHES))


@pytest.mark.parametrize(
    ("before", "position", "after", "expected"),
    [
        ((25, 1), 8, (25, 3), 2),  # two of the eight batches come again
        ((25, 3), 8, (25, 1), 24),
        ((25, 4), 6, (25, 1), 24),
        ((100, 1), 50, (50, 1), 25),  # batches of twice the size: half is half
        ((100, 8), 12, (33, 2), 15),
        ((25, 2), 5, (25, 2), 5),
    ],
)
def test_the_place_in_the_epoch_is_converted(before, position, after, expected):
    itr = iterator(after[1], batches=after[0])
    state = {"version": 2, "epoch": 3, "iterations_in_epoch": position, "shuffle": True}
    itr.load_state_dict(state | {"num_batches": before[0], "num_shards": before[1]})
    assert (itr.iterations_in_epoch, itr.epoch) == (expected, 3)


def test_the_place_in_a_checkpoint_of_stock_fairseq_stays():
    itr = iterator(1)
    itr.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": 7, "shuffle": True})
    assert itr.iterations_in_epoch == 7


class Saver:
    """What save_checkpoint asks of a trainer; files hold the state of the data iterator."""

    data_parallel_rank = 0
    checkpoint_suffix = ""
    should_save_checkpoint_on_current_rank = True
    task = SimpleNamespace()

    def __init__(self) -> None:
        self.updates = 0

    def get_num_updates(self) -> int:
        return self.updates

    def consolidate_optimizer(self) -> None:
        pass

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> None:
        torch.save(extra_state, filename)


def saved(folder: Path, **options: Any) -> dict[int, dict[str, Any]]:
    """The state in checkpoint_E_U.pt by U, after 12 updates in epochs of 6 that call
    save_checkpoint as fairseq-train does: every two updates and where an epoch ends."""
    settings = {"save_dir": str(folder), "save_interval_updates": 2, "no_epoch_checkpoints": True}
    cfg = OmegaConf.structured(CheckpointConfig(**settings | options))
    trainer, itr = Saver(), iterator(1, batches=6)
    for _ in range(2):
        for _ in itr.next_epoch_itr():
            trainer.updates += 1
            if trainer.updates % 2 == 0 or itr.end_of_epoch():
                checkpoint_utils.save_checkpoint(cfg, trainer, itr, None)
    numbers = {
        int(match[1]): torch.load(path)["train_iterator"]
        for path in folder.iterdir()
        if (match := re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name))
    }
    return dict(sorted(numbers.items()))


def test_a_checkpoint_is_written_at_every_interval(tmp_path):
    states = saved(tmp_path)
    assert list(states) == [2, 4, 6, 8, 10, 12]
    # One resumes at the beginning of the next epoch.
    place = {number: (s["epoch"], s["iterations_in_epoch"]) for number, s in states.items()}
    assert place == {2: (1, 2), 4: (1, 4), 6: (2, 0), 8: (2, 2), 10: (2, 4), 12: (3, 0)}
    assert torch.load(tmp_path / "checkpoint_last.pt")["train_iterator"]["epoch"] == 3


def test_old_checkpoints_are_removed_there_too(tmp_path):
    assert list(saved(tmp_path, keep_interval_updates=3)) == [8, 10, 12]


def test_no_checkpoint_is_written_between_intervals(tmp_path):
    assert list(saved(tmp_path, save_interval_updates=4)) == [4, 8, 12]


def test_with_checkpoints_by_epoch_fairseq_does_as_ever(tmp_path):
    assert list(saved(tmp_path, no_epoch_checkpoints=False)) == [2, 4, 8, 10]
    assert {path.name for path in tmp_path.glob("checkpoint?.pt")} == {
        "checkpoint1.pt",
        "checkpoint2.pt",
    }


def load(monkeypatch, saved, updates, *, patience=-1, max_update=0, hours=0.0, **checkpoint):
    """fairseq's load_checkpoint, patched, around a trainer that resumes at ``updates`` after two
    hours of training."""
    state = SimpleNamespace()
    monkeypatch.setattr(resume, "early_stopping", lambda: state)
    limits = SimpleNamespace(max_update=max_update, stop_time_hours=hours)
    trainer = SimpleNamespace(
        get_num_updates=lambda: updates,
        cumulative_training_time=lambda: 7200.0,
        cfg=SimpleNamespace(optimization=limits),
    )

    def original(cfg, trainer):
        return saved, SimpleNamespace(next_epoch_idx=3)

    settings = {"reset_meters": False, "restore_file": "checkpoint_last.pt", **checkpoint}
    cfg = SimpleNamespace(patience=patience, **settings)
    _, itr = resume.restore_early_stopping(original)(cfg, trainer)
    return state, itr.next_epoch_idx


def test_early_stopping_goes_on_where_it_was(monkeypatch):
    saved = {"early_stopping": {"best": 4.5, "num_runs": 2}}
    state, epoch = load(monkeypatch, saved, 100, patience=3)
    assert (state.best, state.num_runs, epoch) == (4.5, 2, 3)


def test_a_run_out_of_patience_or_at_its_last_update_trains_no_further(monkeypatch):
    saved = {"early_stopping": {"best": 4.5, "num_runs": 3}}
    assert load(monkeypatch, saved, 100, patience=3)[1] != 3
    assert load(monkeypatch, saved, 100, patience=4)[1] == 3
    assert load(monkeypatch, saved, 100)[1] == 3
    assert load(monkeypatch, saved, 100, max_update=100)[1] != 3
    assert load(monkeypatch, saved, 100, max_update=101)[1] == 3
    assert load(monkeypatch, saved, 100, hours=1.9)[1] != 3
    assert load(monkeypatch, saved, 100, hours=2.1)[1] == 3


def test_a_checkpoint_named_by_the_user_is_a_start_not_an_end(monkeypatch):
    saved = {"early_stopping": {"best": 4.5, "num_runs": 3}}
    assert load(monkeypatch, saved, 100, max_update=100, restore_file="other.pt")[1] == 3


def test_fine_tuning_and_reset_meters_start_their_own_count(monkeypatch):
    saved = {"early_stopping": {"best": 4.5, "num_runs": 3}}
    state, epoch = load(monkeypatch, saved, 0, patience=3)
    assert not vars(state) and epoch == 3
    state, epoch = load(monkeypatch, saved, 100, patience=3, reset_meters=True)
    assert not vars(state) and epoch == 3


def test_a_checkpoint_of_stock_fairseq_resumes(monkeypatch):
    state, epoch = load(monkeypatch, {}, 100, patience=3)
    assert not vars(state) and epoch == 3


def test_a_checkpoint_for_which_the_disk_has_no_room_is_named_and_leaves_nothing(tmp_path):
    path = tmp_path / "checkpoint_1_2.pt"
    (tmp_path / "checkpoint_1_2.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError) as error:
        checkpoint_utils.torch_persistent_save({"model": torch.zeros(1_000_000)}, str(path))
    assert (error.value.filename, error.value.strerror) == (str(path), "No space left on device")
    assert not list(tmp_path.iterdir())

    checkpoint_utils.torch_persistent_save({"model": torch.ones(3)}, str(path))
    (tmp_path / "checkpoint_last.pt.tmp").symlink_to("/dev/full")
    last = str(tmp_path / "checkpoint_last.pt")
    with pytest.raises(OSError) as error:
        PathManager.copy(str(path), last, overwrite=True)
    assert error.value.filename == last
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    PathManager.copy(str(path), last, overwrite=True)
    assert torch.load(last)["model"].tolist() == [1, 1, 1]
