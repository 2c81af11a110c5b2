"""A picture of ``bench speculative``: times over T, a panel a layer; tokens/s, a panel a model. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replayssm.bench.drafts import ModelRow
from replayssm.bench.speculative import LayerRow


def plot(rows: Sequence[LayerRow | ModelRow], path: Path, title: str) -> None:
    """Writes the picture; its format is that of the file's suffix. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    layers: dict[str, list[LayerRow]] = {}
    models: dict[str, list[ModelRow]] = {}
    for row in rows:
        if isinstance(row, LayerRow):
            layers.setdefault(f"{row.shape}, {row.dtype}, batch {row.batch}", []).append(row)
        else:
            models.setdefault(row.model, []).append(row)
    wide, high = max(len(layers), len(models)), bool(layers) + bool(models)
    figure = Figure(figsize=(1 + 3.6 * wide, 0.6 + 3.6 * high), layout="constrained")
    panels = figure.subplots(high, wide, squeeze=False)
    for axes in panels.flat:
        axes.set_visible(False)
    for axes, (name, mine) in zip(panels[0], layers.items(), strict=False):
        axes.set_visible(True)
        _layer(axes, mine)
        axes.set_title(name, fontsize=9)
    for axes, (name, texts) in zip(panels[-1], models.items(), strict=False):
        axes.set_visible(True)
        _model(axes, texts)
        axes.set_title(name, fontsize=9)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)


def _layer(axes: Any, rows: list[LayerRow]) -> None:
    for backend in dict.fromkeys(row.backend for row in rows):
        mine = [row for row in rows if row.backend == backend]
        axes.plot([row.T for row in mine], [row.us for row in mine], "o-", label=f"ring, {backend}")
    first = [row for row in rows if row.backend == rows[0].backend]
    T = [row.T for row in first]
    axes.plot(T, [row.plain_us for row in first], "-.", color="grey", label="T plain steps")
    axes.plot(T, [row.snapshot_us for row in first], "s--", color="tab:red", label="snapshots, torch")
    axes.plot(T, [row.traffic_us for row in first], ":", color="tab:red", label="snapshots, traffic alone")
    axes.set(xlabel="T, new tokens a step", ylabel="us a step", xscale="log", yscale="log")
    axes.set_xticks(T, [str(each) for each in T])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def _model(axes: Any, rows: list[ModelRow]) -> None:
    labels = [f"{row.drafter} {row.draft_tokens or ''}" for row in rows]
    bars = axes.barh(labels, [row.tokens_per_s for row in rows])
    axes.bar_label(bars, [f"{row.acceptance:.0%}" if row.drafted else "" for row in rows], fontsize=6, padding=2)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.set_xlabel("tokens/s (beside the bars: drafts accepted)", fontsize=7)
