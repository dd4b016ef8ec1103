"""A tiny work folder: a toy corpus, and a model of it trained for some seconds."""

import fcntl
import functools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from fairseq import options
from fairseq_cli import preprocess

from rope_fairseq.average import average_checkpoints, select_checkpoints
from rope_fairseq.corpus.bpe import encode_corpus, train_bpe
from rope_fairseq.corpus.clean import clean_corpus
from rope_fairseq.corpus.rules import Limits
from rope_fairseq.errors import run_main
from rope_fairseq.text import MODEL_FILE, OPTIONS_FILE, Text
from rope_fairseq.translate import main as translate
from tests import forkserver

ROOT = Path(__file__).resolve().parent.parent
WORDS = {
    "open": "öffne",
    "the": "die",
    "file": "Datei",
    "menu": "Leiste",
    "page": "Seite",
    "save": "sichere",
    "print": "drucke",
    "new": "neue",
    "drop-down": "Drop-down",
    "text": "Text",
    "and": "und",
    "&": "&",
    "re-open": "wieder-öffne",
    '"OK"': '"OK"',
    "it's": "ist's",
}
# Not a multiple of the updates in an epoch (12): at its end fairseq writes no checkpoint by update.
SAVE_EVERY = 65
CHECKPOINTS = 5
BESIDE_THE_DATA = (MODEL_FILE, OPTIONS_FILE)
DICTIONARIES = ("dict.en.txt", "dict.de.txt")
UPDATES = 6 * SAVE_EVERY
# Names the folder that conftest.py makes for all processes of a test run.
SHARED_FOLDER = "ROPE_FAIRSEQ_TEST_FOLDER"


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Pairs of toy sentences with quotes, ampersands and hyphens, translated word by word."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        words = rng.choices(list(WORDS), k=rng.randint(1, 9))
        pairs.append((" ".join(words) + ".", " ".join(WORDS[word] for word in words) + "."))
    return pairs


def run(*command: str | Path, **settings) -> subprocess.CompletedProcess:
    """Run a command on one thread; output as text in ``stdout`` and ``stderr``."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [str(word) for word in command],
        env=environment | settings.pop("env", {}),
        capture_output=True,
        encoding="utf-8",
        **settings,
    )


def interpreter() -> str:
    """What to call in place of ``python`` so that fairseq starts by fork (see forkserver.py)."""
    return forkserver.interpreter(shared_folder())


def python(module: str, *arguments: str | Path, **settings) -> subprocess.CompletedProcess:
    """Run ``python -m module``, by fork where that imports fairseq."""
    return run(interpreter(), "-m", module, *arguments, **settings)


def fairseq(command: str, *arguments: str | Path, **settings) -> subprocess.CompletedProcess:
    """Run one of fairseq's own commands, such as ``fairseq-train``, by fork."""
    return run(interpreter(), Path(sys.executable).with_name(command), *arguments, **settings)


def scripts() -> dict[str, str]:
    """The environment in which our scripts start fairseq by fork."""
    return forkserver.for_scripts(shared_folder())


def torchrun() -> dict[str, str]:
    """The environment in which torchrun starts its workers by fork."""
    return forkserver.for_torchrun(shared_folder())


def shared_folder() -> Path:
    return Path(os.environ[SHARED_FOLDER])


@functools.cache
def tiny_work() -> Path:
    """The folder, built once for all tests and all their processes; they must not change it."""
    shared = shared_folder()
    with open(shared / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        work = shared / "work"
        if not (shared / "complete").exists():
            shutil.rmtree(work, ignore_errors=True)
            build_work_folder(work)
            (shared / "complete").touch()
    return work


def call(main: Callable[[], None], *arguments: str | Path) -> int:
    """Run a tool's ``main`` in this process as on the command line; its exit status."""
    replaced = {"argv": ["tool", *map(str, arguments)]}
    if main is translate:  # it starts fairseq-generate
        replaced["executable"] = interpreter()
    with mock.patch.multiple(sys, **replaced):
        try:
            run_main(main)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


class CallsAFunction:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mknod, (str(self.path),)


def build_work_folder(work: Path) -> None:
    """Fill ``work`` with data/, text/, data-bin/, checkpoints/ and model/."""
    for folder in ("data", "model"):
        (work / folder).mkdir(parents=True)
    for seed, (split, count) in enumerate({"train": 400, "valid": 20, "test": 20}.items()):
        for side, lang in enumerate(("en", "de")):
            lines = [pair[side] + "\n" for pair in sentences(count, seed)]
            (work / "data" / f"{split}.{lang}").write_text("".join(lines), encoding="utf-8")
    limits = Limits(keep_duplicates=True)  # SAVE_EVERY counts on the number of pairs
    clean_corpus(Text("en", "de"), work / "data", work / "tok", limits, workers=1)
    train_bpe(work / "tok", 120, work / "text")
    encode_corpus(work / "tok", work / "text", work / "text", workers=1)

    preprocess.main(
        options.get_preprocessing_parser().parse_args(
            [
                *("--source-lang", "en", "--target-lang", "de", "--joined-dictionary"),
                *(f"--{split}pref={work}/text/{split}" for split in ("train", "valid", "test")),
                f"--destdir={work}/data-bin",
            ]
        )
    )
    # As prepare.sh does it.
    (work / "data-bin" / "preprocess.log").unlink()
    for name in BESIDE_THE_DATA:
        shutil.copy(work / "text" / name, work / "data-bin" / name)

    trained = python("fairseq_cli.train", *train_options(work), "--save-dir", work / "checkpoints")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    checkpoints = select_checkpoints([work / "checkpoints"], CHECKPOINTS, "update")
    torch.save(average_checkpoints(checkpoints), work / "model" / "averaged.pt")
    for name in (*BESIDE_THE_DATA, *DICTIONARIES):
        shutil.copy(work / "data-bin" / name, work / "model" / name)


def train_options(work: Path) -> list[str | Path]:
    """fairseq-train's arguments for the tiny model, without ``--save-dir``."""
    return [
        *(work / "data-bin", "--user-dir", ROOT / "rope_fairseq", "--arch", "rope_transformer"),
        *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128", "--share-all-embeddings"),
        *("--encoder-layers", "1", "--encoder-attention-heads", "2", "--encoder-normalize-before"),
        *("--decoder-layers", "1", "--decoder-attention-heads", "2", "--decoder-normalize-before"),
        *("--optimizer", "adam", "--lr", "0.005", "--lr-scheduler", "inverse_sqrt"),
        *("--warmup-updates", "20", "--clip-norm", "1", "--dropout", "0"),
        *("--max-tokens", "500", "--max-update", str(UPDATES)),
        *("--save-interval-updates", str(SAVE_EVERY), "--no-epoch-checkpoints"),
        *("--disable-validation", "--num-workers", "0", "--no-progress-bar", "--seed", "1"),
    ]
