"""The demo's report: three plots and one Markdown page, from `results.json` and the run's metrics alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .checks import require_matplotlib

TEACHER, STUDENT = "#8a8f98", "#c2410c"
ROWS = {
    "teacher": "teacher (softmax attention)",
    "untrained": "converted, untrained",
    "transfer": "after attention transfer",
    "final": "**after the last stage**",
    "window_only": "ablation: window alone",
    "linear_only": "ablation: linear part alone",
    "paper_preset": "the paper's preset after the same transfer",
}


def write_report(
    folder: Path, results: dict[str, Any], metrics: list[dict[str, Any]], texts: dict[str, str]
) -> Path:
    """Write loss.png, memory.png, time.png and report.md into `folder`; return the page's path.

    `texts` holds the `prompt` and what `teacher` and `student` made of it.

    Raises:
        SupraError: matplotlib is not installed.
    """
    _plot_loss(folder / "loss.png", metrics)
    _plot_by_context(
        folder / "memory.png",
        results["context_bytes"],
        1e6,
        "memory of the context (MB)",
        "Memory against context",
    )
    _plot_by_context(
        folder / "time.png",
        results["decode_ms"],
        1.0,
        "milliseconds per token",
        "Time per token against context",
    )
    page = folder / "report.md"
    page.write_text(render_page(results, texts), encoding="utf-8")
    return page


def render_page(results: dict[str, Any], texts: dict[str, str]) -> str:
    """The Markdown page."""
    lines = [
        "# A Transformer becomes an RNN",
        "",
        f"{results['teacher_name']}, converted by the recipe `{results['recipe']}` and trained on "
        f"{results['tokens_trained']:,} tokens in {results['train_s'] / 60:.1f} minutes. "
        f"Whole run: {results['wall_s'] / 60:.1f} minutes, peak memory {results['peak_bytes'] / 1e9:.2f} GB.",
        f"Ran on: {results['runs_on']}.",
        "",
        f"## Quality: perplexity on held-out books ({', '.join(results['heldout'])}; "
        f"{results['scored_tokens']:,} tokens in blocks of {results['eval_length']})",
        "",
        perplexity_table(results),
        "",
        "The ablations run the final model with one branch off. The paper's preset (dense ReLU map, ALiBi-type "
        "decay, GroupNorm, no window) is made for uptraining on billions of tokens: its row shows why a short run "
        "needs another recipe, not what the paper reaches.",
        "",
        "![loss](loss.png)",
        "",
        "## Memory and speed against context",
        "",
        context_table(results),
        "",
        "![memory](memory.png) ![time](time.png)",
        "",
        "## One prompt, continued greedily by both",
        "",
        f"> {_quote(texts['prompt'])}",
        "",
        f"Teacher: {_quote(texts['teacher'])}",
        "",
        f"Student: {_quote(texts['student'])}",
        "",
        "## How it was made",
        "",
        f"Command: `{results['command']}` · seed {results['seed']} · "
        + " · ".join(f"{name} {version}" for name, version in results["versions"].items()),
        "",
    ]
    return "\n".join(lines)


def perplexity_table(results: dict[str, Any]) -> str:
    """Markdown table of the perplexities, each with its ratio to the teacher's."""
    scores = results["perplexity"]
    rows = [
        f"| {ROWS.get(name, name)} | {value:,.2f} | {value / scores['teacher']:,.3f} |"
        for name, value in scores.items()
    ]
    return "\n".join(["| model | perplexity | × teacher |", "|---|---:|---:|", *rows])


def context_table(results: dict[str, Any]) -> str:
    """Markdown table of context memory and decode time of both models."""
    memory, time = results["context_bytes"], results["decode_ms"]
    rows = [
        f"| {int(tokens):,} | {memory['teacher'][tokens] / 1e6:,.1f} MB | {memory['student'][tokens] / 1e6:,.1f} MB "
        f"| {time['teacher'][tokens]:.0f} ms | {time['student'][tokens]:.0f} ms |"
        for tokens in memory["teacher"]
    ]
    head = (
        "| context (tokens) | teacher's cache | student's state | teacher, per token | student, per token |"
    )
    return "\n".join([head, "|---:|---:|---:|---:|---:|", *rows])


def read_results(path: Path) -> dict[str, Any]:
    """Read a results.json."""
    loaded = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def _quote(text: str) -> str:
    return " ".join(text.split())


def _figure(title: str) -> tuple[Any, Any]:
    require_matplotlib()
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained", dpi=150)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _plot_loss(path: Path, metrics: list[dict[str, Any]]) -> None:
    figure, axes = _figure("Training loss by stage")
    stages = list(dict.fromkeys(row["stage"] for row in metrics))
    tokens = 0
    for stage in stages:
        points = []
        for row in metrics:
            if row["stage"] == stage:
                tokens += row["tokens"]
                points.append((tokens / 1e3, row["loss"]))
        axes.plot(*zip(*points, strict=True), label=stage)
    axes.set_xlabel("tokens trained (thousands)")
    axes.set_ylabel("loss")
    axes.set_yscale("log")
    axes.legend(frameon=False)
    figure.savefig(path)


def _plot_by_context(
    path: Path, series: dict[str, dict[str, float]], unit: float, label: str, title: str
) -> None:
    figure, axes = _figure(title)
    for name, colour in (("teacher", TEACHER), ("student", STUDENT)):
        tokens = [int(key) for key in series[name]]
        axes.plot(tokens, [value / unit for value in series[name].values()], "o-", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel(label)
    axes.legend(frameon=False)
    figure.savefig(path)
