"""Where a teacher comes from: a folder of safetensors, a hub id, a folder of pickles or a GGUF file.

A source knows its config.json and the header of every tensor without reading a weight, and can write each of
its weight files, and everything around the weights, into the converted model's folder.
"""

from __future__ import annotations

import re
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supra.convert.shard_writer import Hash, OnBytes, copy_file
from supra.errors import UserError
from supra.weights.headers import INDEX_NAME, TensorInfo, index_map, read_header, read_json, shard_names

# What travels with the weights; never code.
SMALL_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "tekken.json", "chat_template*", "additional_chat_templates/*", "generation_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Shard:
    """One weight file of the source and `num_bytes`, its size once written as safetensors."""

    name: str
    tensors: tuple[TensorInfo, ...]
    num_bytes: int


class Source(ABC):
    """A teacher; `where` names its configuration in messages, `config` is its config.json."""

    kind: str
    location: str
    where: str
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    revision: str | None = None

    def notes(self) -> list[str]:
        """What the plan should say about this source."""
        return []

    def local_path(self) -> Path | None:
        """The local folder or file that OUT must not touch, when there is one."""
        return None

    def bytes_to_download(self) -> int:
        """Bytes that `fetch` will download."""
        return 0

    def fetch(self) -> None:  # noqa: B027  (most sources are already local)
        """Bring the weights onto this machine."""

    @abstractmethod
    def write_shard(self, shard: Shard, target: Path, on_bytes: OnBytes, stop: threading.Event) -> Hash:
        """Write one weight file as safetensors and return what gives the hash of its bytes."""

    @abstractmethod
    def write_small_files(self, out: Path) -> None:
        """Write tokenizer, chat template, generation config and licence into `out`."""

    def small_bytes(self) -> int:
        """Bytes that `write_small_files` needs, or an estimate."""
        return 0

    def source_hashes(self, written: dict[str, str]) -> dict[str, str]:
        """Hash of each source file, given those of the files written from them."""
        return written


class FolderSource(Source):
    """A Hugging Face folder with safetensors files; UserError for anything missing or broken in it."""

    kind = "folder"

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        self._folder = folder
        self.where = str(folder / "config.json")
        self.config = read_json(folder / "config.json", "config.json")
        names = shard_names(folder)
        if names is None:
            raise _no_weights(folder)
        self.shards = tuple(
            Shard(name, read_header(folder / name), (folder / name).stat().st_size) for name in names
        )
        weight_map = index_map(folder) if names != ("model.safetensors",) else None
        check_shards(self.shards, weight_map, str(folder / INDEX_NAME))

    def local_path(self) -> Path | None:
        return self._folder

    def write_shard(self, shard: Shard, target: Path, on_bytes: OnBytes, stop: threading.Event) -> Hash:
        return copy_file(self._folder / shard.name, target, on_bytes, stop)

    def write_small_files(self, out: Path) -> None:
        copy_small_files(self._folder, out)

    def small_bytes(self) -> int:
        return sum(path.stat().st_size for path in small_files(self._folder))

    def notes(self) -> list[str]:
        return tokenizer_notes(self._folder)


def check_shards(shards: tuple[Shard, ...], weight_map: dict[str, str] | None, where: str) -> None:
    """UserError when two files hold the same tensor, or the index names a tensor its file does not hold."""
    owner: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in owner:
                raise UserError(
                    f"{where}: tensor {tensor.name}",
                    f"it is in both {owner[tensor.name]} and {shard.name}, and only one can be right",
                    "Save the checkpoint again",
                )
            owner[tensor.name] = shard.name
    for name, file in (weight_map or {}).items():
        if owner.get(name) != file:
            raise UserError(
                f"{where}: tensor {name}", f"{file} does not hold it", "Download or save the checkpoint again"
            )


def small_files(folder: Path) -> Iterator[Path]:
    """The files beside the weights that the converted model keeps, each once."""
    found = {path for pattern in SMALL_FILES for path in folder.glob(pattern) if path.is_file()}
    yield from sorted(path for path in found if path.suffix not in (".py", ".safetensors", ".bin", ".gguf"))


def copy_small_files(folder: Path, out: Path) -> None:
    """Copy `small_files` of `folder` into `out`."""
    for path in small_files(folder):
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def tokenizer_notes(folder: Path) -> list[str]:
    """A remark when the folder has no tokenizer to keep."""
    if any(
        (folder / name).exists()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
    ):
        return []
    return [f"{folder} has no tokenizer: the converted model will have none either"]


def _no_weights(folder: Path) -> UserError:
    pickled = any((folder / name).exists() for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"))
    if pickled:
        return UserError(
            str(folder),
            "its weights are pickled (.bin), and unpickling can run code",
            "Convert them to safetensors, or pass --allow-pickle if you trust where they come from",
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return UserError(
            str(folder),
            "it holds GGUF files and no safetensors",
            f"Give the file itself: {folder / ggufs[0]}",
        )
    return UserError(
        str(folder),
        "there is neither model.safetensors nor model.safetensors.index.json",
        "Give the folder that holds the weights",
    )


def open_source(source: str, *, revision: str | None = None, allow_pickle: bool = False) -> Source:
    """The Source for what the user typed: a folder, a .gguf file or a hub id; UserError if it is none."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            from supra.convert.gguf import GgufSource

            return GgufSource(path)
        raise UserError(
            source,
            "this is a file, and neither a model folder nor a .gguf",
            f"Give its folder: {path.parent}",
        )
    if path.is_dir():
        if allow_pickle and shard_names(path) is None:
            from supra.convert.pickled import PickleSource

            return PickleSource(path)
        return FolderSource(path)
    if path.suffix != ".gguf" and not source.startswith((".", "/", "~")) and HUB_ID.fullmatch(source):
        from supra.convert.hub import HubSource

        return HubSource(source, revision)
    raise UserError(
        source, "there is no such folder or file", "Check the path; a model on the hub is written owner/name"
    )
