"""Does ``--train-matmul-precision medium`` change what a training learns? What it rounds off,
beside what dropout and the choice of the batch change anyway.

    python -m benchmarks.matmul_precision --data DATA_BIN CHECKPOINT… \\
        --output results/matmul-precision.json

For each checkpoint and each of some batches of the training data the gradient of the loss is taken
three times: in full precision, with rounded products and the same dropout, and in full precision
with another dropout. All numbers are norms over all parameters: ``rounding`` and ``other_dropout``
are ‖difference‖ / ‖exact gradient of the batch‖, ``other_batch`` is ‖exact gradient of the batch −
mean gradient‖ / ‖mean gradient‖. Rounding that is small against both is lost in them.
``rounding_of_the_mean`` is ‖mean difference‖ / ‖mean gradient‖: it falls with √batches as far as
rounding does not always point one way.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from torch import Tensor

from benchmarks import ROOT, machine
from rope_fairseq.checkpoint import load_checkpoint, num_updates
from rope_fairseq.errors import Parser, run_main
from rope_fairseq.files import replacing

PRECISION = "medium"


def gradient(model: Any, criterion: Any, sample: Any, precision: str, seed: int) -> Tensor:
    """All parameters' gradient of the loss per token, as one vector; float64."""
    torch.manual_seed(seed)
    model.zero_grad()
    model.train_matmul_precision = precision
    model.train()
    loss, size, _ = criterion(model, sample)
    (loss / size).backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients).double()


def relative(difference: Tensor, to: Tensor) -> float:
    return float(difference.norm() / to.norm())


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean(dim=0)


def measure(checkpoint: Path, data: Path, batches: int) -> dict[str, Any]:
    """What one checkpoint's gradients say."""
    override = {"data": str(data)}
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], override)
    model, criterion = models[0], task.build_criterion(cfg.criterion)
    task.load_dataset("train")
    iterator = task.get_batch_iterator(
        task.dataset("train"), max_tokens=cfg.dataset.max_tokens, max_positions=(1024, 1024), seed=1
    ).next_epoch_itr(shuffle=True)
    exact, errors, dropout = [], [], []
    for number, sample in zip(range(batches), iterator, strict=False):
        exact.append(gradient(model, criterion, sample, "highest", seed=number))
        rounded = gradient(model, criterion, sample, PRECISION, seed=number)
        other = gradient(model, criterion, sample, "highest", seed=batches + number)
        errors.append(rounded - exact[-1])
        dropout.append(other - exact[-1])
    model.eval()  # what the process had before
    center = mean(exact)
    pairs = list(zip(errors, dropout, exact, strict=True))
    state = load_checkpoint(checkpoint)
    return {
        "position_encoding": cfg.model.position_encoding,
        "seed": cfg.common.seed,
        "updates": num_updates(state),
        # In which training would go on.
        "epoch": state["extra_state"]["train_iterator"]["epoch"],
        "rounding": [round(relative(error, g), 5) for error, _, g in pairs],
        "other_dropout": [round(relative(change, g), 5) for _, change, g in pairs],
        "other_batch": [round(relative(g - center, center), 5) for g in exact],
        "rounding_of_the_mean": round(relative(mean(errors), center), 5),
    }


def main() -> None:
    parser = Parser(
        prog="python -m benchmarks.matmul_precision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--data", type=Path, required=True, help="data-bin of the training")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True, metavar="JSON")
    arguments = parser.parse_args()
    utils.import_user_module(argparse.Namespace(user_dir=str(ROOT / "rope_fairseq")))
    facts = machine.describe("cpu")
    measured = [measure(path, arguments.data, arguments.batches) for path in arguments.checkpoints]
    record = {"precision": PRECISION, "batches": arguments.batches, "checkpoints": measured}
    with replacing(arguments.output) as file:
        file.write((json.dumps(record | {"machine": facts}, indent=1) + "\n").encode())
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    run_main(main)
