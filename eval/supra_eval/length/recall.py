"""`supra eval --recall`: how much of what stands far back each model still knows, by task and context."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from supra.errors import UserError
from supra.generate import end_tokens, greedy, prefill, require_finite
from supra.loading import load_tokenizer
from supra_eval.contenders import Contender
from supra_eval.results import EvalRun, Grid, Score

from .filler import Filler, read_filler
from .recall_tasks import RULER, Example, make_example, require_depths, require_tasks, score
from .session import TOKENS, Part, Readers, Say, Session, require_contexts

# RULER's bar: what Llama-2-7B reaches at its 4,096 tokens (arXiv 2404.06654, section 4).
EFFECTIVE_ACCURACY = 0.856
EFFECTIVE_LENGTH = "effective_length"


def continuation(model: Any, tokenizer: Any, prompt: str, new_tokens: int, chunk_tokens: int = 512) -> str:
    """What `model` writes greedily after `prompt`, up to its end token or `new_tokens`; the prompt is read in chunks.

    Raises:
        SupraError: the logits are not finite.
    """
    ids = tokenizer(prompt, return_tensors="pt", verbose=False).input_ids.to(model.device)
    ends = end_tokens(model, tokenizer)
    return str(tokenizer.decode(greedy(model, ids, new_tokens, ends=ends, chunk_tokens=chunk_tokens)))


@torch.no_grad()
def fraction_recalled(model: Any, tokenizer: Any, example: Example, chunk_tokens: int = 512) -> float:
    """Fraction of the example's spans that greedy decoding would write, the earlier ones being given.

    All tokens that overlap a span must be the most likely ones; nothing is generated, for the prompt holds them.
    """
    encoded = tokenizer(example.prompt, return_tensors="pt", return_offsets_mapping=True, verbose=False)
    ids = encoded.input_ids.to(model.device)
    offsets = encoded.offset_mapping[0].tolist()
    places = [
        [i for i, (start, end) in enumerate(offsets) if start < span_end and end > span_start]
        for span_start, span_end in example.spans
    ]
    first = places[0][0]
    logits, cache = prefill(model, ids[:, :first], chunk_tokens)
    # From here on a few questions only: their logits fit side by side.
    output = model(ids[:, first:], cache=cache, use_cache=True)
    predicted = torch.cat([logits[:, None], output.logits[:, :-1]], dim=1)
    require_finite(predicted)
    right = (predicted.argmax(-1) == ids[:, first:])[0].tolist()
    return sum(all(right[i - first] for i in place) for place in places) / len(places)


def accuracy_on(model: Any, tokenizer: Any, example: Example, chunk_tokens: int = 512) -> float:
    """The model's score on one example, 0–1."""
    if example.spans:
        return fraction_recalled(model, tokenizer, example, chunk_tokens)
    return score(example, continuation(model, tokenizer, example.prompt, example.new_tokens, chunk_tokens))


def effective_length(accuracy: Mapping[int, float], threshold: float = EFFECTIVE_ACCURACY) -> int | None:
    """The longest context (key) at which the accuracy reaches `threshold`, None if it never does."""
    return max((context for context, value in accuracy.items() if value >= threshold), default=None)


