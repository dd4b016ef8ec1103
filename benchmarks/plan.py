"""What is measured: which systems, on which shapes."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.encodings import SOURCES
from benchmarks.shapes import Shape, Size, of_tokens

BASE = Size(embed_dim=512, ffn_dim=2048, layers=6, heads=8, vocabulary=37000)
TINY = Size(embed_dim=128, ffn_dim=256, layers=4, heads=4, vocabulary=10000)
MINUTE = Size(embed_dim=16, ffn_dim=32, layers=1, heads=2, vocabulary=100)

STOCK = "stock"
MARIAN = "Marian"
EOLE = "Eole rope"
ROPE, NONE = "rope", "none"
BFLOAT16 = "rope, bfloat16"
SEARCH, SEARCH_BFLOAT16 = "rope, task rope_translation", "rope, task rope_translation, bfloat16"
FLOAT32, INT8 = "CTranslate2 float32", "CTranslate2 int8"
EXPORTED_BY = "rope"

# Kinds of comparisons in which a call is an update.
TRAININGS = ("training", "encodings")


@dataclass(frozen=True)
class System:
    """A class of one of the modules ``*_system.py`` and what it is built with."""

    kind: str
    work: str = "Training"
    arguments: dict[str, Any] = field(default_factory=dict)
    tf32: bool = False
    own_environment: bool = False
    """Runs on the interpreter of ``build/eole``."""
    process: str | None = None
    """The process that it shares with others; None for one of its own."""
    exported: bool = False
    """Needs the model that ``EXPORTED_BY`` writes."""


@dataclass(frozen=True)
class Comparison:
    """Systems that do the same work, in rounds; ratios are to the first one."""

    kind: str
    name: str
    shape: Shape
    systems: dict[str, System]


@dataclass(frozen=True)
class Plan:
    comparisons: list[Comparison]
    memory: Comparison
    rounds: int


def fairseq(criterion: str, *options: str, plugin: bool = True) -> System:
    arguments = {"options": [f"--criterion={criterion}", *options]}
    if plugin:
        arguments["user_dir"] = str(ROOT / "rope_fairseq")
    return System("fairseq", arguments=arguments)


STOCK_LOSS, OUR_LOSS = "label_smoothed_cross_entropy", "fused_label_smoothed_cross_entropy"


def ours(encoding: str, *options: str, criterion: str = OUR_LOSS) -> System:
    words = ("--arch=rope_transformer", f"--position-encoding={encoding}", *options)
    return fairseq(criterion, *words)


def training_systems(bfloat16: bool, device: str, eole: bool) -> dict[str, System]:
    stock = fairseq(STOCK_LOSS, "--arch=transformer", plugin=False)
    systems = {
        STOCK: stock,
        NONE: ours("none"),
        "sinusoidal": ours("sinusoidal"),
        ROPE: ours("rope"),
        "rope, stock loss": ours("rope", criterion=STOCK_LOSS),
        MARIAN: System("marian"),
    }
    if bfloat16:
        systems[BFLOAT16] = ours("rope", "--compute-dtype=bfloat16")
    if device == "cuda":
        systems["stock, TF32"] = replace(stock, tf32=True)
        systems["rope, TF32"] = replace(systems[ROPE], tf32=True)
        half = fairseq(STOCK_LOSS, "--arch=transformer", "--fp16", plugin=False)
        systems["stock, float16"] = half
    if eole:
        systems[EOLE] = System("eole", own_environment=True)
    return systems


def decoding_systems(bfloat16: bool, marian: bool, threads: int) -> dict[str, System]:
    stock = fairseq(STOCK_LOSS, "--arch=transformer", plugin=False)
    task = "--task=rope_translation"
    systems = {
        STOCK: stock,
        EXPORTED_BY: ours("rope", criterion=STOCK_LOSS),
        SEARCH: ours("rope", task, criterion=STOCK_LOSS),
    }
    if bfloat16:
        words = (task, "--compute-dtype=bfloat16")
        systems[SEARCH_BFLOAT16] = ours("rope", *words, criterion=STOCK_LOSS)
    for name, compute_type in ((FLOAT32, "float32"), (INT8, "int8")):
        arguments = {"compute_type": compute_type, "threads": threads}
        systems[name] = System("ctranslate2", arguments=arguments, exported=True)
    if marian:
        systems[MARIAN] = System("marian")
    return {name: replace(system, work="Decoding") for name, system in systems.items()}


def encoding_systems() -> dict[str, System]:
    """A model of each position encoding, the first of them the one that ratios are to.

    All in one process: what each holds between its calls is parameters, gradients and Adam's
    moments, and the rest of an update's memory, which a process keeps, is there once.
    """
    return {name: replace(ours(name), process="encodings") for name in SOURCES}


def only(systems: dict[str, System], *names: str) -> dict[str, System]:
    return {name: system for name, system in systems.items() if name in names}


def make(mode: str, device: str, bfloat16: bool, threads: int, eole: bool) -> Plan:
    """The plan of ``mode``: ``bench``, ``full`` (more of it) or ``quick`` (minute models, to
    see that all of it works).

    Args:
        device: ``cpu`` or ``cuda``.
        bfloat16: whether to measure it.
        threads: cores for CTranslate2, whose own default is not torch's.
        eole: whether Eole is there to be measured.
    """
    # A CPU would take too long for batches as large as one trains with; a GPU would be idle.
    base_tokens, tiny_tokens, rounds = (1024, 4096, 7) if device == "cpu" else (4096, 8192, 15)
    full, base, tiny = mode == "full", BASE, TINY
    sentences, memory_tokens = 32, 4096
    if mode == "quick":
        base = tiny = MINUTE
        base_tokens = tiny_tokens = memory_tokens = 60
        rounds, sentences = 2, 2
    if device == "cuda":
        sentences *= 2
    systems = training_systems(bfloat16, device, eole)
    few = only(systems, STOCK, ROPE, MARIAN, EOLE, BFLOAT16)
    comparisons = []

    def training(size: Size, tokens: int, systems: dict[str, System], length: int = 30) -> None:
        for dropout, compared in ((0.0, systems), (0.1, only(few, *systems))):
            shape = of_tokens(size, tokens, length, dropout)
            comparisons.append(Comparison("training", size_name(size), shape, compared))

    training(base, base_tokens, systems)
    training(tiny, tiny_tokens, systems)
    if full:
        longer = only(systems, STOCK, NONE, ROPE, MARIAN, EOLE)
        for length in (100, 400):
            training(base, base_tokens, longer, length)
        for size, tokens in ((base, base_tokens), (tiny, tiny_tokens)):
            training(replace(size, vocabulary=8000), tokens, longer)
    shape = Shape(base, sentences, 30)
    decoding = decoding_systems(bfloat16, full, threads)
    comparisons.append(Comparison("decoding", size_name(base), shape, decoding))
    large = of_tokens(base, memory_tokens, 30)
    comparisons.append(Comparison("rotation", size_name(base), large, rotation_systems()))
    comparisons.append(Comparison("encodings", size_name(base), large, encoding_systems()))
    memory = only(systems, STOCK, ROPE, MARIAN, BFLOAT16)
    if mode == "quick":  # starting a process takes longer than all that it does
        comparisons = [share_processes(comparison) for comparison in comparisons]
        memory = only(systems, STOCK, ROPE)
    return Plan(comparisons, Comparison("memory", size_name(base), large, memory), rounds)


def rotation_systems() -> dict[str, System]:
    from benchmarks.rotation_system import OPERATIONS

    return {
        name: System("rotation", "Operation", {"operation": name}, process="rotation")
        for name in OPERATIONS
    }


def share_processes(comparison: Comparison) -> Comparison:
    """The comparison with only as many processes as needed: fairseq without the plugin, and the
    rest."""
    systems = {
        name: replace(system, process=STOCK if name == STOCK else "others")
        for name, system in comparison.systems.items()
    }
    return replace(comparison, systems=systems)


def size_name(size: Size) -> str:
    names = {BASE.embed_dim: "base", TINY.embed_dim: "tiny"}
    return names.get(size.embed_dim, "minute")


def spec(system: System, shape: Shape, device: str, model: Path) -> dict[str, Any]:
    """What ``worker.py`` builds ``system`` from."""
    arguments = system.arguments | ({"model": str(model)} if system.exported else {})
    return {
        "kind": system.kind,
        "work": system.work,
        "arguments": arguments,
        "shape": shape.as_json(),
        "device": device,
        "tf32": system.tf32,
    }


def python_of(system: System, default: str) -> str:
    """The interpreter that runs ``system``."""
    return str(ROOT / "build" / "eole" / "bin" / "python") if system.own_environment else default
