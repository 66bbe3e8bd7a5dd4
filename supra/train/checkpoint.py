"""Checkpoints that are whole or absent, and checked when read.

A checkpoint folder holds `tensors.safetensors` (the model's tensors that differ from the conversion, the
adapters, the optimiser's moments, a moving average) and `state.json` (where the run is, hash of the tensors). It is
written beside, flushed to disk, then renamed. The newest two stay. Each step seeds its own random numbers.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from supra.errors import SupraError

KEPT = 2


@dataclass(frozen=True)
class Position:
    """Where a run is: `step` steps of stage number `stage` are done, `global_step` over all stages."""

    stage: int = 0
    step: int = 0
    global_step: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint read back: model tensors by plain names, the others by the stage's names."""

    path: Path
    position: Position
    model: dict[str, Tensor]
    adapters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    average: dict[str, Tensor]


def save(
    run_dir: Path,
    position: Position,
    *,
    model: dict[str, Tensor],
    adapters: dict[str, Tensor],
    moments: dict[str, dict[str, Tensor]],
    average: dict[str, Tensor],
) -> Path:
    """Write a checkpoint and drop all but the newest two.

    Raises:
        SupraError: it cannot be written (a full disk); earlier checkpoints stay.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step-{position.global_step:08d}-stage-{position.stage}"
    partial = folder / f"{final.name}.partial"
    tensors = {f"model.{name}": tensor for name, tensor in model.items()}
    tensors |= {f"adapters.{name}": tensor for name, tensor in adapters.items()}
    tensors |= {f"average.{name}": tensor for name, tensor in average.items()}
    tensors |= {f"moments.{key}.{name}": t for name, state in moments.items() for key, t in state.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file(
            {name: t.detach().contiguous().cpu() for name, t in tensors.items()},
            partial / "tensors.safetensors",
        )
        state = {"position": asdict(position), "xxh3_128": _hash(partial / "tensors.safetensors")}
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        sync_folder(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        sync_folder(folder)
        for old in _folders(run_dir)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is the last of these
        shutil.rmtree(partial, ignore_errors=True)
        raise SupraError(
            str(final),
            f"the checkpoint cannot be written ({error})",
            "Free some space, then run with --resume.",
        ) from None
    return final


def load_newest(run_dir: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint; a damaged one is named through `warn` and passed over.

    Raises:
        SupraError: there are checkpoints and all are damaged.
    """
    folders = _folders(run_dir)
    for folder in reversed(folders):
        try:
            return _load(folder)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warn(f"checkpoint {folder.name} is damaged ({reason}); trying the one before")
    if folders:
        raise SupraError(str(run_dir), "every checkpoint is damaged", "Start anew in another run folder.")
    return None


def newest(run_dir: Path) -> Path | None:
    """Folder of the newest checkpoint, unchecked."""
    folders = _folders(run_dir)
    return folders[-1] if folders else None


def newest_step(run_dir: Path) -> int:
    """Steps done over all stages at the newest checkpoint, unchecked; 0 where there is none."""
    folder = newest(run_dir)
    return int(folder.name.split("-")[1]) if folder else 0


def sync_folder(folder: Path) -> None:
    """Flush a folder's files and entries to disk."""
    for path in [*(p for p in folder.iterdir() if p.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _folders(run_dir: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = (run_dir / "checkpoints").glob("step-*")
    return sorted(path for path in found if path.is_dir() and path.suffix != ".partial")


def _load(folder: Path) -> Checkpoint:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    file = folder / "tensors.safetensors"
    if _hash(file) != state["xxh3_128"]:
        raise ValueError("its tensors are not those that were written")
    kinds: dict[str, dict[str, Tensor]] = {"model": {}, "adapters": {}, "average": {}}
    moments: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in load_file(file).items():
        kind, _, name = full_name.partition(".")
        if kind == "moments":
            key, _, name = name.partition(".")
            moments.setdefault(name, {})[key] = tensor
        else:
            kinds[kind][name] = tensor
    return Checkpoint(folder, Position(**state["position"]), moments=moments, **kinds)


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
