"""Each patch of fairseq at work, on fairseq's own functions."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import data_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from fairseq_cli import train

import rope_fairseq
from rope_fairseq import compat
from rope_fairseq.errors import UserError
from tests import tiny
from tests.tiny import UPDATES, tiny_work, train_options


def test_applying_the_patches_again_changes_nothing():
    names = [
        (data_utils, "batch_by_size"),
        (PathManager, "copy"),
        (FairseqTask, "get_batch_iterator"),
        (EpochBatchIterator, "state_dict"),
        (EpochBatchIterator, "load_state_dict"),
        (Trainer, "save_checkpoint"),
        (checkpoint_utils, "save_checkpoint"),
        (checkpoint_utils, "load_checkpoint"),
        (distributed_utils, "call_main"),
        (train, "add_defaults"),
        (utils, "import_user_module"),
        (sys, "excepthook"),
    ]
    compat.apply()  # some wait for the training command to be imported, as it is here
    before = [getattr(owner, name) for owner, name in names]
    assert all(function._rope_fairseq_patch for function in before)
    compat.apply()
    assert [getattr(owner, name) for owner, name in names] == before


def test_checkpoints_with_a_namespace_load_and_those_that_run_code_do_not(tmp_path):
    good = tmp_path / "good.pt"
    torch.save({"args": argparse.Namespace(lr=[0.1])}, good)
    assert torch.load(good)["args"].lr == [0.1]

    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    bad = tmp_path / "bad.pt"
    torch.save({"args": Bad()}, bad)
    with pytest.raises(Exception, match=r"mkdir"):
        torch.load(bad)
    assert not (tmp_path / "executed").exists()


def test_checkpoints_with_the_counts_of_bleu_load(tmp_path):
    path = tmp_path / "bleu.pt"
    counts = {"_bleu_counts": np.array([3, 2, 1, 0]), "lr": np.array([0.5], dtype=np.float32)}
    torch.save(counts, path)
    loaded = torch.load(path)
    assert loaded["_bleu_counts"].tolist() == [3, 2, 1, 0]
    assert loaded["lr"].dtype == np.float32


def test_option_strings_are_data_and_never_run(tmp_path):
    assert utils.eval_str_list("[1, 2]", type=int) == [1, 2]
    assert utils.eval_str_list("0.5") == [0.5]
    assert utils.eval_str_list([1, 2]) == [1.0, 2.0]
    assert utils.eval_str_list(None) is None
    assert utils.eval_str_dict("{'a': 1}") == {"a": 1}
    assert utils.eval_bool("True") and not utils.eval_bool("0") and not utils.eval_bool(None)
    target = tmp_path / "executed"
    code = f"__import__('os').mkdir({str(target)!r})"
    for function in (utils.eval_str_list, utils.eval_str_dict, utils.eval_bool):
        with pytest.raises(UserError, match="must be a Python literal"):
            function(code)
    assert not target.exists()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 296, 300, 3003])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("lengths_as", ["function", "vector"])
def test_no_sentence_is_lost_whatever_the_batch_multiple(count, multiple, lengths_as):
    lengths = np.random.RandomState(count).randint(1, 40, count).astype(np.int64)
    order = np.argsort(lengths, kind="stable")
    batches = data_utils.batch_by_size(
        order,
        lambda index: lengths[index],
        num_tokens_vec=lengths[order] if lengths_as == "vector" else None,
        max_tokens=400,
        required_batch_size_multiple=multiple,
    )
    assert np.concatenate(batches).tolist() == order.tolist()
    assert max(len(b) * lengths[b].max() for b in batches) <= 400


def test_an_empty_set_makes_no_batch():
    assert data_utils.batch_by_size([], lambda index: 1, max_tokens=10) == []


def test_checkpoints_are_copied_whole_or_not_at_all(tmp_path, monkeypatch):
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    source.write_bytes(b"new")
    target.write_bytes(b"old")

    def interrupted(src, dst):
        Path(dst).write_bytes(b"n")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"old"
    assert PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"new"


def copy_of_the_plugin(folder: Path, version: str) -> Path:
    path = folder / "rope_fairseq"
    path.mkdir()
    (path / "version.py").write_text(f'__version__ = "{version}"\n')
    return path


def test_another_copy_of_the_same_version_is_the_same_plugin(tmp_path):
    path = copy_of_the_plugin(tmp_path, rope_fairseq.__version__)
    utils.import_user_module(argparse.Namespace(user_dir=str(path)))
    assert sys.modules["rope_fairseq"] is rope_fairseq


def test_another_version_is_refused_by_name(tmp_path):
    path = copy_of_the_plugin(tmp_path, "0.0.1")
    with pytest.raises(UserError, match=r"0\.0\.1 there, but .* is loaded from"):
        utils.import_user_module(argparse.Namespace(user_dir=str(path)))


def test_other_user_dirs_are_left_to_fairseq(tmp_path):
    (tmp_path / "some_plugin").mkdir()
    (tmp_path / "some_plugin" / "__init__.py").write_text("loaded = True\n")
    utils.import_user_module(argparse.Namespace(user_dir=str(tmp_path / "some_plugin")))
    assert sys.modules["some_plugin"].loaded
    with pytest.raises(FileNotFoundError):
        utils.import_user_module(argparse.Namespace(user_dir=str(tmp_path / "nowhere")))


def python(code: str) -> subprocess.CompletedProcess:
    """Run code in a process of its own, or by fork where it begins with ``import rope_fairseq``."""
    return tiny.run(tiny.interpreter(), "-c", code)


def test_a_second_registration_is_refused():
    code = (
        "import sys, rope_fairseq, importlib\n"
        "del sys.modules['rope_fairseq.models.rope_transformer']\n"
        "importlib.import_module('rope_fairseq.models.rope_transformer')\n"
    )
    result = python(code)
    assert result.returncode == 1
    assert "rope_transformer is already registered" in result.stderr.splitlines()[-1]


def test_a_process_that_ends_while_batches_are_loaded_ends_well():
    code = (
        "import torch, rope_fairseq\n"
        "from fairseq.data.iterators import BufferedIterator\n"
        "class Endless:\n"
        "    def __len__(self): return 10**9\n"
        "    def __iter__(self):\n"
        "        while True: yield torch.randn(100, 100) @ torch.randn(100, 100)\n"
        "next(iter(BufferedIterator(3, Endless())))\n"
    )
    result = python(code)
    assert (result.returncode, result.stderr) == (0, "")


def test_missing_files_and_refused_checkpoints_are_one_line(tmp_path):
    result = python(f"import rope_fairseq\nopen({str(tmp_path / 'none')!r})")
    assert (result.returncode, result.stderr) == (
        1,
        f"error: {tmp_path / 'none'}: No such file or directory\n",
    )

    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"model": Bad()}, tmp_path / "bad.pt")
    result = python(f"import rope_fairseq, torch\ntorch.load({str(tmp_path / 'bad.pt')!r})")
    assert re.fullmatch(
        r"error: not a checkpoint that can be loaded safely: it calls for \S*mkdir;.*\n",
        result.stderr,
    )
    load = "import rope_fairseq, torch\nm = torch.nn.Linear(2, 3)\n"
    result = python(load + "m.load_state_dict(torch.nn.Linear(4, 3).state_dict())")
    assert re.fullmatch(r"error: the checkpoint does not fit .*size mismatch.*\n", result.stderr)


def test_user_errors_are_one_line_and_others_keep_their_traceback():
    raised = "import rope_fairseq\nfrom rope_fairseq.errors import UserError\nraise "
    result = python(raised + "UserError('--rope-base 0: must be\\n a positive number')")
    assert (result.returncode, result.stderr) == (
        1,
        "error: --rope-base 0: must be a positive number\n",
    )
    result = python(raised + "KeyError('x')")
    assert result.returncode == 1 and "Traceback" in result.stderr


def test_a_damaged_checkpoint_is_named_and_so_is_the_way_out(tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(tiny_work() / "checkpoints", folder)
    last = folder / "checkpoint_last.pt"
    os.truncate(last, last.stat().st_size // 2)
    with pytest.raises(UserError, match=f"^{last}: not a checkpoint, or a damaged one"):
        checkpoint_utils.load_checkpoint_to_cpu(str(last))

    result = tiny.python("fairseq_cli.train", *train_options(tiny_work()), "--save-dir", folder)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {last}: not a checkpoint, or a damaged one")
    newest = folder / f"checkpoint_33_{UPDATES}.pt"
    assert newest.is_file() and error.endswith(f"go on from the one before: cp {newest} {last}")
