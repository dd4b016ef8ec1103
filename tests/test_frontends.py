"""fairseq's own commands with ``--user-dir rope_fairseq``, as a user types them."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from fairseq.tasks.translation import TranslationTask
from fairseq_cli import generate, validate

from rope_fairseq.checkpoint import load_checkpoint
from rope_fairseq.position import ENCODINGS
from rope_fairseq.text import Text
from tests.tiny import (
    ROOT,
    call,
    fairseq,
    interpreter,
    python,
    sentences,
    tiny_work,
    train_options,
)

PLUGIN = ROOT / "rope_fairseq"
VALIDATE = ("--task", "translation", "--max-tokens", "4096")  # it has no defaults for these
# By default one process loads batches. Where fairseq's command is not a process of its own, torch
# waits 5 seconds for it once it is garbage.
HERE = ("--user-dir", PLUGIN, "--num-workers", "0")
SEARCH = ("--beam", "4", "--lenpen", "0.6", "--max-len-a", "1", "--max-len-b", "50")


@pytest.fixture(scope="module")
def work() -> Path:
    return tiny_work()


def succeed(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def hypotheses(output: str) -> dict[int, str]:
    found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return {int(number): text for number, text in found}


def generate_here(capsys, data, path, *extra) -> str:
    """fairseq-generate in this process; its standard output."""
    capsys.readouterr()
    status = call(generate.cli_main, data, *HERE, "--path", path, "--no-progress-bar", *extra)
    assert status == 0
    return capsys.readouterr().out


def losses(output: str) -> list[str]:
    """The training losses that a run has logged, one an update."""
    return re.findall(r"(?:\"loss\": \"|[ |]loss[ =])(\d+\.\d+)", output)


def test_both_front_ends_reach_the_same_loss_on_the_same_seed(work, tmp_path):
    config = {
        "common": {"seed": 1, "no_progress_bar": True, "log_interval": 1},
        "task": {"_name": "translation", "data": str(work / "data-bin")},
        "model": {
            "_name": "rope_transformer_multi30k",
            "encoder_layers": 1,
            "decoder_layers": 1,
            "rope_base": 500.0,
            "share_all_embeddings": True,
        },
        "criterion": {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1},
        "optimizer": {"_name": "adam", "adam_betas": "(0.9,0.98)"},
        "lr_scheduler": {
            "_name": "inverse_sqrt",
            "warmup_updates": 4,
            "warmup_init_lr": 1e-7,
        },
        "optimization": {"lr": [0.005], "max_update": 8},
        "dataset": {"max_tokens": 500, "num_workers": 0, "disable_validation": True},
        "checkpoint": {"no_save": True, "save_dir": str(tmp_path)},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    from_yaml = fairseq(
        *("fairseq-hydra-train", "--config-dir", tmp_path),
        *("--config-name", "small", f"common.user_dir={PLUGIN}", f"hydra.run.dir={tmp_path}"),
        "hydra.output_subdir=null",
    )
    from_options = python(
        *("fairseq_cli.train", work / "data-bin", "--user-dir", PLUGIN),
        *("--arch", "rope_transformer_multi30k", "--encoder-layers", "1", "--decoder-layers", "1"),
        *("--rope-base", "500", "--share-all-embeddings", "--optimizer", "adam"),
        *("--adam-betas", "(0.9,0.98)", "--criterion", "label_smoothed_cross_entropy"),
        *("--label-smoothing", "0.1", "--lr", "0.005", "--lr-scheduler", "inverse_sqrt"),
        *("--warmup-updates", "4", "--warmup-init-lr", "1e-7", "--max-update", "8"),
        *("--max-tokens", "500", "--num-workers", "0", "--disable-validation", "--no-save"),
        *("--save-dir", tmp_path),
        *("--no-progress-bar", "--log-interval", "1", "--seed", "1"),
    )
    first, second = losses(succeed(from_yaml)), losses(succeed(from_options))
    assert len(first) >= 8 and first == second
    for output in (from_yaml.stdout, from_options.stdout):
        assert "position encoding: rope (base 500, layout interleaved" in output


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1003])
def test_default_options_lose_no_line(work, tmp_path, capsys, monkeypatch, count):
    for name in ("dict.en.txt", "dict.de.txt"):
        shutil.copy(work / "data-bin" / name, tmp_path)
    known = (work / "text" / "train.en").read_text().split("\n")
    lines = [known[number % 400].split()[: 1 + number % 5] for number in range(count)]
    text = "".join(" ".join(words) + "\n" for words in lines)
    for split in ("test", "valid"):
        for lang in ("en", "de"):
            (tmp_path / f"{split}.en-de.{lang}").write_text(text)
    data = ("--dataset-impl", "raw", "--source-lang", "en", "--target-lang", "de")
    model = work / "model" / "averaged.pt"

    seen = []
    monkeypatch.setattr(
        TranslationTask,
        "reduce_metrics",
        lambda self, logs, criterion: seen.append(sum(log["nsentences"] for log in logs)),
    )
    assert call(validate.cli_main, tmp_path, *VALIDATE, *HERE, "--path", model, *data) == 0
    assert seen == [count]
    output = generate_here(capsys, tmp_path, model, *data)
    assert sorted(hypotheses(output)) == list(range(count))


def test_validate_generate_and_interactive_as_in_the_readme(work, capsys):
    data, model = work / "data-bin", work / "model" / "averaged.pt"
    common = ("--user-dir", PLUGIN, "--path", model)
    validated = succeed(python("fairseq_cli.validate", data, *VALIDATE, *common))
    assert math.isfinite(float(losses(validated)[-1]))
    generated = succeed(python("fairseq_cli.generate", data, *common, *SEARCH))
    found = hypotheses(generated)
    assert len(found) == 20
    interactive = python(
        *("fairseq_cli.interactive", data, *common, *SEARCH),
        *("--tokenizer", "rope_text", "--text-options", data / "text.json"),
        *("--bpe", "sentencepiece"),
        *("--sentencepiece-model", data / "sentencepiece.bpe.model"),
        input=(work / "data" / "test.en").read_text(),
    )
    detokenized = re.findall(r"^D-\d+\t\S+\t(.*)$", succeed(interactive), re.MULTILINE)
    text = Text.load(data)
    assert detokenized == [text.decode(found[number], "de") for number in range(20)]


def test_beam_search_options(work, capsys):
    data, model = work / "data-bin", work / "model" / "averaged.pt"
    plain = generate_here(capsys, data, model, *SEARCH)
    twice = generate_here(capsys, data, f"{model}:{model}", *SEARCH)
    assert hypotheses(twice) == hypotheses(plain)  # an ensemble of one model with itself

    references = dict(re.findall(r"^T-(\d+)\t(.*)$", plain, re.MULTILINE))
    prefixed = hypotheses(generate_here(capsys, data, model, *SEARCH, "--prefix-size", "2"))
    for number, text in prefixed.items():
        prefix = references[str(number)].split()[:2]
        assert text.split()[: len(prefix)] == prefix

    scored = generate_here(capsys, data, model, *SEARCH, "--score-reference")
    assert {str(n): t for n, t in hypotheses(scored).items()} == references
    positional = re.findall(r"^P-\d+\t(.*)$", scored, re.MULTILINE)
    assert all(float(score) <= 0 for line in positional for score in line.split())

    for kind, pattern in (("hard", r"\d+-\d+"), ("soft", r"[\d.e+-]+(?:,[\d.e+-]+)*")):
        aligned = generate_here(capsys, data, model, *SEARCH, "--print-alignment", kind)
        assert hypotheses(aligned) == hypotheses(plain)
        lines = re.findall(r"^A-(\d+)\t(.*)$", aligned, re.MULTILINE)
        assert len(lines) == 20
        for number, line in lines:
            assert all(re.fullmatch(pattern, word) for word in line.split())
            # One alignment for each token of the hypothesis, its end included where it is soft.
            tokens = len(hypotheses(plain)[int(number)].split())
            assert abs(len(line.split()) - tokens) <= 1


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "rope"])
def test_the_other_encodings_train_and_generate(work, tmp_path, capsys, encoding):
    options = [*train_options(work), "--position-encoding", encoding]
    options[options.index("--max-update") + 1] = "8"
    succeed(python("fairseq_cli.train", *options, "--save-dir", tmp_path))
    state = torch.load(tmp_path / "checkpoint_last.pt")
    assert state["cfg"]["model"]["position_encoding"] == encoding
    output = generate_here(capsys, work / "data-bin", tmp_path / "checkpoint_last.pt", *SEARCH)
    assert len(hypotheses(output)) == 20


def test_the_base_can_be_overridden_at_test_time(work, capsys):
    data, model = work / "data-bin", work / "model" / "averaged.pt"
    plain = generate_here(capsys, data, model, "--score-reference")
    other = generate_here(
        capsys, data, model, "--score-reference", "--model-overrides", "{'rope_base': 3.0}"
    )
    assert re.findall(r"^P-.*$", plain, re.M) != re.findall(r"^P-.*$", other, re.M)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": "linear", "rope_scaling_factor": 4.0},
        {"rope_scaling": "dynamic", "rope_original_max_positions": 3, "rope_target_extra": 2},
        {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_positions": 10},
    ],
    ids=lambda scaling: scaling["rope_scaling"],
)
def test_a_scaling_can_be_chosen_at_test_time(work, tmp_path, capsys, scaling):
    """Also for a checkpoint of a version that did not know the options."""
    data = work / "data-bin"
    state = torch.load(work / "model" / "averaged.pt", weights_only=True)
    for name in scaling.keys() - {"rope_scaling"}:
        del state["cfg"]["model"][name]
    torch.save(state, tmp_path / "older.pt")
    plain = generate_here(capsys, data, work / "model" / "averaged.pt", "--score-reference")
    scores = []
    for model in (work / "model" / "averaged.pt", tmp_path / "older.pt"):
        overrides = ("--model-overrides", str({"model": scaling}))
        output = generate_here(capsys, data, model, "--score-reference", *overrides)
        scores.append(re.findall(r"^P-.*$", output, re.M))
    assert scores[0] == scores[1] != re.findall(r"^P-.*$", plain, re.M)


def test_training_with_bleu_keeps_checkpoints_that_load(work, tmp_path, capsys):
    options = train_options(work)
    options.remove("--disable-validation")
    # From a trained model: fairseq stores the counts of n-grams only when some match.
    options += ["--finetune-from-model", work / "model" / "averaged.pt", "--eval-bleu"]
    options += ["--eval-bleu-args", '{"beam": 4}', "--eval-bleu-remove-bpe", "sentencepiece"]
    options += ["--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"]
    for updates in (6, 9):  # the second call resumes the first
        options[options.index("--max-update") + 1] = str(updates)
        output = succeed(python("fairseq_cli.train", *options, "--save-dir", tmp_path))
        assert float(re.findall(r"\| bleu ([\d.]+)", output)[-1]) > 0
    assert "@ 6 updates" in output
    best = tmp_path / "checkpoint_best.pt"
    assert len(hypotheses(generate_here(capsys, work / "data-bin", best, *SEARCH))) == 20
    assert load_checkpoint(best)["extra_state"]["best"] > 0


@pytest.fixture(scope="module")
def stock(work, tmp_path_factory) -> Path:
    """A ``transformer`` of the tiny model's sizes, trained without the plugin."""
    folder = tmp_path_factory.mktemp("stock")
    options = [str(option) for option in train_options(work)]
    options[options.index("rope_transformer")] = "transformer"
    position = options.index("--user-dir")
    del options[position : position + 2]
    options[options.index("--max-update") + 1] = "60"
    succeed(fairseq("fairseq-train", *options, "--save-dir", folder))
    return folder / "checkpoint_last.pt"


