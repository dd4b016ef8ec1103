"""Scores equal sacreBLEU's own command, and files that do not belong together are refused."""

import json
import lzma
import random
import shutil
import sys
from pathlib import Path

import pytest
from sacremoses import MosesTokenizer

from rope_fairseq import manifest
from rope_fairseq.corpus.signature import sign_corpus
from rope_fairseq.errors import UserError
from rope_fairseq.evaluation import samples
from rope_fairseq.evaluation.buckets import Bucket
from rope_fairseq.evaluation.metrics import Score, split_compounds
from rope_fairseq.evaluation.read import read_generate_output
from rope_fairseq.evaluation.report import Report, read_report, write_report
from rope_fairseq.evaluation.score import main, score_files
from rope_fairseq.lines import read_lines
from rope_fairseq.text import Text
from tests.tiny import ROOT, call, run, scripts, tiny_work

REFERENCE = [
    'Klicken Sie auf "OK" & warten Sie.',
    "Das Drop-down-Menü, das sich öffnet, hat 3 Einträge.",
    "Ein Satz mit\u2028einem Zeilentrenner und\x0cmehr.",
    "Die Datei ist's nicht; das <Menü> auch nicht.",
]
HYPOTHESIS = [
    'Klicken Sie auf "OK" und warten Sie.',
    "Das Drop-down-Menü, das öffnet, hat drei Einträge.",
    "Ein Satz mit\u2028einem Zeilentrenner und mehr.",
    "",
]


