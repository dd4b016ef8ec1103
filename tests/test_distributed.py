"""Several processes train one model, equal to the one that a single process trains; launches whose
processes would train apart are refused."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rope_fairseq.distributed import Launch, join, refuse_apart, torch_launch
from rope_fairseq.errors import UserError
from tests.tiny import fairseq, run, tiny_work, torchrun, train_options

BIN = Path(sys.executable).parent
UPDATES = 8
ALONE = dict.fromkeys(("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), "1")
TORCHRUN = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
TWO = TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
FOUR = TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}


def training(**options: Any) -> SimpleNamespace:
    """fairseq's options of the group distributed_training, on a machine without GPU."""
    defaults = dict(
        distributed_world_size=1,
        distributed_rank=0,
        distributed_backend="nccl",
        distributed_init_method=None,
        distributed_port=-1,
        distributed_no_spawn=False,
        ddp_backend="pytorch_ddp",
        device_id=0,
        tpu=False,
        pipeline_model_parallel=False,
    )
    return SimpleNamespace(**defaults | options)


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        ({"WORLD_SIZE": "2", "RANK": "0"}, None),
        (TWO, Launch(rank=1, local_rank=1, world_size=2, agents=1)),
        (FOUR, Launch(rank=3, local_rank=1, world_size=4, agents=2)),
        # A script that starts the processes itself.
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "8", "RANK": "5"},
            Launch(rank=5, local_rank=5, world_size=8, agents=8),
        ),
    ],
)
def test_what_torchrun_says_is_read(environ, launch):
    assert torch_launch(environ) == launch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a whole number"),
        ({"RANK": "2"}, "RANK=2: must be below WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK=-1: must be a whole number"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        torch_launch(TWO | changes)


@pytest.mark.parametrize(
    ("options", "cpu", "devices", "environ", "changed"),
    [
        ({}, True, 0, {}, {}),
        (
            {},
            True,
            0,
            TWO,
            dict(
                distributed_world_size=2,
                distributed_rank=1,
                distributed_init_method="env://",
                distributed_no_spawn=True,
                distributed_backend="gloo",
                ddp_backend="legacy_ddp",
                device_id=1,
            ),
        ),
        # Two machines with two GPUs each: fairseq's default says 2, torchrun 4.
        (
            {"distributed_world_size": 2},
            False,
            2,
            FOUR,
            dict(
                distributed_world_size=4,
                distributed_rank=3,
                distributed_init_method="env://",
                distributed_no_spawn=True,
                device_id=1,
            ),
        ),
        # A process that may use one GPU only.
        (
            {},
            False,
            1,
            TWO,
            dict(
                distributed_world_size=2,
                distributed_rank=1,
                distributed_init_method="env://",
                distributed_no_spawn=True,
                device_id=0,
            ),
        ),
        # torchrun with a single process, on a machine with eight GPUs.
        (
            {"distributed_world_size": 8},
            False,
            8,
            TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            dict(distributed_world_size=1, distributed_no_spawn=True),
        ),
        # The user says how processes find each other.
        (
            {"distributed_init_method": "tcp://a:1", "distributed_world_size": 3},
            True,
            0,
            TWO,
            {},
        ),
    ],
)
def test_options_are_set_as_torchrun_says(options, cpu, devices, environ, changed):
    result = training(**options)
    launch = join(result, cpu, devices, environ)
    assert vars(result) == vars(training(**options)) | changed
    assert (launch is not None) == (changed.get("distributed_init_method") == "env://")


@pytest.mark.parametrize(("wanted", "devices"), [(3, 0), (4, 1), (8, 4)])
def test_another_world_size_than_that_of_torchrun_is_refused(wanted, devices):
    with pytest.raises(UserError, match=f"--distributed-world-size {wanted}: torchrun started 2"):
        join(training(distributed_world_size=wanted), devices == 0, devices, TWO)


LOCALHOST = {"distributed_world_size": 8, "distributed_init_method": "tcp://localhost:9"}


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ({}, {}),
        ({}, ALONE),
        ({"distributed_world_size": 2, "distributed_init_method": "env://"}, TWO),
        # srun starts one torchrun a machine.
        (
            {"distributed_world_size": 4, "distributed_init_method": "env://"},
            FOUR | {"SLURM_STEP_NUM_TASKS": "2"},
        ),
        # fairseq's own ways.
        (LOCALHOST, ALONE),
        (
            {"distributed_world_size": 2, "distributed_init_method": "tcp://a:1"},
            {"OMPI_COMM_WORLD_SIZE": "2"},
        ),
        (LOCALHOST | {"distributed_no_spawn": True}, {"OMPI_COMM_WORLD_SIZE": "8"}),
        (
            {"distributed_world_size": 16, "distributed_port": 9218},
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"},
        ),
    ],
)
def test_launches_that_train_one_model_are_let_through(options, environ):
    refuse_apart(training(**options), environ)


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        ({}, {"SLURM_STEP_NUM_TASKS": "2"}, r"srun started 2 tasks \(SLURM_STEP_NUM_TASKS\)"),
        ({}, {"OMPI_COMM_WORLD_SIZE": "4"}, r"mpirun started 4 tasks \(OMPI_COMM_WORLD_SIZE\)"),
        ({}, {"PMI_SIZE": "4"}, r"mpiexec started 4 tasks \(PMI_SIZE\)"),
        # Each task would start eight processes for the GPUs of its machine.
        ({"distributed_world_size": 8}, {"SLURM_STEP_NUM_TASKS": "2"}, "srun started 2 tasks"),
        (LOCALHOST, {"SLURM_STEP_NUM_TASKS": "2"}, "srun started 2 tasks"),
        # A port alone helps under SLURM only, and never a world of one.
        (
            {"distributed_world_size": 8, "distributed_port": 9},
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "mpirun started 2 tasks",
        ),
        (
            {"distributed_port": 9},
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"},
            "srun started 2 tasks",
        ),
        # Each task runs a torchrun that knows of no other.
        (
            {"distributed_world_size": 2, "distributed_init_method": "env://"},
            TWO | {"SLURM_STEP_NUM_TASKS": "2"},
            "torchrun in this one knows of 1 .*say --nnodes 2",
        ),
        (
            {"distributed_init_method": "tcp://a:1"},
            TWO,
            "torchrun started 2 processes, but --distributed-world-size 1",
        ),
        ({}, {"PMI_SIZE": "many"}, "PMI_SIZE=many: must be a whole number"),
    ],
)
def test_launches_that_would_train_apart_are_refused(options, environ, message):
    with pytest.raises(UserError, match=message):
        refuse_apart(training(**options), environ)


