"""lm-eval tasks for every model of a comparison, one by one, so that a failure costs no other task its result."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.evaluator import evaluate

from supra.errors import SupraError, UserError
from supra.train.run_folder import write_whole
from supra_eval.contenders import Contender, contender_names, contenders
from supra_eval.harness.model import SupraLM
from supra_eval.harness.offline_data import FEWSHOT_SEED, notes, spread_samples, task_dict
from supra_eval.harness.request_cache import with_cache
from supra_eval.harness.task_groups import Entry, resolve
from supra_eval.results import EvalRun, Score, merged_with_earlier, require_mergeable

BOOTSTRAPS = 1000


def run_tasks(
    model: Path, *, teacher: Path | None, tasks: Sequence[str], data: str | None, limit: int | None = None,
    num_fewshot: int | None = None, chat: bool = False, out: Path | None = None, ablations: bool = True,
    device: str = "auto", dtype: str = "float32", backend: str = "auto", batch_size: int = 64,
    batch_tokens: int = 4096, chunk_tokens: int = 512, seed: int = 0, say: Callable[[str], None] = print,
) -> EvalRun:  # fmt: skip
    """Score a model's folder, its teacher and its ablations on lm-eval's `tasks` (names or groups).

    With `out`, lm-eval's whole result of each model and task is kept in `out/lm_eval/`.

    Raises:
        UserError: a task that nobody knows, or a folder that is wrong.
        SupraError: a folder that does not hold a whole model.
    """
    started = time.monotonic()
    logging.getLogger("lm_eval").setLevel(
        logging.ERROR
    )  # its warnings are about defaults we choose knowingly
    entries = [
        entry if num_fewshot is None else replace(entry, num_fewshot=num_fewshot) for entry in resolve(tasks)
    ]
    run = EvalRun("tasks", str(model), None if teacher is None else str(teacher), seed)
    run.settings = {
        "tasks": [entry.task for entry in entries],
        "data": data or "hub",
        "limit": limit,
        "num_fewshot": num_fewshot,
        "chat": chat,
    }
    if out is not None:
        require_mergeable(run, out)
    built: dict[str, tuple[Entry, dict[str, Any]]] = {}
    for entry in entries:
        with _recorded(run, entry.task, say):
            say(f"reading {entry.task}")
            built[entry.task] = (entry, task_dict([entry], data, seed=seed + FEWSHOT_SEED, say=say))
            run.settings.setdefault("notes", []).extend(notes(built[entry.task][1]))
    if not built:  # nothing but mistakes: the first is the answer
        thing, _, reason = run.failures[entries[0].task].partition(": ")
        raise UserError(thing, reason or "cannot be read", "See the lines above")
    names = contender_names(model, teacher, ablations=ablations)
    for contender in contenders(model, teacher, names, device=device, dtype=dtype, backend=backend, say=say):
        run.runs_on[contender.name] = contender.runs_on
        lm = SupraLM(
            contender.model,
            contender.tokenizer,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            chunk_tokens=chunk_tokens,
            device=str(contender.model.device),
        )
        cached = with_cache(lm, contender.fingerprint, lm.max_length, contender.runs_on)
        for entry, loaded in built.values():
            with _recorded(run, f"{entry.task}, {contender.name}", say):
                run.scores += _score(contender, cached, lm, entry, loaded, limit, chat, seed, out, say)
            if out is not None and run.scores:
                run.settings["unfinished"] = True  # a killed run shows what it had, and that it is not all
                merged_with_earlier(run, out).write(out)
        cached.dbdict.close()
    run.settings.pop("unfinished", None)
    run.seconds = time.monotonic() - started
    return run


def _score(
    contender: Contender, cached: Any, lm: SupraLM, entry: Entry, loaded: dict[str, Any], limit: int | None,
    chat: bool, seed: int, out: Path | None, say: Callable[[str], None],
) -> list[Score]:  # fmt: skip
    """The numbers to quote of one task for one model."""
    began = time.monotonic()
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed + FEWSHOT_SEED)
    with _progress(f"{contender.name} · {entry.task}") as on_tokens:
        lm.on_tokens = on_tokens
        results: Any = evaluate(
            cached,
            loaded,
            samples=spread_samples(loaded, [entry], limit),
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        )
    cached.dbdict.commit()
    rows = {**results["results"], **results.get("groups", {})}
    # A tag has no number of its own: each of its tasks is quoted.
    names = [entry.task] if entry.task in rows else list(loaded["tasks"])
    scores = [_quoted(name, entry, rows[name], results, contender.name) for name in names]
    if out is not None:
        folder = out / "lm_eval" / contender.name
        folder.mkdir(parents=True, exist_ok=True)
        kept = {
            name: results.get(name)
            for name in ("results", "groups", "n-samples", "n-shot", "versions", "configs")
        }
        write_whole(folder / f"{entry.task}.json", json.dumps(kept, indent=2, default=str) + "\n")
    seconds = time.monotonic() - began
    for score in scores:
        shown = f"{score.value:.4f}" + ("" if score.stderr is None else f" ± {score.stderr:.4f}")
        say(f"{contender.name}: {score.task} {score.metric} {shown} in {seconds:.0f} s")
    return scores


def _quoted(task: str, entry: Entry, row: dict[str, Any], results: Any, model: str) -> Score:
    """The quoted number of one row of lm-eval's results; a group's documents are those of all its tasks."""
    key = entry.key_in(row)
    metric, _, answer_filter = key.partition(",")
    stderr = row.get(f"{metric}_stderr,{answer_filter}")
    counts = results["n-samples"]
    own = [counts[task]] if task in counts else counts.values()
    higher = results.get("higher_is_better", {}).get(task, {}).get(metric)
    return Score(
        task, metric, model, float(row[key]), float(stderr) if isinstance(stderr, (int, float)) else None,
        num_samples=sum(count["effective"] for count in own), higher_is_better=higher is not False,
        chance=entry.chance,
    )  # fmt: skip


@contextmanager
def _recorded(run: EvalRun, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Record a failure under `what` and go on."""
    try:
        yield
    except Exception as error:  # whatever a task's own code raises must not cost the others their results
        reason = str(error).strip() or type(error).__name__
        run.failures[what] = (
            reason if isinstance(error, (SupraError, UserError)) else f"{type(error).__name__}: {reason}"
        )
        say(f"failed: {what}: {run.failures[what]}")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr over the tokens read, with the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")
        began = time.monotonic()

        def on_tokens(done: int, total: int) -> None:
            rate = done / max(time.monotonic() - began, 1e-9)
            bar.update(task, completed=done, total=total, rate=f"{rate:,.0f} tokens/s")

        yield on_tokens
