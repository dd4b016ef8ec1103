"""The criterion in fairseq: what it logs, trains and refuses, with one process and with two."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from fairseq import criterions
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics
from fairseq.modules.quant_noise import quant_noise
from fairseq.nan_detector import NanDetector
from omegaconf import OmegaConf
from torch import nn

from rope_fairseq.criterions.fused_label_smoothed_cross_entropy import (
    NAME,
    FusedLabelSmoothedCrossEntropy,
)
from rope_fairseq.errors import UserError
from tests.conftest import TinyTask, build_small
from tests.tiny import ROOT, fairseq, run, tiny_work, train_options

STOCK = "label_smoothed_cross_entropy"
TIED = {"share_all_embeddings": True}


def batch(seed=1, batch_size=5, tgt_len=9):
    """Sentences of different lengths, as the task translation collates them."""
    generator = torch.Generator().manual_seed(seed)
    pad, eos = 1, 2
    target = torch.randint(4, 36, (batch_size, tgt_len), generator=generator)
    for row in range(1, batch_size):
        target[row, tgt_len - row :] = pad
    shifted = torch.cat([torch.full((batch_size, 1), eos), target[:, :-1]], dim=1)
    source = target.flip(0)
    return {
        "target": target,
        "ntokens": int(target.ne(pad).sum()),
        "net_input": {
            "src_tokens": source.flip(1),
            "src_lengths": source.ne(pad).sum(1),
            "prev_output_tokens": shifted,
        },
    }


def both(**options):
    """fairseq's criterion and ours."""
    options = {"sentence_avg": False, "label_smoothing": 0.1, **options}
    return (
        LabelSmoothedCrossEntropyCriterion(TinyTask(), **options),
        FusedLabelSmoothedCrossEntropy(TinyTask(), **options, fused_chunk_size=7),
    )


@pytest.mark.parametrize("arch", ["rope_transformer", "transformer"])
@pytest.mark.parametrize("model", [{}, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.0, "sentence_avg": True},
        {"report_accuracy": True, "ignore_prefix_size": 2},
    ],
)
def test_loss_gradients_and_logging_are_those_of_fairseq(arch, model, options):
    model = build_small(arch, **model).train()
    results, gradients = [], []
    for criterion in both(**options):
        loss, sample_size, logs = criterion(model, batch())
        model.zero_grad()
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        results.append({"loss of forward": loss, "size": sample_size, **logs})
    assert list(results[0]) == list(results[1])
    for name, value in results[0].items():
        assert type(results[1][name]) is type(value), name
        torch.testing.assert_close(results[1][name], value, rtol=1e-6, atol=0, msg=name)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_a_model_in_bfloat16_computes_in_it_and_keeps_float32_parameters():
    model = build_small(**TIED).train()
    stock, fused = both()
    expected = stock(model, batch())[0].item()
    plain = fused(model, batch())[0].item()
    model.compute_dtype = "bfloat16"
    loss = fused(model, batch())[0]
    assert loss.dtype == torch.float32 and plain == pytest.approx(expected, rel=1e-6)
    assert loss.item() != plain and loss.item() == pytest.approx(plain, rel=1e-2)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_unreduced_losses_and_validation():
    model = build_small()
    stock, fused = both()
    expected, *_ = stock(model, batch(), reduce=False)
    with torch.no_grad():
        loss, _, logs = fused(model, batch(), reduce=False)
    assert not loss.requires_grad and loss.shape == logs["nll_loss"].shape
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)


def test_metrics_are_those_of_fairseq():
    model = build_small()
    summaries = []
    for criterion in both(report_accuracy=True):
        logs = [criterion(model, batch(seed))[2] for seed in (1, 2)]
        with metrics.aggregate(new_root=True) as meters:
            type(criterion).reduce_metrics(logs)
        summaries.append(meters.get_smoothed_values())
        assert type(criterion).logging_outputs_can_be_summed()
    assert summaries[1] == pytest.approx(summaries[0], rel=1e-5)
    assert {"loss", "nll_loss", "ppl", "accuracy"} <= set(summaries[0])


def test_nothing_stays_behind_in_the_model_even_after_an_error():
    model = build_small()
    fused = both()[1]
    fused(model, batch())
    broken = batch()
    broken["target"] = broken["target"] + 1000
    with pytest.raises((RuntimeError, IndexError)):
        fused(model, broken)
    assert not model._forward_hooks
    features, _ = model(**batch()["net_input"], features_only=True)
    assert features.shape == (5, 9, 32)


