"""What a training runs on, as one line for its log: ``python -m rope_fairseq.hardware``."""

import json
import os
from pathlib import Path
from typing import Any

#: Instructions that decide how fast torch is; the last two compute in bfloat16.
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "amx_int8", "avx512_bf16", "amx_bf16")


def cpu_field(name: str) -> str:
    """A field of /proc/cpuinfo, of the first core."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.partition(":")[0].strip() == name:
            return line.partition(":")[2].strip()
    return "unknown"


def cpu_flags() -> list[str]:
    """Those of :data:`FLAGS` that the processor has."""
    return [flag for flag in FLAGS if flag in cpu_field("flags").split()]


def describe() -> dict[str, Any]:
    """Processor, its instructions and cores, memory in GiB, the threads of a process where
    OMP_NUM_THREADS says how many, and names of the GPUs if there are."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "processor": cpu_field("model name"),
        "flags": cpu_flags(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
    }
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        facts["threads"] = int(threads)
    # Asking torch takes seconds; without one of these (NVIDIA, AMD, WSL) there is nothing to ask.
    if any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "kfd", "dxg")):
        import torch

        facts["gpus"] = [
            torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
        ]
    return facts


if __name__ == "__main__":
    print(json.dumps(describe()))
