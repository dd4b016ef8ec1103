"""Figures that stay readable 600 pixels wide, for all kinds of colour vision.

Needs matplotlib, which the package's extra ``figures`` brings; it is imported by the functions that
draw, as tables need none.
"""

import logging
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from rope_fairseq.errors import UserError

# Okabe and Ito's palette without its yellow, which is faint on white, and a grey.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#000000", "#999999"),
)
# A second sign beside the colour, for lines that cover each other.
STYLES = ("-", "--", "-.", ":")


def require_matplotlib() -> None:
    """Raises:
    UserError: matplotlib is not installed.
    """
    # Where fairseq has set up the log, matplotlib would report every font that it looks at.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "matplotlib is not installed: pip install matplotlib, or this package with its extra: "
            "pip install '.[figures]'"
        ) from None
    assert matplotlib


def blank(height: float) -> tuple[Any, Any]:
    """A figure of 1,200 pixels in width, sharp at 600, and its axes; ``height`` in inches of 200
    pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_lines(
    axes: Any,
    x: Sequence[Sequence[float]],
    y: Sequence[Sequence[float]],
    names: Sequence[str],
    styles: Sequence[str] = STYLES[:1],
) -> None:
    """A line for each name, and a legend where there are several."""
    for index, (line_x, line_y, name) in enumerate(zip(x, y, names, strict=True)):
        axes.plot(
            line_x,
            line_y,
            color=COLOURS[index],
            linestyle=styles[index % len(styles)],
            linewidth=1.8 if len(names) == 1 else 1.2,
            marker="o" if len(line_x) == 1 else None,
            label=name,
        )
    if len(names) > 1:
        add_legend(axes)


def add_legend(axes: Any) -> None:
    """Where it covers least, without a frame but with a ground of its own."""
    axes.legend(fontsize=8, edgecolor="none", framealpha=0.9)


def save(figure: Any, file: BinaryIO, colours: int = 64) -> None:
    """Write a PNG of few colours: 64 are enough for lines and their text, and make the file a third
    of the size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(colours)
    image.save(file, format="png", optimize=True)