def write(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


@pytest.fixture
def hypothesis(tmp_path: Path) -> Path:
    return write(tmp_path / "hyp.de", HYPOTHESIS)


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write(tmp_path / "ref.de", REFERENCE)


def sacrebleu(reference: Path, hypothesis: Path, *options: str) -> dict:
    """What sacreBLEU's command says, to all digits."""
    command = (sys.executable, "-m", "sacrebleu", reference, "-i", hypothesis, *options)
    done = run(*command, "--width", "20", "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, Path]:
    """Translations like a model's and their references: 200 sentences of the demo's test set, some
    words left out, some others doubled."""
    folder = tmp_path_factory.mktemp("demo")
    packed = (ROOT / "data-prep" / "demo" / "test.de.xz").read_bytes()
    references = lzma.decompress(packed).decode().split("\n")[:200]
    rng = random.Random(1)
    hypotheses = [
        " ".join(word for word in line.split(" ") for _ in range(rng.choice((0, 1, 1, 1, 2))))
        for line in references
    ]
    return write(folder / "hyp.de", hypotheses), write(folder / "ref.de", references)


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("files", ["hand-made", "demo"])
def test_all_scores_equal_sacrebleus_command_on_the_same_files(
    files, generated, hypothesis, reference, demo, tmp_path
):
    if files == "demo":
        hypothesis, reference = demo
    scored = hypothesis
    if generated:
        lines = list(enumerate(read_lines(hypothesis)))
        scored = generate_output(tmp_path / "out", random.Random(1).sample(lines, len(lines)))
    report = score_files(scored, reference, "de", generate_output=generated)
    bleu, tokenized, split, chrf = report.scores

    moses = MosesTokenizer("de")
    tokens, split_tokens = [], []
    for path in (reference, hypothesis):
        lines = [moses.tokenize(line, return_str=True) for line in read_lines(path)]
        tokens.append(write(tmp_path / f"{path.name}.tok", lines))
        lines = [split_compounds(line) for line in lines]
        split_tokens.append(write(tmp_path / f"{path.name}.atat", lines))
    none = ("--tokenize", "none", "--force")
    for score, said in (
        (bleu, sacrebleu(reference, hypothesis)),
        (tokenized, sacrebleu(*tokens, *none)),
        (split, sacrebleu(*split_tokens, *none)),
        (chrf, sacrebleu(reference, hypothesis, "-m", "chrf")),
    ):
        assert score.value == said["score"]
        assert score.signature == said["signature"]
    assert 0 < bleu.value < 100 and "tok:13a" in bleu.signature
    assert len({score.value for score in report.scores}) == 4
    assert "sacremoses" in tokenized.kind and "language de" in tokenized.kind


def test_chinese_is_tokenized_as_sacrebleus_command_does_when_told_the_language(tmp_path):
    hypothesis, reference = (
        write(tmp_path / "h", ["我有一只猫。"]),
        write(tmp_path / "r", ["我有一只狗。"]),
    )
    score = score_files(hypothesis, reference, "zh").scores[0]
    said = sacrebleu(reference, hypothesis, "-l", "en-zh")
    assert (score.value, score.signature) == (said["score"], said["signature"])
    assert "tok:zh" in score.signature and score.value > 0


def test_japanese_without_its_tokenizer_is_refused(reference, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "MeCab", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    assert call(main, "--hyp", reference, "--ref", reference, "--target-lang", "ja") == 2
    says = "error: --target-lang ja: sacreBLEU's tokenizer for it is not installed; pip install "
    assert capsys.readouterr().err == f'{says}"sacrebleu[ja]"\n'


def test_tokenized_bleu_follows_the_rules_of_the_target_language(tmp_path):
    # French: l' homme; others: l 'homme.
    hypothesis = write(tmp_path / "h", ["c'est homme qui dort bien"])
    reference = write(tmp_path / "r", ["c'est l'homme qui dort bien"])
    french, english = (score_files(hypothesis, reference, lang).scores[1] for lang in ("fr", "en"))
    assert french.value > english.value


def test_a_text_against_itself_scores_100(reference):
    scores = score_files(reference, reference, "de").scores
    assert [round(score.value, 6) for score in scores] == [100] * 4


def test_the_command_prints_every_score_with_kind_and_signature_and_writes_json(
    hypothesis, reference, tmp_path, capsys
):
    output = tmp_path / "scores.json"
    files = ("--hyp", hypothesis, "--ref", reference, "--target-lang", "de")
    about = ("--about", "recipe=wmt14, 20 updates", "data=f00d", "--about", "overrides=a=1 b=2")
    assert call(main, *files, "--json", output, *about) == 0
    printed = capsys.readouterr().out
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert list(stored) == ["about", "scores", "buckets"]
    assert stored["about"] == {
        "recipe": "wmt14, 20 updates",
        "data": "f00d",
        "overrides": "a=1 b=2",
    }
    head = "recipe: wmt14, 20 updates\ndata: f00d\noverrides: a=1 b=2\nsacreBLEU "
    assert printed.startswith(head)
    report = score_files(hypothesis, reference, "de")
    names = ["sacreBLEU", "tokenized BLEU", "compound-split BLEU", "chrF2"]
    assert [score["name"] for score in stored["scores"]] == names
    for score, computed in zip(stored["scores"], report.scores, strict=True):
        assert score["value"] == computed.value
        for part in (score["name"], f"{score['value']:.2f}", score["kind"], score["signature"]):
            assert part in printed
    assert [bucket["sentences"] for bucket in stored["buckets"]] == [4, 0, 0, 0, 0, 0, 0]
    assert stored["buckets"][0]["value"] == report.scores[0].value
    assert call(main, "--show", output) == 0
    assert capsys.readouterr().out == printed

    quiet = tmp_path / "quiet.json"
    assert call(main, *files, "--json", quiet, "--quiet", *about) == 0
    assert capsys.readouterr().out == "" and quiet.read_bytes() == output.read_bytes()


def test_a_report_is_read_as_it_was_written(tmp_path):
    report = Report(
        [Score("COMET", 0.1 + 0.2, "kind “x”", "model:x", digits=4)],
        [Bucket("source", 0, 10, 3, 1 / 3, "s"), Bucket("source", 11, None, 0, None, "")],
        {"recipe": "ä"},
    )
    write_report(tmp_path / "scores.json", report)
    assert read_report(tmp_path / "scores.json") == report


def test_the_plain_list_of_scores_of_version_0_1_0_is_still_shown(tmp_path, capsys):
    old = [{"name": "chrF2", "value": 48.7097, "kind": "detokenized", "signature": "nrefs:1"}]
    path = tmp_path / "scores.json"
    path.write_text(json.dumps(old))
    assert call(main, "--show", path) == 0
    shown = capsys.readouterr().out
    assert shown == f"{Score(**old[0])}\n" and "48.71  detokenized" in shown


def generate_output(path: Path, lines: list[tuple[int, str]]) -> Path:
    """What fairseq-generate prints, log lines and all."""
    text = ["2026-01-01 | INFO | fairseq.tasks | loaded"]
    for number, line in lines:
        text += [f"S-{number}\tx", f"H-{number}\t-0.5\t▁pieces ▁x", f"D-{number}\t-0.5\t{line}"]
    return write(path, [*text, "Generate test with beam=4: BLEU4 = 1.00"])


def test_fairseq_generates_output_is_scored_in_the_order_of_its_ids(reference, tmp_path):
    plain = write(tmp_path / "hyp", HYPOTHESIS)
    shuffled = [(number, HYPOTHESIS[number]) for number in (2, 0, 3, 1)]
    generated = generate_output(tmp_path / "generate-test.txt", shuffled)
    assert score_files(generated, reference, "de", generate_output=True) == score_files(
        plain, reference, "de"
    )


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ((0, 1, 3), "1 of 4 sentences have no translation (no line D-ID), the first is id 2"),
        ((0, 1, 2, 2, 3), "id 2 is there twice; generate with --nbest 1"),
        ((0, 1, 2, 3, 4), "id 4, but the reference has only 4 lines"),
        ((), "4 of 4 sentences have no translation"),
    ],
)
def test_missing_repeated_and_surplus_ids_are_refused(tmp_path, ids, says):
    path = generate_output(tmp_path / "out", [(number, "ein Satz") for number in ids])
    with pytest.raises(UserError) as error:
        read_generate_output(path, 4)
    assert str(error.value).startswith(f"{path}: {says}")


@pytest.mark.parametrize("line", ["▁Das ▁ist", "D@@ as ist"])
def test_subword_pieces_are_not_scored_as_text(tmp_path, line):
    path = generate_output(tmp_path / "out", [(0, line), (1, line)])
    with pytest.raises(UserError, match="subword pieces, not text"):
        read_generate_output(path, 2)


def test_empty_translations_are_scored_with_a_note(reference, tmp_path, capsys):
    hypothesis = write(tmp_path / "hyp", ["", " ", "\u2028", ""])
    for options in ((), ("--generate-output",)):
        if options:
            hypothesis = generate_output(tmp_path / "out", [(number, "") for number in range(4)])
        files = ("--hyp", hypothesis, "--ref", reference, "--target-lang", "de")
        assert call(main, *files, *options) == 0
        printed = capsys.readouterr()
        assert printed.err == f"note: {hypothesis}: 4 of 4 translations are empty\n"
        assert printed.out.startswith("sacreBLEU              0.00  ")


BAD = [
    # Options besides --target-lang de, with {folder} for the folder of the files; what is said.
    (
        "--hyp {folder}/short --ref {folder}/ref",
        "{folder}/short has 3 lines, but {folder}/ref has 4",
    ),
    ("--hyp {folder}/empty --ref {folder}/ref", "{folder}/empty: empty, there is nothing to score"),
    ("--hyp {folder}/hyp --ref {folder}/empty", "{folder}/empty: empty, there is nothing to score"),
    ("--hyp {folder}/latin --ref {folder}/ref", "{folder}/latin:2: not UTF-8"),
    ("--hyp {folder}/hyp --ref {folder}/latin", "{folder}/latin:2: not UTF-8"),
    ("--hyp {folder}/none --ref {folder}/ref", "{folder}/none: No such file or directory"),
    ("--hyp {folder} --ref {folder}/ref", "{folder}: Is a directory"),
    ("--hyp {folder}/hyp --ref {folder}/ref --generate-output", "{folder}/hyp: 4 of 4 sentences"),
    ("--src {folder}/short", "{folder}/short has 3 lines, but {folder}/ref has 4"),
    ("--src {folder}/empty", "{folder}/empty: empty"),
    ("--src {folder}/none", "{folder}/none: No such file or directory"),
    ("--buckets 10,5", "--buckets 10,5: must be whole numbers above 0 in rising order"),
    ("--about recipe", "--about recipe: must be NAME=VALUE"),
    ("--about =x", "--about =x: must be NAME=VALUE"),
    ("--about a=1 b=2 --about a=1", "--about a=1: a is there twice"),
    ("--comet x", "--comet x: needs the source text, --src FILE"),
    ("--json {folder}/ref/x.json", "{folder}/ref/x.json: Not a directory"),
    ("--json {folder}/none/x.json", "{folder}/none/x.json: No such file or directory"),
    ("--json {folder}", "{folder}: is a folder; name a file to write"),
    ("--show {folder}/ref", "--show {folder}/ref: goes alone, without other options"),
]


@pytest.mark.parametrize(("options", "says"), BAD)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    options, says, hypothesis, reference, tmp_path, capsys
):
    folder = tmp_path / "files"
    folder.mkdir()
    shutil.copy(hypothesis, folder / "hyp")
    shutil.copy(reference, folder / "ref")
    write(folder / "empty", [])
    write(folder / "short", HYPOTHESIS[:-1])
    (folder / "latin").write_bytes("a\nMen\u00fc\n".encode("latin-1"))
    before = sorted(folder.iterdir())
    command = [word.format(folder=folder) for word in options.split()]
    if "--hyp" not in command:
        command += ["--hyp", folder / "hyp", "--ref", folder / "ref"]
    if "--json" not in command and "--show" not in command:
        command += ["--json", folder / "scores.json"]
    assert call(main, *command, "--target-lang", "de") == 2
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {says.format(folder=folder)}")
    assert sorted(folder.iterdir()) == before


