"""The kinds of evaluation that `supra eval` offers, behind one signature each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from supra.checks import require_matplotlib
from supra.config import Documents
from supra.errors import SupraError, UserError
from supra_eval.results import EvalRun, merged_with_earlier
from supra_eval.tables import describe_settings, render

__all__ = [
    "EvalRun",
    "Machine",
    "describe_settings",
    "keep",
    "render",
    "require_writable",
    "score_length",
    "score_perplexity",
    "score_tasks",
]

Say = Callable[[str], None]
# What is measured unless asked otherwise; 50 prompts a length is the passkey protocol's own number.
CONTEXTS = (1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
MAX_SEQUENCES, NUM_PROMPTS = 4, 50


@dataclass(frozen=True)
class Machine:
    """What an evaluation runs on, and the sizes of its batches."""

    device: str = "auto"
    dtype: str = "float32"
    backend: str = "auto"
    batch_size: int = 64
    batch_tokens: int = 4096
    chunk_tokens: int = 512

    def where(self) -> dict[str, str]:
        """Device, dtype and backend as keyword arguments."""
        return {"device": self.device, "dtype": self.dtype, "backend": self.backend}


def score_perplexity(
    model: Path, teacher: Path | None, data: list[str], *, block_tokens: int | None, max_tokens: int,
    documents: Documents = "all", ablations: bool, machine: Machine, say: Say,
) -> list[EvalRun]:  # fmt: skip
    """Perplexity on held-out text."""
    from supra_eval.perplexity import evaluate_folder

    run = evaluate_folder(
        model, data, teacher=teacher, block_tokens=block_tokens, max_tokens=max_tokens, documents=documents,
        ablations=ablations, say=say, **machine.where(),
    )  # fmt: skip
    return [run]


def score_tasks(
    model: Path, teacher: Path | None, tasks: Sequence[str], data: Sequence[str] | None, *,
    contexts: Sequence[int], limit: int | None, num_fewshot: int | None, chat: bool, split: str, truncate: str,
    ablations: bool, seed: int, out: Path | None, machine: Machine, say: Say,
) -> list[EvalRun]:  # fmt: skip
    """lm-eval's tasks and SCROLLS, a run of its own for each where both are asked for.

    Raises:
        UserError: an unknown task, or more than one place for the data.
    """
    if data and len(data) > 1:
        raise UserError("--data", "is given more than once, and tasks read one place", "Give one")
    place = data[0] if data else None
    long = [name for name in tasks if name.startswith(("scrolls", "qasper_yes_no"))]
    short = [name for name in tasks if name not in long]
    if short and place and any(name.startswith("scrolls") for name in long):
        raise UserError(
            f"--data {place}", "serves lm-eval's tasks or SCROLLS, not both", "Run them one after the other"
        )
    runs: list[EvalRun] = []
    if short:
        from supra_eval.harness.run import run_tasks

        runs.append(
            run_tasks(
                model, teacher=teacher, tasks=short, data=place, limit=limit, num_fewshot=num_fewshot, chat=chat,
                out=_place(out, "tasks"), ablations=ablations, seed=seed, say=say, **asdict(machine),
            )
        )  # fmt: skip
    if long:
        from supra_eval.scrolls.run import CONTEXTS as CUT_OFFS
        from supra_eval.scrolls.run import run_scrolls

        runs.append(
            run_scrolls(
                model, teacher=teacher, tasks=long, data=(not short and place) or "tau/scrolls",
                contexts=contexts or CUT_OFFS,
                limit=limit, split=split, truncate=truncate, out=_place(out, "scrolls"), ablations=ablations,
                chunk_tokens=machine.chunk_tokens, seed=seed, say=say, **machine.where(),
            )
        )  # fmt: skip
    return runs


def score_length(
    model: Path, teacher: Path | None, data: list[str], *, length: bool, recall: Sequence[str],
    contexts: Sequence[int], rope: Sequence[str], student_rope: bool, cost: bool,
    protocols: Sequence[str], limit: int | None, ablations: bool, seed: int,
    out: Path | None, machine: Machine, say: Say,
) -> list[EvalRun]:  # fmt: skip
    """Losses, memory and time past the training length, and generated recall tasks; plots beside their results.

    Raises:
        UserError: no text for the losses, or a task, context, depth or scaling that is wrong.
    """
    from supra_eval.length import run_length, run_recall, write_plots
    from supra_eval.length.recall_tasks import TASKS

    if length and not data:
        raise UserError(
            "--data", "is missing", "Name the books to read; the longest context must fit in each"
        )
    if out is not None:
        require_matplotlib()
    common: dict[str, Any] = {
        "teacher": teacher, "contexts": contexts or CONTEXTS, "rope": rope,
        "student_rope": student_rope, "ablations": ablations,
        "chunk_tokens": machine.chunk_tokens, "seed": seed, "say": say, **machine.where(),
    }  # fmt: skip
    runs: list[EvalRun] = []
    if length:
        runs.append(
            run_length(
                model, data=data, protocols=protocols, cost=cost, max_sequences=limit or MAX_SEQUENCES,
                out=_place(out, "length"), **common,
            )
        )  # fmt: skip
    if recall:
        names = tuple(TASKS) if "all" in recall else tuple(recall)
        runs.append(
            run_recall(
                model, tasks=names, depths=DEPTHS, num_samples=limit or NUM_PROMPTS, data=data,
                out=_place(out, "recall"), **common,
            )
        )  # fmt: skip
    if out is not None:
        for run in runs:
            for path in write_plots(run, out / run.kind / "plots"):
                say(f"wrote {path}")
    return runs


def require_writable(out: Path) -> None:
    """Raise unless results can be written into `out`: found out before hours of scoring, not after them.

    Raises:
        UserError: `out` is a file.
        SupraError: it cannot be made or written.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"-o {out}", "is a file", "Name a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SupraError(
            f"-o {out}", f"cannot be written ({error.strerror or error})", "Choose another place"
        ) from error


def keep(runs: Sequence[EvalRun], out: Path) -> list[Path]:
    """Write each run that has results, with the model's recipe, to `out/<kind>/results.json`."""
    written = []
    for run in runs:
        if not (run.scores or run.curves or run.grids):
            continue  # what an earlier run left there is worth more
        recipe = Path(run.model) / "recipe.yaml"
        run.recipe = recipe.read_text(encoding="utf-8") if recipe.is_file() else None
        whole = merged_with_earlier(run, out / run.kind) if run.kind in ("tasks", "scrolls") else run
        written.append(whole.write(out / run.kind))
    return written


def _place(out: Path | None, kind: str) -> Path | None:
    return None if out is None else out / kind
