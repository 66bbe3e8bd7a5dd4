"""SCROLLS (arXiv 2201.03533) at several context cut-offs: teacher, student and ablations read the same prompts.

- A prompt is shots, document, question, "Answer:". The official input puts the question first; here it stands last, as
  in lm-eval-harness, with which the SUPRA paper (arXiv 2405.06640) measured: a fading memory has just read it.
- A cut-off counts everything: prompt and answer together never exceed `context_tokens`. Only documents are shortened,
  by token: `middle` cuts the middle out, `end` keeps the end. A shot's document gets at most an equal share of the
  room. Pieces are tokenised apart and joined as ids, so that a cut never changes a question.
- Answers are generated greedily, also for QuALITY and ContractNLI, which official SCROLLS scores by exact match of the
  generated text; lm-eval-harness compares the choices' likelihoods instead, so its numbers for these two differ.
- `qasper_yes_no` compares the log-likelihoods of " yes" and " no"; what the questions on a paper share is read once and
  its state forked (`supra_eval.harness.scoring`). Its rows are the same for every split.
- Scores, chance and errors are × 100. Prompts are read in chunks: a recurrent model's memory does not grow with them.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from supra.checks import require_model_folder
from supra.errors import SupraError, UserError
from supra.generate import end_tokens, greedy
from supra.loading import load_tokenizer
from supra.train.run_folder import write_whole
from supra_eval.contenders import Contender, contender_names, contenders
from supra_eval.harness.prefixes import Request
from supra_eval.harness.scoring import Limits, Scorer
from supra_eval.results import EvalRun, Score, require_mergeable

from .data import (
    QASPER_YES_NO,
    SPLITS,
    TRUNCATIONS,
    YES_NO,
    Example,
    Prompts,
    Task,
    draw_shots,
    find_tasks,
    read_examples,
)
from .metrics import overall, require_rouge, score_task

CONTEXTS = (2048, 4096, 8192, 16384)
_PROGRESS_SECONDS = 30.0


def generate_greedy(
    model: Any, tokenizer: Any, ids: Sequence[int], max_new_tokens: int, *, stop_at_newline: bool,
    chunk_tokens: int,
) -> str:  # fmt: skip
    """The likeliest continuation of `ids`, token by token, up to end of text, a newline or `max_new_tokens`.

    Raises:
        SupraError: logits that are not finite.
    """
    new = greedy(
        model, torch.tensor([list(ids)], device=model.device), max_new_tokens,
        ends=end_tokens(model, tokenizer), chunk_tokens=chunk_tokens,
        until=(lambda written: "\n" in tokenizer.decode(written)) if stop_at_newline else None,
    )  # fmt: skip
    text = tokenizer.decode(new, skip_special_tokens=True)
    return str(text.split("\n")[0] if stop_at_newline else text).strip()


def log_likelihoods(
    scorer: Scorer, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]]
) -> list[list[float]]:
    """log p(answer | prompt) of each prompt's answers; what prompts share is read once.

    Raises:
        SupraError: logits that are not finite.
    """
    requests = [
        Request((*prompt, *answer[:-1]), tuple(answer))
        for prompt, own in zip(prompts, answers, strict=True)
        for answer in own
    ]
    found = {outcome.request: outcome.log_likelihood for outcome in scorer.score(requests)}
    numbers = iter(range(len(requests)))
    return [[found[next(numbers)] for _ in own] for own in answers]


class Predictions:
    """Predictions of one model on one task at one cut-off: one JSON line each, appended as they are made.

    A line counts again only for the same model and prompt; a line torn by a kill is none.
    """

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint
        self._known: dict[tuple[str, str], str] = {}
        self.num_reused = 0
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes() if path.is_file() else b""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                if row["model"] == fingerprint:
                    self._known[row["id"], row["prompt"]] = row["prediction"]
            except (ValueError, KeyError, TypeError):
                continue
        if text and not text.endswith(b"\n"):
            path.write_bytes(text + b"\n")  # the next line must not be glued to the torn one

    def get(self, example: Example, prompt: str) -> str | None:
        known = self._known.get((example.id, prompt))
        self.num_reused += known is not None
        return known

    def add(self, example: Example, prompt: str, prediction: str) -> str:
        if self._path is not None:
            row = {"id": example.id, "prediction": prediction, "model": self._fingerprint, "prompt": prompt}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return prediction


def predict(
    contender: Contender, prompts: Prompts, examples: Sequence[Example], context_tokens: int,
    store: Predictions, chunk_tokens: int,
) -> Iterator[tuple[Example, str]]:  # fmt: skip
    """Yield each example with its prediction, from the store where it is known."""
    task = prompts.task
    for example in examples:
        ids = prompts.build(example, context_tokens)
        key = _hash(ids, [task.max_new_tokens, task.stop_at_newline])
        prediction = store.get(example, key)
        if prediction is None:
            text = generate_greedy(
                contender.model, contender.tokenizer, ids, task.max_new_tokens,
                stop_at_newline=task.stop_at_newline, chunk_tokens=chunk_tokens,
            )  # fmt: skip
            prediction = store.add(example, key, text)
        yield example, prediction


def predict_yes_no(
    contender: Contender, prompts: Prompts, examples: Sequence[Example], context_tokens: int,
    store: Predictions, chunk_tokens: int,
) -> Iterator[tuple[Example, str]]:  # fmt: skip
    """Yield each example with `yes` or `no`, whichever is likelier; questions of one paper come one after the other."""
    scorer = Scorer(contender.model, Limits(chunk_tokens=chunk_tokens))
    by_paper: dict[str, list[Example]] = {}
    for example in examples:
        by_paper.setdefault(example.document, []).append(example)
    for questions in by_paper.values():
        room = prompts.room(questions, context_tokens)  # one cut for all questions of a paper
        paper = prompts.begin + prompts.document(questions[0], room)
        asked = [[*paper, *prompts.tails(example)[0]] for example in questions]
        answers = [prompts.answers(example) for example in questions]
        keys = [_hash(*pair) for pair in zip(asked, answers, strict=True)]
        known = [store.get(example, key) for example, key in zip(questions, keys, strict=True)]
        new = [i for i, prediction in enumerate(known) if prediction is None]
        scores = log_likelihoods(scorer, [asked[i] for i in new], [answers[i] for i in new])
        for i, own in zip(new, scores, strict=True):
            known[i] = store.add(questions[i], keys[i], YES_NO[int(np.argmax(own))])
        yield from zip(questions, (str(prediction) for prediction in known), strict=True)


def _hash(ids: Sequence[int], settings: object) -> str:
    digest = xxhash.xxh3_128(np.asarray(ids, dtype=np.int64).tobytes())
    digest.update(json.dumps(settings).encode())
    return digest.hexdigest()


def run_scrolls(
    model: Path, *, teacher: Path | None, tasks: Sequence[str], data: str, contexts: Sequence[int] = CONTEXTS,
    limit: int | None = None, split: str = "validation", truncate: str = "middle", out: Path | None = None,
    ablations: bool = False, device: str = "auto", dtype: str = "float32", backend: str = "auto",
    chunk_tokens: int = 512, seed: int = 0, say: Callable[[str], None] = print,
) -> EvalRun:  # fmt: skip
    """Score a model's folder, its teacher and its ablations on `tasks` (`scrolls` is all seven) at each of `contexts`.

    `data` is the folder of the official jsonl files, or `tau/scrolls` for the hub; `limit` takes a task's first
    examples. With `out`, predictions are kept there as they are made and taken up again by the next run; on the test
    split, whose labels are hidden, `out/submission/<model>-<context>.csv` is written instead of a score. A task that
    fails for one model at one cut-off is recorded in `failures`, and the others go on.

    Raises:
        UserError: anything wrong with what was asked for, before a model is loaded.
        SupraError: the hub or a folder cannot be read or written, or a model not loaded.
    """
    start = time.perf_counter()
    chosen, cutoffs = find_tasks(tasks), tuple(dict.fromkeys(contexts))
    _check(chosen, cutoffs, limit, split, truncate, chunk_tokens, out)
    require_model_folder(model)
    if teacher is not None:
        require_model_folder(teacher)
    if any(task.metric == "rouge" for task in chosen):
        require_rouge()
    tokenizer = load_tokenizer(model)
    work: list[tuple[Prompts, list[Example]]] = []
    for task in chosen:
        examples = read_examples(task, data, split, limit)
        prompts = Prompts(task, draw_shots(task, data, seed, examples), tokenizer, truncate)
        prompts.room(examples, min(cutoffs))
        work.append((prompts, examples))
        say(
            f"{task.name}: {len(examples)} examples, {len(prompts.shots)} shots, documents cut at {truncate!r}"
        )
    run = EvalRun("scrolls", str(model), None if teacher is None else str(teacher), seed, settings={
        "tasks": [task.name for task in chosen], "contexts": list(cutoffs), "limit": limit,
        "data": None if chosen == (QASPER_YES_NO,) else data, "split": split, "truncate": truncate,
        "chunk_tokens": chunk_tokens,
        "num_shots": {task.name: task.num_shots for task in chosen},
        "max_new_tokens": {task.name: task.max_new_tokens for task in chosen},
        "decoding": "greedy; qasper_yes_no by log-likelihood", "scale": "scores, chance and errors are x 100",
    })  # fmt: skip
    if out is not None:
        require_mergeable(run, out)
    names = contender_names(model, teacher, ablations=ablations)
    for contender in contenders(model, teacher, names, device=device, dtype=dtype, backend=backend, say=say):
        run.runs_on[contender.name] = contender.runs_on
        _warn_of_length(contender, cutoffs, say)
        for context_tokens in cutoffs:
            answers: dict[str, list[tuple[Example, str]]] = {}
            for prompts, examples in work:
                title = f"{contender.name}, {prompts.task.name}, {context_tokens} tokens"
                try:
                    answers[prompts.task.folder] = _answer(
                        contender, prompts, examples, context_tokens, out, chunk_tokens, title, say
                    )
                    found = score_task(
                        prompts.task, answers[prompts.task.folder], contender.name, context_tokens, seed
                    )
                except Exception as error:  # one task's failure must not cost the others their results
                    run.failures[title] = str(error) or type(error).__name__
                    say(f"{title}: failed: {run.failures[title]}")
                    continue
                run.scores += found
                for part in found:
                    say(f"{title}: {_shown(part)}")
            whole = overall(run.scores, contender.name, context_tokens)
            if whole is not None:
                run.scores.append(whole)
                say(f"{contender.name}, all seven, {context_tokens} tokens: {_shown(whole)}")
            answers.pop(QASPER_YES_NO.folder, None)
            if split == "test" and answers:
                assert out is not None
                say(f"wrote {write_submission(out, contender.name, context_tokens, answers)}")
    run.seconds = time.perf_counter() - start
    return run


def write_submission(
    out: Path, model: str, context_tokens: int, answers: Mapping[str, Sequence[tuple[Example, str]]]
) -> Path:
    """Write the benchmark's submission file, a CSV of Task, ID and Prediction, and return its path."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("Task", "ID", "Prediction"))
    for folder, predicted in answers.items():
        writer.writerows((folder, example.id, prediction) for example, prediction in predicted)
    path = out / "submission" / f"{model}-{context_tokens}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue())
    return path