def run_recall(
    model: Path, *, teacher: Path | None, tasks: Sequence[str], contexts: Sequence[int], depths: Sequence[float],
    num_samples: int, data: Sequence[str] = (), rope: Sequence[str] = ("none",), ablations: bool = True,
    out: Path | None = None, device: str = "auto", dtype: str = "float32", backend: str = "auto",
    student_rope: bool = False, chunk_tokens: int = 512, seed: int = 0, say: Say = print,
) -> EvalRun:  # fmt: skip
    """Score the recall `tasks` (see `recall_tasks.TASKS`) at every context, the same prompts for every model.

    `num_samples` prompts are made for each task and context, for the needle as many at each of `depths`. `data` are
    texts to hide things in, neutral sentences if none. `rope` and `student_rope` as in `run_length`.

    Raises:
        UserError: a folder, text, task, context or depth that is wrong, a context too short for a task, or `out`
            holds another evaluation.
        SupraError: a folder that does not hold a whole model, or `out` cannot be written.
    """
    contexts = require_contexts(contexts)
    require_tasks(tasks)
    require_depths(depths)
    for option, value in (("samples", num_samples), ("chunk-tokens", chunk_tokens)):
        if value < 1:
            raise UserError(f"--{option} {value}", "is out of range", "Use at least 1")
    if "needle" in tasks and not depths:
        raise UserError("--depths", "is empty", "Give at least one depth for the task needle")
    readers = Readers(model, teacher, rope, contexts[-1], ablations, device, dtype, backend, student_rope)
    filler, tokenizer = read_filler(data), load_tokenizer(model)
    for task in tasks:  # a context that is too short is found out before any model is loaded
        make_example(task, tokenizer, contexts[0], seed=seed, sample=0, filler=filler)
    settings: dict[str, Any] = {
        "tasks": list(tasks), "contexts": contexts, "depths": list(depths), "num_samples": num_samples,
        "filler": [str(item) for item in data] or "neutral sentences", "filler_sentences": len(filler.sentences),
        "rope": readers.describe_rope(), "chunk_tokens": chunk_tokens, "device": device,
        "dtype": dtype, "backend": backend,
    }  # fmt: skip
    session = Session(
        EvalRun("recall", str(model), str(teacher) if teacher else None, seed, settings), out, say
    )

    def work(contender: Contender) -> None:
        for task in tasks:
            cells: dict[tuple[float | None, int], float] = {}
            for context in contexts:
                at: list[float | None] = [None] if task != "needle" else list(depths)
                session.attempt(
                    contender, f"{task} at {context}",
                    _task, contender, task, context, at, num_samples, filler, chunk_tokens, seed, cells,
                )  # fmt: skip
            if task == "needle" and cells:
                session.keep([_grid(contender.name, contexts, depths, cells)])
        _summarise(session, contender.name, tasks)

    return session.measure(readers, work)


def _task(
    contender: Contender, task: str, context: int, depths: Sequence[float | None], num_samples: int,
    filler: Filler, chunk_tokens: int, seed: int, cells: dict[tuple[float | None, int], float],
) -> list[Part]:  # fmt: skip
    """One task at one context: its score, and the mean of each depth in `cells`."""
    values: list[float] = []
    chances: list[float] = []
    for depth in depths:
        at_depth = []
        for sample in range(num_samples):
            example = make_example(
                task, contender.tokenizer, context, seed=seed, sample=sample, filler=filler, depth=depth
            )
            at_depth.append(accuracy_on(contender.model, contender.tokenizer, example, chunk_tokens))
            chances.append(example.chance)
        cells[depth, context] = _mean(at_depth)
        values += at_depth
    mean, num = _mean(values), len(values)
    stderr = math.sqrt(sum((value - mean) ** 2 for value in values) / (num - 1) / num) if num > 1 else None
    return [Score(task, "accuracy", contender.name, mean, stderr, num, context, True, _mean(chances))]


def _grid(
    name: str,
    contexts: Sequence[int],
    depths: Sequence[float],
    cells: Mapping[tuple[float | None, int], float],
) -> Grid:
    values = [[cells.get((depth, context)) for context in contexts] for depth in depths]
    x, y = [float(context) for context in contexts], [float(depth) for depth in depths]
    return Grid("needle", name, TOKENS, "depth (0 start, 1 end)", x, y, values)


def _summarise(session: Session, name: str, tasks: Sequence[str]) -> None:
    """Curves of accuracy by context, and effective lengths of each task and of RULER's tasks together."""
    accuracy = {task: session.keep_curve(name, task, "accuracy", f"recall {task}") for task in tasks}
    lengths = {task: effective_length(values) for task, values in accuracy.items() if values}
    ruler = [accuracy[task] for task in tasks if task in RULER]
    # A context at which one of the tasks failed has no mean over all of them.
    shared = set.intersection(*map(set, ruler)) if ruler else set()
    if shared:
        lengths["RULER tasks"] = effective_length(
            {context: _mean(values[context] for values in ruler) for context in shared}
        )
    for task, length in lengths.items():
        session.keep([Score(task, EFFECTIVE_LENGTH, name, math.nan if length is None else float(length))])
    shown = (f"{task} {length if length is None else f'{length:,}'}" for task, length in lengths.items())
    session.say(f"{name}: longest context with {EFFECTIVE_ACCURACY:.1%} or more: {', '.join(shown)}")


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
