"""Commands that import fairseq, without the seconds that the import takes.

The tests start fairseq about a hundred times, and nearly all the time of a start goes to imports
that are the same each time. So one process (the server) imports fairseq, torch and Hydra, but not
the plugin, and waits; each command is a forked child of it. ``interpreter()`` names a program to
call in place of ``python``. Called with what imports fairseq (``-m fairseq_cli.MODULE``,
``-m rope_fairseq.MODULE``, a command of fairseq), it hands arguments, environment, folder and
standard streams to the server and ends as the child does; called with anything else, it becomes the
real interpreter. Forked too are the workers of torchrun (see ``for_torchrun``), and what
``rope_fairseq.translate`` starts in turn.

A child differs from a process of its own in what precedes the command's first line: fairseq is
imported already, so what the import says is not seen, and all children have the same hash seed.
Tests of the start itself use ``sys.executable``, and so do those that run everything as a user
does: test_readme.py up to the trained model, the first test of test_translate.py, the run that
test_pipeline.py kills, and two processes that train together in test_distributed.py.
"""

import contextlib
import functools
import gc
import importlib
import marshal
import os
import re
import select
import shlex
import signal
import socket
import sys
import warnings
from pathlib import Path
from types import ModuleType

# What Python and the libraries read while they start: a request in which one of these is not as it
# was for the server gets a process of its own. (transformers sets TORCHINDUCTOR_CACHE_DIR; what
# torchrun sets is read when processes join.)
READ_AT_START = re.compile(
    rb"(LANG|LC_|OMP_|MKL_|OPENBLAS_|TORCH(?!INDUCTOR_CACHE_DIR$|ELASTIC_|_NCCL_)|PYTORCH|CUDA|LD_)"
    rb"|PYTHON(?!$|_EXEC$|PATH$|WARNINGS$|UTF8$)"
    rb"|(HOME|TMPDIR|TZ|LOGLEVEL)$"
)
IMPORTED = (
    *("fairseq", "fairseq.trainer", "fairseq.model_parallel.megatron_trainer", "torch._dynamo"),
    *("hydra", "sacrebleu", "sacremoses", "sentencepiece", "yaml"),
)
OWN_FILTERS = len(warnings.filters)  # Python's, before any import
KEPT_OPEN: list[object] = []
# These set up the log themselves before they import fairseq, whose import otherwise does.
LOG_FIRST = re.compile(r"fairseq_cli\.(train|validate|interactive|preprocess)|.*/fairseq-train")
PROGRAM = """#!/bin/sh
case "$1 $2 $3" in
"-m rope_fairseq."* | "-c import rope_fairseq"* | */scripts/tool.py" corpus binarize" | \
    "-m fairseq_cli."* | "-u -m fairseq_cli."* | {bin}/fairseq-* | "-u {bin}/fairseq-"*)
    exec {python} -I -S {file} ask {socket} "$@" ;;
esac
exec {python} "$@"
"""


@functools.cache
def interpreter(folder: Path) -> str:
    """The program, made in ``folder``; its server lives as long as the process that asks first."""
    import locale
    import subprocess
    import tempfile

    # A child cannot change the encoding, and what a fork gets of CUDA may be of no use.
    if locale.getpreferredencoding(False).upper() != "UTF-8" or os.path.exists("/dev/nvidiactl"):
        return sys.executable
    place = Path(tempfile.mkdtemp(prefix="fork", dir=folder))
    values = {
        "bin": Path(sys.executable).parent,
        "python": sys.executable,
        "file": __file__,
        "socket": place / "socket",
    }
    program = place / "python"
    program.write_text(PROGRAM.format(**{name: shlex.quote(str(v)) for name, v in values.items()}))
    program.chmod(0o755)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    with socket.socket(socket.AF_UNIX) as listener, open(place / "log", "wb") as log:
        listener.bind(str(place / "socket"))
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno()), str(program)],
            stdin=subprocess.PIPE,  # closed when this process ends, however it does
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    KEPT_OPEN.append(server)
    return str(program)


def for_scripts(folder: Path) -> dict[str, str]:
    """Environment variables with which the scripts of scripts/ start fairseq in this way."""
    # common.sh puts the folder of the real interpreter in front of PATH; a function precedes that.
    environment = {"PYTHON": interpreter(folder)}
    for name in ("fairseq-hydra-train", "fairseq-interactive"):
        program = Path(sys.executable).with_name(name)
        function = f'() {{ "$PYTHON" {shlex.quote(str(program))} "$@"; }}'
        environment[f"BASH_FUNC_{name}%%"] = function
    return environment