def _answer(
    contender: Contender, prompts: Prompts, examples: Sequence[Example], context_tokens: int, out: Path | None,
    chunk_tokens: int, title: str, say: Callable[[str], None],
) -> list[tuple[Example, str]]:  # fmt: skip
    """All predictions of one task, saying now and then how far they are."""
    path = (
        out / "predictions" / contender.name / f"{prompts.task.name}-{context_tokens}.jsonl" if out else None
    )
    run = predict_yes_no if prompts.task is QASPER_YES_NO else predict
    predicted: list[tuple[Example, str]] = []
    store, said = Predictions(path, contender.fingerprint), time.perf_counter()
    for pair in run(contender, prompts, examples, context_tokens, store, chunk_tokens):
        predicted.append(pair)
        if time.perf_counter() - said > _PROGRESS_SECONDS:
            say(f"{title}: {len(predicted)} of {len(examples)}")
            said = time.perf_counter()
    if store.num_reused:
        say(f"{title}: {store.num_reused} of {len(examples)} predictions are those of an earlier run")
    return predicted


def _check(
    tasks: Sequence[Task], contexts: Sequence[int], limit: int | None, split: str, truncate: str,
    chunk_tokens: int, out: Path | None,
) -> None:  # fmt: skip
    numbers = {"--contexts": min(contexts, default=0), "--limit": limit, "--chunk-tokens": chunk_tokens}
    for option, number in numbers.items():
        if number is not None and number < 1:
            raise UserError(f"{option} {number}", "is out of range", "Use a value of at least 1")
    for option, word, known in (("--split", split, SPLITS), ("--truncate", truncate, TRUNCATIONS)):
        if word not in known:
            raise UserError(f"{option} {word}", "is unknown", f"Choose one of {', '.join(known)}")
    if split == "test" and out is None and set(tasks) != {QASPER_YES_NO}:
        raise UserError(
            "--split test", "has hidden labels and gives predictions only", "Say where with -o, or use validation"
        )  # fmt: skip
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SupraError(
                str(out), f"cannot be made ({error.strerror})", "Choose another place with -o"
            ) from error


def _warn_of_length(contender: Contender, contexts: Sequence[int], say: Callable[[str], None]) -> None:
    longest = contender.model.config.max_position_embeddings
    if max(contexts) > longest:
        say(f"warning: {contender.name} was made for {longest} tokens, contexts go up to {max(contexts)}")


def _shown(part: Score) -> str:
    error = "" if part.stderr is None else f" ± {part.stderr:.2f}"
    chance = "" if part.chance is None else f", chance {part.chance:.2f}"
    return f"{part.metric} {part.value:.2f}{error} (n = {part.num_samples}{chance})"
