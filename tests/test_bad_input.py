"""Bad input to every script and tool: one clear line, an exit status other than 0, and nothing
half-written. One table; what is special to a module is tested beside the module."""

import contextlib
import gzip
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from rope_fairseq import average, translate
from tests.tiny import ROOT, call, run, scripts, tiny_work

# (what it is, the command, what the line must say). In the folder `places` there are:
#   good.en good.de     two parallel texts of 40 lines      short.de      one line less than good.en
#   empty.en empty.de   no bytes at all                      latin1.de     not UTF-8 in line 3
#   broken.en.gz        no gzip file                         blank.de      40 empty lines
#   model               a trained model                      model-cut     its checkpoint truncated
#   model-bare          only the checkpoint                  model-json    text.json is no JSON
#   model-class         a checkpoint that calls a function   work          prepared, not trained
CASES = [
    # scripts: the recipe and the folder
    ("no recipe", "prepare.sh", "no recipe given"),
    ("unknown recipe", "prepare.sh wmt15", "recipe 'wmt15'"),
    ("recipe is a path", "train.sh ../demo", "recipe '../demo'"),
    ("unknown recipe, dry", "reproduce.sh nosuch --dry-run", "recipe 'nosuch'"),
    ("--work without value", "prepare.sh demo --work", "--work needs a folder"),
    ("--work is a file", "prepare.sh demo --work good.en", "work folder good.en"),
    ("--work with a colon", "prepare.sh demo --work a:b", "must hold none of"),
    ("unknown option", "prepare.sh demo --wrok x", "unknown argument --wrok"),
    ("vocabulary no number", "prepare.sh demo --vocab-size big --work w", "--vocab-size big"),
    ("vocabulary 0", "prepare.sh demo --vocab-size 0 --work w", "--vocab-size 0"),
    ("same languages", "prepare.sh demo --target-lang en --work w", "target"),
    ("option without value", "prepare.sh demo --vocab-size", "--vocab-size needs a value"),
    # prepare: own texts
    ("own without texts", "prepare.sh own --work w", "--train"),
    ("one text only", "prepare.sh own --work w --train good.en", "--train needs two files"),
    ("text missing", "prepare.sh own --work w --train good.en no.de", "no.de"),
    ("text is a folder", "prepare.sh own --work w --train good.en model", "model"),
    ("unequal texts", "prepare.sh own --work w --train good.en short.de", "short.de"),
    ("empty texts", "prepare.sh own --work w --train empty.en empty.de", "empty.en"),
    ("same text twice", "prepare.sh own --work w --train good.en good.en", "good.en"),
    ("no gzip file", "prepare.sh own --work w --train broken.en.gz good.de", "broken.en.gz"),
    (
        "test not UTF-8",
        "prepare.sh own --work w --train good.en good.de --valid en de --test en2 latin1.de",
        "data/test.de:3: not UTF-8",
    ),
    ("a blank side", "prepare.sh own --work w --train good.en blank.de", "blank.de"),
    (
        "vocabulary too large",
        "prepare.sh own --work w --train good.en good.de --held-out 2 --vocab-size 9999",
        "vocab_size 9999",
    ),
    ("held out no number", "prepare.sh own --work w --train good.en good.de --held-out x", "x"),
    ("held out 0", "prepare.sh own --work w --train good.en good.de --held-out 0", "--held-out 0"),
    # prepare: WMT14
    ("mirror missing", "prepare.sh wmt14 --work w --mirror nowhere", "nowhere"),
    ("mirror without archives", "prepare.sh wmt14 --work w --mirror model", "training-parallel"),
    ("mirror of no known kind", "prepare.sh wmt14 --work w --mirror gopher://x/", "gopher"),
    ("miniature of nothing", "miniature.py w --pairs 0", "--pairs 0"),
    # train
    ("not prepared", "train.sh demo --work w", "run prepare.sh demo first"),
    ("mistyped key", "train.sh own --work work optimization.max_updates=5", "max_updates"),
    ("mistyped value", "train.sh own --work work model.position_encoding=ropes", "ropes"),
    ("no override", "train.sh own --work work beam", "unknown argument beam"),
    ("devices 0", "train.sh own --work work --devices 0", "--devices 0"),
    ("devices no number", "train.sh own --work work --devices two", "--devices two"),
    ("max tokens 0", "train.sh own --work work --max-tokens 0", "--max-tokens 0"),
    ("node outside", "train.sh own --work work --nodes 2 --node-rank 2", "--node-rank 2"),
    ("nodes without master", "train.sh own --work work --nodes 2", "--master"),
    ("own batch size", "train.sh own --work work dataset.max_tokens=5", "--max-tokens"),
    ("own update freq", "train.sh own --work work optimization.update_freq=[2]", "update_freq"),
    ("tokens per update 0", "train.sh own --work work --tokens-per-update 0", "per-update 0"),
    ("updates below 0", "train.sh own --work work --max-update -1", "--max-update -1"),
    ("too few kept", "train.sh own --work work checkpoint.keep_interval_updates=1", "keeps 1"),
    ("heads do not fit", "train.sh own --work work +model.encoder_embed_dim=36", "head dim"),
    # average
    ("not trained", "average.sh demo --work w", "the step train is not finished"),
    ("no checkpoints", "average.py --inputs work --last 2 --output a.pt", "work"),
    ("no checkpoint", "average.py --inputs good.en --output a.pt", "good.en"),
    ("damaged checkpoint", "average.py --inputs model-cut/averaged.pt --output a.pt", "model-cut"),
    ("code in a checkpoint", "average.py --inputs model-class/averaged.pt --output a.pt", "safely"),
    # translate
    ("no model", "translate.sh", "usage"),
    ("model missing", "translate.sh nowhere good.en", "nowhere"),
    ("model incomplete", "translate.sh model-bare good.en", "no such file"),
    ("model damaged", "translate.sh model-cut good.en", "model-cut"),
    ("model with code", "translate.sh model-class good.en", "safely"),
    ("text options damaged", "translate.sh model-json good.en", "text.json"),
    ("input missing", "translate.sh model no.en", "no.en"),
    ("input not UTF-8", "translate.sh model latin1.de -o out.de", "latin1.de:3: not UTF-8"),
    ("output is a folder", "translate.sh model good.en -o work", "work: is a folder"),
    ("n best", "translate.sh model good.en -o out.de --nbest 2", "--nbest"),
    ("overrides no dict", "translate.sh model good.en --model-overrides 1", "--model-overrides 1"),
    ("option of nobody", "translate.sh model good.en -o out.de --baem 4", "--baem"),
    ("too long a line", "translate.sh model good.en -o out.de --max-source-positions 3", "line "),
    # score and compare
    ("not averaged", "score.sh demo --work w", "the step average is not finished"),
    ("translation missing", "score.sh --hyp no.de --ref good.de --target-lang de", "no.de"),
    ("unequal lines", "score.sh --hyp short.de --ref good.de --target-lang de", "39 lines"),
    ("empty reference", "score.sh --hyp good.de --ref empty.de --target-lang de", "empty.de"),
    ("reference not UTF-8", "score.sh --hyp good.de --ref latin1.de --target-lang de", "latin1"),
    ("no language", "score.sh --hyp good.de --ref good.de", "--target-lang"),
    (
        "not from generate",
        "score.sh --hyp good.de --ref good.de --target-lang de --generate-output",
        "no translation",
    ),
    (
        "buckets descend",
        "score.sh --hyp good.de --ref good.de --target-lang de --buckets 9,5",
        "--buckets",
    ),
    ("not scores", "score.sh --show good.de", "good.de"),
    (
        "scores in a folder that is none",
        "score.sh --hyp good.de --ref good.de --target-lang de --json no/s.json",
        "no/s.json",
    ),
    (
        "no trials",
        "compare.py --baseline good.de --hyp good.de --ref good.de --target-lang de --trials 0",
        "--trials 0",
    ),
    # text and corpus
    ("unknown language", "text.py encode --model model --lang fr", "'fr'"),
    ("no text options", "text.py decode --model work --lang de", "text.json"),
]
TOOLS = {"compare.py": "evaluation.compare", "text.py": "text"}
NEED_FAIRSEQ = {"average.py": average.main, "translate.sh": translate.main}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    tiny = tiny_work()
    for lang in ("en", "de"):
        lines = (tiny / "data" / f"train.{lang}").read_bytes().splitlines(keepends=True)[:40]
        (folder / f"good.{lang}").write_bytes(b"".join(lines))
        (folder / f"empty.{lang}").touch()
    for copy in ("en", "en2", "de"):  # the same text, but not the same file
        shutil.copy(folder / f"good.{copy[:2]}", folder / copy)
    german = (folder / "good.de").read_bytes().splitlines(keepends=True)
    (folder / "short.de").write_bytes(b"".join(german[:-1]))
    (folder / "latin1.de").write_bytes(b"".join([*german[:2], b"\xfcber\n", *german[3:]]))
    (folder / "blank.de").write_bytes(b"\n" * 40)
    (folder / "broken.en.gz").write_bytes(gzip.compress(b"text\n" * 40)[:20])
    for name in ("model", "model-cut", "model-json"):
        shutil.copytree(tiny / "model", folder / name)
    os.truncate(folder / "model-cut" / "averaged.pt", 20_000)
    (folder / "model-json" / "text.json").write_text("text")
    (folder / "model-bare").mkdir()
    shutil.copy(tiny / "model" / "averaged.pt", folder / "model-bare")
    shutil.copytree(tiny / "model", folder / "model-class")
    # torch's old format: a pickle that calls posix.mknod("called").
    (folder / "model-class" / "averaged.pt").write_bytes(b"cposix\nmknod\n(S'called'\ntR.")
    result = run(
        *(ROOT / "scripts" / "prepare.sh", "own", "--work", folder / "work"),
        *("--train", folder / "good.en", folder / "good.de", "--held-out", "2"),
        *("--vocab-size", "60"),
        env=scripts(),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def files(folder: Path) -> set[str]:
    """All files but what a script keeps for itself (lock, logs, manifests)."""
    found = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in found}
    return {name for name in names if not {"logs", "manifests", ".lock"} & set(name.split("/"))}


