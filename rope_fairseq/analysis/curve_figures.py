"""Figures of rotary frequencies: curves over distance, wavelengths over pairs of channels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rope_fairseq.analysis.curves import wavelengths
from rope_fairseq.analysis.figure import STYLES, add_legend, blank, draw_lines
from rope_fairseq.analysis.settings import Setting, named


def distance_figure(
    chosen: Sequence[Setting], curves: Sequence[Sequence[float]], title: str, label: str
) -> Any:
    """Curves over the distances 0, 1, …; the vertical axis begins at 0 or below.

    Args:
        chosen: the rotations, one curve for each.
        curves: the curves, of equal length.
        title: what the curves show.
        label: the same as a formula, of the vertical axis.

    Returns:
        A matplotlib figure.
    """
    longest = len(curves[0]) - 1
    common, names = named(chosen)
    fig, axes = blank(3.2)
    draw_lines(axes, [range(longest + 1)] * len(curves), curves, names)
    lowest = min(map(min, curves))
    axes.set_xlim(0, longest)
    if lowest >= 0:
        axes.set_ylim(bottom=0)
    else:
        axes.axhline(0, color="0.4", linewidth=0.8)
    if longest % 8 == 0:
        axes.set_xticks(range(0, longest + 1, longest // 8))
    axes.set_xlabel("relative distance $m$ (tokens)")
    axes.set_ylabel(label)
    _set_title(axes, title, common if len(names) > 1 else names[0])
    return fig


def wavelength_figure(
    chosen: Sequence[Setting],
    thetas: Sequence[Tensor],
    trained: int | None,
    notes: Sequence[str],
) -> Any:
    """Wavelengths over pairs, and on the right the frequencies.

    Args:
        chosen: the rotations.
        thetas: the frequencies of each [dim/2], in radians a token.
        trained: the tokens of a line to mark, or None.
        notes: what the legend says of each rotation where a line is marked.

    Returns:
        A matplotlib figure.
    """
    common, names = named(chosen)
    title = common if len(names) > 1 else names[0]
    pairs = [range(1, len(theta) + 1) for theta in thetas]
    lengths = [wavelengths(theta).tolist() for theta in thetas]
    fig, axes = blank(3.2)
    axes.set_yscale("log")
    if trained:
        label = f"{trained:,} tokens: pairs above never complete a turn"
        axes.axhline(trained, color="0.4", linewidth=1, linestyle=(0, (1, 1.5)), label=label)
        names = [f"{name}: {note}" for name, note in zip(names, notes, strict=True)]
    draw_lines(axes, pairs, lengths, names, STYLES)
    if trained and len(chosen) == 1:
        add_legend(axes)
    axes.set_xlim(1, max(max(map(len, pairs)), 2))
    axes.set_xlabel("pair of channels $i$")
    axes.set_ylabel(r"wavelength $2\pi/\theta_i$ (tokens)")
    other = axes.secondary_yaxis("right", functions=(_turned, _turned))
    other.set_ylabel(r"frequency $\theta_i$ (radians a token)")
    _set_title(axes, "Wavelengths", title)
    return fig


def _turned(value: Any) -> Any:
    """Wavelength to frequency and back; matplotlib also asks for 0's."""
    with np.errstate(divide="ignore"):
        return 2 * np.pi / value


def _set_title(axes: Any, title: str, of: str) -> None:
    axes.set_title(f"{title}: {of}" if of else title, fontsize=10)
