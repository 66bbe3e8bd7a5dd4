"""Released data in both layouts, made up here small: found, read, and refused where a trap lies."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from supra.errors import UserError
from supra_eval.lra.data import images, listops
from supra_eval.lra.data.folder import refuse_shared
from supra_eval.lra.data.load import load_task
from supra_eval.lra.data.release import NUM_BYTE_TOKENS

LRA = "lra_release/lra_release"
LISTOPS = {
    "train": "Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n( ( ( [SM 8 ) ( ( ( [MED 3 ) 4 ) ] ) ) ] )\t1\n",
    "val": "Source\tTarget\n( ( ( [MIN 2 ) 9 ) ] )\t2\n",
    "test": "Source\tTarget\n( ( ( [MED 2 ) 9 ) ] )\t5\n",
}


def put(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@pytest.mark.parametrize(
    "place", ["", "listops", "listops-1000", f"{LRA}/listops-1000", "lra_release/listops-1000"]
)
def test_listops_in_every_layout(tmp_path: Path, place: str) -> None:
    put(tmp_path / place, {f"basic_{name}.tsv": text for name, text in LISTOPS.items()})
    task = load_task("listops", tmp_path)
    assert [listops.WORDS[token] for token in task.train.inputs[1]] == "[SM 8 [MED 3 4 ] ]".split()  # noqa: SIM905
    assert task.train.lengths.tolist() == [4, 7] and not task.train.inputs[0, 4:].any()
    assert task.train.labels.tolist() == [9, 1] and task.test.labels.tolist() == [5]
    assert task.num_tokens == 16 and task.num_classes == 10


def test_reads_what_the_generator_writes(tmp_path: Path) -> None:
    task = listops.make(seed=0, train=30, validation=5, test=5, min_length=5, max_length=60)
    listops.write_tsv(task, tmp_path)
    again = load_task("listops", tmp_path)
    for split in ("train", "validation", "test"):
        ours, theirs = getattr(task, split), getattr(again, split)
        assert np.array_equal(ours.inputs, theirs.inputs) and np.array_equal(ours.labels, theirs.labels)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("( ( ( [MAX 2 ) 9 ) )\t9", "brackets"),  # as in some published runs
        ("( ( ( [AVG 2 ) 9 ) ] )\t9", "AVG"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t11", "11"),
        ("", "no expression"),
    ],
)
def test_a_bad_line_of_listops_is_named(tmp_path: Path, line: str, says: str) -> None:
    put(tmp_path, {f"basic_{name}.tsv": text for name, text in LISTOPS.items()})
    put(tmp_path, {"basic_val.tsv": f"Source\tTarget\n{line}\n"})
    with pytest.raises(UserError, match=rf"basic_val\.tsv:2.*{says}"):
        load_task("listops", tmp_path)
    put(tmp_path, {"basic_val.tsv": f"{line}\n"})
    with pytest.raises(UserError, match=r"basic_val\.tsv:1.*header"):
        load_task("listops", tmp_path)


@pytest.mark.parametrize("place", ["", "aan", f"{LRA}/tsv_data"])
def test_retrieval_in_every_layout(tmp_path: Path, place: str) -> None:
    rows = {
        "train": '1.0\ta\tb\tfirst "quoted\tsecond\n0.0\tc\td\té\t\n',
        "eval": "0\te\tf\tx\ty\n",
        "test": f"1\tg\th\t{'z' * 5000}\tw\r\n",
    }
    put(tmp_path / place, {f"new_aan_pairs.{name}.tsv": text for name, text in rows.items()})
    task = load_task("retrieval", tmp_path)
    assert task.train.labels.tolist() == [1, 0] and task.train.second is not None
    assert bytes(task.train.inputs[0, :13] - 1) == b'first "quoted' and task.train.lengths.tolist() == [13, 2]
    assert bytes(task.train.inputs[1, :2] - 1) == "é".encode()
    assert bytes(task.train.second.inputs[0] - 1) == b"second" and task.train.second.lengths.tolist() == [
        6,
        1,
    ]
    assert task.test.lengths.tolist() == [4000] and task.test.second is not None
    assert bytes(task.test.second.inputs[0] - 1) == b"w"
    assert task.train[:1].second is not None and task.num_tokens == NUM_BYTE_TOKENS
    put(tmp_path / place, {"new_aan_pairs.test.tsv": "1\tg\th\tz\n"})
    with pytest.raises(UserError, match=r"test\.tsv:1"):
        load_task("retrieval", tmp_path)


def reviews(split: str, count: int) -> dict[str, str]:
    return {
        f"{split}/{name}/{number}_{rank}.txt": f"{split} {name} {number} très"
        for name, rank in (("pos", 9), ("neg", 2))
        for number in range(count)
    }


@pytest.mark.parametrize("place", ["", "aclImdb", "imdb"])
def test_text_validates_on_train_unless_asked(tmp_path: Path, place: str) -> None:
    put(tmp_path / place, reviews("train", 20) | reviews("test", 3))
    task = load_task("text", tmp_path)
    assert [len(split) for split in (task.train, task.validation, task.test)] == [36, 4, 6]
    assert task.validation.labels.tolist() == [0, 0, 1, 1]
    refuse_shared(task)
    words = bytes(task.test.inputs[5, : task.test.lengths[5]] - 1).decode().split()
    assert words == ["test", "pos", "2", "très"] and task.test.labels[5] == 1
    published = load_task("text", tmp_path, validate_on_test=True)
    assert len(published.train) == 40 and published.validation is published.test
    other = load_task("text", tmp_path, seed=1)
    assert not np.array_equal(other.validation.inputs, task.validation.inputs)


def test_text_from_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "plain_text").mkdir()
    for split in ("train", "test"):
        table = pa.table(
            {"text": [f"{split} {n} " * 1000 for n in range(20)], "label": [n % 2 for n in range(20)]}
        )
        parquet.write_table(table, tmp_path / f"plain_text/{split}-00000-of-00001.parquet")
    task = load_task("text", tmp_path)
    assert len(task.train) == 18 and task.test.lengths.tolist() == [4096] * 20


def colours(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), np.arange(count) % 10


@pytest.mark.parametrize("kind", ["bin", "py"])
def test_image_in_both_forms(tmp_path: Path, kind: str) -> None:
    names = [*images.BATCHES, "test_batch"]
    folder = tmp_path / f"cifar-10-batches-{kind}"
    for number, name in enumerate(names):
        data, labels = colours(20, number)
        if kind == "bin":
            put(
                folder,
                {f"{name}.bin": np.concatenate([labels[:, None].astype(np.uint8), data], axis=1).tobytes()},
            )
        else:
            batch: dict[Any, Any] = {b"data": data, b"labels": labels.tolist(), b"filenames": [b"a.png"] * 20}
            put(folder, {name: pickle.dumps(batch, protocol=2)})
    task = load_task("image", tmp_path, pixels="tokens")
    assert [len(split) for split in (task.train, task.validation, task.test)] == [90, 10, 20]
    assert task.num_tokens == 257 and sorted(task.validation.labels) == list(range(10))
    data, labels = colours(20, 5)
    pillow = Image.fromarray(data[7].reshape(3, 32, 32).transpose(1, 2, 0)).convert("L")
    assert np.array_equal(task.test.inputs[7], np.asarray(pillow).reshape(-1).astype(int) + 1)
    assert np.array_equal(task.test.labels, labels)
    numbers = load_task("image", tmp_path)
    assert numbers.num_tokens is None and numbers.test.inputs.shape == (20, 1024, 1)
    scaled = (np.asarray(pillow).reshape(-1) - 122.6) / 61
    np.testing.assert_allclose(numbers.test.inputs[7, :, 0], scaled, atol=1e-5)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    put(
        tmp_path / "cifar-10-batches-py", dict.fromkeys([*images.BATCHES, "test_batch"], pickle.dumps(Evil()))
    )
    with pytest.raises(UserError, match="no place in a picture file"):
        load_task("image", tmp_path)
    assert not (tmp_path / "ran").exists()


def contours(folder: Path, size: int, count: int = 20, part: str = "0", binary: bool = False) -> Path:
    """The release's files for pictures whose first pixel tells their number."""
    lines = []
    for number in range(count):
        picture = np.zeros((size, size), dtype=np.uint8)
        picture[0, 0] = number + 1
        path = folder / images.HARD / f"imgs/{part}/sample_{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
        lines.append(f"imgs/{part} sample_{number}.png {number} {number % 2} 1.0 14 4 2 0.5 1 1")
    metadata = folder / images.HARD / f"metadata/{part}.npy"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    if binary:
        np.save(metadata, np.array([line.split() for line in lines]))
    else:
        metadata.write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("place", ["", "pathfinder32", "pathfinder/pathfinder32", f"{LRA}/pathfinder32"])
