"""A teacher on the Hugging Face hub: a plan downloads config.json and headers, a conversion the weights."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

from supra.convert.shard_writer import Hash, OnBytes, disk_error, header_bytes
from supra.convert.source import (
    SMALL_FILES,
    FolderSource,
    Shard,
    Source,
    copy_small_files,
    small_files,
    tokenizer_notes,
)
from supra.errors import SupraError, UserError
from supra.weights.headers import TensorInfo, read_json, shard_names

WEIGHT_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")


class HubSource(Source):
    """`owner/name` at `revision`; UserError when it is missing, gated, or out of reach and not cached."""

    kind = "hub"

    def __init__(self, repo_id: str, revision: str | None) -> None:
        self.location, self.revision = repo_id, revision
        self._snapshot = self._download(("config.json", *SMALL_FILES))
        self.where = f"{repo_id}/config.json"
        self.config = read_json(self._snapshot / "config.json", "config.json")
        # A snapshot folder is named after its commit: later downloads cannot slip to a newer one.
        self.revision = self._snapshot.name
        self._local = self._cached()
        self.shards = self._local.shards if self._local else self._remote_shards()

    def _cached(self) -> FolderSource | None:
        try:
            return FolderSource(self._snapshot) if shard_names(self._snapshot) else None
        except UserError:
            return None  # cached in part: a shard of the index is not here yet

    def _download(self, patterns: tuple[str, ...]) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            self._ask(snapshot_download, self.location, revision=self.revision, allow_patterns=list(patterns))
        )

    def _remote_shards(self) -> tuple[Shard, ...]:
        from huggingface_hub import HfApi

        metadata = self._ask(HfApi().get_safetensors_metadata, self.location, revision=self.revision)
        shards = []
        for name, file in sorted(metadata.files_metadata.items()):
            tensors = [
                TensorInfo(key, str(value.dtype), tuple(value.shape), value.data_offsets[0])
                for key, value in file.tensors.items()
            ]
            tensors.sort(key=lambda tensor: tensor.start)
            size = len(header_bytes(tensors)) + sum(tensor.num_bytes for tensor in tensors)
            shards.append(Shard(name, tuple(tensors), size))
        return tuple(shards)

    def _ask(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the hub, turning its many errors into one UserError."""
        from huggingface_hub import errors

        try:
            return call(*args, **kwargs)
        except errors.GatedRepoError:
            reason, mend = (
                "its owner asks readers to accept terms first",
                "Accept them on its page and run `hf auth login`",
            )
        except errors.RepositoryNotFoundError:
            reason, mend = (
                "there is neither such a folder nor such a model on the hub",
                "Check the spelling, or `hf auth login`",
            )
        except errors.RevisionNotFoundError:
            reason, mend = f"it has no revision {self.revision!r}", "Check the branch, tag or commit"
        except (errors.NotASafetensorsRepoError, errors.SafetensorsParsingError):
            reason, mend = (
                "it has no readable safetensors",
                "Choose a revision that has them, or download and convert it",
            )
        except errors.HFValidationError:
            reason, mend = (
                "there is no such folder, and it is no valid hub id",
                "A model on the hub is written owner/name",
            )
        except (
            errors.LocalEntryNotFoundError,
            errors.OfflineModeIsEnabled,
            errors.HTTPError,
            OSError,
        ) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise disk_error(error, Path(self.location)) from None
            reason = f"there is no such folder, and the hub cannot be reached ({type(error).__name__})"
            mend = "Check the path, or the network; a downloaded folder or .gguf file needs none"
        raise UserError(self.location, reason, mend) from None

    def bytes_to_download(self) -> int:
        return 0 if self._local else sum(shard.num_bytes for shard in self.shards)

    def fetch(self) -> None:
        if self._local is None:
            self._local = FolderSource(self._download((*WEIGHT_FILES, "config.json", *SMALL_FILES)))
        planned = {
            (tensor.name, tensor.dtype, tensor.shape) for shard in self.shards for tensor in shard.tensors
        }
        found = {
            (tensor.name, tensor.dtype, tensor.shape)
            for shard in self._local.shards
            for tensor in shard.tensors
        }
        if planned != found:
            raise SupraError(
                self.location, "the downloaded weights differ from the plan", "Run the conversion again"
            )

    def write_shard(self, shard: Shard, target: Path, on_bytes: OnBytes, stop: threading.Event) -> Hash:
        assert self._local is not None, "fetch() comes first"
        return self._local.write_shard(shard, target, on_bytes, stop)

    def write_small_files(self, out: Path) -> None:
        copy_small_files(self._snapshot, out)

    def small_bytes(self) -> int:
        return sum(path.stat().st_size for path in small_files(self._snapshot))

    def notes(self) -> list[str]:
        return tokenizer_notes(self._snapshot)
