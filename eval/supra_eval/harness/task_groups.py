"""Which lm-eval tasks are run together, with how many examples in the prompt, and which of their numbers is quoted.

`supra-paper` is the main table of "Linearizing Large Language Models" (arXiv 2405.06640). Its tasks and metrics follow
the note under that table in the README of the authors' code (TRI-ML/linear_open_lm): "5-shot results are used for MMLU.
Norm results are used for PIQA, HellaSwag, ARC-C"; they come from EleutherAI's harness. What it leaves out is taken for
that harness's default: 0 shots, plain accuracy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from supra.errors import SupraError, UserError


@dataclass(frozen=True)
class Entry:
    """One lm-eval task, group or tag as it is asked for.

    `num_fewshot` None leaves it to the task's YAML (0 where that is silent). `metric` is the number to quote, of
    lm-eval's answer filter `answer_filter`; None is the first that the task reports. `chance` is what guessing scores,
    nominally: fewer than 1 in 100 of ARC's questions have 3 or 5 choices, and a constant yes scores 0.62 on BoolQ.
    `max_documents` bounds the documents of each task in it.
    """

    task: str
    num_fewshot: int | None = None
    metric: str | None = None
    chance: float | None = None
    answer_filter: str = "none"
    max_documents: int | None = None

    def key_in(self, results: Mapping[str, Any]) -> str:
        """The key of the quoted number in one task's row of lm-eval's `results`.

        Raises:
            SupraError: the row has no such number.
        """
        numbers = [key for key in results if "," in key and "_stderr," not in key]
        if self.metric is None and numbers:
            return numbers[0]
        key = f"{self.metric},{self.answer_filter}"
        if key not in numbers:
            raise SupraError(
                self.task, f"has no {key} (it reports {', '.join(numbers)})", "Quote one of those"
            )
        return key


# By task: what to quote, and the folder of lm-eval's tasks that defines it, so that those few can be indexed in place
# of all 14,000 (which takes 20 seconds).
_KNOWN = {
    "arc_challenge": (Entry("arc_challenge", metric="acc_norm", chance=0.25), "arc"),
    "arc_easy": (Entry("arc_easy", metric="acc", chance=0.25), "arc"),
    "boolq": (Entry("boolq", metric="acc", chance=0.5), "super_glue"),
    "commonsense_qa": (Entry("commonsense_qa", metric="acc", chance=0.2), "commonsense_qa"),
    "copa": (Entry("copa", metric="acc", chance=0.5), "super_glue"),
    "gsm8k": (Entry("gsm8k", metric="exact_match", chance=0.0, answer_filter="strict-match"), "gsm8k"),
    "gsm8k_cot": (Entry("gsm8k_cot", metric="exact_match", chance=0.0, answer_filter="strict-match"), "gsm8k"),
    "hellaswag": (Entry("hellaswag", metric="acc_norm", chance=0.25), "hellaswag"),
    "lambada_openai": (Entry("lambada_openai", metric="acc", chance=0.0), "lambada"),
    "mmlu": (Entry("mmlu", metric="acc", chance=0.25), "mmlu/default"),
    "openbookqa": (Entry("openbookqa", metric="acc_norm", chance=0.25), "openbookqa"),
    "piqa": (Entry("piqa", metric="acc_norm", chance=0.5), "piqa"),
    "sciq": (Entry("sciq", metric="acc", chance=0.25), "sciq"),
    "social_iqa": (Entry("social_iqa", metric="acc", chance=1 / 3), "siqa"),
    "winogrande": (Entry("winogrande", metric="acc", chance=0.5), "winogrande"),
}  # fmt: skip
_PAPER = {"hellaswag": 0, "piqa": 0, "winogrande": 0, "arc_easy": 0, "arc_challenge": 0, "mmlu": 5}

GROUPS: dict[str, tuple[Entry, ...]] = {
    "supra-paper": tuple(replace(_KNOWN[task][0], num_fewshot=shots) for task, shots in _PAPER.items()),
    "quick": tuple(
        replace(_KNOWN[task][0], num_fewshot=0, max_documents=200)
        for task in ("piqa", "arc_easy", "hellaswag")
    ),
}


def resolve(names: Iterable[str]) -> tuple[Entry, ...]:
    """The tasks behind some names: our groups, and any task, group or tag that lm-eval knows; each of them once.

    Raises:
        UserError: a name nobody knows, a task asked for in two ways, or no name at all.
    """
    entries: dict[str, Entry] = {}
    for name in names:
        for entry in GROUPS.get(name) or (_entry(name),):
            if entries.setdefault(entry.task, entry) != entry:
                raise UserError(
                    f"task {entry.task}",
                    "is asked for twice, with other shots or documents each time",
                    "Name it once, or run the two one after the other",
                )
    if not entries:
        raise UserError("the tasks", "are none", f"Name some: {', '.join(GROUPS)}, or any of lm-eval's")
    return tuple(entries.values())


def task_manager(names: Iterable[str]) -> Any:
    """lm-eval's TaskManager that knows all of `names`: a small one of the usual tasks, or if need be the whole."""
    usual = _manager(usual=True)
    known = {
        name for name, entry in usual.task_index.items() if entry.kind.name != "TAG"
    }  # tags cross folders
    return usual if known.issuperset(names) else _manager(usual=False)


def _entry(name: str) -> Entry:
    if name in _KNOWN:
        return _KNOWN[name][0]
    if name.startswith("mmlu_") and name in _manager(usual=True).task_index:
        return Entry(name, metric="acc", chance=0.25)
    if name in task_manager([name]).task_index:
        return Entry(name)
    everything = [*GROUPS, *_manager(usual=False).all_tasks]
    near = difflib.get_close_matches(name, everything, n=5)
    hint = (
        f"Did you mean {', '.join(near)}?" if near else f"Choose {', '.join(GROUPS)}, or any task of lm-eval"
    )
    raise UserError(f"task {name}", "is unknown, to lm-eval too", hint)


@cache
def _manager(usual: bool) -> Any:
    from pathlib import Path

    import lm_eval.tasks

    if not usual:
        return lm_eval.tasks.TaskManager()
    folders = sorted({folder for _, folder in _KNOWN.values()})
    root = Path(str(lm_eval.tasks.__file__)).parent
    return lm_eval.tasks.TaskManager(
        include_defaults=False, include_path=[root / folder for folder in folders]
    )
