"""The README's commands, run as they stand there on a small corpus."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tiny import ROOT, scripts, sentences

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(
    r"<!-- tests/test_readme\.py runs this block -->\n```(bash|python)\n(.*?)```", README, re.DOTALL
)
# A base-size model takes minutes for the miniature.
SMALL_MODEL = "".join(
    f" +model.{option}"
    for option in (
        *("encoder_embed_dim=32", "encoder_ffn_embed_dim=64", "encoder_layers=1"),
        *("decoder_layers=1", "encoder_attention_heads=2", "decoder_attention_heads=2"),
    )
)
# The toy corpus is too small for 8,000 pieces, a test too short for 8,000 updates of all layers.
SMALLER = {
    "--arch rope_transformer_multi30k": (
        "--arch rope_transformer_multi30k --encoder-layers 1 --decoder-layers 1"
    ),
    "--vocab-size 8000": "--vocab-size 100",
    "--warmup-updates 2000": "--warmup-updates 20",
    "--max-tokens 4096 --max-update 8000 --save-interval-updates 500": (
        "--max-tokens 500 --max-update 150 --save-interval-updates 25 --num-workers 0"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    (folder / "corpus").mkdir()
    for name in ("rope_fairseq", "scripts", "configs", "data-prep"):
        (folder / name).symlink_to(ROOT / name)
    for seed, (split, count) in enumerate({"train": 300, "valid": 12, "test": 12}.items()):
        for side, lang in enumerate(("en", "de")):
            lines = [pair[side] + "\n" for pair in sentences(count, seed)]
            (folder / "corpus" / f"{split}.{lang}").write_text("".join(lines), encoding="utf-8")
    return folder


def run_block(folder: Path, kind: str, text: str, environ: Mapping[str, str] = {}) -> str:
    tools = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "-euo", "pipefail", "-c"] if kind == "bash" else [sys.executable, "-c"]
    result = subprocess.run(
        [*command, text],
        cwd=folder,
        env=environment | environ,
        capture_output=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_the_commands_of_the_readme_work_in_their_order(folder):
    assert [kind for kind, _ in BLOCKS] == ["bash", "bash", "bash", "python"]
    train = BLOCKS[1][1]
    for stated, smaller in SMALLER.items():
        assert train.count(stated) == 1, stated
        train = train.replace(stated, smaller)
    output = run_block(folder, "bash", train)
    for kind in ("sacreBLEU", "tokenized BLEU", "chrF2"):
        assert re.search(rf"^{kind} .*\d", output, re.MULTILINE)

    # The starts that these commands take are seen in test_translate.py.
    output = run_block(folder, *BLOCKS[2], scripts())
    assert (folder / "test.hyp.de").read_text().count("\n") == 12
    assert len(re.findall(r"^D-\d", output, re.MULTILINE)) == 3

    sentence = "Open the file."
    (folder / "one.en").write_text(sentence + "\n")
    expected = run_block(folder, "bash", "scripts/translate.sh model one.en", scripts())
    assert run_block(folder, *BLOCKS[3]) == expected and expected.strip()


def test_the_miniature_of_wmt14_runs_as_the_readme_says(folder):
    kind, text = BLOCKS[0]
    small = text.rstrip() + SMALL_MODEL
    forked = scripts()
    output = run_block(folder, kind, small, forked)
    scores = json.loads((folder / "exp" / "wmt14" / "scores.json").read_text())
    names = ["sacreBLEU", "tokenized BLEU", "compound-split BLEU", "chrF2"]
    assert [score["name"] for score in scores["scores"]] == names
    # What differs from the recipe is said with the scores.
    for change in (
        *("vocab_size=500 (recipe: 37000)", "tokens_per_update=2000 (recipe: 25000)"),
        *("optimization.max_update=20", "+model.encoder_embed_dim=32", "published:no"),
    ):
        assert change in output and change in json.dumps(scores["about"]), change

    again = run_block(folder, kind, small, forked)
    assert ": running" not in again
    planning = "scripts/reproduce.sh wmt14 --dry-run --work exp/none"
    planned = run_block(folder, "bash", planning, forked)
    assert not (folder / "exp" / "none").exists()
    for command in (
        "--vocab-size 37000",
        "fairseq-preprocess --source-lang en --target-lang de --joined-dictionary",
        "fairseq-hydra-train --config-dir configs --config-name wmt14_base",
        "dataset.max_tokens=3125 optimization.update_freq=\\[8\\]",
        "--last 5 --by update",
        "fairseq_cli.generate",
        "--beam 4 --lenpen 0.6 --max-len-a 1 --max-len-b 50",
    ):
        assert command in planned, command


def test_every_file_that_the_readme_links_to_exists():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)|src=\"([^\"]+)\"", README)
    assert links and not re.search(r"@[A-Z]+@", README)
    for link in (a or b for a, b in links):
        assert (ROOT / link).exists(), link


def test_the_numbers_in_the_results_table_are_those_of_results():
    rows = {
        cells[1].strip("`"): [float(cell) for cell in cells[2:5]]
        for cells in (
            [cell.strip() for cell in row.strip("|").split("|")]
            for row in re.findall(r"^\| .*`.*\|$", README.partition("Signatures:")[0], re.MULTILINE)
        )
    }
    results = [json.loads(path.read_text()) for path in (ROOT / "results").glob("make-demo-*.json")]
    assert {result["position_encoding"] for result in results} == rows.keys()
    for result in results:
        scores = [round(score["value"], 2) for score in result["scores"]]
        assert rows[result["position_encoding"]] == scores
        for score in result["scores"]:
            assert score["signature"] in README
