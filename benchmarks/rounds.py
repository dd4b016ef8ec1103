"""Worker processes that take turns, and the statistics of what they took."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT


class WorkerError(RuntimeError):
    """A system could not be built or failed; the message is one line."""


class Worker:
    """A process of ``worker.py``.

    Args:
        python: the interpreter, which decides what is installed.
        log: file that gets what the process prints.
    """

    def __init__(self, python: str, log: Path) -> None:
        self.log = log
        with open(log, "ab") as stream:
            self.process = subprocess.Popen(
                [python, "-m", "benchmarks.worker"],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                encoding="utf-8",
            )

    def send(self, do: str, name: str, **command: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, "name": name} | command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # receive() says why

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            why = "killed, perhaps for want of memory" if status == -9 else f"status {status}"
            raise WorkerError(f"the process ended ({why}): {self.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "exit" in answer:  # fairseq has printed why
            raise WorkerError(f"exit status {answer['exit']}: {self.last_words()}")
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def last_words(self) -> str:
        """The last line that the process has printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((text.strip() for text in reversed(lines) if text.strip()), "no message")

    def ask(self, do: str, name: str, **command: Any) -> dict[str, Any]:
        """Have a command of ``worker.py`` done to the system ``name``.

        Raises:
            WorkerError: what went wrong there.
        """
        self.send(do, name, **command)
        return self.receive()

    def stop(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()  # the end of its commands
        except BrokenPipeError:
            pass
        self.process.wait()
        self.process.stdout.close()


class Workers:
    """The processes of a run, by name, started when first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, Worker] = {}

    def get(self, name: str, python: str = sys.executable) -> Worker:
        worker = self.running.get(name)
        if worker is None or worker.process.poll() is not None:
            log = self.folder / f"{len(list(self.folder.glob('*.log')))}.log"
            worker = self.running[name] = Worker(python, log)
        return worker

    def stop(self) -> None:
        for worker in self.running.values():
            worker.stop()
        self.running.clear()


def interleave(workers: Mapping[str, Worker], rounds: int) -> dict[str, list[float]]:
    """Let the systems take turns, A B C, B C A, …; each has done a call before.

    Returns:
        Seconds of each call, by system, in the order of the rounds.
    """
    names = list(workers)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(workers[name].ask("run", name)["seconds"])
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and quartiles (inclusive: those of the values themselves)."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "min": min(values), "low": low, "high": high}


def ratios(values: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios within rounds, in which a slow moment of the machine hits both."""
    return spread([mine / other for mine, other in zip(values, reference, strict=True)])
