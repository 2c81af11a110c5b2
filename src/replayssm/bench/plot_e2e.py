"""A picture of ``bench e2e``: milliseconds a step over the batch, a panel a model; below, where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replayssm.bench.e2e import Row

COLOURS = {"weights": "tab:blue", "state": "tab:orange", "attention": "tab:green", "rest": "tab:grey", "idle": "white"}


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Writes the picture; its format is that of the file's suffix. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row.model for row in rows))
    split = any(row.parts for row in rows)
    figure = Figure(figsize=(1 + 4 * len(models), 3.6 * (1 + split)), layout="constrained")
    panels = figure.subplots(1 + split, len(models), squeeze=False)
    for i, model in enumerate(models):
        mine = [row for row in rows if row.model == model]
        _times(panels[0][i], mine)
        if split:
            _parts(panels[1][i], [row for row in mine if row.parts])
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)


def _times(axes: Any, rows: Sequence[Row]) -> None:
    for name in dict.fromkeys(map(_name, rows)):
        line = sorted((row.batch, row.ms) for row in rows if _name(row) == name)
        axes.plot(*zip(*line, strict=True), "o-", markersize=4, label=name)
    floor = sorted({(row.batch, row.floor_ms) for row in rows})
    axes.plot(*zip(*floor, strict=True), ":", color="black", label="floor")
    axes.set(title=f"{rows[0].model}, {rows[0].layers} layers", xlabel="batch", ylabel="ms a step", xscale="log")
    axes.set_yscale("log")
    axes.set_xticks(ticks := [batch for batch, _ in floor], [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def _name(row: Row) -> str:
    return row.variant if row.T == 1 else f"{row.variant} T={row.T}"


def _parts(axes: Any, rows: Sequence[Row]) -> None:
    labels = [f"{_name(row)} {row.batch}" for row in rows]
    left = [0.0] * len(rows)
    for name, colour in COLOURS.items():
        width = [(row.parts or {}).get(name, 0.0) for row in rows]
        axes.barh(labels, width, left=left, color=colour, edgecolor="black", linewidth=0.4, label=name)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.tick_params(labelsize=6)
    axes.legend(fontsize=6)
