"""A project of its own with a toy corpus: the scripts and the package, and one recipe."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.tiny import ROOT, sentences


def toy_project(folder: Path, recipe_name: str) -> Path:
    """Fill ``folder`` with the project's scripts and package, the corpus ``toy`` and a recipe of a
    tiny model, 26 updates, instead of the project's own ones."""
    for name in ("scripts", "rope_fairseq"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    corpus = folder / "data-prep" / "toy"
    corpus.mkdir(parents=True)
    for seed, (split, count) in enumerate({"train": 300, "valid": 12, "test": 12}.items()):
        for side, lang in enumerate(("en", "de")):
            lines = [pair[side] + "\n" for pair in sentences(count, seed)]
            (corpus / f"{split}.{lang}").write_text("".join(lines), encoding="utf-8")
    (corpus / "get.sh").write_text(
        '#!/usr/bin/env bash\nset -euo pipefail\nmkdir -p "$1"\ncp "$(dirname "$0")"/*.?? "$1/"\n'
        'echo "{}" >"$1/source.json"\n'
        'rm "$1/get.sh"\n'
    )
    (corpus / "get.sh").chmod(0o755)
    demo = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    demo["common"]["log_interval"] = 1
    demo["model"] |= {
        "encoder_embed_dim": 64,
        "encoder_ffn_embed_dim": 128,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "dropout": 0.1,
    }
    demo["optimization"] |= {"max_update": 26, "lr": [0.005]}
    demo["lr_scheduler"]["warmup_updates"] = 10
    demo["dataset"]["max_tokens"] = 500
    demo["checkpoint"]["save_interval_updates"] = 4
    (folder / "configs" / "recipes").mkdir(parents=True)
    (folder / "configs" / f"{recipe_name}.yaml").write_text(yaml.safe_dump(demo))
    recipe = yaml.safe_load((ROOT / "configs" / "recipes" / "demo.yaml").read_text())
    recipe |= {"corpus": "toy", "config": recipe_name, "vocab_size": 100, "expected": {}}
    recipe |= {"tokens_per_update": 500}
    recipe["clean"]["drop_duplicates"] = False
    (folder / "configs" / "recipes" / f"{recipe_name}.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def kill_during_training(
    script: Path, *words: str, update: int, env: Mapping[str, str] | None = None
) -> None:
    """Start a script and kill it and all its processes in the middle of training."""
    kill_at(rf"epoch 0.*num_updates[ =]{update}\b", script, *words, env=env)


def kill_at(pattern: str, script: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
    """Start a script, by fork with ``env=scripts()``, and kill it and all its processes when it
    prints a line in which ``pattern`` is found."""
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | (env or {})
    with subprocess.Popen(
        [script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env=environment,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(pattern, line):
                os.killpg(process.pid, signal.SIGKILL)
                break
        else:
            raise AssertionError(f"the run ended before it printed {pattern}")