def run_here(main: Callable[[], None], folder: Path, *arguments: str) -> tuple[int, str, str]:
    """A tool in this process, which has fairseq already: exit status, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), redirect_stdout(out), redirect_stderr(err):
        status = call(main, *arguments)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("command", "message"),
    [pytest.param(*case[1:], id=case[0].replace(" ", "-")) for case in CASES],
)
def test_bad_input_is_one_clear_line(places, command, message, script=False):
    before = files(places)
    program, *arguments = shlex.split(command)
    if program == "miniature.py":
        words = [sys.executable, ROOT / "data-prep" / "wmt14" / program]
    elif program in TOOLS:
        words = [sys.executable, ROOT / "scripts" / "tool.py", TOOLS[program]]
    else:
        words = [ROOT / "scripts" / program]
    if program in NEED_FAIRSEQ and not script:
        status, out, err = run_here(NEED_FAIRSEQ[program], places, *arguments)
    else:
        result = run(*words, *arguments, cwd=places, input="", env=scripts(), timeout=120)
        status, out, err = result.returncode, result.stdout, result.stderr
    output = out + err
    assert status not in (0, 126, 127), output
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert message in errors[0]
    assert "Traceback" not in output
    # What the steps before the bad one made is whole; .start says from what a training began.
    new = {name for name in files(places) - before if not name.startswith("w/")}
    assert new <= {"work/checkpoints/.start"}, new
    assert not [path for path in places.rglob("*") if re.search(r"\.(tmp|part)$", path.name)]
    assert not (places / "called").exists()
    shutil.rmtree(places / "w", ignore_errors=True)


def test_the_script_translate_sh_says_it_in_one_line_too(places):
    test_bad_input_is_one_clear_line(places, "translate.sh nowhere good.en", "nowhere", script=True)


def test_the_table_is_long_and_covers_every_script():
    assert len(CASES) >= 40
    programs = {command.split()[0] for _, command, _ in CASES}
    user_scripts = {"prepare.sh", "train.sh", "average.sh", "translate.sh", "score.sh"}
    assert programs >= user_scripts | {"reproduce.sh"}
