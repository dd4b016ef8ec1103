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

#: Instructions that decide how fast torch and CTranslate2 are; the last two compute in bfloat16.
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "amx_int8", "avx512_bf16", "amx_bf16")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}
PACKAGES = ("torch", "ve-fairseq", "ctranslate2", "transformers", "numpy")
#: Another process above this part of one core is other load.
BUSY = 0.1


def cpu_field(name: str) -> str:
    """A field of /proc/cpuinfo, of the first core."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.partition(":")[0].strip() == name:
            return line.partition(":")[2].strip()
    return "unknown"


def has_bfloat16(device: str) -> bool:
    """Whether the device computes in bfloat16 itself."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return not BFLOAT16_FLAGS.isdisjoint(cpu_field("flags").split())


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
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "processor": cpu_field("model name"),
        "flags": [flag for flag in FLAGS if flag in cpu_field("flags").split()],
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory / 2**30, 1),
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
