"""Averaging: which checkpoints, which numbers, what is kept, and what is refused."""

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from rope_fairseq import manifest
from rope_fairseq.average import (
    average_checkpoints,
    main,
    select_checkpoints,
)
from rope_fairseq.checkpoint import load_checkpoint
from rope_fairseq.errors import UserError
from tests.tiny import (
    BESIDE_THE_DATA,
    CHECKPOINTS,
    ROOT,
    UPDATES,
    CallsAFunction,
    call,
    python,
    run,
    scripts,
    tiny_work,
    train_options,
)


def checkpoint(path: Path, model: dict | None = None, updates: int = 1, **options) -> Path:
    """Write what fairseq-train writes, in small."""
    state = {
        "cfg": {
            "model": argparse.Namespace(arch="rope_transformer", dropout=0.1, **options),
            "checkpoint": {"save_interval_updates": 10, "keep_interval_updates": 3},
        },
        "model": {"weight": torch.ones(2, 3)} if model is None else model,
        "optimizer_history": [{"num_updates": updates}],
        "last_optimizer_state": {"state": {0: torch.zeros(100)}},
        "extra_state": {"train_iterator": {"epoch": 1}, "val_loss": 2.0},
    }
    torch.save(state, path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as fairseq-train leaves it; names in another order than numbers."""
    for name in ("1_900", "1_1000", "2_1100"):
        checkpoint(tmp_path / f"checkpoint_{name}.pt", updates=int(name[2:]))
    for epoch in (8, 9, 10):
        checkpoint(tmp_path / f"checkpoint{epoch}.pt", updates=epoch * 100)
    for name in ("_last", "_best", ".best_loss_1.0"):
        checkpoint(tmp_path / f"checkpoint{name}.pt")
    return tmp_path


@pytest.mark.parametrize(
    ("by", "last", "names"),
    [
        ("update", 2, ["checkpoint_1_1000.pt", "checkpoint_2_1100.pt"]),
        ("update", 3, ["checkpoint_1_900.pt", "checkpoint_1_1000.pt", "checkpoint_2_1100.pt"]),
        ("epoch", 2, ["checkpoint9.pt", "checkpoint10.pt"]),
        ("epoch", 1, ["checkpoint10.pt"]),
    ],
)
def test_the_last_checkpoints_are_chosen_by_number(folder, by, last, names):
    assert [path.name for path in select_checkpoints([folder], last, by)] == names
    assert select_checkpoints(list(folder.iterdir()), last, by) == [folder / n for n in names]


def test_fewer_checkpoints_than_asked_are_refused_with_the_option_that_keeps_more(folder):
    with pytest.raises(UserError, match="3 checkpoints named checkpoint_EPOCH_UPDATE.pt") as error:
        select_checkpoints([folder], 5, "update")
    assert "--keep-interval-updates 3" in str(error.value)
    with pytest.raises(UserError, match="3 checkpoints named checkpointEPOCH.pt.*--keep-last-ep"):
        select_checkpoints([folder], 4, "epoch")


def test_a_folder_without_checkpoints_and_last_0_are_refused(tmp_path):
    with pytest.raises(UserError, match="0 checkpoints named .*--save-interval-updates"):
        select_checkpoints([tmp_path], 1, "update")
    with pytest.raises(UserError, match="--last 0: must be at least 1"):
        select_checkpoints([tmp_path], 0, "update")


def test_two_checkpoints_of_one_update_are_refused(folder):
    checkpoint(folder / "checkpoint_7_1000.pt")
    with pytest.raises(UserError, match="both of update 1000"):
        select_checkpoints([folder], 2, "update")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_mean_is_taken_in_higher_precision_and_has_the_stored_dtype(tmp_path, dtype):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(50, 7, generator=generator).to(dtype) for _ in range(5)]
    paths = [checkpoint(tmp_path / f"{i}.pt", {"w": value}) for i, value in enumerate(values)]
    mean = average_checkpoints(paths)["model"]["w"]
    assert mean.dtype == dtype
    assert torch.equal(mean, torch.stack([v.double() for v in values]).mean(0).to(dtype))


def test_half_precision_sums_do_not_overflow(tmp_path):
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    paths = [checkpoint(tmp_path / f"{i}.pt", {"w": large}) for i in range(5)]
    assert torch.equal(average_checkpoints(paths)["model"]["w"], large)


def test_integer_buffers_are_the_last_checkpoints(tmp_path):
    paths = [
        checkpoint(tmp_path / f"{i}.pt", {"n": torch.tensor([i]), "flag": torch.tensor(i == 2)})
        for i in range(3)
    ]
    model = average_checkpoints(paths)["model"]
    assert model["n"].item() == 2 and model["flag"].item() is True


def test_tied_parameters_stay_tied_and_views_of_one_tensor_stay_right(tmp_path):
    paths = []
    for i in range(2):
        base = torch.arange(6.0).reshape(2, 3) + i
        tied = {"embed": base, "out": base, "row": base[1], "transposed": base.T}
        paths.append(checkpoint(tmp_path / f"{i}.pt", tied))
    torch.save(average_checkpoints(paths), tmp_path / "mean.pt")
    model = load_checkpoint(tmp_path / "mean.pt")["model"]
    expected = torch.arange(6.0).reshape(2, 3) + 0.5
    assert model["embed"].data_ptr() == model["out"].data_ptr()
    for name, value in {
        "embed": expected,
        "out": expected,
        "row": expected[1],
        "transposed": expected.T,
    }.items():
        assert torch.equal(model[name], value), name


def test_only_the_optimizer_state_is_dropped_and_the_origin_is_recorded(tmp_path):
    paths = [checkpoint(tmp_path / f"checkpoint{u}.pt", updates=u) for u in (10, 20)]
    result = average_checkpoints(paths)
    last = load_checkpoint(paths[-1])
    assert result.keys() == last.keys() - {"last_optimizer_state"}
    assert result["optimizer_history"] == [{"num_updates": 20}]
    assert result["extra_state"].pop("averaged_from") == [
        {"file": "checkpoint10.pt", "updates": 10},
        {"file": "checkpoint20.pt", "updates": 20},
    ]
    assert result["extra_state"] == last["extra_state"]


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, {}, "bias is float32 [3]"),
        ({"zeta": torch.ones(1)}, {}, "weight is missing, but float32 [2, 3] in"),
        ({"weight": torch.ones(3, 2)}, {}, "weight is float32 [3, 2], but float32 [2, 3] in"),
        ({"weight": torch.ones(2, 3).half()}, {}, "weight is float16 [2, 3]"),
        (None, {"rope_base": 5.0}, "rope_base is 5.0"),
        (None, {"encoder_attention_heads": 8}, "encoder_attention_heads is 8"),
        (None, {"attention_kind": "linear"}, "attention_kind is 'linear', but 'softmax' in"),
        (None, {"linear_feature_map": "favor"}, "linear_feature_map is 'favor', but 'elu' in"),
        (None, {"linear_features": 8}, "linear_features is 8, but None in"),
    ],
)
def test_checkpoints_of_another_model_are_refused_by_file_and_difference(
    tmp_path, model, options, says
):
    first = checkpoint(tmp_path / "first.pt")
    second = checkpoint(tmp_path / "second.pt", model, **options)
    with pytest.raises(UserError) as error:
        average_checkpoints([first, second])
    assert str(error.value).startswith(f"{second}: {says}")


def test_random_features_of_two_runs_are_not_averaged(tmp_path):
    name = "encoder.layers.0.self_attn.feature_map.projection"
    paths = []
    for number, value in enumerate((1.0, 1.0, 2.0)):
        model = {name: torch.full((4, 2), value), "weight": torch.full((2,), float(number))}
        paths.append(checkpoint(tmp_path / f"{number}.pt", model))
    assert average_checkpoints(paths[:2])["model"]["weight"].tolist() == [0.5, 0.5]
    with pytest.raises(UserError, match=f"2.pt: {name} differs from that in .*0.pt: not"):
        average_checkpoints(paths)


@pytest.mark.parametrize("value, same", [(32, True), (16, False)])
def test_an_option_that_an_older_version_did_not_have_was_at_its_default(tmp_path, value, same):
    older = checkpoint(tmp_path / "older.pt")
    newer = checkpoint(tmp_path / "newer.pt", relative_buckets=value)
    if same:
        average_checkpoints([older, newer])
    else:
        with pytest.raises(UserError, match="relative_buckets is 16, but 32 in"):
            average_checkpoints([older, newer])


def test_another_dropout_is_still_the_same_model(tmp_path):
    paths = [
        checkpoint(tmp_path / f"{i}.pt", encoder_layerdrop=rate) for i, rate in enumerate((0, 0.2))
    ]
    assert torch.equal(average_checkpoints(paths)["model"]["weight"], torch.ones(2, 3))


@pytest.mark.parametrize("zip_format", [True, False])
def test_a_checkpoint_that_calls_a_function_is_refused_and_nothing_runs(
    tmp_path, capsys, zip_format
):
    trace = tmp_path / "it-ran"
    path = tmp_path / "checkpoint1.pt"
    torch.save(
        {"model": {}, "extra_state": CallsAFunction(trace)},
        path,
        _use_new_zipfile_serialization=zip_format,
    )
    assert call(main, "--inputs", path, "--output", tmp_path / "averaged.pt") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: not a checkpoint that can be loaded safely")
    assert "mknod" in error and error.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint1.pt"]


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("zip_format", [True, False])
def test_a_truncated_checkpoint_is_refused_and_the_old_output_stays(
    tmp_path, capsys, kept, zip_format
):
    path = tmp_path / "checkpoint1.pt"
    torch.save(
        {"model": {"w": torch.ones(99, 99)}}, path, _use_new_zipfile_serialization=zip_format
    )
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    output = tmp_path / "averaged.pt"
    output.write_text("old")
    assert call(main, "--inputs", path, "--output", output) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: not a checkpoint") and error.count("\n") == 1
    assert output.read_text() == "old" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", [b"text\n", b"", b"PK\x03\x04"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, capsys, content):
    path = tmp_path / "checkpoint1.pt"
    path.write_bytes(content)
    assert call(main, "--inputs", path, "--output", tmp_path / "averaged.pt") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: not a checkpoint") and error.count("\n") == 1


def test_a_checkpoint_without_a_model_is_refused(tmp_path):
    torch.save({"weights": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="a.pt: not a fairseq checkpoint"):
        load_checkpoint(tmp_path / "a.pt")


def test_missing_files_and_folders_are_named(tmp_path, capsys):
    output = ("--output", tmp_path / "averaged.pt")
    missing = tmp_path / "missing"
    for inputs in ([missing], [missing, "--last", "2"]):
        assert call(main, "--inputs", *inputs, *output) == 2
        assert capsys.readouterr().err == f"error: {missing}: No such file or directory\n"
    assert call(main, "--inputs", tmp_path, *output) == 2
    assert "a folder needs --last N" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_averaging(tmp_path, capsys):
    path = checkpoint(tmp_path / "checkpoint1.pt")
    for output, reason in (
        (path / "averaged.pt", "Not a directory"),
        (tmp_path / "no" / "averaged.pt", "No such file or directory"),
        (tmp_path, "is a folder; name a file to write"),
    ):
        assert call(main, "--inputs", path, "--output", output) == 2
        assert capsys.readouterr().err == f"error: {output}: {reason}\n"


def test_averaging_a_real_run_gives_the_mean_and_loads_into_fairseq():
    work = tiny_work()
    paths = select_checkpoints([work / "checkpoints"], CHECKPOINTS, "update")
    states = [load_checkpoint(path)["model"] for path in paths]
    averaged = load_checkpoint(work / "model" / "averaged.pt")
    assert averaged["extra_state"]["averaged_from"][-1]["updates"] == UPDATES

    path = str(work / "model" / "averaged.pt")
    settings = {"data": str(work / "model"), "source_lang": "en", "target_lang": "de"}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], settings)
    loaded = model.state_dict()
    assert loaded.keys() == states[0].keys()
    for name, value in loaded.items():
        mean = torch.stack([state[name].double() for state in states]).mean(0).to(value.dtype)
        assert torch.equal(value, mean), name


def test_an_averaged_checkpoint_starts_another_training(tmp_path):
    work = tiny_work()
    trained = python(
        "fairseq_cli.train",
        *train_options(work),
        *("--max-update", "1", "--save-dir", tmp_path, "--save-interval-updates", "1"),
        *("--finetune-from-model", work / "model" / "averaged.pt"),
    )
    assert trained.returncode == 0, trained.stderr
    assert "loading pretrained model from" in trained.stdout
    assert (tmp_path / "checkpoint_1_1.pt").is_file()


@pytest.fixture
def trained(tmp_path) -> Path:
    """A work folder of the recipe demo after training."""
    for name in ("checkpoints", "data-bin"):
        shutil.copytree(tiny_work() / name, tmp_path / "work" / name)
    work = tmp_path / "work"
    (work / "data.json").write_text("{}")
    outputs = [work / "checkpoints"]
    manifest.write(work / "manifests" / "train.json", [work / "data-bin"], {}, outputs)
    return work


def test_average_sh_makes_a_model_folder_and_knows_when_it_is_done(trained):
    script = (ROOT / "scripts" / "average.sh", "demo", "--work", trained)
    done = run(*script, env=scripts())
    assert done.returncode == 0, done.stderr
    names = ["averaged.pt", "data.json", "dict.de.txt", "dict.en.txt", *BESIDE_THE_DATA]
    names.append("train.json")
    assert sorted(file.name for file in (trained / "model").iterdir()) == names
    expected = load_checkpoint(tiny_work() / "model" / "averaged.pt")["model"]
    averaged = load_checkpoint(trained / "model" / "averaged.pt")["model"]
    assert all(torch.equal(averaged[name], value) for name, value in expected.items())

    assert run(*script, env=scripts()).stdout == "average: up to date\n"
    for path in sorted((trained / "checkpoints").glob("checkpoint_*_*.pt"))[:2]:
        path.unlink()
    again = run(*script, env=scripts())
    assert again.returncode == 2
    assert "4 checkpoints named checkpoint_EPOCH_UPDATE.pt, fewer than --last 5" in again.stderr


def test_average_sh_refuses_data_that_the_model_was_not_trained_on(trained):
    dictionary = trained / "data-bin" / "dict.de.txt"
    dictionary.write_text(dictionary.read_text() + "new 1\n")
    done = run(ROOT / "scripts" / "average.sh", "demo", "--work", trained, env=scripts())
    assert done.returncode == 2
    assert f"error: {dictionary} is not what the step train ran on" in done.stderr
    assert not (trained / "model").exists()


def test_average_sh_refuses_a_run_that_was_not_trained_in_one_line(tmp_path):
    done = run(ROOT / "scripts" / "average.sh", "demo", "--work", tmp_path / "w")
    assert done.returncode == 2
    errors = [line for line in done.stderr.split("\n") if line.startswith("error: ")]
    assert errors == [
        f"error: {tmp_path}/w: the step train is not finished there; run its script first"
    ]