# Tokens


TOKENS = [
    "ein mann &amp; eine frau - &quot; ok &quot; .",
    "die drop-down-liste .",
    "noch eine zeile 10-20",
    "",
]
TOKEN_REFERENCE = [
    "ein mann &amp; eine frau , &quot; ok &quot; .",
    "die drop-down-liste hier .",
    "noch eine zeile 10-20",
    "und eine",
]
RAW_REFERENCE = [
    'Ein Mann & eine Frau, "OK".',
    "Die Drop-down-Liste hier.",
    "Noch eine Zeile 10-20",
    "Und eine",
]


@pytest.fixture
def token_files(tmp_path: Path) -> list[str | Path]:
    """The options that score tokens."""
    Text("en", "de", escape=True, lowercase=True).save_options(tmp_path)
    return [
        *("--hyp", write(tmp_path / "hyp.tok", TOKENS)),
        *("--ref", write(tmp_path / "ref.tok", TOKEN_REFERENCE)),
        *("--raw-ref", write(tmp_path / "ref.raw", RAW_REFERENCE)),
        *("--text", tmp_path / "text.json", "--tokenized", "--target-lang", "de"),
    ]


def test_tokens_are_scored_as_they_are_and_their_text_without_case(token_files, tmp_path):
    scores_file = tmp_path / "scores.json"
    assert call(main, *token_files, "--json", scores_file) == 0
    bleu, tokenized, split, chrf = read_report(scores_file).scores
    reference, hypothesis = tmp_path / "ref.tok", tmp_path / "hyp.tok"
    none = ("--tokenize", "none", "--force")
    text = ['ein mann & eine frau - "ok".', "die drop-down-liste.", "noch eine zeile 10-20", ""]
    of_text = (tmp_path / "ref.raw", write(tmp_path / "hyp.text", text))
    sides = ((TOKEN_REFERENCE, "ref.split"), (TOKENS, "hyp.split"))
    apart = [
        write(tmp_path / name, [split_compounds(line) for line in lines]) for lines, name in sides
    ]
    for score, said in (
        (bleu, sacrebleu(*of_text, "--lowercase")),
        (tokenized, sacrebleu(reference, hypothesis, *none)),
        (split, sacrebleu(*apart, *none)),
        (chrf, sacrebleu(*of_text, "-m", "chrf", "--chrf-lowercase")),
    ):
        assert (score.value, score.signature) == (said["score"], said["signature"])
    assert "case:lc" in bleu.signature and "case:lc" in chrf.signature
    assert "case ignored" in bleu.kind and "tokens of the corpus, lower-cased" in tokenized.kind
    assert len({score.value for score in (bleu, tokenized, split, chrf)}) == 4
    # All that is wrong with the text is its words, not its case.
    bucket = read_report(scores_file).buckets[0]
    assert (bucket.by, bucket.value) == ("reference", bleu.value)


