"""Streamed text: every document once an epoch, the same tokens from any place on, little disk, kills cost nothing."""

import json
import multiprocessing
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from supra.config import Data, Recipe
from supra.errors import SupraError, UserError
from supra.train import streaming
from supra.train.plan import dry_run
from supra.train.streaming import StreamedData, TokenStream
from supra.train.tokens import cache_folder

LENGTH = 10


@pytest.fixture(autouse=True)
def _small_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SHARD_TOKENS", 40)
    monkeypatch.setenv("SUPRA_CACHE", str(tmp_path / "cache"))


def texts(count: int = 60) -> list[str]:
    return [f"<{n}> the" + " cat" * (n % 5) for n in range(count)]


def write(folder: Path, kind: str, rows: list[str]) -> str:
    """The rows in one file, or in two text files each, as a recipe names them."""
    folder.mkdir(parents=True)
    if kind == "text":
        for number, row in enumerate(rows):
            (folder / f"{number:03}.txt").write_text(row)
        return str(folder / "*.txt")
    if kind == "jsonl":
        half = len(rows) // 2
        for name, part in (("a", rows[:half]), ("b", [*rows[half:], " "])):
            (folder / f"{name}.jsonl").write_text("\n\n".join(json.dumps({"text": row}) for row in part))
        return str(folder / "*.jsonl")
    if kind == "parquet":
        pq.write_table(pa.table({"text": rows}), folder / "a.parquet", row_group_size=7)
        return str(folder / "a.parquet")
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def stream_of(tiny: ModuleType, spec: str, seed: int = 5, **options: Any) -> StreamedData:
    stream = TokenStream(Data(train=(spec,), streaming=True, **options), tiny.make_tokenizer())
    return StreamedData(stream, length=LENGTH, seed=seed)


def read(data: StreamedData, *numbers: int) -> list[tuple[list[int], list[int]]]:
    sequences = [data.sequence(number) for number in numbers]
    return [(sequence.tokens.tolist(), sequence.starts.tolist()) for sequence in sequences]


def shards_on_disk() -> list[int]:
    (folder,) = (cache_folder() / "streams").iterdir()
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir())


