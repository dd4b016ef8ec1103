"""Multi30k: its files at other places, and both recipes from a miniature to scores and serving."""

import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from rope_fairseq import export, translate
from rope_fairseq.evaluation.report import read_report
from rope_fairseq.lines import read_lines
from rope_fairseq.models.rope_transformer import RopeTransformerModel
from rope_fairseq.text import Text
from tests.corpora import get, left, load, one_error
from tests.serving import Server
from tests.tiny import ROOT, call, python, run, scripts
from tests.toy import toy_project

multi30k = load("multi30k", "get")
miniature = load("multi30k", "miniature")
SHARED = ROOT.parent / "shared" / "data" / "multi30k"
PAIRS = 200
PARTS = [f"{part}.{lang}" for part in ("train", "valid", "test") for lang in ("en", "de")]
RAW_TEST = ["raw.test.en", "raw.test.de"]
SOME = "data/task1/tok/val.lc.norm.tok.en"


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    miniature.make(folder, PAIRS, seed=1)
    return folder


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


# Getting it


@pytest.mark.parametrize("variant", ["tok", "raw"])
def test_each_variant_is_the_files_of_the_mirror(
    variant: str, mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get(multi30k, tmp_path, "--variant", variant, "--mirror", mirror) == 0
    files = left(tmp_path)
    source = json.loads(files.pop("source.json"))
    assert sorted(files) == sorted(PARTS + RAW_TEST * (variant == "tok"))
    published = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    for name, content in files.items():
        part, _, lang = name.removeprefix("raw.").partition(".")
        raw = mirror / f"data/task1/raw/{published[part]}.{lang}.gz"
        tok = mirror / f"data/task1/tok/{published[part]}.lc.norm.tok.{lang}"
        is_raw = variant == "raw" or name.startswith("raw.")
        assert content == (gzip.decompress(raw.read_bytes()) if is_raw else tok.read_bytes())
    assert (source["corpus"], source["variant"], source["published"]) == (
        *("multi30k", variant),
        False,
    )
    assert source["train"] == {"name": "train", "lines": PAIRS}
    assert source["test"] == {"name": "test_2016_flickr", "lines": 20}
    assert "this is NOT the published corpus" in capsys.readouterr().err


def test_the_tokens_of_the_miniature_are_made_as_the_published_ones(
    mirror: Path, tmp_path: Path
) -> None:
    assert get(multi30k, tmp_path, "--mirror", mirror) == 0
    text = Text("en", "de", escape=True, lowercase=True)
    for lang in ("en", "de"):
        raw = read_lines(tmp_path / f"raw.test.{lang}")
        tokens = [text.tokenize(line, lang) for line in raw]
        assert tokens == list(read_lines(tmp_path / f"test.{lang}"))


@pytest.mark.parametrize("kind", ["flat", "flat and packed", "repository and packed"])
def test_files_may_lie_packed_or_in_one_folder(kind: str, mirror: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name, content in left(mirror).items():
        text = gzip.decompress(content) if name.endswith(".gz") else content
        place = name.removesuffix(".gz")
        if "flat" in kind:
            place = place.rpartition("/")[2]
        if "packed" in kind and name != "archives.tsv":
            place, text = f"{place}.gz", gzip.compress(text)
        (other / place).parent.mkdir(parents=True, exist_ok=True)
        (other / place).write_bytes(text)
    for number, base in enumerate((mirror, other)):
        assert get(multi30k, tmp_path / str(number), "--mirror", base) == 0
    first, second = left(tmp_path / "0"), left(tmp_path / "1")
    del first["source.json"], second["source.json"]
    assert first == second


def test_what_comes_from_a_server_is_kept_and_not_asked_for_again(
    mirror: Path, tmp_path: Path
) -> None:
    arguments = ("--downloads", tmp_path / "downloads", "--mirror")
    with Server.of_folder(mirror).running() as server:
        assert get(multi30k, tmp_path / "0", *arguments, server.base) == 0
        asked = {path for path, _ in server.requests}
        assert f"/{SOME}" in asked and "/data/task1/raw/train.en.gz" not in asked
        del server.requests[:]
        kept = next((tmp_path / "downloads").glob(f"*/{SOME}"))
        assert get(multi30k, tmp_path / "1", *arguments, server.base) == 0
        assert [path for path, _ in server.requests] == ["/archives.tsv"]
        # One that is no longer right is.
        del server.requests[:]
        kept.write_text("other\n")
        assert get(multi30k, tmp_path / "2", *arguments, server.base) == 0
        assert [path for path, _ in server.requests] == ["/archives.tsv", f"/{SOME}"]
    assert left(tmp_path / "0") == left(tmp_path / "1") == left(tmp_path / "2")


def gone(path: Path) -> None:
    path.unlink()


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().swapcase())


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def not_packed(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(path.read_bytes())
    path.unlink()


def half_packed(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes())[:-9])
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (gone, "{base}: has no {path}, nor {path}.gz, val.lc.norm.tok.en, val.lc.norm.tok.en.gz; "),
        (changed, "{base}/{path}: the sha256 of its text is "),
        (cut_off, "{base}/{path}: has "),
        (not_packed, "{base}/{path}.gz: cannot be unpacked as .gz ("),
        (half_packed, "{base}/{path}.gz: cannot be unpacked as .gz ("),
    ],
)
def test_a_wrong_file_is_refused_and_nothing_is_written(
    spoil, message: str, mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "mirror"
    shutil.copytree(mirror, base)
    spoil(base / SOME)
    assert get(multi30k, tmp_path / "data", "--mirror", base) == 2
    assert one_error(capsys).startswith(message.format(base=base, path=SOME))
    assert not left(tmp_path / "data")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "bpe"], "argument --variant: invalid choice: 'bpe'"),
        (["--target-lang", "fr"], "--source-lang en --target-lang fr: must be en and de"),
        (["--mirror", "/none"], "/none: no such folder"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get(multi30k, tmp_path / "data", *arguments) == 2
    assert one_error(capsys).startswith(message)
    assert not left(tmp_path)


@pytest.mark.parametrize(("pairs", "right"), [(39, False), (40, True), (24_656, False)])
def test_the_miniature_has_a_smallest_and_a_largest_size(
    pairs: int, right: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get(miniature, tmp_path / "m", "--pairs", str(pairs)) == (0 if right else 2)
    assert (tmp_path / "m" / "archives.tsv").exists() == right
    if not right:
        assert one_error(capsys) == f"--pairs {pairs}: must be from 40 to 24655"


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs copies of the published files")
@pytest.mark.parametrize("corpus", ["multi30k", "multi30k-raw"])
def test_the_published_files_are_those_of_the_table(corpus: str, tmp_path: Path) -> None:
    script = ROOT / "data-prep" / corpus / "get.sh"
    done = run(script, tmp_path, "--mirror", SHARED, env={"PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    source = json.loads((tmp_path / "source.json").read_text())
    assert source["published"] is True and "NOT the published" not in done.stderr
    assert [source[part]["lines"] for part in ("train", "valid", "test")] == [29_000, 1014, 1000]
    assert source["variant"] == ("raw" if corpus == "multi30k-raw" else "tok")


# From the miniature to scores


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with its recipes of Multi30k and a tiny config in the place of theirs."""
    root = toy_project(tmp_path_factory.mktemp("project"), "toy")
    for corpus in ("multi30k", "multi30k-raw"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "data-prep" / corpus, root / "data-prep" / corpus, ignore=ignore)
        path = Path("configs") / "recipes" / f"{corpus}.yaml"
        recipe = yaml.safe_load((ROOT / path).read_text())
        average = {"last": 3, "by": "update"}
        (root / path).write_text(yaml.safe_dump(recipe | {"config": "toy", "average": average}))
    return root


@pytest.fixture(scope="module")
def reproduced(project: Path, mirror: Path) -> tuple[Path, str]:
    """The work folder of the recipe multi30k, and what reproduce.sh printed."""
    done = run(
        project / "scripts" / "reproduce.sh",
        *("multi30k", "--mirror", mirror, "--merges", "200", "--tokens-per-update", "500"),
        env=scripts(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "exp" / "multi30k", done.stdout


def test_the_tokens_are_used_as_they_are_distributed(reproduced: tuple[Path, str]) -> None:
    work, _ = reproduced
    for name in PARTS:
        assert (work / "tok" / name).read_bytes() == (work / "data" / name).read_bytes()
    assert (work / "text" / "bpecodes").read_text().count("\n") == 201
    assert json.loads((work / "model" / "text.json").read_text())["bpe"] == "subword_nmt"
    report = json.loads((work / "tok" / "cleaning.json").read_text())
    assert report["options"]["tokenized"] is True and report["changes"] == {}
    assert report["pairs"]["train"]["kept"] == PAIRS  # nothing is left out


def test_the_scores_are_of_the_tokens_and_of_the_raw_reference(
    reproduced: tuple[Path, str],
) -> None:
    work, printed = reproduced
    report = read_report(work / "scores.json")
    kinds = {score.name: (score.kind, score.signature) for score in report.scores}
    assert list(kinds) == ["sacreBLEU", "tokenized BLEU", "compound-split BLEU", "chrF2"]
    for name in ("sacreBLEU", "chrF2"):
        assert kinds[name][0] == "detokenized translation, raw reference, case ignored"
        assert "case:lc" in kinds[name][1]
    assert "tok:none" in kinds["tokenized BLEU"][1]
    assert report.about["data"].startswith(
        "corpus:multi30k|published:no|pairs:200+20+20|merges:200"
    )
    assert "merges=200 (recipe: 10000); tokens_per_update=500" in report.about["changes"]
    assert "merges=200 (recipe: 10000)" in printed
    # A translation is tokens, and its own reference would be a perfect one.
    files = [work / "data" / name for name in ("test.de", "raw.test.de")]
    perfect = run(
        ROOT / "scripts" / "score.sh",
        *("--hyp", files[0], "--ref", files[0], "--raw-ref", files[1], "--target-lang", "de"),
        *("--tokenized", "--text", work / "model" / "text.json"),
        env={"PYTHON": sys.executable},
    )
    assert perfect.returncode == 0, perfect.stderr
    assert re.search(
        r"^tokenized BLEU +100\.00  tokens of the corpus, lower-cased", perfect.stdout, re.M
    )


def test_every_front_end_gives_the_same_translations(
    reproduced: tuple[Path, str], tmp_path: Path
) -> None:
    work, _ = reproduced
    model, raw = work / "model", work / "data" / "raw.test.en"
    assert call(translate.main, model, raw, "-o", tmp_path / "raw.de") == 0
    text = list(read_lines(tmp_path / "raw.de"))
    # The raw text is made the tokens that are distributed: so tokens and text are translated alike.
    tokens = work / "data" / "test.en"
    assert call(translate.main, model, tokens, "-o", tmp_path / "tok.de", "--tokenized") == 0
    found = list(read_lines(tmp_path / "tok.de"))
    options = Text.load(model)
    assert [options.detokenize(line, "de") for line in found] == text
    assert any(found) and not any("@@" in line for line in found)

    hub = RopeTransformerModel.from_pretrained(str(model))
    assert hub.translate(list(read_lines(raw))) == text
    assert "&quot;" in " ".join(hub.string(hub.encode('A "x"')).split())

    interactive = python(
        *("fairseq_cli.interactive", work / "data-bin", "--user-dir", ROOT / "rope_fairseq"),
        *("--path", model / "averaged.pt", "--task", "rope_translation"),
        *("--beam", "4", "--lenpen", "0.6", "--max-len-a", "1", "--max-len-b", "50"),
        *("--tokenizer", "rope_text", "--text-options", model / "text.json"),
        *("--bpe", "subword_nmt", "--bpe-codes", model / "bpecodes"),
        input=raw.read_text(),
    )
    assert interactive.returncode == 0, interactive.stderr
    assert re.findall(r"^D-\d+\t\S+\t(.*)$", interactive.stdout, re.MULTILINE) == text

    assert call(export.main, model, "--output", tmp_path / "exported") == 0
    assert (tmp_path / "exported" / "bpecodes").is_file()
    served = tmp_path / "served.de"
    engine = ("--engine", "ctranslate2")
    assert call(translate.main, tmp_path / "exported", raw, "-o", served, *engine) == 0
    assert sum(a != b for a, b in zip(read_lines(served), text, strict=True)) <= 1


@pytest.mark.parametrize("missing", ["bpecodes", "text.json"])
def test_a_model_without_its_text_files_is_refused(
    missing: str,
    reproduced: tuple[Path, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(reproduced[0] / "model", model)
    (model / missing).unlink()
    assert call(translate.main, model, reproduced[0] / "data" / "test.en") == 2
    assert one_error(capsys).startswith(f"{model / missing}: no such file")


def test_the_raw_recipe_is_prepared_from_the_text(project: Path, mirror: Path) -> None:
    size = ("--vocab-size", "300")
    done = run(
        project / "scripts" / "prepare.sh", "multi30k-raw", "--mirror", mirror, *size, env=scripts()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    work = project / "exp" / "multi30k-raw"
    text = Text.load(work / "text")
    assert (text.bpe, text.lowercase) == ("sentencepiece", False)
    signature = json.loads((work / "data.json").read_text())["signature"]
    assert signature.startswith("corpus:multi30k-raw|published:no|pairs:200+20+20|vocab:300|")
    assert list(read_lines(work / "tok" / "test.de")) == [
        text.tokenize(line, "de") for line in read_lines(work / "data" / "test.de")
    ]


def test_a_dry_run_prints_the_commands_and_writes_nothing(tmp_path: Path) -> None:
    work = tmp_path / "work"
    done = run(
        ROOT / "scripts" / "reproduce.sh",
        *("multi30k", "--work", work, "--dry-run", "--mirror", "m"),
        env={"PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for command in (
        f"data-prep/multi30k/get.sh {work}/data --source-lang en --target-lang de --mirror m",
        f"python -m rope_fairseq.corpus clean --data {work}/data --output {work}/tok "
        "--source-lang en --target-lang de --max-tokens 250 --keep-duplicates --lowercase "
        "--escape --tokenized --bpe subword_nmt",
        f"python -m rope_fairseq.corpus bpe --tokens {work}/tok --output {work}/text "
        "--merges 10000",
        f"python -m rope_fairseq.translate {work}/model {work}/data/test.en -o {work}/test.hyp.de "
        "--config configs/multi30k.yaml --tokenized",
    ):
        assert command in lines, done.stdout
    score = next(line for line in lines if "evaluation.score" in line)
    assert f"--ref {work}/data/test.de --src {work}/data/raw.test.en --tokenized" in score
    assert f"--raw-ref {work}/data/raw.test.de --text {work}/model/text.json" in score
    assert not work.exists()
