"""Measurements of speed and memory; ``bench.py`` is the one that ``make bench`` runs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
