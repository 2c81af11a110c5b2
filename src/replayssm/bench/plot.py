"""A picture of the rows: x over the batch, a panel a shape. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from replayssm.bench.kernels import Row

COLOURS = {"float32": "tab:blue", "bfloat16": "tab:orange", "float16": "tab:green"}
MARKERS = "osDv^*P"
LINES = {"standard": "-", "verify": "--", "fold": ":"}


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Writes the picture; its format is that of the file's suffix. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    markers = dict(zip(dict.fromkeys(row.backend for row in rows), MARKERS, strict=False))
    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure = Figure(figsize=(1 + 3.4 * len(shapes), 4), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for axes, shape in zip(panels, shapes, strict=True):
        mine = [row for row in rows if row.shape == shape]
        for key in dict.fromkeys((row.backend, row.mode, row.dtype) for row in mine):
            line = sorted((row.batch, row.x, row.plain_x) for row in mine if (row.backend, row.mode, row.dtype) == key)
            backend, mode, dtype = key
            batch, x, plain = zip(*line, strict=True)
            style = {"color": COLOURS.get(dtype), "marker": markers.get(backend, "."), "markersize": 4}
            axes.plot(batch, x, LINES.get(mode, "-"), label=f"{backend} {mode} {dtype}", **style)
            if mode == "standard" and backend == mine[0].backend:
                axes.plot(batch, plain, "-.", alpha=0.4, label=f"plain {dtype}", **style)
        axes.set(title=shape, xlabel="batch", xscale="log")
        axes.set_xticks(ticks := sorted({row.batch for row in mine}), [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    panels[0].set_ylabel("x: time of a step / time to read the checkpoint once")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)
