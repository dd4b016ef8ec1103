"""forkserver.py: a forked command is like a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forkserver import IMPORTED
from tests.test_distributed import is_alive
from tests.tiny import ROOT, interpreter, python, run, scripts

# As -m rope_fairseq.probe: what a command can see of how it was started.
PROBE = """
import json, logging, os, random, sys, warnings
for name in IMPORTED:
    __import__(name)
import numpy, torch
seen = {
    "argv": sys.argv,
    "path": sys.path,
    "executable": sys.executable,
    "main": (__name__, __file__, __spec__.name, sys.modules["__main__"].__dict__ is globals()),
    # A shell, which the program starts with, sets PWD.
    "environment": {name: value for name, value in sorted(os.environ.items()) if name != "PWD"},
    "folder": os.getcwd(),
    "filters": [repr(entry) for entry in warnings.filters],
    "options": (sys.warnoptions, sys.flags.utf8_mode, sys.flags.hash_randomization),
    "encodings": [(s.encoding, s.errors) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "log": (logging.root.level, [repr(handler) for handler in logging.root.handlers]),
    "threads": (torch.get_num_threads(), len(os.listdir("/proc/self/task"))),
    "left": getattr(torch, "left_by_another", None),
    "input": sys.stdin.read(),
}
drawn = [random.random(), numpy.random.random(), torch.initial_seed()]
torch.left_by_another = True
os.environ["LEFT"] = "1"
numpy.random.seed(0)
print(json.dumps([drawn, seen]))
print("said", file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the modules ``rope_fairseq.probe`` and ``.run``, which are not the plugin's."""
    package = tmp_path / "rope_fairseq"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "probe.py").write_text(f"IMPORTED = {IMPORTED}\n{PROBE}")
    (package / "run.py").write_text("import os, sys\nexec(sys.argv[1])\n")
    return tmp_path


def test_a_child_sees_what_a_process_of_its_own_sees_and_nothing_of_another_child(folder):
    words = ("rope_fairseq.probe", "ä b", "-x")
    settings = {"cwd": folder, "input": "ü\n", "env": {"GIVEN": "1", "PYTHONWARNINGS": "ignore"}}
    real = run(sys.executable, "-m", *words, **settings)
    drawn, expected = json.loads(real.stdout)
    assert expected["argv"][1:] == ["ä b", "-x"]
    assert expected["input"] == "ü\n" and expected["environment"]["GIVEN"] == "1"
    for _ in range(2):
        child = python(*words, **settings)
        assert (child.returncode, child.stderr) == (0, "said\n")
        numbers, seen = json.loads(child.stdout)
        assert seen == expected
        drawn += numbers
    assert len({*drawn}) == 9


def test_what_cannot_be_changed_after_the_start_gets_a_process_of_its_own(folder):
    words = ("rope_fairseq.run", "print('fairseq' in sys.modules)")
    at_any_time = (
        {"PYTHONWARNINGS": "ignore"},
        {"PYTHONUTF8": "1"},
        {"TORCHINDUCTOR_CACHE_DIR": "x"},
    )
    for environ in ({}, scripts(), *at_any_time):
        assert python(*words, cwd=folder, env=environ).stdout == "True\n"
    for environ in ({"OMP_NUM_THREADS": "2"}, {"PYTHONHASHSEED": "1"}, {"LC_ALL": "C"}):
        assert python(*words, cwd=folder, env=environ).stdout == "False\n"


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('text')", 1, "text\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit; atexit.register(print, 'end', file=sys.stderr)", 0, "end\n"),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
        ("sys.excepthook = lambda *_: print('hook', file=sys.stderr); 1 / 0", 1, "hook\n"),
    ],
)
def test_a_command_ends_as_its_child_does(folder, code, status, error):
    done = python("rope_fairseq.run", code, cwd=folder)
    assert done.returncode == status
    assert done.stderr.endswith(error) and bool(done.stderr) == bool(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_to_the_command_ends_the_child(folder, number):
    code = "print(os.getpid(), flush=True); import time; time.sleep(60)"
    command = [interpreter(), "-m", "rope_fairseq.run", code]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert child != process.pid
        process.send_signal(number)
    assert process.returncode == -number
    end = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_script_starts_its_training_by_fork_and_everything_else_as_ever(tmp_path):
    line = f'source {ROOT}/scripts/common.sh; type -t fairseq-hydra-train; "$PYTHON" "$@"'
    words = ("-c", "import sys; print(sys.executable, *sys.argv)", "a b")
    done = run("bash", "-c", line, "bash", *words, env=scripts())
    assert done.stdout == f"function\n{sys.executable} -c a b\n", done.stderr
