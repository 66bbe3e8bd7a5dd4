"""How much faster log-likelihood tasks run when shared prefixes are read once: our class against lm-eval's HFLM.

Both run the same converted model on the same documents in one process; HFLM runs at each of `--hf-batch-sizes` and its
fastest counts. Scores must be equal, and the largest difference of a request's log-likelihood is printed.

    python eval/benchmarks/harness_speed.py MODEL --threads 2
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from supra.loading import load_model
from supra_eval.harness.model import SupraLM
from supra_eval.harness.offline_data import spread_samples, task_dict
from supra_eval.harness.task_groups import Entry

# Task, shots, documents of each of its tasks, and how much faster it should be.
CASES = (
    ("mmlu_astronomy", 5, 40, 4.0),
    ("mmlu_world_religions", 5, 40, 4.0),
    ("hellaswag", 0, 60, 2.0),
)


def timed(lm: Any, loaded: Any, samples: Any) -> tuple[float, list[float], dict[str, Any]]:
    """Seconds, every request's log-likelihood, and lm-eval's results."""
    scores: list[float] = []
    plain = lm.loglikelihood

    def listen(requests: Any, **options: Any) -> Any:
        answers = plain(requests, **options)
        scores.extend(score for score, _ in answers)
        return answers

    lm.loglikelihood = listen
    started = time.perf_counter()
    results: Any = evaluate(lm, loaded, samples=samples, bootstrap_iters=0, log_samples=False)
    seconds = time.perf_counter() - started
    lm.loglikelihood = plain
    return seconds, scores, results["results"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hf-batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--data", default="packages")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    loaded_model = load_model(options.model)
    print(loaded_model.describe(), f"· {options.threads} threads")
    model, tokenizer = loaded_model.model, loaded_model.tokenizer
    rows = []
    for task, shots, documents, aim in CASES:
        entry = Entry(task, num_fewshot=shots)
        loaded = task_dict([entry], options.data)
        samples = spread_samples(loaded, [entry], documents)
        ours = SupraLM(model, tokenizer, device=str(model.device))
        seconds, scores, results = timed(ours, loaded, samples)
        reference: dict[int, float] = {}
        for batch_size in options.hf_batch_sizes:
            hflm = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device))
            reference[batch_size], expected, hf_results = timed(hflm, loaded, samples)
            difference = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
            same = all(
                results[name][key] == value
                for name, row in hf_results.items()
                for key, value in row.items()
                if key.startswith("acc") and isinstance(value, float)
            )
        best = min(reference, key=lambda size: reference[size])
        row = {
            "task": task, "shots": shots, "documents": documents, "requests": len(scores), "seconds": seconds,
            "hflm_seconds": reference, "ratio": reference[best] / seconds, "aim": aim,
            "largest_difference": difference, "equal_scores": same,
        }  # fmt: skip
        rows.append(row)
        print(
            f"{task} {shots}-shot, {documents} documents: {seconds:.1f} s; "
            f"HFLM at batch {best} {reference[best]:.1f} s: "
            f"{row['ratio']:.1f} x (aim {aim:g}) · largest difference {difference:.1e} · "
            f"scores {'equal' if same else 'NOT equal'}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
