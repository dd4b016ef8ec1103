"""Is anything lost? Kill the pipeline at random moments, fill its disk, damage its files, start it
twice; each time run it again, and compare its end with that of an undisturbed run.

    python benchmarks/crash_safety.py --kills 20 --seed 1 --json results/crash-safety.json

The pipeline is ``scripts/reproduce.sh wmt14`` on the miniature of the WMT14 archives, with a small
model: every step, the same scripts. The end of a run is what it leaves: the prepared text's
signature, the averaged parameters, the translation and the scores, all of which must be equal.
Takes about half an hour on 2 cores; the full disk needs root (a small tmpfs is mounted).
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
# Changes of the recipe that make it small; dropout stays on, early stopping is added.
OPTIONS = [
    *("--vocab-size", "500", "--max-update", "24", "--tokens-per-update", "1000"),
    *("+model.encoder_embed_dim=32", "+model.encoder_ffn_embed_dim=64"),
    *("+model.encoder_attention_heads=2", "+model.decoder_attention_heads=2"),
    *("+model.encoder_layers=1", "+model.decoder_layers=1", "checkpoint.patience=50"),
    *("optimization.lr=[0.003]", "lr_scheduler.warmup_updates=10", "common.log_interval=1"),
]
DISK_SHARES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)


@dataclass
class Pipeline:
    """One work folder and the mirror that its data comes from."""

    work: Path
    mirror: Path

    @property
    def command(self) -> list[str]:
        return [
            *(str(ROOT / "scripts" / "reproduce.sh"), "wmt14", "--mirror", str(self.mirror)),
            *("--work", str(self.work), *OPTIONS),
        ]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        )

    def run(self) -> tuple[int, str]:
        """Run to the end; exit status and output."""
        with self.start() as process:
            output = process.communicate()[0]
        return process.returncode, output

    def finish(self) -> dict[str, str]:
        """Run to the end, which must be a good one; what it left."""
        status, output = self.run()
        if status:
            raise SystemExit(f"{self.work}: exit status {status}\n{output[-3000:]}")
        return self.end()

    def kill_after(self, seconds: float) -> str | None:
        """Start, kill −9 all processes after some time; the step that was hit, None if it ended."""
        with self.start() as process:
            try:
                process.communicate(timeout=seconds)
                return None
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        started = sorted((self.work / "manifests").glob("*.started"))
        return started[0].name.removesuffix(".json.started") if started else "between steps"

    def kill_in_training(self, update: int) -> None:
        """Start, and kill −9 all processes after an update of training."""
        with self.start() as process:
            assert process.stdout is not None
            for line in process.stdout:
                if re.search(rf"\bnum_updates[ =]{update}\b", line):
                    os.killpg(process.pid, signal.SIGKILL)
                    return
        raise SystemExit(f"{self.work}: ended before update {update}")

    def end(self) -> dict[str, str]:
        """What a finished run leaves, as hashes, and its scores."""
        parameters = torch.load(self.work / "model" / "averaged.pt")["model"]
        digest = hashlib.sha256()
        for name in sorted(parameters):
            digest.update(name.encode() + parameters[name].contiguous().numpy().tobytes())
        scores = json.loads((self.work / "scores.json").read_text())["scores"]
        return {
            "data": hashlib.sha256((self.work / "data.json").read_bytes()).hexdigest(),
            "parameters": digest.hexdigest(),
            "translation": hashlib.sha256((self.work / "test.hyp.de").read_bytes()).hexdigest(),
            "scores": " ".join(f"{score['name']} {score['value']!r}" for score in scores),
        }


@dataclass
class Experiment:
    """The undisturbed run, and what the disturbed ones came to."""

    folder: Path
    mirror: Path
    undisturbed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)

    def pipeline(self, name: str) -> Pipeline:
        work = self.folder / name
        shutil.rmtree(work, ignore_errors=True)
        return Pipeline(work, self.mirror)

    def record(self, name: str, **details: Any) -> None:
        self.results.append({"experiment": name, **details})
        told = ", ".join(f"{key} {value}" for key, value in details.items())
        print(f"{name}: {told}", flush=True)

    def disturbed(
        self, name: str, pipeline: Pipeline, run: tuple[int, str] | None = None, **details: Any
    ) -> None:
        """Run a disturbed pipeline to its end, compare that with the undisturbed one, and record
        what was lost.

        Args:
            run: exit status and output of a run before, which must have ended with one clear line.
            details: recorded as well.
        """
        lost = []
        if run is not None:
            status, output = run
            errors = [line for line in output.splitlines() if line.startswith("error: ")]
            details["message"] = errors[0] if errors else "none"
            if status == 0:
                lost.append("the run before ended well")
            if len(errors) != 1 or "Traceback" in output:
                lost.append(f"not one clear line: {output[-1500:]}")
        end = pipeline.finish()
        lost += [f"{key} differs" for key in end if end[key] != self.undisturbed[key]]
        self.record(name, **details, lost=lost)


def kills(experiment: Experiment, number: int, moments: random.Random) -> None:
    """Kill −9 at ``number`` random moments, in as many runs as it takes to place them."""
    hit: Counter[str] = Counter()
    run = 0
    while hit.total() < number:
        run += 1
        pipeline = experiment.pipeline(f"kill-{run}")
        steps: list[str] = []
        while hit.total() < number:
            # Restarts cost time as well: several kills fall into one run.
            step = pipeline.kill_after(moments.uniform(0.5, experiment.seconds * 0.6))
            if step is None:
                break
            steps.append(step)
            hit[step] += 1
        experiment.disturbed("kill -9", pipeline, hit=steps)
    experiment.record("kill -9, all", kills=hit.total(), by_step=dict(sorted(hit.items())))


def full_disk(experiment: Experiment, size: int) -> None:
    """A file system that is too small for the run, made larger afterwards."""
    for share in DISK_SHARES:
        pipeline = experiment.pipeline("disk")
        pipeline.work.mkdir()
        limit = f"size={int(size * share)}"
        mount = ["mount", "-t", "tmpfs", "-o", limit, "tmpfs", str(pipeline.work)]
        if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
            experiment.record("full disk", skipped="mounting a tmpfs needs root")
            return
        try:
            run = pipeline.run()
            subprocess.run(["mount", "-o", "remount,size=4G", str(pipeline.work)], check=True)
            experiment.disturbed("full disk", pipeline, run, share=share)
        finally:
            subprocess.run(["umount", "-l", str(pipeline.work)], check=True)


def truncate(path: Path) -> None:
    """Cut a file off in the middle."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def damaged_archives(experiment: Experiment) -> None:
    """An archive of the mirror is damaged in three ways; then it is whole again."""
    archive = experiment.mirror / "wmt13" / "training-parallel-commoncrawl.tgz"
    whole = archive.read_bytes()
    for name, damage in (("truncated", truncate), ("changed", flip), ("missing", Path.unlink)):
        pipeline = experiment.pipeline("archive")
        damage(archive)
        run = pipeline.run()
        archive.write_bytes(whole)
        experiment.disturbed(f"archive {name}", pipeline, run)


