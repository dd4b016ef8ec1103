"""scripts/train.sh and scripts/slurm.sbatch: the same training on any number of devices and
machines, and the command for it."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.test_distributed import UPDATES, error_lines, losses, parameters
from tests.tiny import ROOT, run, scripts, tiny_work, torchrun


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The project with the recipe ``toy``, prepared."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("scripts", "rope_fairseq"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    config["common"]["log_interval"] = 1
    config["model"] |= {
        "encoder_embed_dim": 64,
        "encoder_ffn_embed_dim": 128,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    config["optimization"] |= {"max_update": UPDATES, "lr": [0.005], "stop_time_hours": 0}
    config["lr_scheduler"]["warmup_updates"] = 10
    config["dataset"] |= {"max_tokens": 500, "disable_validation": True}
    config["checkpoint"]["save_interval_updates"] = 1
    (folder / "configs" / "recipes").mkdir(parents=True)
    (folder / "configs" / "toy.yaml").write_text(yaml.safe_dump(config))
    recipe = yaml.safe_load((ROOT / "configs" / "recipes" / "demo.yaml").read_text())
    recipe |= {"config": "toy", "tokens_per_update": 500}
    (folder / "configs" / "recipes" / "toy.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def work_folder(project: Path, name: str) -> Path:
    work = project / "exp" / name
    shutil.copytree(tiny_work() / "data-bin", work / "data-bin")
    (work / "manifests").mkdir()
    (work / "manifests" / "sign.json").touch()  # prepare.sh has come to its end
    return work


def train_sh(project: Path, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess:
    alone = ("--devices", "1") in zip(arguments, arguments[1:], strict=False)
    env = (scripts() if alone else torchrun()) | environ
    return run(project / "scripts" / "train.sh", "toy", *arguments, env=env)


@pytest.fixture(scope="module")
def alone_by_script(project) -> Path:
    """The work folder of one process that takes as many tokens an update as two do."""
    work = work_folder(project, "alone")
    result = train_sh(project, "--work", work, "--devices", "1", "--max-tokens", "250")
    assert result.returncode == 0, result.stdout + result.stderr
    return work


def logged(work: Path) -> list[float]:
    return losses((work / "logs" / "train.log").read_text())


def test_train_sh_trains_the_same_with_two_processes(project, alone_by_script):
    work = work_folder(project, "two")
    result = train_sh(project, "--work", work, "--devices=2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(logged(work)) == UPDATES
    assert logged(work) == pytest.approx(logged(alone_by_script), rel=1e-4)
    last = "checkpoints/checkpoint_last.pt"
    one, two = parameters(alone_by_script / last), parameters(work / last)
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    # How many devices there were is no part of what makes the run.
    again = train_sh(project, "--work", work, "--devices", "1", "--max-tokens", "100")
    assert again.stdout == "train: up to date\n"


def test_two_machines_train_together(project, alone_by_script):
    work = work_folder(project, "machines")
    command = [project / "scripts" / "train.sh", "toy", "--work", work, "--devices", "1"]
    shared = ["--nodes", "2", "--master", f"localhost:{free_port()}", "--node-rank"]
    # As srun starts them: one task a machine.
    environment = torchrun() | {"OMP_NUM_THREADS": "1", "SLURM_STEP_NUM_TASKS": "2"}
    second = subprocess.Popen(
        [*map(str, command), *shared, "1"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        first = run(*command, *shared, "0", env=environment)
        output = second.communicate(timeout=60)[0]
    finally:
        second.kill()
    assert first.returncode == 0, first.stdout + first.stderr + output
    assert second.returncode == 0, output
    assert logged(work) == pytest.approx(logged(alone_by_script), rel=1e-4)
    assert (work / "manifests" / "train.json").is_file()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_a_machine_that_would_train_otherwise_does_not_join(project):
    work = work_folder(project, "otherwise")
    (work / "logs").mkdir()
    (work / "logs" / "train.launch").write_text("2 nodes, 1 devices each: dataset.max_tokens=9\n")
    shared = ["--nodes", "2", "--node-rank", "1", "--master", "localhost:1", "--devices", "1"]
    result = train_sh(project, "--work", work, *shared, JOIN_TIMEOUT="1")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert re.search(r"node 1 would train .*, the first node: '2 nodes, .*=9'", result.stderr)


def test_train_sh_refuses_to_run_as_one_of_several_tasks(project):
    work = work_folder(project, "tasks")
    result = train_sh(project, "--work", work, "--devices", "1", OMPI_COMM_WORLD_SIZE="2")
    assert result.returncode != 0
    assert len(error_lines(result)) == 1 and "mpirun started 2 tasks" in error_lines(result)[0]
    assert "Traceback" not in result.stderr
    assert not list((work / "checkpoints").glob("*.pt"))


SRUN = """#!/usr/bin/env bash
echo "srun $1"
while [[ $1 == -* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURM_NNODES=2 SLURM_STEP_NUM_TASKS=2 "$@"; done
"""
SCONTROL = """#!/usr/bin/env bash
[[ $* == "show hostnames n[7-8]" ]] && printf '%s\\n' n7 n8
"""


def test_the_template_for_slurm_starts_train_sh_on_each_machine(tmp_path):
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    sbatch = ROOT / "scripts" / "slurm.sbatch"
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHON": sys.executable,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_ID": "1234567",
        "DRY_RUN": "1",
    }
    arguments = ["wmt14", "--devices", "4", "model.rope_base=5", "--work", tmp_path / "w"]
    result = run("bash", sbatch, *arguments, env=environ, cwd="/")
    assert result.returncode == 0, result.stderr
    commands = re.findall("^torchrun.*", result.stdout, re.MULTILINE)
    assert len(commands) == 2 and result.stdout.startswith("srun --kill-on-bad-exit=1\n")
    for rank, command in enumerate(commands):
        assert f"--nnodes 2 --node-rank {rank} --master-addr n7 --master-port 24567 " in command
        assert (
            "dataset.max_tokens=3125 optimization.update_freq=\\[1\\] model.rope_base=5" in command
        )
    # sbatch reads its lines up to the first command.
    head = sbatch.read_text().partition("\nset -euo")[0]
    assert re.findall("^#SBATCH --(nodes|ntasks-per-node|requeue)", head, re.MULTILINE)
    assert run("bash", sbatch, env=environ).returncode == 2


DEMO = "fairseq-hydra-train .*dataset.max_tokens=1024 optimization.update_freq=.\\[1.\\].*"


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["demo"], DEMO + "distributed_world_size=1"),
        (["demo", "--devices", "1"], DEMO + "distributed_world_size=1"),
        (
            ["wmt14", "--devices", "3", "--max-update", "20", "model.rope_base=5"],
            r"torchrun --nproc-per-node 3 --standalone \S*fairseq-hydra-train "
            r".*--config-name wmt14_base (?!.*position_encoding).*"
            r"optimization.max_update=20 checkpoint.save_interval_updates=4 "
            r"dataset.max_tokens=2777 optimization.update_freq=.\[3.\] model.rope_base=5",
        ),
        (
            ["wmt14-sinusoidal", "--devices=8", "--nodes=2", "--node-rank=1", "--master=n0:29500"],
            r"torchrun --nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr n0 "
            r"--master-port 29500 .*model.position_encoding=sinusoidal "
            r"dataset.max_tokens=1562 optimization.update_freq=.\[1.\]",
        ),
        (
            ["own", "--source-lang", "fr", "--target-lang", "en", "--max-tokens", "1000"],
            r"fairseq-hydra-train .*task.source_lang=\S*fr\S* task.target_lang=\S*en\S* "
            r"dataset.max_tokens=819 optimization.update_freq=.\[5.\].*",
        ),
    ],
)
def test_the_command_that_train_sh_would_run(arguments, command, tmp_path):
    result = run(
        ROOT / "scripts" / "train.sh",
        *(*arguments, "--dry-run", "--work", tmp_path / "work"),
        env={"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(rf"\s*# train\n{command}\n", result.stdout), result.stdout
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "--devices 0: must be a whole number above 0"),
        (["--devices"], "--devices needs a value"),
        (["--nodes", "x"], "--nodes x: must be a whole number above 0"),
        (["--max-tokens", "1k"], "--max-tokens 1k: must be a whole number above 0"),
        (["--nodes", "2"], "--master '': must be HOST:PORT"),
        (["--nodes", "2", "--master", "a", "--node-rank", "0"], "--master 'a': must be HOST:PORT"),
        (["--nodes", "2", "--master", "a:1", "--node-rank", "2"], "--node-rank 2: must be"),
        (["--node-rank", "1"], "--node-rank 1: must be a whole number from 0 to 0"),
        (["--master", "a:1"], "--master a:1: says where the other --nodes N are"),
        (["dataset.max_tokens=100"], "override dataset.max_tokens=100: is computed"),
        (["+optimization.update_freq=[2]"], "override +optimization.update_freq=[2]: is computed"),
        (["--devices", "2000"], "--devices 2000: more than the 1024 tokens per update"),
        (["--tokens-per-update", "x"], "--tokens-per-update x: must be a whole number above 0"),
        (["--max-update", "4"], "--max-update 4: must be at least 5"),
    ],
)
def test_bad_options_of_train_sh_are_one_line(arguments, message, tmp_path):
    command = [ROOT / "scripts" / "train.sh", "demo", "--dry-run", "--work", tmp_path / "work"]
    result = run(*command, *arguments, env={"PYTHON": sys.executable})
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and message in result.stderr, result.stderr
    assert not (tmp_path / "work").exists()