@pytest.mark.parametrize("binary", [False, True])
def test_pathfinder_in_every_layout(tmp_path: Path, place: str, binary: bool) -> None:
    contours(tmp_path / place, 32, binary=binary)
    task = load_task("pathfinder", tmp_path)
    assert [len(split) for split in (task.train, task.validation, task.test)] == [16, 2, 2]
    numbers = np.concatenate([part.inputs[:, 0] for part in (task.train, task.validation, task.test)]) - 2
    labels = np.concatenate([part.labels for part in (task.train, task.validation, task.test)])
    assert sorted(numbers) == list(range(20)) and np.array_equal(labels, numbers % 2)
    assert task.train.inputs.shape == (16, 1024) and task.num_tokens == 257
    scaled = load_task("pathfinder", tmp_path, pixels="numbers")
    assert scaled.train.inputs.min() == -1 and scaled.train.inputs.dtype == np.float32


def test_pathx_takes_the_right_copy(tmp_path: Path) -> None:
    right = contours(tmp_path / LRA / "pathfinder128", 128, count=20)
    broken = contours(tmp_path / "lra_release/pathfinder128", 128, count=10)
    for folder in (tmp_path, tmp_path / "lra_release", right.parent, right):
        assert len(load_task("pathx", folder).train) == 16
    with pytest.raises(UserError, match="broken second copy"):
        load_task("pathx", broken)


