"""COMET (Rei et al., 2020, arXiv 2009.09025), if unbabel-comet is installed.

It is no dependency: its models are gigabytes, and its release 2.2.7 asks for numpy below 2 and, not
saying so, for setuptools below 81.
A model is downloaded only when ``--comet`` names one that is not on this machine.
"""

import re
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rope_fairseq.errors import UserError
from rope_fairseq.evaluation.metrics import Score

BATCH_SIZE = 8
# A model's name on the Hugging Face hub, or one of COMET's own, older names.
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def _checkpoint(model: str, comet: Any) -> str:
    """The path of a COMET model's checkpoint, after a download if ``model`` is a name."""
    path = Path(model)
    if path.is_dir():  # as the model's repository has it
        path = path / "checkpoints" / "model.ckpt"
    if path.is_file():
        return str(path)
    if path.suffix == ".ckpt" or not _NAME.fullmatch(model):
        raise UserError(f"--comet {model}: {path}: no such file")
    try:
        return str(comet.download_model(model))
    except Exception as error:
        raise UserError(
            f"--comet {model}: neither a checkpoint here nor a model that can be downloaded "
            f"({error})"
        ) from error


def comet_score(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str], model: str
) -> Score:
    """The mean of a COMET model's sentence scores, as ``comet-score`` prints it.

    Args:
        sources, hypotheses, references: raw text, the same number of lines.
        model: a model's name such as ``Unbabel/wmt22-comet-da``, the path of its checkpoint, or
            of the folder that holds ``checkpoints/model.ckpt``.

    Raises:
        UserError: COMET is not installed, or there is no such model.
    """
    try:
        comet = import_module("comet")
        torch = import_module("torch")
        release = version("unbabel-comet")
    except ImportError as error:
        raise UserError(
            f"--comet {model}: COMET cannot be imported ({error}); "
            'pip install unbabel-comet "setuptools<81"'
        ) from error
    checkpoint = _checkpoint(model, comet)
    try:
        scorer = comet.load_from_checkpoint(checkpoint)
    except Exception as error:
        raise UserError(f"--comet {model}: {checkpoint} does not load ({error})") from error
    samples = [
        {"src": source, "mt": hypothesis, "ref": reference}
        for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True)
    ]
    # No progress bar: it goes to standard output, where the scores are to stand alone.
    prediction = scorer.predict(
        samples,
        batch_size=BATCH_SIZE,
        gpus=int(torch.cuda.is_available()),
        progress_bar=False,
    )
    return Score(
        "COMET",
        float(prediction.system_score),
        "source, detokenized translation, raw reference; not in points out of 100",
        f"model:{model}|version:{release}",
        digits=4,
    )