def for_torchrun(folder: Path) -> dict[str, str]:
    """Environment variables with which torchrun starts its workers in this way, and the scripts all
    but fairseq-hydra-train, of which torchrun needs the file."""
    return {"PYTHON": interpreter(folder), "PYTHON_EXEC": interpreter(folder)}


# In place of the interpreter ---------------------------------------------------------------------


def ask(address: str, *arguments: str) -> None:
    """Have a child of the server run ``arguments``, and end as it does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = marshal.dumps((arguments, dict(os.environb), os.getcwd()))
        socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
        server.sendall(request)
        child = int.from_bytes(server.recv(8), "little")
        if not child:
            os.execv(sys.executable, [sys.executable, *arguments])
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(child, number))
        os.closerange(0, 3)  # a pipe ends when the child, which has its own copies, closes it
        answer = server.recv(8)
    status = int.from_bytes(answer, "little") if answer else signal.SIGKILL
    if os.WIFSIGNALED(status):
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


# The server --------------------------------------------------------------------------------------


def at_start(environment: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in environment.items() if READ_AT_START.match(name)}


def serve(listener: socket.socket) -> list[str]:
    """Answer requests until standard input ends. In a child it returns: the arguments to run."""
    own = dict(os.environb)
    for name in IMPORTED:
        importlib.import_module(name)
    set_by_imports = dict(os.environb.items() - own.items())
    assert "rope_fairseq" not in sys.modules and len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()  # or each child would copy all of it, only to count references
    children: dict[int, tuple[int, socket.socket]] = {}  # by pidfd, ready when the child has ended
    while True:
        clients = {client: child for child, client in children.values()}
        ready = select.select([0, listener, *clients, *children], [], [])[0]
        for client, child in clients.items():
            if client in ready or 0 in ready:  # killed, or the tests have ended
                for kill in (os.kill, os.killpg):
                    with contextlib.suppress(ProcessLookupError):
                        kill(child, signal.SIGKILL)
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # before another one starts
        if 0 in ready:
            os._exit(0)
        for ended in children.keys() & ready:
            child, client = children.pop(ended)
            os.close(ended)
            reply(client, os.waitpid(child, 0)[1])
            client.close()
        if listener in ready:
            client = listener.accept()[0]
            length, streams, _, _ = socket.recv_fds(client, 8, 3)
            request = client.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
            arguments, environment, folder = marshal.loads(request)
            served = at_start(environment) == at_start(own)
            served = served and environment.get(b"PYTHONWARNINGS", b"") in (b"", b"ignore")
            child = os.fork() if served else 0
            if served and not child:
                for item in (listener, client, *clients):
                    item.close()
                for descriptor in children:
                    os.close(descriptor)
                os.setsid()
                for stream, descriptor in enumerate(streams):
                    os.dup2(descriptor, stream)
                    os.close(descriptor)
                os.environb.clear()
                os.environb.update(set_by_imports | environment)
                os.chdir(folder)
                return list(arguments)
            for descriptor in streams:
                os.close(descriptor)
            reply(client, child)
            if child:
                children[os.pidfd_open(child)] = child, client
            else:
                client.close()


def reply(client: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):
        client.sendall(number.to_bytes(8, "little"))


def run(arguments: list[str], forking: str) -> None:
    """Be the interpreter that is called with ``arguments``; ``forking`` is the one that asks us."""
    import logging
    import runpy

    import numpy as np
    import torch

    np.random.seed()
    torch.seed()
    importlib.invalidate_caches()
    if os.environ.get("PYTHONWARNINGS"):
        sys.warnoptions.append("ignore")
        warnings.filterwarnings("ignore", append=True)
        warnings.filters.insert(-OWN_FILTERS, warnings.filters.pop())  # between libraries' and own
    if arguments[0] == "-u":
        del arguments[0]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=True)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.abspath(path) for path in paths if path]
    sys.modules["__main__"] = main = ModuleType("__main__")
    program = arguments.pop(1) if arguments[0] in ("-m", "-c") else arguments[0]
    if LOG_FIRST.fullmatch(program):
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
    sys.argv[:] = arguments
    if program == "rope_fairseq.translate":
        sys.executable = forking  # with which it starts fairseq_cli.generate
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(program)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        exec(compile(program, "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program)))
        main.__file__ = program
        exec(compile(Path(program).read_bytes(), program, "exec"), vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(*sys.argv[2:])
    del sys.path[0]
    run(serve(socket.socket(fileno=int(sys.argv[2]))), sys.argv[3])