def test_tokens_with_their_case_are_scored_with_it(token_files, tmp_path):
    Text("en", "de", escape=True).save_options(tmp_path)
    scores_file = tmp_path / "scores.json"
    assert call(main, *token_files, "--json", scores_file) == 0
    assert "case:mixed" in read_report(scores_file).scores[0].signature


@pytest.mark.parametrize("left_out", ["--tokenized", "--raw-ref", "--text"])
def test_what_scores_tokens_goes_together(left_out, token_files, capsys):
    at = token_files.index(left_out)
    del token_files[at : at + (1 if left_out == "--tokenized" else 2)]
    assert call(main, *token_files) == 2
    error = capsys.readouterr().err
    assert error == "error: --tokenized, --raw-ref FILE and --text FILE go together\n"


def test_a_raw_reference_of_another_length_is_refused(token_files, tmp_path, capsys):
    write(tmp_path / "ref.raw", RAW_REFERENCE[:2])
    assert call(main, *token_files) == 2
    said = f"{tmp_path}/ref.raw has 2 lines, but {tmp_path}/ref.tok has 4\n"
    assert capsys.readouterr().err.endswith(said)


def test_missing_options_and_foreign_score_files_are_refused(hypothesis, tmp_path, capsys):
    assert call(main, "--hyp", hypothesis) == 2
    assert "--hyp, --ref and --target-lang are needed" in capsys.readouterr().err
    files = ("--hyp", hypothesis, "--ref", hypothesis, "--target-lang", "de")
    assert call(main, *files, "--quiet") == 2
    assert capsys.readouterr().err == "error: --quiet: needs --json FILE, or the scores are lost\n"
    foreign = tmp_path / "foreign"
    for text in (
        "text",
        "{}",
        '{"scores": [1]}',
        "3",
        '[{"name": "x"}]',
        '{"scores": {}, "about": 1}',
    ):
        foreign.write_text(text)
        assert call(main, "--show", foreign) == 2
        error = capsys.readouterr().err
        assert (
            error.startswith(f"error: {foreign}: not a file of scores") and error.count("\n") == 1
        )