def losses(output: str) -> list[float]:
    """The loss of each update."""
    return [float(loss) for loss in re.findall(r"[^_]loss=([0-9.]+)", output)]


def parameters(checkpoint: Path) -> torch.Tensor:
    model = torch.load(checkpoint)["model"]
    return torch.cat([model[name].flatten() for name in sorted(model)])


#: fairseq-train that also notes, beside itself, what parameters each rank ends with.
FAIRSEQ_TRAIN = """
import hashlib, os, pathlib
from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main
trainers = []
original = Trainer.__init__
def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    trainers.append(self)
Trainer.__init__ = init
cli_main()
digest = hashlib.sha256()
for parameter in trainers[0].get_model().parameters():
    digest.update(parameter.detach().numpy().tobytes())
pathlib.Path(__file__).with_name("rank" + os.environ["RANK"]).write_text(digest.hexdigest())
"""


def options(folder: Path, *more: str | int) -> list[str]:
    arguments = [
        *train_options(tiny_work()),
        *("--max-tokens", 250, "--max-update", UPDATES, "--log-interval", 1),
        *("--save-interval-updates", 4, "--save-dir", folder),
    ]
    return [str(word) for word in (*arguments, *more)]


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> tuple[Path, str]:
    """Two processes of torchrun: their checkpoints and output."""
    folder = tmp_path_factory.mktemp("together")
    script = folder / "fairseq_train.py"
    script.write_text(FAIRSEQ_TRAIN)
    command = (BIN / "torchrun", "--standalone", "--nproc-per-node", "2")
    result = run(*command, script, *options(folder / "checkpoints"))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "checkpoints", result.stdout + result.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, str]:
    """One process that takes the batches of the two in turn."""
    folder = tmp_path_factory.mktemp("alone")
    result = fairseq("fairseq-train", *options(folder, "--update-freq", 2))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout + result.stderr