def damaged_files(experiment: Experiment) -> None:
    """Files of a finished run are cut off: what they belong to is made again."""
    for name in (
        *("data/train.en", "tok/train.de", "text/sentencepiece.bpe.model", "model/averaged.pt"),
        *("data-bin/train.en-de.en.bin", "manifests/clean.json", "scores.json", "test.hyp.de"),
    ):
        pipeline = experiment.pipeline("file")
        shutil.copytree(experiment.folder / "undisturbed", pipeline.work)
        truncate(pipeline.work / name)
        experiment.disturbed(f"damaged {name}", pipeline)


def damaged_checkpoints(experiment: Experiment) -> None:
    """A checkpoint of a run that was killed in training is cut off."""
    for name in ("checkpoint_last.pt", "the oldest"):
        pipeline = experiment.pipeline("checkpoint")
        pipeline.kill_in_training(18)
        folder = pipeline.work / "checkpoints"
        by_age = sorted(folder.glob("checkpoint_*_*.pt"), key=lambda path: path.stat().st_mtime)
        truncate(folder / name if name.endswith(".pt") else by_age[0])
        if name == "checkpoint_last.pt":
            run = pipeline.run()
            shutil.copy(by_age[-1], folder / name)  # as the message says
            experiment.disturbed(f"damaged {name}", pipeline, run)
        else:  # by the end it is none of those that are averaged
            experiment.disturbed("damaged checkpoint, the oldest", pipeline)


def two_at_once(experiment: Experiment) -> None:
    """A second run in the same folder while the first is at work."""
    pipeline = experiment.pipeline("twice")
    with pipeline.start() as first:
        while not (pipeline.work / "manifests" / "data.json.started").exists():
            time.sleep(0.1)
        run = pipeline.run()
        first.communicate()
    experiment.disturbed("two runs at once", pipeline, run)


def folder_size(folder: Path) -> int:
    """In bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments of kills")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened here")
    parser.add_argument(
        "--only", choices=("twice", "archives", "files", "checkpoints", "disk", "kills")
    )
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="crash-safety-") as temporary:
        folder = Path(temporary)
        mirror = folder / "mirror"
        miniature = ROOT / "data-prep" / "wmt14" / "miniature.py"
        subprocess.run([sys.executable, miniature, mirror], check=True)
        experiment = Experiment(folder, mirror)
        begin = time.monotonic()
        experiment.undisturbed = experiment.pipeline("undisturbed").finish()
        experiment.seconds = time.monotonic() - begin
        experiment.record("undisturbed", seconds=experiment.seconds, **experiment.undisturbed)

        size = folder_size(folder / "undisturbed")
        chosen: dict[str, Callable[[], None]] = {
            "twice": lambda: two_at_once(experiment),
            "archives": lambda: damaged_archives(experiment),
            "files": lambda: damaged_files(experiment),
            "checkpoints": lambda: damaged_checkpoints(experiment),
            "disk": lambda: full_disk(experiment, size),
            "kills": lambda: kills(experiment, arguments.kills, random.Random(arguments.seed)),
        }
        for name, run in chosen.items():
            if arguments.only in (None, name):
                run()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(experiment.results, indent=2) + "\n")
    lost = [result for result in experiment.results if result.get("lost")]
    if lost:
        raise SystemExit(f"{len(lost)} of {len(experiment.results)} experiments lost something")


if __name__ == "__main__":
    main()
