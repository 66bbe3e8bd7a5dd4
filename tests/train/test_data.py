"""Texts found and read, tokens cached, sequences packed."""

import json
import multiprocessing
import os
import platform
import signal
import time
from pathlib import Path
from types import ModuleType

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from supra.config import Data
from supra.errors import SupraError, UserError
from supra.train.data import IGNORED, PackedData
from supra.train.documents import read_documents, read_rows, unwrap
from supra.train.sources import find_sources, package_folder
from supra.train.tokens import TokenStore, cache_folder, load_tokens


def store_of(lengths: list[int]) -> TokenStore:
    """Documents of these lengths in which every token is different."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return TokenStore(np.arange(offsets[-1], dtype=np.uint32), offsets, "key")


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    length=st.integers(2, 17),
    size=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 2),
)
def test_packing(lengths: list[int], length: int, size: int, seed: int, epoch: int) -> None:
    store = store_of(lengths)
    total = len(store.tokens)
    if total < length:
        with pytest.raises(UserError, match="less than one sequence"):
            PackedData(store, length=length, seed=seed)
        return
    data = PackedData(store, length=length, seed=seed)
    first = epoch * data.num_sequences
    rows = [data.batch(first + n, 1) for n in range(data.num_sequences)]
    seen = torch.cat([row.input_ids.flatten() for row in rows]).tolist()
    # Every token at most once, and all of them but a tail shorter than a sequence, which is one stretch.
    assert len(seen) == len(set(seen)) == total // length * length
    assert max(seen) - min(seen) == len(seen) - 1

    batch = data.batch(first, size)
    flat, labels, positions = (t.flatten() for t in (batch.input_ids, batch.labels, batch.position_ids))
    starts = set(store.offsets.tolist())
    expected = sorted({i for i in range(size * length) if i % length == 0 or flat[i].item() in starts})
    assert batch.cu_seqlens.tolist() == [*expected, size * length]
    for i in range(size * length):
        begins = i in expected
        assert positions[i] == (0 if begins else positions[i - 1] + 1)
        ends = i + 1 in expected or i + 1 == size * length
        assert labels[i] == (IGNORED if ends else flat[i + 1])


def test_batches_are_a_pure_function_of_seed_and_number() -> None:
    store = store_of([50, 3, 90, 57])
    one, two = (PackedData(store, length=8, seed=5) for _ in range(2))
    for _ in range(3):
        two.batch(17, 4)  # what was read before changes nothing
    assert torch.equal(one.batch(22, 3).input_ids, two.batch(22, 3).input_ids)
    assert torch.equal(one.batch(0, 4).input_ids[2:], one.batch(2, 2).input_ids)
    other = PackedData(store, length=8, seed=6)
    assert not torch.equal(one.batch(0, 8).input_ids, other.batch(0, 8).input_ids)
    assert not torch.equal(one.batch(0, 8).input_ids, one.batch(one.num_sequences, 8).input_ids)


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    texts = ["the cat runs", "a dog", "under the tree"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts) + "\n\n")
    pq.write_table(pa.table({"body": texts, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"body": texts}).save_to_disk(str(tmp_path / "saved"))
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    for spec in ("a.jsonl", "a.parquet", "saved", "[0-9].txt"):
        data = Data(train=(str(tmp_path / spec),), text_field="body")
        found, _ = find_sources(data)
        assert [text for source in found for text in read_documents(source, data)] == texts, spec


def test_held_out_files_never_train_and_patterns_exclude(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    data = Data(train=(f"{tmp_path}/*.txt",), heldout=(f"{tmp_path}/./b.txt",), exclude=("c*",))
    train, heldout = find_sources(data)
    assert [source.name for source in train] == ["a.txt"]
    assert [source.name for source in heldout] == ["b.txt"]


def test_package_files_are_found_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "text_package_for_test"
    (package / "books").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "books" / "one.txt").write_text("the cat")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package_folder("text_package_for_test") == package
    (source,), _ = find_sources(Data(train=("package:text_package_for_test/books/*.txt",)))
    assert Path(source.where) == package / "books" / "one.txt"


def test_latin_1_is_read_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    data = Data(train=(str(tmp_path / "a.txt"),))
    (source,), _ = find_sources(data)
    assert list(read_documents(source, data)) == ["café"]
    assert "a.txt: not UTF-8, read as latin-1" in capsys.readouterr().err


def test_unwrap_joins_paragraphs_and_keeps_verse() -> None:
    wrapped = "One line\nand another.\r\n\r\n\nNext  \nparagraph\n\n    a verse\n    of two lines\n"
    assert unwrap(wrapped) == "One line and another.\n\nNext paragraph\n\n    a verse\n    of two lines"


def test_tokens_are_cached_and_the_key_follows_content_and_options(tiny: ModuleType, tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer()
    path = tiny.write_text(tmp_path / "a.txt", seed=3, num_words=60)
    data = Data(train=(str(path),))
    said: list[str] = []
    first = load_tokens(data, tokenizer, report=said.append)
    again = load_tokens(data, tokenizer, report=said.append)
    assert len(said) == 1
    assert first.key == again.key
    assert tokenizer.decode(again.tokens[:-1]) == path.read_text()
    assert again.tokens[-1] == tokenizer.eos_token_id
    capped = load_tokens(Data(train=(str(path),), max_tokens=10), tokenizer)
    assert capped.tokens.tolist() == first.tokens[:10].tolist()
    path.write_text(path.read_text() + " the cat")
    assert load_tokens(data, tokenizer).key != first.key


def test_short_documents_are_left_out_and_counted(tiny: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lengths = [3, 9, 1, 5, 4, 20]
    path.write_text("\n".join(json.dumps({"text": " ".join(["the"] * n)}) for n in lengths))
    tokenizer, said = tiny.make_tokenizer(), []
    whole = load_tokens(Data(train=(str(path),)), tokenizer, report=said.append)
    tokens_of = np.diff(whole.offsets).tolist()
    assert (len(tokens_of), whole.num_short, len(said)) == (6, 0, 1)
    for minimum in (tokens_of[4], tokens_of[4] + 1):
        kept = [n for n in tokens_of if n >= minimum]
        for _ in range(2):  # made, then found
            store = load_tokens(
                Data(train=(str(path),), min_document_tokens=minimum), tokenizer, report=said.append
            )
            assert np.diff(store.offsets).tolist() == kept
            assert store.num_short == 6 - len(kept)
            assert said[-1] == f"kept {len(kept)} of 6 documents, those of {minimum} tokens or more"
    with pytest.raises(
        UserError, match=f"all 6 documents are shorter, the longest has {tokens_of[5]} tokens"
    ):
        load_tokens(Data(train=(str(path),), min_document_tokens=1000), tokenizer)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_even_and_odd_documents_share_out_a_source(tmp_path: Path, suffix: str) -> None:
    texts, path = [f"text {n}" for n in range(7)], tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    else:
        pq.write_table(pa.table({"text": texts}), path, row_group_size=2)
    data = {kind: Data(train=(str(path),), documents=kind) for kind in ("all", "even", "odd")}
    (source,), _ = find_sources(data["all"])
    assert [list(read_documents(source, data[kind])) for kind in data] == [texts, texts[::2], texts[1::2]]
    # Resuming from any row passes over the same documents.
    assert [row.number for row in read_rows(source, data["even"], first=3)] == [4, 6]
    assert [row.number for row in read_rows(source, data["odd"], first=3)] == [3, 5]


def test_half_of_the_documents_is_another_text(tiny: ModuleType, tmp_path: Path) -> None:
    tokenizer, path = tiny.make_tokenizer(), tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": "the cat"}) for _ in range(4)))
    keys = {
        load_tokens(Data(train=(str(path),), documents=kind), tokenizer).key
        for kind in ("all", "even", "odd")
    }
    assert len(keys) == 3
    book = tiny.write_text(tmp_path / "book.txt", seed=4, num_words=60)
    with pytest.raises(UserError, match="is one document, the first, and documents: odd leaves it out"):
        load_tokens(Data(train=(str(book),), documents="odd"), tokenizer)


def test_a_crash_while_tokenising_leaves_no_cache(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Data(train=(str(tiny.write_text(tmp_path / "a.txt", seed=4, num_words=60)),))
    monkeypatch.setenv("SUPRA_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(SupraError, match="No space left"):
            load_tokens(data, tiny.make_tokenizer())
    assert list((cache_folder() / "tokens").iterdir()) == []


def test_abandoned_caches_are_removed_and_those_of_others_are_not(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPRA_CACHE", str(tmp_path / "cache"))
    here, yesterday = platform.node(), time.time() - 90_000
    names = {
        "dead here": f"01.partial.{here}.999999999",
        "alive here": f"02.partial.{here}.{os.getppid()}",
        "fresh elsewhere": f"03.partial.some.host.{os.getpid()}",
        "old elsewhere": "04.partial.some.host.999999999",
        "old folder, fresh file": "05.partial.some.host.999999999",
    }
    folders = {kind: cache_folder() / "tokens" / name for kind, name in names.items()}
    for kind, folder in folders.items():
        folder.mkdir(parents=True)
        if kind == "old folder, fresh file":
            (folder / "tokens.bin").touch()
        if kind.startswith("old"):
            os.utime(folder, (yesterday, yesterday))
    load_tokens(
        Data(train=(str(tiny.write_text(tmp_path / "a.txt", seed=4, num_words=60)),)), tiny.make_tokenizer()
    )
    assert {kind for kind, folder in folders.items() if not folder.exists()} == {"dead here", "old elsewhere"}


def test_kill_9_while_tokenising_costs_nothing(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokenizer = tmp_path / "a.jsonl", tiny.make_tokenizer()
    path.write_text("\n".join(json.dumps({"text": f"the cat {n} " * 50}) for n in range(200)))
    data = Data(train=(str(path),))
    monkeypatch.setenv("SUPRA_CACHE", str(tmp_path / "clean"))
    clean = load_tokens(data, tokenizer)
    monkeypatch.setenv("SUPRA_CACHE", str(tmp_path / "killed"))
    context = multiprocessing.get_context("fork")
    halted = context.Event()
    child = context.Process(target=load_tokens, args=(data, tiny.Halting(tokenizer, halted)))
    child.start()
    assert halted.wait(60)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    (partial,) = (cache_folder() / "tokens").iterdir()
    assert (partial / "tokens.bin").stat().st_size > 0
    again = load_tokens(data, tokenizer)
    assert [folder.name for folder in (cache_folder() / "tokens").iterdir()] == [clean.key]
    assert again.key == clean.key
    assert again.tokens.tolist() == clean.tokens.tolist()
    assert again.offsets.tolist() == clean.offsets.tolist()


@pytest.mark.parametrize(
    ("name", "kept"),
    [("tokens.bin", -4), ("tokens.bin", 0), ("offsets.npy", 40), ("offsets.npy", -8), ("meta.json", 9)],
)
def test_a_damaged_cache_is_named(
    name: str, kept: int, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Data(train=(str(tiny.write_text(tmp_path / "a.txt", seed=5, num_words=60)),))
    monkeypatch.setenv("SUPRA_CACHE", str(tmp_path / "cache"))
    store = load_tokens(data, tiny.make_tokenizer())
    file = cache_folder() / "tokens" / store.key / name
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(SupraError, match="damaged"):
        load_tokens(data, tiny.make_tokenizer())


def _tokenise_at_once(barrier: object, path: str, folder: str, results: object) -> None:
    os.environ["SUPRA_CACHE"] = folder
    barrier.wait()  # type: ignore[attr-defined]
    data = Data(train=(path,))
    results.put(load_tokens(data, _TOKENIZER).tokens.tolist())  # type: ignore[attr-defined]


def test_two_processes_may_tokenise_the_same_text(tiny: ModuleType, tmp_path: Path) -> None:
    global _TOKENIZER
    _TOKENIZER = tiny.make_tokenizer()
    path = tiny.write_text(tmp_path / "a.txt", seed=6, num_words=600)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (barrier, str(path), str(tmp_path / "cache"), results)
    processes = [context.Process(target=_tokenise_at_once, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


_TOKENIZER: object = None


def test_big_vocabularies_need_wide_ids(tiny: ModuleType, tmp_path: Path) -> None:
    class Wide:
        eos_token_id = 70_000

        def __len__(self) -> int:
            return 70_001

        def __call__(self, texts: list[str], **options: bool) -> dict[str, list[list[int]]]:
            return {"input_ids": [[69_999] for _ in texts]}

        def get_vocab(self) -> dict[str, int]:
            return {"x": 69_999}

    path = tiny.write_text(tmp_path / "a.txt", seed=7, num_words=24)
    store = load_tokens(Data(train=(str(path),)), Wide())
    assert store.tokens.dtype == np.uint32
    assert store.tokens.tolist() == [69_999, 70_000]
