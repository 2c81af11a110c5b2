"""The README's picture of the figures in `results/`: `python benchmarks/plot_results.py` writes docs/h200.svg. Needs
matplotlib (the extra `plot`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = [ROOT / "benchmarks" / "results" / name for name in ("h200-kernels.json", "h200-e2e.json")]
PICTURE = ROOT / "docs" / "h200.svg"
SHAPES = {
    "mamba2 128x64": "Mamba-2 128x64",
    "mamba2 96x80": "Mamba-2 96x80",
    "gdn 16/64": "Gated DeltaNet 16/64",
    "gdn 16/32": "Gated DeltaNet 16/32",
    "kda 64": "KDA 64",
}
MODELS = {
    "qwen3.5-4b": "Qwen3.5-4B",
    "nemotron-3-nano-4b": "Nemotron-3-\nNano-4B",
    "kimi-linear-48b-a3b": "Kimi-Linear,\n8 layers",
}
PUBLIC = {("mamba2 128x64", "float32"): 339, ("mamba2 128x64", "bfloat16"): 223, ("gdn 16/64", "float32"): 312}
"""Microseconds of the best public replay kernels (the README names them), decoding at batch 256 on the same GPU."""


def made_from() -> str:
    """What the picture says it was made from: a digest of the files' rows."""
    rows = [json.loads(path.read_text("utf-8"))["rows"] for path in RESULTS]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def _kernels(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Microseconds of a step, a bar each for the plain recurrence and replay."""
    labels, ticks = [], []
    for i, (shape, dtype) in enumerate((s, d) for s in SHAPES for d in ("float32", "bfloat16")):
        row = next(
            r for r in rows if (r["shape"], r["dtype"], r["batch"], r["mode"]) == (shape, dtype, 256, "standard")
        )
        once = row["us"] / row["x"]
        first = i == 0
        axes.barh(i - 0.19, row["plain_us"], 0.36, color="#b9c4d0", label="plain recurrence" if first else None)
        axes.barh(i + 0.19, row["us"], 0.36, color="#2a6fb0", label="replay" if first else None)
        axes.plot([once, once], [i - 0.4, i + 0.4], color="black", label="states read once" if first else None)
        axes.annotate(f"{row['us']:.0f}", (6, i + 0.19), va="center", fontsize=7, color="white")
        axes.annotate(f"{row['plain_us']:.0f}", (row["plain_us"] + 6, i - 0.19), va="center", fontsize=7)
        if (shape, dtype) in PUBLIC:
            label = "best public replay kernel" if first else None
            axes.plot(PUBLIC[shape, dtype], i + 0.19, "d", color="#d1731c", markersize=5, label=label)
        labels.append(f"{SHAPES[shape]}, {dtype}")
        ticks.append(i)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="microseconds a step of one layer", title="One layer, decoding, batch 256", xlim=(0, 640))
    axes.legend(fontsize=7, loc="lower right")


def _models(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Milliseconds of a whole model's step."""
    at = {(r["model"], r["variant"]): r for r in rows if r["batch"] == 256 and r["T"] == 1}
    kinds = (
        ("stock-compiled", "stock, compiled", "#d9d2c3"),
        ("replay-off", "ours, plain recurrence", "#b9c4d0"),
        ("replay-on", "ours, replay", "#2a6fb0"),
    )
    for j, (variant, name, colour) in enumerate(kinds):
        first = True
        for i, model in enumerate(MODELS):
            row, y = at.get((model, variant)), i + (j - 1) * 0.27
            if row is None:
                axes.annotate(f"{name}: not measured", (7.3, y), va="center", fontsize=7)
                continue
            axes.barh(y, row["ms"], 0.25, color=colour, label=name if first else None)
            axes.annotate(f"{row['ms']:.2f}", (row["ms"] + 0.4, y), va="center", fontsize=7)
            first = False
    for i, model in enumerate(MODELS):
        floor = at[model, "replay-on"]["floor_ms"]
        label = "weights and states read once" if i == 0 else None
        axes.plot([floor, floor], [i - 0.42, i + 0.42], color="black", label=label)
    axes.set_yticks(range(len(MODELS)), list(MODELS.values()), fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds a step", title="Whole models in transformers, batch 256", xlim=(0, 53))
    axes.legend(fontsize=7, loc="lower right")


def main() -> None:
    """Writes the picture."""
    import matplotlib
    from matplotlib.figure import Figure

    kernels, models = (json.loads(path.read_text("utf-8"))["rows"] for path in RESULTS)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "replayssm", "font.family": "sans-serif"}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _kernels(left, kernels)
        _models(right, models)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle("NVIDIA H200, fold every 16 tokens", fontsize=9)
        figure.savefig(PICTURE, metadata={"Date": None, "Description": f"made from {made_from()}"})


if __name__ == "__main__":
    main()