def test_scoring_needs_neither_fairseq_nor_torch():
    code = (
        "import sys, types; package = types.ModuleType('rope_fairseq'); "
        f"package.__path__ = [{str(ROOT / 'rope_fairseq')!r}]; "
        "sys.modules['rope_fairseq'] = package; "
        "import rope_fairseq.evaluation.score, rope_fairseq.evaluation.samples; "
        "import rope_fairseq.evaluation.compare; "
        "assert not {'fairseq', 'torch'} & sys.modules.keys()"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_score_sh_scores_any_two_files(hypothesis, reference):
    files = ("--hyp", hypothesis, "--ref", reference, "--target-lang", "de")
    done = run(ROOT / "scripts" / "score.sh", *files)
    assert done.returncode == 0
    assert done.stdout == f"{score_files(hypothesis, reference, 'de')}\n"


def test_score_sh_translates_and_scores_the_test_set_of_a_recipe(tmp_path):
    work = tmp_path / "work"
    for name in ("data", "model"):
        shutil.copytree(tiny_work() / name, work / name)
    tiny = tiny_work()
    dictionary = tiny / "data-bin" / "dict.en.txt"
    data = work / "model" / "data.json"
    signed = sign_corpus(tiny / "text", tiny / "tok", dictionary, "demo", data, None)
    options = {"tokens_per_update": "500", "+model.encoder_layers": "1"}
    (work / "model" / "train.json").write_text(json.dumps({"options": options}))
    script = (ROOT / "scripts" / "score.sh", "demo", "--work", work)
    assert "the step average is not finished" in run(*script, env=scripts()).stderr
    manifest.write(work / "manifests" / "average.json", [data], {}, [work / "model"])
    done = run(*script, env=scripts())
    assert done.returncode == 0, done.stderr
    report = read_report(work / "scores.json")
    # From the model, whatever the command says.
    assert report.about == {
        "recipe": "demo",
        "data": signed["signature"],
        "changes": "vocab_size=120 (recipe: 2000); clean.drop_duplicates=False (recipe: True); "
        "tokens_per_update=500 (recipe: 1024); +model.encoder_layers=1",
    }
    files = (work / "test.hyp.de", work / "data" / "test.de")
    computed = score_files(*files, "de", source=work / "data" / "test.en")
    assert (report.scores, report.buckets) == (computed.scores, computed.buckets)
    assert report.buckets[0].by == "source" and report.about["recipe"] == "demo"
    assert done.stdout.endswith(f"{report}\n")
    again = run(*script, "--vocab-size", "77")
    assert again.stdout == f"translate: up to date\nscore: up to date\n{report}\n"
    other = run(ROOT / "scripts" / "score.sh", "own", "--work", work)
    assert "its corpus is own, but the model was trained on demo" in other.stderr
    data.write_text("{}")
    assert f"{data} is not what the step average ran on" in run(*script, env=scripts()).stderr


def test_samples_are_taken_at_even_distances_and_shown_with_source_and_reference(
    hypothesis, reference, capsys
):
    assert samples.sample_numbers(500, 5) == [50, 150, 250, 350, 450]
    assert samples.sample_numbers(3, 5) == [0, 1, 2]
    files = ("--src", reference, "--ref", reference, "--hyp", hypothesis)
    assert call(samples.main, *files, "--number", "2") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"line 2\n  source       {REFERENCE[1]}\n  reference    ")
    assert f"  translation  {HYPOTHESIS[1]}\nline 4\n" in printed


def test_samples_of_unequal_or_empty_files_are_refused(reference, tmp_path, capsys):
    short = write(tmp_path / "short", REFERENCE[:2])
    empty = write(tmp_path / "empty", [])
    for hyp, says in ((short, "has 2 lines, but"), (empty, "empty")):
        files = ("--src", reference, "--ref", reference, "--hyp", hyp)
        assert call(samples.main, *files) == 2
        assert says in capsys.readouterr().err
