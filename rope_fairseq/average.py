"""Average the parameters of a run's last checkpoints into one.

    python -m rope_fairseq.average --inputs checkpoints --last 5 --by update --output averaged.pt

Averaging the last checkpoints is part of the recipe of Vaswani et al. (2017, section 6.1), which
RoFormer follows. The result is a checkpoint like any other: fairseq-generate, ensembles,
`--finetune-from-model` and the hub interface load it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_fairseq.attention_kind import AttentionKind
from rope_fairseq.checkpoint import load_checkpoint, num_updates, options
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.files import replacing
from rope_fairseq.position import PositionOptions
from rope_fairseq.schedule import kept_by_schedule

# The names fairseq gives its checkpoints; the group is the number that orders them.
PATTERNS = {
    "update": re.compile(r"checkpoint_\d+_(\d+)\.pt"),
    "epoch": re.compile(r"checkpoint(\d+)\.pt"),
}
PATTERN_NAMES = {"update": "checkpoint_EPOCH_UPDATE.pt", "epoch": "checkpointEPOCH.pt"}

# Options of a model that change what it computes without changing a parameter's name or shape.
# Dropout is left out: it acts in training only, and may change within a run.
_COMPUTES = re.compile(
    r"_name|arch|position_encoding|attention_kind|(?:rope|relative|linear)_\w+|activation_fn|"
    r"no_scale_embedding|no_token_positional_embeddings|no_cross_attention|cross_self_attention|share_\w+|"
    r"(?:en|de)coder_(?:normalize_before|attention_heads|learned_pos)"
)

# An earlier version did not know all options of ours, and did what they are by default.
DEFAULTS = {
    **{option.name: option.default for option in fields(PositionOptions)},
    "attention_kind": AttentionKind.kind,
    "linear_feature_map": AttentionKind.feature_map,
}
# Drawn once and never trained: the mean of two is neither.
_FIXED = "feature_map.projection"


def select_checkpoints(inputs: Sequence[Path], last: int, by: str) -> list[Path]:
    """The ``last`` checkpoints in order of their number.

    Args:
        inputs: one folder, or checkpoint files named the way fairseq names them.
        last: how many to select, at least 1.
        by: ``update`` for ``checkpoint_E_U.pt`` ordered by U, ``epoch`` for ``checkpointE.pt``.

    Raises:
        UserError: there are fewer than ``last``, or two of the same number.
    """
    if last < 1:
        raise UserError(f"--last {last}: must be at least 1")
    if len(inputs) == 1 and not inputs[0].is_file():
        paths = list(inputs[0].iterdir())
        where = str(inputs[0])
    else:
        paths = list(inputs)
        where = "--inputs"
    numbered: dict[int, Path] = {}
    for path in sorted(paths):
        match = PATTERNS[by].fullmatch(path.name)
        if match is None:
            continue
        number = int(match[1])
        if number in numbered:
            raise UserError(
                f"{numbered[number]} and {path} are both of {by} {number}: "
                "remove the one that an earlier run has left"
            )
        numbered[number] = path
    if len(numbered) < last:
        raise UserError(
            f"{where}: {len(numbered)} checkpoints named {PATTERN_NAMES[by]}, fewer than "
            f"--last {last}; {_advice(numbered, last, by)}"
        )
    return [numbered[number] for number in sorted(numbered)[-last:]]


def _advice(numbered: Mapping[int, Path], last: int, by: str) -> str:
    """Which training option would have left more checkpoints."""
    if by == "update":
        keep, write = "--keep-interval-updates", "--save-interval-updates"
    else:
        keep, write = "--keep-last-epochs", "--save-interval"
    kept = None
    if numbered:
        newest = load_checkpoint(numbered[max(numbered)])
        kept = kept_by_schedule(options(newest, "checkpoint"), by)
    if kept and kept < last:
        return f"the run was trained with {keep} {kept}, train with a greater one"
    if kept:
        return f"train longer, or save more often ({write})"
    return f"train longer, or save more often ({write}) and keep more ({keep})"


def average_checkpoints(paths: Sequence[Path]) -> dict[str, Any]:
    """The last of the checkpoints in ``paths`` with the mean of all their parameters.

    Sums are taken in float64 and the mean is cast to the stored dtype; integer and boolean
    buffers are the last checkpoint's. Tensors that share memory (tied embeddings) share it in the
    result. ``last_optimizer_state`` is dropped, being of no use beside averaged parameters;
    everything else stays, for fairseq does not load a checkpoint without it.
    ``extra_state["averaged_from"]`` lists file name and update of each checkpoint.

    Raises:
        UserError: the checkpoints differ in the names, shapes or dtypes of their parameters, or
            in an option of the model that changes what it computes.
    """
    states = [load_checkpoint(path) for path in paths]
    for path, state in zip(paths[1:], states[1:], strict=True):
        _check_same_model(paths[0], states[0], path, state)

    models = [state["model"] for state in states]
    means: dict[tuple[Any, ...], Tensor] = {}
    averaged = {}
    for name, stored in models[-1].items():
        place = _place(stored)
        if place not in means:
            means[place] = _mean([model[name] for model in models])
        averaged[name] = means[place]

    result = {key: value for key, value in states[-1].items() if key != "last_optimizer_state"}
    result["model"] = averaged
    result["extra_state"] = {
        **(result.get("extra_state") or {}),
        "averaged_from": [
            {"file": path.name, "updates": num_updates(state)}
            for path, state in zip(paths, states, strict=True)
        ],
    }
    return result


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are views of the same memory in the same way."""
    storage = tensor.untyped_storage()
    shared = storage.data_ptr() if storage.nbytes() else id(tensor)
    return shared, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    last = tensors[-1]
    if not last.is_floating_point():
        return last
    total = torch.zeros(last.shape, dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(last.dtype)


def _check_same_model(
    first: Path, first_state: Mapping[str, Any], path: Path, state: Mapping[str, Any]
) -> None:
    """Refuse the checkpoint ``path`` if it holds another model than the one in ``first``."""
    expected, found = options(first_state, "model"), options(state, "model")
    for option in sorted(filter(_COMPUTES.fullmatch, expected | found)):
        default = DEFAULTS.get(option)
        before, now = expected.get(option, default), found.get(option, default)
        if before != now:
            raise UserError(
                f"{path}: {option} is {now!r}, but {before!r} in {first}: not checkpoints of one "
                "model"
            )
    for name in sorted(first_state["model"].keys() | state["model"].keys()):
        ours, theirs = (_description(one["model"].get(name)) for one in (first_state, state))
        if ours != theirs:
            raise UserError(
                f"{path}: {name} is {theirs}, but {ours} in {first}: not checkpoints of one model"
            )
        tensors = [one["model"][name] for one in (first_state, state)]
        if name.endswith(_FIXED) and not torch.equal(*tensors):
            raise UserError(
                f"{path}: {name} differs from that in {first}: not checkpoints of one run"
            )


def _description(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def main() -> None:
    parser = Parser(
        prog="python -m rope_fairseq.average",
        description="Average the parameters of a run's last checkpoints.",
    )
    parser.add_argument(
        "--inputs",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="the folder that fairseq-train saved to, or checkpoint files",
    )
    parser.add_argument(
        "--last", type=int, metavar="N", help="average the N last (default: all files of --inputs)"
    )
    parser.add_argument(
        "--by",
        choices=sorted(PATTERNS),
        default="epoch",
        help="which checkpoints: those named by epoch (default) or by update",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()

    paths = arguments.inputs
    if arguments.last is not None:
        paths = select_checkpoints(paths, arguments.last, arguments.by)
    elif len(paths) == 1 and paths[0].is_dir():
        raise UserError(f"--inputs {paths[0]}: a folder needs --last N and --by update or epoch")
    for path in paths:
        print(f"average: {path}", flush=True)
    with replacing(arguments.output) as file:
        torch.save(average_checkpoints(paths), file)
    print(f"average: wrote {arguments.output}, the mean of {len(paths)} checkpoints")


if __name__ == "__main__":
    run_main(main)
