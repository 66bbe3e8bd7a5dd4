"""One picture of a run: milliseconds of forward and backward against length, a panel for each kind of decay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OPERATION = "forward+backward"


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG. Raises ValueError for a report that measured nothing, ImportError without matplotlib."""
    rows = [row for row in report["cases"] if row["operation"] == OPERATION and row["ms"] is not None]
    if not report["measured"] or not rows:
        raise ValueError("nothing was measured, so there is nothing to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    decays = list(dict.fromkeys(row["decay"] for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    figure, grid = pyplot.subplots(
        len(models), len(decays), figsize=(4 * len(decays), 3.4 * len(models)), squeeze=False, sharex=True
    )
    for model, panels in zip(models, grid, strict=True):
        for decay, panel in zip(decays, panels, strict=True):
            own = [row for row in rows if (row["model"], row["decay"]) == (model, decay)]
            for i, name in enumerate(names):
                points = sorted((row["T"], row["ms"]) for row in own if row["contender"] == name)
                if points:
                    panel.plot(*zip(*points, strict=True), marker="o", color=f"C{i}", label=name)
            limit = sorted({(row["T"], row["roofline_ms"]) for row in own if row["roofline_ms"] is not None})
            if limit:
                panel.plot(*zip(*limit, strict=True), "k--", label="roofline, ours")
            panel.set(
                xscale="log", yscale="log", title=f"{model}\ndecay {decay}", xlabel="tokens in a row (log)"
            )
            panel.set_ylabel(f"ms for {report['tokens']:,} tokens (log)")
            panel.grid(alpha=0.3)
    grid[0][0].legend(fontsize=7)
    figure.suptitle(f"Forward and backward of one layer, bf16, {report['card']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)
