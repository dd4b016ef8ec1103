"""Exported models for tests: small random ones, and the tiny trained one."""

from pathlib import Path
from typing import Any

import ctranslate2
import torch
from fairseq.data import Dictionary

from rope_fairseq import ctranslate2_engine, ctranslate2_spec, export, translate
from tests.tiny import call, sentences, tiny_work

LINES = [source for source, _ in sentences(60, 7)]


def sharpened(model: Any) -> Any:
    """Random weights as they are built attend almost evenly: positions would hardly show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            if "q_proj.weight" in name or "output_projection" in name:
                parameter.mul_(3)
    return model


def exported(model: Any, folder: Path, quantization: str = "float32") -> Any:
    dictionaries = (model.encoder.dictionary, model.decoder.dictionary)
    spec = ctranslate2_spec.build_spec(model, *dictionaries)
    ctranslate2_spec.quantize(spec, quantization)
    folder.mkdir(exist_ok=True)
    spec.save(str(folder))
    return ctranslate2.Translator(str(folder), intra_threads=1)


def words(dictionary: Dictionary, numbers: list[list[int]]) -> list[list[str]]:
    return [[dictionary[number] for number in line] for line in numbers]


def export_tiny(output: Path) -> Path:
    """The tiny model, exported by the command."""
    assert call(export.main, tiny_work() / "model", "--output", output) == 0
    return output


def translated(folder: Path, lines: list[str], **options: Any) -> list[str]:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    model = ctranslate2_engine.load(folder, None, given)
    return translate.translate_lines(model, lines, "test", [])


def nearly_all(found: list[str], expected: list[str]) -> bool:
    """Are the lines the same but for one, where two words may be as good as each other?"""
    return sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
