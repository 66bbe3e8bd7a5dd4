"""The picture tasks as others released them: CIFAR-10 in grey, and Long Range Arena's Pathfinder at any size.

Notable: the release's metadata is called `.npy` and is plain text; one picture of it is empty; and a second copy of
pathfinder128, one level above the right one, is broken and gives chance: it is refused. CIFAR-10's Python files are
pickles, which could run anything: only arrays are let out of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from supra.errors import UserError

from ..task import Examples, Task
from .release import GET_LRA, find, lines
from .splits import carve

CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
GET_CIFAR = f"It is in {CIFAR_URL} (tar -xf cifar-10-binary.tar.gz); name the folder it lies in, or one above"
NUM_SHADE_TOKENS = 257  # padding, then 256 shades of grey
HARD = "curv_contour_length_14"  # the only difficulty that counts
KNOWN_EMPTY = "pathfinder32/curv_baseline/imgs/0/sample_172.png"
# Mean and deviation of a shade, of 255, by which numbers are scaled: CIFAR-10's train split in grey, and the middle.
SCALES = {"image": (122.6, 61.0)}
MIDDLE = (127.5, 127.5)
BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


def as_numbers(name: str, examples: Examples) -> Examples:
    """Examples whose inputs are shade tokens [N, T] with scaled numbers [N, T, 1] (float32) instead."""
    mean, deviation = SCALES.get(name, MIDDLE)
    numbers = (examples.inputs.astype(np.float32) - np.float32(1 + mean)) / np.float32(deviation)
    return Examples(numbers[..., None], examples.labels, examples.lengths)


def shade_examples(shades: np.ndarray, labels: np.ndarray) -> Examples:
    """Pictures [N, …] (uint8) as tokens `1 + shade`, row by row."""
    tokens = shades.reshape(len(shades), -1).astype(np.int16) + 1
    return Examples(tokens, labels.astype(np.int64), np.full(len(tokens), tokens.shape[1], dtype=np.int32))


def read_image(folder: Path, *, seed: int, share: float = 0.1) -> Task:
    """CIFAR-10 in grey (as Pillow makes it), validation carved out of train; binary files or Python's.

    Raises:
        UserError: a file is missing or broken.
    """
    names = ("cifar-10-batches-bin", "cifar/cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "")
    pickled = tuple(name.replace("-bin", "-py") for name in names)
    if any((folder / name / BATCHES[0]).is_file() for name in pickled):
        found, suffix, read = find(folder, pickled, BATCHES[0], GET_CIFAR), "", unpickle
    else:
        found, suffix, read = find(folder, names, f"{BATCHES[0]}.bin", GET_CIFAR), ".bin", unpack
    parts = [read(found / f"{name}{suffix}") for name in [*BATCHES, "test_batch"]]
    whole = shade_examples(
        np.concatenate([grey(colours) for colours, _ in parts[:-1]]),
        np.concatenate([label for _, label in parts[:-1]]),
    )
    train, validation = carve(whole, share, seed)
    test = shade_examples(grey(parts[-1][0]), parts[-1][1])
    return Task("image", 10, NUM_SHADE_TOKENS, 1, train, validation, test)


def grey(colours: np.ndarray) -> np.ndarray:
    """Shades [N, 1024] of colours [N, 3072] (red, green, blue planes), by ITU-R 601 in Pillow's whole numbers."""
    red, green, blue = (colours.reshape(len(colours), 3, -1)[:, plane].astype(np.int32) for plane in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8)


def unpack(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Colours [N, 3072] and labels [N] of a binary file of CIFAR-10: a byte of label, then the picture."""
    if not path.is_file():
        raise UserError(str(path), "is missing", GET_CIFAR)
    rows = np.fromfile(path, dtype=np.uint8)
    if not len(rows) or len(rows) % 3073:
        raise UserError(str(path), f"has {len(rows)} bytes, no multiple of 3073", GET_CIFAR)
    rows = rows.reshape(-1, 3073)
    return rows[:, 1:], checked(rows[:, 0], path)


class _ArraysOnly(pickle.Unpickler):
    """Reads what numpy arrays are pickled as, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype", "_frombuffer"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a picture file")


def unpickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The same of a Python file of CIFAR-10."""
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        colours, labels = np.asarray(batch["data"], dtype=np.uint8), np.array(batch["labels"])
        colours = colours.reshape(len(labels), 3072)
    except FileNotFoundError:
        raise UserError(str(path), "is missing", GET_CIFAR) from None
    except (pickle.UnpicklingError, AttributeError, EOFError, KeyError, TypeError, ValueError) as error:
        raise UserError(str(path), f"is no batch of CIFAR-10 ({error})", GET_CIFAR) from None
    return colours, checked(labels, path)


def checked(labels: np.ndarray, path: Path) -> np.ndarray:
    if labels.min() < 0 or labels.max() > 9:
        raise UserError(str(path), "has a label that is none of 0 to 9", GET_CIFAR)
    return labels


def read_pathfinder(
    folder: Path, name: str, size: int, *, seed: int, difficulty: str = HARD,
    say: Callable[[str], None] = lambda text: None,
) -> Task:  # fmt: skip
    """The release's pictures of `size` pixels, a tenth each for validation and test, drawn by `seed`.

    Raises:
        UserError: a file is missing, empty or of another size; the broken copy.
    """
    place = f"{difficulty}/metadata"
    named = f"pathfinder{size}"
    found = find(folder, (named, f"pathfinder/{named}", ""), place, GET_LRA).resolve()
    refuse_broken_copy(found, named)
    metadata = sorted((found / place).glob("*.npy"), key=lambda path: (len(path.stem), path.stem))
    if not metadata:
        raise UserError(str(found / place), "holds no .npy file", GET_LRA)
    shades, labels = [], []
    for number, path in enumerate(metadata):
        for where, words in metadata_rows(path):
            if len(words) < 4 or words[3] not in ("0", "1"):
                raise UserError(where, "is not folder, file, number, label", GET_LRA)
            picture = Path(difficulty) / words[0] / words[1]
            if str(Path(named) / picture) != KNOWN_EMPTY:
                shades.append(shade(found / picture, size))
                labels.append(int(words[3]))
        if number % 20 == 19:
            say(f"{name}: {number + 1} of {len(metadata)} parts read")
    whole = shade_examples(np.stack(shades), np.array(labels))
    order = np.random.default_rng(seed).permutation(len(whole))
    held = len(whole) // 10
    if not held:
        raise UserError(str(found), f"has {len(whole)} pictures: too few for three splits", GET_LRA)
    test, validation, train = np.split(order, [held, 2 * held])
    return Task(
        name, 2, NUM_SHADE_TOKENS, 1, whole[np.sort(train)], whole[np.sort(validation)], whole[np.sort(test)]
    )


def refuse_broken_copy(found: Path, named: str) -> None:
    """UserError for the archive's second copy of pathfinder128, which lies beside a folder `lra_release`."""
    beside = found.parent / "lra_release"
    if named == "pathfinder128" and beside.is_dir():
        raise UserError(
            str(found),
            "is the release's broken second copy, which gives chance",
            f"Name {beside / named} instead",
        )


def metadata_rows(path: Path) -> list[tuple[str, list[str]]]:
    """The words of each line: text in the release, an array of words where the original code made the pictures."""
    with path.open("rb") as file:
        is_array = file.read(6) == b"\x93NUMPY"
    if not is_array:
        return [(where, line.split()) for where, line in lines(path, GET_LRA) if line.strip()]
    try:
        rows = np.load(path, allow_pickle=False).astype(str)
    except ValueError as error:
        raise UserError(str(path), f"cannot be read ({error})", GET_LRA) from None
    return [(f"{path}:{number}", list(row)) for number, row in enumerate(np.atleast_2d(rows), 1)]


def shade(path: Path, size: int) -> np.ndarray:
    """A picture in grey [size, size] (uint8)."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError(
            "Pillow", "is not installed", "Run: pip install -c constraints.txt -e '.[lra]'"
        ) from None
    try:
        with Image.open(path) as image:
            shades = np.asarray(image.convert("L"))
    except FileNotFoundError:
        raise UserError(str(path), "is missing", GET_LRA) from None
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(str(path), f"is no picture ({error})", GET_LRA) from None
    if shades.shape != (size, size):
        raise UserError(str(path), f"is of {shades.shape[1]} × {shades.shape[0]} pixels, not {size}", GET_LRA)
    return shades