def test_two_processes_train_what_one_process_trains(together, alone):
    assert len(losses(alone[1])) == UPDATES
    assert losses(together[1]) == pytest.approx(losses(alone[1]), rel=1e-4)
    one, two = (parameters(folder / "checkpoint_last.pt") for folder, _ in (alone, together))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    assert "training on 2 devices" in together[1]


def test_both_processes_end_with_the_same_parameters(together):
    ends = [(together[0].parent / f"rank{rank}").read_text() for rank in (0, 1)]
    assert ends[0] == ends[1] and len(ends[0]) == 64


def test_one_process_goes_on_where_two_were(together, alone, tmp_path):
    shutil.copy(together[0] / "checkpoint_1_4.pt", tmp_path / "checkpoint_last.pt")
    result = fairseq("fairseq-train", *options(tmp_path, "--update-freq", 2))
    assert result.returncode == 0, result.stdout + result.stderr
    assert losses(result.stdout) == pytest.approx(losses(alone[1])[4:], rel=1e-4)
    one, went_on = (parameters(folder / "checkpoint_last.pt") for folder in (alone[0], tmp_path))
    torch.testing.assert_close(went_on, one, rtol=1e-5, atol=1e-6)


def test_two_processes_go_on_where_two_were(together, tmp_path):
    shutil.copy(together[0] / "checkpoint_1_4.pt", tmp_path / "checkpoint_last.pt")
    command = (BIN / "torchrun", "--standalone", "--nproc-per-node", "2", BIN / "fairseq-train")
    result = run(*command, *options(tmp_path), env=torchrun())
    assert result.returncode == 0, result.stdout + result.stderr
    assert losses(result.stdout) == losses(together[1])[4:]
    both = (parameters(folder / "checkpoint_last.pt") for folder in (together[0], tmp_path))
    assert torch.equal(*both)


def error_lines(result: subprocess.CompletedProcess) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def test_every_process_refuses_a_world_size_that_torchrun_did_not_start(tmp_path):
    command = (BIN / "torchrun", "--standalone", "--nproc-per-node", "2")
    arguments = options(tmp_path / "checkpoints", "--distributed-world-size", 3)
    result = run(*command, BIN / "fairseq-train", *arguments, env=torchrun())
    assert result.returncode != 0
    line = "error: --distributed-world-size 3: torchrun started 2 processes; leave the option away"
    # torchrun ends the second process when the first one has ended.
    assert set(error_lines(result)) == {line}
    assert not (tmp_path / "checkpoints").exists()


def test_fairseq_train_refuses_to_run_as_one_of_several_tasks(tmp_path):
    command = ("fairseq-train", *options(tmp_path / "checkpoints"))
    result = fairseq(*command, env={"SLURM_STEP_NUM_TASKS": "2"})
    assert result.returncode == 1
    assert len(error_lines(result)) == 1 and "srun started 2 tasks" in error_lines(result)[0]
    assert "Traceback" not in result.stderr and not (tmp_path / "checkpoints").exists()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_process_trains_on_when_torchrun_is_killed(tmp_path):
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    command += [str(BIN / "fairseq-train"), *options(tmp_path, "--max-update", 10**6)]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output
        )
        try:
            while process.poll() is None and "num_updates=2" not in log.read_text():
                time.sleep(0.1)
            assert process.poll() is None, log.read_text()
            workers = children(process.pid)
        finally:
            process.kill()
            process.wait()
    assert len(workers) == 2
    end = time.monotonic() + 10
    while any(map(is_alive, workers)):
        assert time.monotonic() < end
        time.sleep(0.05)