def test_fairseqs_search_for_nan_is_let_through():
    model = build_small()
    with NanDetector(model.decoder.output_projection):
        assert both()[1](model, batch())[0].isfinite()


# Refusals ---------------------------------------------------------------------------------------


def configuration(model=None, backend="pytorch_ddp", **criterion):
    return OmegaConf.create(
        {
            "model": model or {"_name": "rope_transformer", "adaptive_softmax_cutoff": None},
            "distributed_training": {"ddp_backend": backend},
            "optimization": {"sentence_avg": False},
            "criterion": {"_name": NAME, "label_smoothing": 0.1, **criterion},
        }
    )


ELSEWHERE = f"; use {STOCK}$"
BEFORE_TRAINING = [
    ({"backend": "fully_sharded"}, "--ddp-backend fully_sharded is not served, only pytorch_ddp, "),
    ({"backend": "slowmo"}, "--ddp-backend slowmo is not served"),
    (
        {"model": {"_name": "transformer", "adaptive_softmax_cutoff": [10, 20]}},
        "--adaptive-softmax-cutoff: ",
    ),
    ({"model": {"_name": "transformer", "quant_noise_scalar": 0.5}}, "--quant-noise-scalar "),
    *(
        ({"model": {"_name": arch}}, rf"--arch {arch}: .*\(features_only\)")
        # A recurrent network, convolutions (which swallow the argument), language models, an
        # encoder alone, and a Transformer with a loss of alignments.
        for arch in ("lstm", "lightconv", "transformer_lm", "transformer_align", "masked_lm")
    ),
]


@pytest.mark.parametrize(("settings", "message"), BEFORE_TRAINING)
def test_runs_that_it_cannot_serve_are_refused_before_training(settings, message):
    with pytest.raises(UserError, match=rf"^--criterion {NAME}: {message}.*{ELSEWHERE}") as refusal:
        criterions.build_criterion(configuration(**settings).criterion, TinyTask())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("arch", ["transformer", "rope_transformer", "transformer_wmt_en_de"])
@pytest.mark.parametrize("backend", ["pytorch_ddp", "c10d", "legacy_ddp", "no_c10d"])
def test_runs_that_it_serves_are_let_through(arch, backend):
    cfg = configuration({"_name": arch}, backend, fused_chunk_size=3)
    criterion = criterions.build_criterion(cfg.criterion, TinyTask())
    assert (type(criterion), criterion.chunk_size) == (FusedLabelSmoothedCrossEntropy, 3)


@pytest.mark.parametrize("size", [0, -5])
def test_a_chunk_size_below_one_is_refused(size):
    with pytest.raises(UserError, match=f"--fused-chunk-size {size}: must be at least 1"):
        criterions.build_criterion(configuration(fused_chunk_size=size).criterion, TinyTask())


class Scaled(nn.Linear):
    def forward(self, features):
        return 2 * super().forward(features)


def scaled(model):
    model.decoder.output_projection = Scaled(32, 36, bias=False)


def overridden(model):
    class Decoder(type(model.decoder)):
        def output_layer(self, features):
            return 2 * super().output_layer(features)

    model.decoder.__class__ = Decoder


def hooked(model):
    model.decoder.output_projection.register_forward_hook(lambda *arguments: None)


def noisy(model):
    quant_noise(model.decoder.output_projection, p=0.1, block_size=4)


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.decoder.output_projection)


def adaptive(model):
    model.decoder.adaptive_softmax = nn.Identity()


def another(model):
    model.decoder = nn.Identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scaled, r"RopeDecoder: its output_projection \(Scaled\) must be an nn.Linear"),
        (parametrized, r"RopeDecoder: its output_projection \(ParametrizedLinear\) must be"),
        (hooked, r"RopeDecoder: its output_projection \(Linear\) must be .* without hooks"),
        (noisy, r"RopeDecoder: its output_projection \(Linear\) must be .* without hooks"),
        (overridden, "Decoder: it does more to its features than one projection"),
        (adaptive, "RopeDecoder: an adaptive softmax"),
        (another, r"RopeTransformerModel: its decoder is no Transformer \(Identity\)"),
    ],
)
def test_models_that_it_cannot_serve_are_refused_when_called(change, message):
    model = build_small()
    change(model)
    with pytest.raises(UserError, match=f"^--criterion {NAME}: {message}.*{ELSEWHERE}"):
        both()[1](model, batch())


