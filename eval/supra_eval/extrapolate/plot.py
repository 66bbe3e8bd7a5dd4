"""Loss by position as lines: a panel for each task and mixer, a line for each method, a mark where training ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from supra.checks import require_matplotlib

from .methods import Method

if TYPE_CHECKING:
    from .report import Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """Means over seeds at the longest length; a task that is asked for at the end alone is drawn by length.

    Raises:
        SupraError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys((row.name, row.task) for row in rows))
    mixers = list(dict.fromkeys(row.mixer for row in rows))
    figure, panels = plt.subplots(
        len(tasks), len(mixers), figsize=(3.6 * len(mixers), 2.9 * len(tasks)), squeeze=False, sharey="row"
    )
    styles = {method: (f"C{place % 10}", "-" if place < 10 else "--") for place, method in enumerate(Method)}
    for row in rows:
        axes = panels[tasks.index((row.name, row.task))][mixers.index(row.mixer)]
        ends, losses = zip(*row.curve(), strict=True)
        color, style = styles[Method(row.method)]
        axes.plot(ends, losses, style, color=color, label=row.method, linewidth=1.2, marker=".", markersize=3)
        axes.axvline(row.train_tokens, color="grey", linestyle=":", linewidth=1)
    for line, (name, task) in zip(panels, tasks, strict=True):
        line[0].set_ylabel(f"{name}, {task}: loss (nats)", fontsize=8)
        for mixer, axes in zip(mixers, line, strict=True):
            axes.set_title(mixer, fontsize=9)
            axes.set_xscale("log", base=2)
            axes.tick_params(labelsize=7)
    for axes in panels[-1]:
        axes.set_xlabel("position asked for (end of the bucket)", fontsize=8)
    named = {
        text: line
        for axes in panels.flat
        for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        named.values(), named.keys(), fontsize=7, loc="outside lower center", ncols=min(6, len(named))
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=110)
    plt.close(figure)
    partial.replace(path)
