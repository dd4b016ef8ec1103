"""A process that holds systems and does one call of one of them when it is told to.

``bench.py`` starts one for each system, so that stock fairseq runs without the plugin and each has
a memory of its own. It reads one JSON command a line from standard input and answers each with one
line on standard output; whatever else is printed goes to standard error. Each has ``"name"``, which
says which system is meant:

    {"do": "build", "spec": {…}}   what to hold under the name: see :func:`build`
    {"do": "first"}                one call that is not timed
    {"do": "run"}                  one call; its seconds
    {"do": "kernels"}              one call under torch's profiler; attention operators, how often
    {"do": "small", "shape": {…}}  one update on a batch of another shape
    {"do": "export", "to": DIR}    write the model for CTranslate2
    {"do": "peak"}                 the most memory until now, in bytes
"""

import gc
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from benchmarks.shapes import Shape

# Operators of torch that compute attention; the last is what explicit code is made of.
ATTENTION = ("_attention", "bmm")
NOT_KERNELS = ("aten::scaled_dot_product_attention", "backward")


def build(spec: dict[str, Any], folder: Path) -> Any:
    """A system for ``spec``: ``kind`` (a module), ``work`` (a class in it), ``shape``, ``device``,
    ``tf32``, and ``arguments`` of that class."""
    module = importlib.import_module(f"benchmarks.{spec['kind']}_system")
    arguments = dict(spec.get("arguments", {}))
    if spec["kind"] == "fairseq":
        arguments["folder"] = folder
    if spec["device"] == "cuda":
        import torch

        torch.backends.cuda.matmul.allow_tf32 = spec.get("tf32", False)
    return getattr(module, spec["work"])(
        Shape.from_json(spec["shape"]), spec["device"], **arguments
    )


def synchronise(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def timed(system: Any, device: str) -> float:
    """Seconds of one call. On a GPU one that is not timed comes first, and the memory between calls
    is given back afterwards: there is not enough for all systems at once."""
    if device == "cuda":
        system.run()
    synchronise(device)
    start = time.perf_counter()
    system.run()
    synchronise(device)
    seconds = time.perf_counter() - start
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
    return seconds


def kernels(system: Any) -> dict[str, int]:
    """How often each operator of ``ATTENTION`` ran in one call; of the fused ones forward only."""
    import torch

    with torch.profiler.profile() as profile:
        system.run()
    return {
        event.key.removeprefix("aten::"): event.count
        for event in profile.key_averages()
        if event.key.startswith("aten::")
        and any(name in event.key for name in ATTENTION)
        and not any(name in event.key for name in NOT_KERNELS)
    }


def peak_bytes(device: str) -> int:
    """The most memory that this process has had: of the GPU, or resident."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def answer(systems: dict[str, Any], command: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Do one command; ``systems`` holds the built ones, with their devices."""
    do, name = command["do"], command["name"]
    if do == "build":
        systems.pop(name, None)
        gc.collect()
        spec = command["spec"]
        system = build(spec, folder)
        systems[name] = (system, spec["device"])
        loaded = "rope_fairseq" in sys.modules
        return {"parameters": getattr(system, "parameters", None), "plugin_loaded": loaded}
    system, device = systems[name]
    if do == "run":
        return {"seconds": timed(system, device)}
    if do == "kernels":
        return {"kernels": kernels(system)}
    if do == "peak":
        return {"bytes": peak_bytes(device)}
    if do == "small":
        system.run_small(Shape.from_json(command["shape"]))
    elif do == "export":
        system.export(Path(command["to"]))
    else:
        system.run()
    return {}


def serve(commands: Iterable[str], answers: TextIO) -> None:
    """Answer commands until they end."""
    systems: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for line in commands:
            try:
                reply = answer(systems, json.loads(line), Path(folder))
            except SystemExit as error:  # fairseq, on wrong options
                reply = {"exit": error.code}
            except Exception as error:
                text = " ".join(str(error).split()) or "no message"
                reply = {"error": f"{type(error).__name__}: {text}"}
            print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    # Whatever a library prints must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