def test_a_stock_checkpoint_generates_through_the_plugin(work, stock, capsys):
    assert len(hypotheses(generate_here(capsys, work / "data-bin", stock, *SEARCH))) == 20


@pytest.mark.parametrize("kind", ["stock", "averaged"])
def test_fine_tuning_starts_from_a_stock_and_from_an_averaged_model(work, stock, tmp_path, kind):
    start = stock if kind == "stock" else work / "model" / "averaged.pt"
    options = [*train_options(work), "--finetune-from-model", start, "--log-interval", "1"]
    options[options.index("--max-update") + 1] = "3"
    output = succeed(python("fairseq_cli.train", *options, "--save-dir", tmp_path))
    assert f"loading pretrained model from {start}" in output
    # From random weights the loss starts near log2(120) = 6.9.
    assert float(losses(output)[0]) < 5.5
    state = torch.load(tmp_path / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 3


@pytest.mark.parametrize(
    "options, message",
    [
        (["--position-encoding", "ropes"], "--position-encoding ropes: choose from rope, sin"),
        (["--encoder-embed-dim", "60", "--encoder-attention-heads", "4"], "head dimension 15"),
        (["--rope-base", "0"], "--rope-base 0.0: must be positive"),
        (["--encoder-learned-pos"], "--encoder-learned-pos: say it with --position-encoding"),
        (["--cross-self-attention"], "--cross-self-attention: not served"),
    ],
)
def test_wrong_model_options_end_training_with_one_line(work, tmp_path, options, message):
    result = python(
        "fairseq_cli.train", *train_options(work), *options, "--save-dir", tmp_path / "out"
    )
    assert result.returncode == 1
    # torch and fairseq have their own say before the plugin is loaded.
    said = [line for line in result.stderr.splitlines() if "INFO" not in line]
    assert len(said) == 1 and said[0].startswith("error: ") and message in said[0]
    assert not list((tmp_path / "out").glob("*.pt"))


# Training that is killed ------------------------------------------------------------------------


def interruptible(work: Path, folder: Path) -> list[str]:
    options = [str(option) for option in train_options(work)]
    for name, value in {
        "--dropout": "0.3",
        "--lr": "0.03",  # too high: the validation loss soon stops falling
        "--save-interval-updates": "5",
        "--max-update": "400",
    }.items():
        options[options.index(name) + 1] = value
    options.remove("--disable-validation")
    options.remove("--no-epoch-checkpoints")
    return [
        *("fairseq_cli.train", *options, "--save-dir", str(folder)),
        *("--patience", "4", "--keep-interval-updates", "2", "--keep-last-epochs", "2"),
        *("--log-interval", "1", "--log-format", "json"),
    ]


def train_and_kill_at(command: list[str], update: int) -> None:
    """Train until the log shows ``update``, then SIGKILL."""
    with subprocess.Popen(
        [interpreter(), "-m", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            match = re.search(r'"num_updates": "(\d+)"', line)
            if match and int(match[1]) >= update and "train_inner" in line:
                process.send_signal(signal.SIGKILL)
                break
        else:
            raise AssertionError(f"training ended before update {update}")
    assert process.returncode == -signal.SIGKILL


def test_a_run_killed_between_and_inside_epochs_ends_as_the_undisturbed_one(work, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    succeed(python(*interruptible(work, whole)))
    expected = torch.load(whole / "checkpoint_last.pt")
    last = expected["optimizer_history"][-1]["num_updates"]
    updates_an_epoch = 12
    assert 2 * updates_an_epoch < last < 400  # patience has ended it, after several epochs

    command = interruptible(work, killed)
    for update in (7, updates_an_epoch + 1, last - 4):
        train_and_kill_at(command, update)
    log = succeed(python(*command))
    assert "early stop since valid performance" in log
    again = python(*command)  # started after its end, it is complete
    assert "training is complete" in succeed(again)
    state = torch.load(killed / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == last
    for name, parameter in expected["model"].items():
        assert torch.equal(parameter, state["model"][name]), name
    assert state["extra_state"]["early_stopping"] == expected["extra_state"]["early_stopping"]
    assert json.dumps(state["extra_state"]["best"]) == json.dumps(expected["extra_state"]["best"])


def test_the_toy_corpus_is_what_the_other_tests_assume(work):
    assert len(sentences(3, 0)) == 3
    assert (work / "text" / "train.en").read_text().count("\n") == 400
