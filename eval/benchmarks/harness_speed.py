"""How much faster log-likelihood tasks run when shared prefixes are read once: our class against lm-eval's HFLM.

Both run the same converted model on the same documents in one process; HFLM runs at each of `--hf-batch-sizes`. Scores
must be equal, and the largest difference of a request's log-likelihood is printed.

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

# Task, shots, documents, and how much faster than HFLM at its default batch size of 1 it should be. A subject of MMLU
# has 246 questions on average, so 40 of one share their shots less than the whole does.
CASES = (("mmlu_astronomy", 5, 40, 4.0), ("hellaswag", 0, 30, 2.0))


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
    parser.add_argument("--only", choices=[case[0] for case in CASES], help="one task instead of all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    loaded_model = load_model(options.model)
    print(loaded_model.describe(), f"· {options.threads} threads")
    model, tokenizer = loaded_model.model, loaded_model.tokenizer
    rows = []
    for task, shots, documents, aim in CASES:
        if options.only not in (None, task):
            continue
        entry = Entry(task, num_fewshot=shots)
        loaded = task_dict([entry], options.data)
        samples = spread_samples(loaded, [entry], documents)
        ours = SupraLM(model, tokenizer, device=str(model.device))
        seconds, scores, results = timed(ours, loaded, samples)
        reference: dict[int, float] = {}
        difference, same = 0.0, True
        for batch_size in options.hf_batch_sizes:
            hflm = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device))
            reference[batch_size], expected, hf_results = timed(hflm, loaded, samples)
            differences = [abs(a - b) for a, b in zip(scores, expected, strict=True)]
            difference = max(difference, *differences)
            same = same and all(
                results[name][key] == value
                for name, row in hf_results.items()
                for key, value in row.items()
                if key.startswith("acc") and isinstance(value, float)
            )
        ratios = {size: reference[size] / seconds for size in reference}
        row = {
            "task": task, "shots": shots, "documents": documents, "requests": len(scores), "seconds": seconds,
            "hflm_seconds": reference, "ratios": ratios, "aim": aim, "largest_difference": difference,
            "equal_scores": same,
        }  # fmt: skip
        rows.append(row)
        against = ", ".join(
            f"HFLM at batch {size} {reference[size]:.1f} s = {ratio:.1f} x" for size, ratio in ratios.items()
        )
        print(
            f"{task} {shots}-shot, {documents} documents: {seconds:.1f} s; {against} (aim {aim:g} at batch 1) · "
            f"largest difference {difference:.1e} · scores {'equal' if same else 'NOT equal'}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
