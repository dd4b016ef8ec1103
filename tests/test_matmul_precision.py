"""benchmarks/matmul_precision.py: what rounded products do to a gradient."""

import json

import torch

from benchmarks import matmul_precision
from rope_fairseq.precision import products_are_changed
from tests.tiny import call, tiny_work


def test_gradients_of_a_checkpoint_are_compared(tmp_path, monkeypatch):
    work, output = tiny_work(), tmp_path / "it.json"
    words = (work / "checkpoints" / "checkpoint_last.pt", "--data", work / "data-bin")
    before = torch.get_float32_matmul_precision()

    def measured() -> dict:
        assert call(matmul_precision.main, *words, "--batches", "2", "--output", output) == 0
        (checkpoint,) = json.loads(output.read_text())["checkpoints"]
        return checkpoint

    found = measured()
    assert torch.get_float32_matmul_precision() == before and not products_are_changed()
    assert (found["position_encoding"], found["seed"]) == ("rope", 1) and found["updates"] > 0
    # The tiny model has no dropout; two batches are as far from their mean.
    assert found["other_dropout"] == [0, 0]
    assert 0 <= max(found["rounding"]) < 0.2 < min(found["other_batch"])

    # Full precision against itself.
    monkeypatch.setattr(matmul_precision, "PRECISION", "highest")
    assert measured()["rounding"] == [0, 0]
