"""The command ``attention``: measured self-attention by distance, as a figure and as numbers."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from rope_fairseq.analysis import output
from rope_fairseq.analysis.distances import ByDistance
from rope_fairseq.analysis.figure import blank
from rope_fairseq.analysis.model import load, measure, read_sentences
from rope_fairseq.errors import UserError

# Weights below it have the darkest colour; the same in all figures, so that they can be compared.
FAINTEST = 1e-3
MOST_LABELS = 32  # rows that can be named one by one


def command(arguments: argparse.Namespace) -> None:
    """Measure, write and print.

    Raises:
        UserError: see :func:`load`, :func:`read_sentences` and :func:`rope_fairseq.analysis.output.
            opened`; or an option is missing, outside its range or without effect.
    """
    side, reference, longest = arguments.side, arguments.reference, arguments.longest
    if side == "decoder" and reference is None:
        raise UserError("--side decoder: needs --reference, the translations to give to it")
    if side == "encoder" and reference is not None:
        raise UserError(f"--reference {reference}: has an effect with --side decoder alone")
    if longest < 0:
        raise UserError(f"--longest {longest}: must be at least 0")
    with output.opened(arguments) as files:
        loaded = load(arguments.model)
        columns, left_out = read_sentences(loaded, arguments.text, reference)
        targets = columns[1] if reference is not None else None
        found = measure(loaded.model, side, columns[0], targets, loaded.dictionaries[0].pad())
        files.write(_rows(found, longest))
        files.draw(lambda: _figure(found, longest, side), colours=256)
    without = f" ({left_out} without text left out)" if left_out else ""
    print(
        f"{side} self-attention of {arguments.model}: {len(columns[0])} sentences{without}, "
        f"{found.queries} tokens"
    )
    print("\n".join(_summary(found, longest)))


def _rows(found: ByDistance, longest: int) -> Iterator[dict[str, Any]]:
    """A row for each layer, head and distance up to ``longest``; layers and heads are counted from
    0, as in the names of parameters."""
    mean, share = found.mean().tolist(), found.share().tolist()
    pairs = found.pairs.tolist()
    for layer in range(len(mean)):
        for head in range(len(mean[layer])):
            for index, distance in enumerate(found.distances.tolist()):
                if abs(distance) <= longest:
                    yield {
                        "layer": layer,
                        "head": head,
                        "distance": distance,
                        "pairs": pairs[index],
                        "queries": found.queries,
                        "mean_weight": mean[layer][head][index],
                        "share": share[layer][head][index],
                    }


def _summary(found: ByDistance, longest: int) -> Iterator[str]:
    """A line for each head: the mean distance, and which share of its attention goes where."""
    yield f"layer  head  mean distance   at -1    at 0    at 1  beyond {longest}"
    beyond = found.share()[..., found.distances.abs() > longest].sum(-1)
    columns = (found.mean_distance(), found.at(-1), found.at(0), found.at(1), beyond)
    for layer, heads in enumerate(torch.stack(columns, dim=-1).tolist()):
        for head, (distance, *shares) in enumerate(heads):
            cells = "".join(f"{share:8.3f}" for share in shares)
            yield f"{layer:5}  {head:4}  {distance:13.2f}{cells}"


def _figure(found: ByDistance, longest: int, side: str) -> Any:
    """A heat map: a row for each head, layer under layer, and a column for each distance."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    shown = found.distances.abs() <= longest
    distance = found.distances[shown].tolist()
    mean = found.mean()[..., shown]
    layers, heads = mean.shape[:2]
    rows = layers * heads
    figure, axes = blank(min(max(1.1 + 0.17 * rows, 2.4), 8))
    axes.grid(False)
    image = axes.imshow(
        mean.flatten(0, 1).clamp(min=FAINTEST).numpy(),
        norm=LogNorm(FAINTEST, 1),
        # Perceived evenly by all kinds of colour vision; in steps, which 256 colours keep apart.
        cmap=colormaps["viridis"].resampled(30),  # ten to a factor of ten
        aspect="auto",
        interpolation="nearest",
        extent=(distance[0] - 0.5, distance[-1] + 0.5, rows - 0.5, -0.5),
    )
    for layer in range(1, layers):
        axes.axhline(layer * heads - 0.5, color="white", linewidth=2)
    if rows <= MOST_LABELS:
        names = [f"{layer}.{head}" for layer in range(layers) for head in range(heads)]
        axes.set_yticks(range(rows), names, fontsize=7)
        axes.set_ylabel("layer.head")
    else:
        axes.set_yticks([(layer + 0.5) * heads - 0.5 for layer in range(layers)], range(layers))
        axes.set_ylabel("layer (a row is a head)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("distance, key − query (tokens)")
    axes.set_title(f"Self-attention of the {side} by distance", fontsize=10)
    figure.colorbar(image, ax=axes, extend="min", pad=0.02).set_label("mean weight")
    return figure
