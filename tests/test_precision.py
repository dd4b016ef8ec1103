"""``--compute-dtype``: products in bfloat16, everything that is kept in float32."""

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf

from rope_fairseq.errors import UserError
from rope_fairseq.models.rope_transformer import RopeTransformerModel
from rope_fairseq.precision import train_no_more
from tests.conftest import TinyTask, build_small
from tests.tiny import ROOT, fairseq

SRC, LENGTHS = torch.tensor([[5, 6, 7, 8, 2], [9, 4, 2, 1, 1]]), torch.tensor([5, 3])
PREV = torch.tensor([[2, 6, 9, 4], [2, 5, 1, 1]])


@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_products_run_in_bfloat16_and_gradients_are_float32(options, pre_norm):
    norms = {"encoder_normalize_before": pre_norm, "decoder_normalize_before": pre_norm}
    exact = build_small(**options, **norms).train()
    model = build_small(**options, **norms, compute_dtype="bfloat16").train()
    dtypes = set()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.fc1.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    scores = [m(SRC, LENGTHS, PREV)[0].float().log_softmax(-1) for m in (model, exact)]
    assert dtypes == {torch.bfloat16}
    assert 0 < (scores[0] - scores[1]).abs().max() < 0.1
    for out in scores:
        out[:, :2, 7].sum().backward()
    assert dtypes == {torch.bfloat16}  # recomputed activations too
    for (name, mine), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == torch.float32, name
        if other.grad.abs().max() > 1e-3:
            likeness = torch.cosine_similarity(mine.grad.flatten(), other.grad.flatten(), dim=0)
            assert likeness > 0.99, name


def test_a_model_says_what_it_computes_in():
    assert build_small().compute_dtype == "float32"
    assert build_small(compute_dtype="bfloat16").compute_dtype == "bfloat16"


def test_step_by_step_decoding_in_bfloat16_is_near_the_full_one():
    model = build_small(compute_dtype="bfloat16")
    full, _ = model.decoder(PREV[:1], encoder_out=model.encoder(SRC[:1], LENGTHS[:1]))
    model.make_generation_fast_()
    encoder_out = model.encoder(SRC[:1], LENGTHS[:1])
    state: dict = {}
    with torch.no_grad():
        for step in range(1, 5):
            out, _ = model.decoder(
                PREV[:1, :step], encoder_out=encoder_out, incremental_state=state
            )
            difference = out[:, -1].float().log_softmax(-1) - full[:, step - 1].float().log_softmax(
                -1
            )
            assert difference.abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_model_that_was_cast_as_a_whole_stays_in_its_dtype(dtype, pre_norm):
    norms = {"encoder_normalize_before": pre_norm, "decoder_normalize_before": pre_norm}
    model = build_small(**norms, compute_dtype="bfloat16").to(dtype)
    exact = build_small(**norms)(SRC, LENGTHS, PREV)[0].log_softmax(-1)
    out, _ = model(SRC, LENGTHS, PREV)
    assert out.dtype == dtype
    assert (out.float().log_softmax(-1) - exact)[:, :2].abs().max() < 0.1


def test_an_unknown_precision_is_refused():
    with pytest.raises(UserError, match="--compute-dtype float16: choose from float32, bfloat16"):
        build_small(compute_dtype="float16")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("bf16", "--bf16: .* --compute-dtype bfloat16"),
        ("fp16", "--fp16: not together with --compute-dtype bfloat16"),
    ],
)
def test_other_half_precisions_are_refused_beside_it(option, message):
    run = OmegaConf.structured(FairseqConfig)
    OmegaConf.set_struct(run, False)
    run.common[option] = True
    run.model = {"_name": "rope_transformer", "compute_dtype": "bfloat16"}
    with pytest.raises(UserError, match=message):
        RopeTransformerModel.build_model(run.model, TinyTask())


def test_several_processes_with_bf16_are_refused_before_fairseq_looks_for_a_tpu(tmp_path):
    result = fairseq(
        *("fairseq-train", tmp_path, "--user-dir", ROOT / "rope_fairseq"),
        *("--arch", "rope_transformer", "--bf16", "--distributed-world-size", "2"),
    )
    assert result.returncode != 0
    error = result.stderr.strip().split("\n")[-1]
    assert error.startswith("error: --bf16: ") and "--compute-dtype bfloat16" in error
    assert "Traceback" not in result.stderr


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(SRC, LENGTHS, PREV)[0].log_softmax(-1)[:, :2, 7].sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


@pytest.fixture
def precision():
    before = torch.get_float32_matmul_precision()
    yield torch.get_float32_matmul_precision
    train_no_more()
    torch.set_float32_matmul_precision(before)


def test_the_precision_of_products_is_the_options_while_the_model_trains(precision):
    model = build_small(train_matmul_precision="medium")
    torch.set_float32_matmul_precision("high")
    assert model.eval() is model and precision() == "high"
    for _ in range(2):
        assert model.train() is model and precision() == "medium"
    assert model.eval() is model and precision() == "high"
    other = build_small()
    other.train().eval()
    assert precision() == "high"


def test_training_with_rounded_products_is_near_training_without(precision):
    model = build_small(train_matmul_precision="medium", position_encoding="t5")
    exact = gradients(model.eval())
    rounded = gradients(model.train())
    model.eval()
    assert all(value.dtype == torch.float32 for value in rounded.values())
    for name, value in exact.items():
        if value.abs().max() > 1e-3:
            near = torch.cosine_similarity(value.flatten(), rounded[name].flatten(), dim=0)
            assert near > 0.99, name


def test_an_unknown_precision_of_products_is_refused():
    with pytest.raises(UserError, match="--train-matmul-precision low: choose from highest, high,"):
        build_small(train_matmul_precision="low")
