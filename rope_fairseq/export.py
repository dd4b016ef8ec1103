"""Export a model to CTranslate2, which translates without torch or fairseq's search.

    python -m rope_fairseq.export MODEL --output DIR [--quantization int8]

MODEL is what translate.sh takes: a folder that average.sh has made, or a checkpoint in it. DIR
holds CTranslate2's own files and, beside them, the text options, BPE model and dictionaries:
``translate.sh DIR --engine ctranslate2`` needs nothing else.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.data import Dictionary

from rope_fairseq.ctranslate2_engine import WEIGHTS_FILE, ctranslate2
from rope_fairseq.ctranslate2_spec import build_spec, quantize
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.fairseq_engine import Model, load_model
from rope_fairseq.text import OPTIONS_FILE

# As CTranslate2 names them; "int8" leaves open which type the rest of the computation has.
QUANTIZATIONS = (
    *("float32", "float16", "bfloat16"),
    *("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16"),
)
# What average.sh puts into a model's folder where it is known, beside what a translation needs.
PROVENANCE_FILES = ("data.json", "train.json")


def load_transformer(model: Model) -> Any:
    """Build the model of a checkpoint and load its parameters, in float32 on the CPU.

    Args:
        model: the checkpoint, overrides of its options, and the dictionaries beside it.
    """
    languages = {"source_lang": model.text.source_lang, "target_lang": model.text.target_lang}
    folder = {"data": str(model.folder)}
    (transformer,), _ = checkpoint_utils.load_model_ensemble(
        [str(model.checkpoint)], arg_overrides={**model.overrides, **languages, **folder}
    )
    return transformer.float().eval()


@contextmanager
def new_folder(output: Path, force: bool) -> Iterator[Path]:
    """A temporary folder that becomes ``output`` when the block ends.

    When the block raises or is killed, ``output`` is as it was; the next run removes what a killed
    one has left. A folder is never half of one model and half of another.

    Raises:
        UserError: see :func:`check_output`.
    """
    check_output(output, force)
    output = Path(os.path.abspath(output))
    temporary = output.parent / f".{output.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    new, old = temporary / "new", temporary / "old"
    try:
        new.mkdir(parents=True)
        yield new
        if output.exists():
            os.replace(output, old)
        os.replace(new, output)
    except OSError as error:
        if error.filename is None:  # a write, of which Python does not say where
            raise OSError(error.errno, error.strerror, str(output)) from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_output(output: Path, force: bool) -> None:
    """Refuse to write where something is.

    Args:
        output: the folder to make.
        force: an exported model may be there.
    """
    if not output.absolute().parent.is_dir():
        raise UserError(f"--output {output}: its parent is no folder")
    if not os.path.lexists(output):
        return
    if not force:
        raise UserError(f"--output {output}: exists; name another folder, or say --force")
    if output.is_symlink() or not (output / WEIGHTS_FILE).is_file():
        raise UserError(f"--output {output}: no exported model, so --force does not replace it")


def export(model: Model, transformer: Any, output: Path, quantization: str, force: bool) -> None:
    """Write a model's CTranslate2 files, and its text files beside them.

    Args:
        model: names the text options, BPE model and dictionaries to copy.
        transformer: its parameters.
        output: the folder to make.
        quantization: one of ``QUANTIZATIONS``.
        force: replace an exported model that is there.

    Raises:
        UserError: the model or the folder is refused; nothing has been written.
    """
    languages = (model.text.source_lang, model.text.target_lang)
    source, target = (Dictionary.load(str(model.dictionary(lang))) for lang in languages)
    spec = build_spec(transformer, source, target)
    quantize(spec, quantization)
    with new_folder(output, force) as folder:
        spec.save(str(folder))
        names = (OPTIONS_FILE, model.text.model.name, *(f"dict.{lang}.txt" for lang in languages))
        provenance = [name for name in PROVENANCE_FILES if (model.folder / name).is_file()]
        for name in dict.fromkeys((*names, *provenance)):
            shutil.copyfile(model.folder / name, folder / name)


def main() -> None:
    parser = Parser(
        prog="python -m rope_fairseq.export",
        description="Export a model to CTranslate2, for translate.sh --engine ctranslate2.",
    )
    parser.add_argument("model", type=Path, help="a folder that average.sh has made, or …/FILE.pt")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="float32",
        help="how numbers are stored, and computed where the machine can (default: float32)",
    )
    parser.add_argument(
        "--max-source-positions",
        type=int,
        metavar="N",
        help="the longest source to serve (default: what the model was trained with)",
    )
    parser.add_argument("--model-overrides", default="{}", metavar="DICT", help="as in fairseq")
    parser.add_argument("--force", action="store_true", help="replace an exported model")
    arguments = parser.parse_args()
    ctranslate2()
    check_output(arguments.output, arguments.force)
    model = load_model(arguments.model, arguments.max_source_positions, arguments.model_overrides)
    transformer = load_transformer(model)
    export(model, transformer, arguments.output, arguments.quantization, arguments.force)
    print(f"{arguments.output}: {arguments.quantization}, CTranslate2 {ctranslate2().__version__}")


if __name__ == "__main__":
    run_main(main)