def test_a_model_without_features_only_is_refused_when_called():
    with pytest.raises(UserError, match="Identity: its model cannot give"):
        both()[1](nn.Identity(), batch())


# fairseq's commands -----------------------------------------------------------------------------


def arguments(folder, criterion, *more, tied=True, arch="rope_transformer"):
    """fairseq-train's arguments for some updates of the tiny model."""
    words = [str(word) for word in train_options(tiny_work())]
    if not tied:
        words.remove("--share-all-embeddings")
    words[words.index("--arch") + 1] = arch
    extra = ["--criterion", criterion, "--label-smoothing", 0.1, "--max-update", 3]
    extra += ["--log-interval", 1, "--save-dir", folder, "--max-tokens", 250, *more]
    if criterion == NAME:
        extra += ["--fused-chunk-size", 33]
    return [*words, *map(str, extra)]


def logged(output, key):
    found = re.findall(rf"[ |\"]{key}[\": ]*[ =]\"?(-?\d+\.?\d*)", output)
    return [float(number) for number in found]


EVAL_BLEU = ("--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 5}')


def test_training_validation_and_bleu_are_those_of_fairseq(tmp_path):
    outputs = []
    for criterion in (STOCK, NAME):
        words = arguments(tmp_path / criterion, criterion, "--report-accuracy", *EVAL_BLEU)
        words.remove("--disable-validation")
        train = fairseq("fairseq-train", *words)
        assert train.returncode == 0, train.stdout + train.stderr
        checkpoint = tmp_path / criterion / "checkpoint_last.pt"
        validate = fairseq(
            *("fairseq-validate", tiny_work() / "data-bin", "--user-dir", ROOT / "rope_fairseq"),
            *("--path", checkpoint, "--task", "translation", "--max-tokens", "4096"),
        )
        assert validate.returncode == 0, validate.stdout + validate.stderr
        outputs.append((train.stdout, validate.stdout))
    for keys, stock, ours in zip(
        (("loss", "accuracy", "bleu"), ("loss", "accuracy")), *outputs, strict=True
    ):
        for key in keys:
            assert logged(stock, key), key
            assert logged(ours, key) == pytest.approx(logged(stock, key), rel=1e-3), key
    assert len(logged(outputs[0][0], "loss")) >= 4
    assert "criterion: FusedLabelSmoothedCrossEntropy" in outputs[1][0]


def test_hydra_trains_what_the_command_line_trains(tmp_path):
    config = {
        "common": {"seed": 1, "no_progress_bar": True, "log_interval": 1},
        "task": {"_name": "translation", "data": str(tiny_work() / "data-bin")},
        "model": {
            "_name": "rope_transformer",
            **{f"{side}_embed_dim": 64 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_embed_dim": 128 for side in ("encoder", "decoder")},
            **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
            **{f"{side}_normalize_before": True for side in ("encoder", "decoder")},
            "share_all_embeddings": True,
            "dropout": 0.0,
        },
        "criterion": {"_name": NAME, "label_smoothing": 0.1, "fused_chunk_size": 20},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "inverse_sqrt", "warmup_updates": 20},
        "optimization": {"lr": [0.005], "max_update": 3, "clip_norm": 1.0},
        "dataset": {"max_tokens": 250, "num_workers": 0, "disable_validation": True},
        "checkpoint": {"no_save": True, "save_dir": str(tmp_path)},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    hydra = fairseq(
        *("fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "small"),
        *(f"common.user_dir={ROOT / 'rope_fairseq'}", f"hydra.run.dir={tmp_path}"),
        "hydra.output_subdir=null",
    )
    assert hydra.returncode == 0, hydra.stdout + hydra.stderr
    command_line = fairseq("fairseq-train", *arguments(tmp_path, STOCK, "--no-save"))
    expected = logged(command_line.stdout, "loss")
    assert len(expected) >= 3
    assert logged(hydra.stdout, "loss") == pytest.approx(expected, rel=1e-3)


def test_a_refusal_is_one_line_and_leaves_nothing(tmp_path):
    words = arguments(tmp_path / "save", NAME, "--adaptive-softmax-cutoff", "20", tied=False)
    result = fairseq("fairseq-train", *words)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: --criterion {NAME}: --adaptive-softmax-cutoff: ")
    assert not list(tmp_path.glob("save/*.pt"))


# Two processes ----------------------------------------------------------------------------------

#: fairseq-train for each list of arguments in turn, in processes that stay connected, with the loss
#: of each update and the parameters at the end. Torch's wrapper wants no device named on CPUs.
TRAIN_ALL = """
import json, os, pathlib, sys
import torch
import rope_fairseq
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.trainer import Trainer
from fairseq_cli import train

class OnCPU(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids, output_device, **kwargs):
        super().__init__(module, **kwargs)

distributed_fairseq_model.DistributedDataParallel = OnCPU
def log(self, outputs, sample_size, grad_norm=None):
    losses.append(float(sum(output["loss"] for output in outputs)) / float(sample_size))
    wrappers.add(type(self.model.module).__name__)
    trainers.append(self)
    return original(self, outputs, sample_size, grad_norm)

original, Trainer._reduce_and_log_stats = Trainer._reduce_and_log_stats, log
folder = pathlib.Path(__file__).parent
for number, (backend, words) in enumerate(json.loads((folder / "runs.json").read_text())):
    losses, wrappers, trainers = [], set(), []
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    cfg = convert_namespace_to_omegaconf(args)
    group = cfg.distributed_training
    group.distributed_world_size, group.distributed_rank = 2, int(os.environ["RANK"])
    group.distributed_init_method, group.distributed_no_spawn = "env://", True
    group.distributed_backend, group.ddp_backend = "gloo", backend
    if not torch.distributed.is_initialized():
        distributed_utils.distributed_init(cfg)
    train.main(cfg)
    model = {n: p.detach() for n, p in trainers[0].get_model().named_parameters()}
    result = {"losses": losses, "wrappers": list(wrappers), "model": model}
    torch.save(result, folder / f"{number}.{os.environ['RANK']}.pt")
"""

#: Whether embeddings are tied, and options that both criterions run with.
SETTINGS = {
    "tied": (True, ("--update-freq", 2, "--checkpoint-activations")),
    "untied": (False, ()),
}
#: Backend, setting, options of ours alone.
CASES = [
    *itertools.product(("pytorch_ddp", "legacy_ddp"), SETTINGS, [()]),
    ("pytorch_ddp", "untied", ("--find-unused-parameters",)),
]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What each run of two processes ends with: stock by setting, then ours by case; by rank."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "train_all.py").write_text(TRAIN_ALL)
    runs = [("legacy_ddp", STOCK, setting, ()) for setting in SETTINGS]
    runs += [(backend, NAME, setting, more) for backend, setting, more in CASES]
    lists = []
    for backend, criterion, setting, more in runs:
        tied, options = SETTINGS[setting]
        words = arguments(folder, criterion, "--no-save", *options, *more, tied=tied)
        lists.append((backend, words))
    (folder / "runs.json").write_text(json.dumps(lists))
    torchrun = Path(sys.executable).with_name("torchrun")
    result = run(torchrun, "--standalone", "--nproc-per-node", "2", folder / "train_all.py")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    ends = [
        tuple(torch.load(folder / f"{number}.{rank}.pt") for rank in (0, 1))
        for number in range(len(runs))
    ]
    stock = dict(zip(SETTINGS, ends, strict=False))
    return stock, dict(zip(CASES, ends[len(SETTINGS) :], strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join((case[0], case[1], *case[2])))
def test_two_processes_train_what_fairseqs_criterion_trains(two_processes, case):
    stock, ours = (
        results[key] for results, key in zip(two_processes, (case[1], case), strict=True)
    )
    kind = "OnCPU" if case[0] == "pytorch_ddp" else "LegacyDistributedDataParallel"
    assert ours[0]["wrappers"] == [kind]
    assert len(ours[0]["losses"]) == 3
    assert ours[0]["losses"] == pytest.approx(stock[0]["losses"], rel=1e-5)
    for name, parameter in stock[0]["model"].items():
        for rank in ours:
            torch.testing.assert_close(rank["model"][name], parameter, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours[0]["model"][name], ours[1]["model"][name])
    projection = "decoder.output_projection.weight"
    assert (projection in stock[0]["model"]) == (case[1] == "untied")
