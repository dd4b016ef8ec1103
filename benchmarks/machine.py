"""What a measurement was made on."""

import datetime
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from rope_fairseq import hardware

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}
PACKAGES = ("torch", "ve-fairseq", "ctranslate2", "transformers", "numpy")
#: Another process above this part of one core is other load.
BUSY = 0.1


def has_bfloat16(device: str) -> bool:
    """Whether the device computes in bfloat16 itself."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return not BFLOAT16_FLAGS.isdisjoint(hardware.cpu_flags())


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit that is checked out, with ``+changes`` where files differ from it."""
    try:
        name, changes = (
            subprocess.run(
                ["git", *words], cwd=ROOT, check=True, capture_output=True, encoding="utf-8"
            ).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}+changes" if changes else name


def describe(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = hardware.describe() | {
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "device": device,
        "bfloat16": has_bfloat16(device),
        "versions": {"python": platform.python_version()}
        | {name: found for name in PACKAGES if (found := version(name))},
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def _ticks() -> dict[str, int]:
    """Clock ticks of CPU time of each process, by name and number, but this one."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        if stat.parent.name != str(os.getpid()):
            words = rest.split()
            found[f"{name.partition('(')[2]} ({stat.parent.name})"] = int(words[11]) + int(
                words[12]
            )
    return found


def load(seconds: float = 1.0) -> dict[str, Any]:
    """The load average, and what else computes now; to be called while no worker is running."""
    before = _ticks()
    time.sleep(seconds)
    ticks = seconds * os.sysconf("SC_CLK_TCK")
    shares = {
        name: (used - before[name]) / ticks for name, used in _ticks().items() if name in before
    }
    busy = {name: round(share, 2) for name, share in shares.items() if share > BUSY}
    return {"average": os.getloadavg()[0], "busy": busy}


if __name__ == "__main__":
    print(describe(sys.argv[1] if len(sys.argv) > 1 else "cpu"), load())