def test_traps_of_the_pictures(tmp_path: Path) -> None:
    easy = contours(tmp_path / "pathfinder32", 32, count=20).rename(tmp_path / "x")
    (easy / images.HARD).rename(easy / "curv_baseline")
    folder = easy.rename(tmp_path / "pathfinder32")
    metadata = folder / "curv_baseline/metadata/0.npy"
    metadata.write_text(metadata.read_text() + "imgs/0 sample_172.png 172 1 1.0 6\n")
    empty = folder / "curv_baseline/imgs/0/sample_172.png"
    empty.write_bytes(b"")
    with pytest.raises(UserError, match=images.HARD):  # only the hard ones count
        load_task("pathfinder", tmp_path)
    task = images.read_pathfinder(tmp_path, "pathfinder", 32, seed=0, difficulty="curv_baseline")
    assert len(task.train) + len(task.validation) + len(task.test) == 20
    empty.with_name("sample_3.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"sample_3\.png.*no picture"):
        images.read_pathfinder(tmp_path, "pathfinder", 32, seed=0, difficulty="curv_baseline")


@pytest.mark.parametrize(
    ("task", "file", "where"),
    [
        ("listops", "basic_train.tsv", "long-range-arena"),
        ("retrieval", "new_aan_pairs.train.tsv", "long-range-arena"),
        ("text", "train/pos", "aclImdb"),
        ("image", "data_batch_1", "cifar"),
        ("pathfinder", "metadata", "long-range-arena"),
        ("pathx", "pathfinder128", "long-range-arena"),
    ],
)
def test_a_missing_file_is_named_with_where_it_is_had(
    tmp_path: Path, task: str, file: str, where: str
) -> None:
    with pytest.raises(UserError, match=rf"(?s){file}.*https://\S*{where}"):
        load_task(task, tmp_path)


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    put(tmp_path, {"basic_train.tsv": LISTOPS["train"], "basic_val.tsv": LISTOPS["val"]})
    with pytest.raises(UserError, match=r"basic_test\.tsv.*is missing.*https://"):
        load_task("listops", tmp_path)
