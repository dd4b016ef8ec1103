"""Which processes train together: what torchrun, srun and mpirun say of a launch, and what fairseq
makes of it.

fairseq 0.12.3 trains with several processes only where its own ``distributed_world_size`` is above
1; by default it is the number of GPUs of one machine. Under torchrun on CPUs, or with one GPU a
machine, each process therefore trains a model of its own, and all write to the same folder.
``rope_fairseq.compat`` calls these functions; nothing here imports fairseq.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rope_fairseq.errors import UserError

#: How many tasks a launcher has started, ours among them.
TASK_COUNTS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}


@dataclass(frozen=True)
class Launch:
    """What torchrun says in the environment of each process that it starts.

    Args:
        rank: number of the process, below ``world_size``.
        local_rank: its number on its machine.
        world_size: processes on all machines.
        agents: torchruns that work together, one a machine.
    """

    rank: int
    local_rank: int
    world_size: int
    agents: int


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise UserError(f"environment variable {name}={text}: must be a whole number")
    return int(text)


def torch_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """torchrun's launch, or None without one.

    The four variables are torch's convention (``env://``); scripts that start the processes
    themselves set them too, often without ``LOCAL_RANK``.
    """
    if not all(key in environ for key in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")):
        return None
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank >= world_size:
        raise UserError(f"environment variable RANK={rank}: must be below WORLD_SIZE={world_size}")
    return Launch(
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        world_size=world_size,
        agents=_number(environ, "GROUP_WORLD_SIZE", world_size),
    )


def join(
    training: Any, cpu: bool, devices: int, environ: Mapping[str, str] = os.environ
) -> Launch | None:
    """Set fairseq's options so that the processes of torchrun train together.

    Args:
        training: fairseq's options of the group ``distributed_training``; they are changed.
        cpu: whether training uses CPUs: ``--cpu``, or there is no GPU.
        devices: GPUs that this process sees.
        environ: the environment.

    Returns:
        The launch whose processes must now be connected, or None: one process alone, or one that
        is told otherwise how to find the others (``--distributed-init-method``, TPU, pipelines).

    Raises:
        UserError: ``--distributed-world-size`` says another number than torchrun.
    """
    launch = torch_launch(environ)
    if (
        launch is None
        or training.distributed_init_method is not None
        or training.tpu
        or training.pipeline_model_parallel
    ):
        return None
    wanted = training.distributed_world_size
    # 1 and the number of GPUs are fairseq's defaults, which nobody has asked for.
    if wanted not in (1, devices, launch.world_size):
        raise UserError(
            f"--distributed-world-size {wanted}: torchrun started {launch.world_size} processes; "
            "leave the option away"
        )
    training.distributed_world_size = launch.world_size
    training.distributed_rank = launch.rank
    # A process that sees one GPU, its own, calls it 0.
    training.device_id = launch.local_rank % devices if devices else launch.local_rank
    training.distributed_no_spawn = True
    if launch.world_size == 1:
        return None
    training.distributed_init_method = "env://"
    if cpu:
        training.distributed_backend = "gloo"
        # torch's own DistributedDataParallel is given a device number by fairseq.
        training.ddp_backend = "legacy_ddp"
    return launch


def end_with_torchrun(environ: Mapping[str, str] = os.environ) -> None:
    """Let the kernel end this process when torchrun, its parent, is killed. torchrun gives each
    process a session of its own: ``kill -9`` of a script and all that belongs to it ends torchrun,
    and what it started would train on beside the next run in the same folder. Linux only."""
    if "TORCHELASTIC_RUN_ID" in environ and sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def refuse_apart(training: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a training of which several copies run without knowing of each other.

    Args:
        training: as for :func:`join`, and after it.
        environ: the environment.

    Raises:
        UserError: a launcher has started several tasks, and they will not train together.
    """
    launch = torch_launch(environ)
    if launch is not None and launch.world_size > 1 and training.distributed_world_size == 1:
        raise UserError(
            f"torchrun started {launch.world_size} processes, but --distributed-world-size 1: "
            "each would train a model of its own in the same folder; "
            f"say --distributed-world-size {launch.world_size}"
        )
    for name, launcher in TASK_COUNTS.items():
        tasks = _number(environ, name, 1)
        if tasks == 1:
            continue
        if launch is not None and launch.agents < tasks:
            raise UserError(
                f"{launcher} started {tasks} tasks ({name}), but torchrun in this one knows of "
                f"{launch.agents} (--nnodes): they would train apart in the same folder; "
                f"say --nnodes {tasks}"
            )
        if launch is None and not _finds_the_others(training, environ):
            raise UserError(
                f"{launcher} started {tasks} tasks ({name}), but fairseq knows of this one only: "
                "each would train a model of its own in the same folder; start one task a machine "
                "that calls torchrun (scripts/slurm.sbatch), or unset the variable if these "
                "are separate trainings"
            )


def _finds_the_others(training: Any, environ: Mapping[str, str]) -> bool:
    """Whether fairseq, without torchrun, reaches processes that it did not start itself."""
    if training.distributed_world_size == 1:
        return False
    method = training.distributed_init_method
    if method is not None:
        # What fairseq makes up for the GPUs of one machine; it starts those processes itself.
        return training.distributed_no_spawn or not method.startswith("tcp://localhost:")
    # fairseq's own way under SLURM: the first node at the port that is given.
    in_slurm = "SLURM_STEP_NODELIST" in environ or "SLURM_JOB_NODELIST" in environ
    return in_slurm and training.distributed_port > 0