def drop_shards() -> None:
    """As if all shards had been left behind; what is recorded of them stays."""
    for path in (cache_folder() / "streams").glob("*/*"):
        if path.is_dir():
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "saved", "hub"])
def test_every_document_comes_once_an_epoch_and_any_place_can_be_reached_again(
    kind: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, tokenizer = write(tmp_path / "text", kind, texts()), tiny.make_tokenizer()
    if kind == "hub":
        rows, spec = datasets.load_from_disk(spec), "someone/texts"

        def load_dataset(name: str, config: None, *, split: str, streaming: bool) -> Any:
            assert (name, config, split, streaming) == ("someone/texts", None, "train", True)
            return rows.to_iterable_dataset()

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data, documents = stream_of(tiny, spec), []
    whole: list[int] = []
    kept, number = [], 0
    while len(documents) < 130:
        kept += read(data, number)
        assert len(shards_on_disk()) <= 2 * streaming.NEIGHBOURS + 1
        whole += kept[-1][0]
        documents = tokenizer.decode(whole).split("<eos>")[:-1]
        number += 1
    epochs = [documents[:60], documents[60:120]]
    for epoch in epochs:
        assert sorted(epoch) == sorted(texts())
        assert epoch != texts()
    assert epochs[0] != epochs[1]
    stream_starts = [0, *(np.flatnonzero(np.array(whole) == tokenizer.eos_token_id) + 1)]
    for n, (_, starts) in enumerate(kept):
        assert starts == [s - n * LENGTH for s in stream_starts if n * LENGTH < s < (n + 1) * LENGTH]

    late = list(range(number - 9, number))
    assert read(data, 2, *late, 3) == [kept[2], *kept[-9:], kept[3]], "backwards too"
    drop_shards()
    assert read(stream_of(tiny, spec), *late) == kept[-9:], "from the record before it"
    for path in (cache_folder() / "streams").glob("*/*.json"):
        path.unlink()
    assert read(stream_of(tiny, spec), *late) == kept[-9:], "from nothing"
    assert read(stream_of(tiny, spec, seed=6), 0) != kept[:1]


def test_a_resumed_stream_does_not_tokenise_what_lies_behind(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write(tmp_path / "text", "jsonl", texts(600))
    wanted = read(stream_of(tiny, spec), *range(280))[-1]
    drop_shards()
    seen: list[int] = []
    real = streaming.encode

    def counting(*args: Any) -> Any:
        for document in real(*args):
            seen.append(len(document.ids))
            yield document

    monkeypatch.setattr(streaming, "encode", counting)
    assert read(stream_of(tiny, spec), 279)[0] == wanted
    assert sum(seen) < 200, "of about 5,000"


def test_short_documents_and_chats_are_streamed_too(tiny: ModuleType, tmp_path: Path) -> None:
    spec, tokenizer = write(tmp_path / "text", "jsonl", texts()), tiny.make_tokenizer()
    minimum = len(tokenizer(texts()[14])["input_ids"]) + 1
    data = stream_of(tiny, spec, min_document_tokens=minimum)
    tokens = [token for sequence, _ in read(data, *range(40)) for token in sequence]
    documents = tokenizer.decode(tokens).split("<eos>")
    long = [text for text in texts() if len(tokenizer(text)["input_ids"]) + 1 >= minimum]
    assert sorted(documents[: len(long)]) == sorted(long)
    assert len(long) < 60
    with pytest.raises(UserError, match="all 60 documents are shorter"):
        stream_of(tiny, spec, min_document_tokens=500)

    rows = [
        [{"role": "user", "content": "the"}, {"role": "assistant", "content": f"cat {n}"}] for n in range(30)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    chats = Data(train=(str(tmp_path / "chats.jsonl"),), streaming=True, messages_field="messages")
    data = StreamedData(TokenStream(chats, tokenizer), length=LENGTH, seed=5)
    learned: list[int] = []
    for number in range(120):
        sequence = data.sequence(number)
        assert sequence.answers is not None
        learned += sequence.tokens[sequence.answers].tolist()
    answers = sorted(tokenizer.decode(learned).split("cat")[1:][:30])
    assert answers == sorted(f" {n}" for n in range(30))


def test_a_damaged_record_and_a_failing_source_are_named(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write(tmp_path / "text", "jsonl", texts())
    read(stream_of(tiny, spec), 20)
    (record,) = (cache_folder() / "streams").glob("*/00000002.json")
    record.write_text("{")
    with pytest.raises(SupraError, match=r"00000002\.json: it is damaged"):
        read(stream_of(tiny, spec), 20)

    def rows() -> Any:
        yield {"text": "the cat"}
        raise ConnectionError("the hub does not answer")

    made = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: made)
    with pytest.raises(UserError, match="someone/texts: the hub does not answer"):
        stream_of(tiny, "someone/texts")


def test_text_that_changed_behind_the_stream_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    spec = write(tmp_path / "text", "text", ["the cat runs"] * 40)
    read(stream_of(tiny, spec), *range(12))
    drop_shards()
    data = stream_of(tiny, spec)
    for path in (tmp_path / "text").glob("*.txt"):
        path.write_text("a dog sleeps under the tree")
    data._open.clear()
    with pytest.raises(SupraError, match="no longer what it was"):
        read(data, 9)


def _read_all(data: Data, tokenizer: Any, numbers: range, results: Any, makes_shards: bool = True) -> None:
    stream = TokenStream(data, tokenizer)
    results.put(read(StreamedData(stream, length=LENGTH, seed=5, makes_shards=makes_shards), *numbers))


def test_one_process_makes_the_shards_and_others_wait(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, tokenizer = write(tmp_path / "text", "jsonl", texts(300)), tiny.make_tokenizer()
    context = multiprocessing.get_context("fork")
    halted, results = context.Event(), context.Queue()
    monkeypatch.setattr(
        streaming, "NEIGHBOURS", 1000
    )  # else the one that waits may have to make what was dropped
    silent = tiny.Halting(tokenizer, halted)
    silent.batches = 2  # halts as soon as it is used
    arguments = (Data(train=(spec,), streaming=True), silent, range(60), results, False)
    child = context.Process(target=_read_all, args=arguments)
    child.start()
    wanted = read(stream_of(tiny, spec), *range(60))
    assert results.get(timeout=60) == wanted
    child.join()
    assert not halted.is_set()


def test_kill_9_in_a_shard_and_two_processes_at_once(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, tokenizer = write(tmp_path / "text", "jsonl", texts(300)), tiny.make_tokenizer()
    data, numbers = Data(train=(spec,), streaming=True), range(120)
    wanted = read(stream_of(tiny, spec), *numbers)
    monkeypatch.setenv("SUPRA_CACHE", str(tmp_path / "other"))
    context = multiprocessing.get_context("fork")
    halted, results = context.Event(), context.Queue()
    arguments = (data, tiny.Halting(tokenizer, halted), numbers, results)
    child = context.Process(target=_read_all, args=arguments)
    child.start()
    assert halted.wait(60)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert shards_on_disk()
    children = [context.Process(target=_read_all, args=(data, tokenizer, numbers, results)) for _ in range(2)]
    for child in children:
        child.start()
    outcomes = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert outcomes == [wanted, wanted]
    assert len(shards_on_disk()) <= 2 * streaming.NEIGHBOURS + 1


def test_a_plan_of_streamed_text(tiny: ModuleType, tmp_path: Path, model_dir: Path) -> None:
    spec = write(tmp_path / "text", "jsonl", texts())
    raw = tiny.raw_recipe(tmp_path)
    raw["data"] = {"train": [spec], "streaming": True}
    (stage,) = dry_run(Recipe.model_validate(raw), model_dir, tmp_path / "run", probe=False).stages
    assert (stage.data_tokens, stage.epochs) == (None, (None,))
    raw["data"] = {"train": [write(tmp_path / "none", "jsonl", [" "])], "streaming": True}
    with pytest.raises(UserError, match="hold no text"):
        dry_run(Recipe.model_validate(raw), model_dir, tmp_path / "run", probe=False)
