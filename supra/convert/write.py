"""Carrying out a plan: copy the teacher's files, stream new tensors beside them, verify, then rename.

Everything is written to `OUT.partial-…` next to OUT and renamed at the end, so an error, a full disk or
Ctrl-C leaves nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from supra.convert.card import write_index, write_small_files
from supra.convert.plan import FLOAT_DTYPES, Plan
from supra.convert.render import human_bytes
from supra.convert.shard_writer import ShardWriter, disk_error, tensor_blocks
from supra.errors import SupraError, UserError

# Called with (what is being done, bytes done, bytes in all), from any thread.
Progress = Callable[[str, int, int], None]
COPY_THREADS = 2


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote: the folder, parameters, bytes, wall time, and whether it was verified."""

    out: str
    parameters_kept: int
    parameters_added: int
    num_bytes: int
    write_seconds: float
    verify_seconds: float
    verified: bool

    def to_json(self) -> str:
        """The result as a JSON object."""
        return json.dumps(asdict(self), indent=2)


class Meter:
    """Adds up bytes from several threads and tells `progress`."""

    def __init__(self, progress: Progress | None, what: str, total: int) -> None:
        self._progress, self._what, self._total = progress, what, total
        self._done, self._lock = 0, threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._what, self._done, self._total)


def execute(
    plan: Plan,
    out: str | Path,
    *,
    seed: int,
    recipe_yaml: str,
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> ConversionResult:
    """Carry out `plan`, writing the folder `out`.

    Raises:
        UserError: the plan has refused tensors, or `out` cannot be written (it exists, lies in the teacher,
            or has no parent).
        SupraError: the disk is or becomes full, a download fails, or the verification finds a fault.
    """
    out = Path(out).expanduser().absolute()
    plan.require_convertible()
    check_target(plan, out, overwrite)
    check_disk(plan, out)
    plan.source.fetch()
    started = time.monotonic()
    with _partial_folder(out) as partial:
        hashes = write_weights(plan, partial, seed, progress)
        source_hashes = plan.source.source_hashes(
            {
                shard.name: hashes[name]
                for shard, name in zip(plan.source.shards, file_names(plan), strict=False)
            }
        )
        write_small_files(
            plan,
            partial,
            seed=seed,
            recipe_yaml=recipe_yaml,
            hashes={"source_files": source_hashes, "files": hashes},
        )
        written = time.monotonic()
        if verify:
            from supra.convert.verify import verify_folder

            verify_folder(plan, partial, hashes, progress)
        num_bytes = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        _give_name(partial, out)
    verify_seconds = time.monotonic() - written
    return ConversionResult(
        str(out),
        plan.parameters_kept,
        plan.parameters_added,
        num_bytes,
        written - started,
        verify_seconds,
        verify,
    )


def file_names(plan: Plan) -> list[str]:
    """Names of the weight files in OUT: one for each of the teacher's, and one more for the new tensors.

    Never `model.safetensors`: transformers would read that one alone and ignore the index.
    """
    total = len(plan.source.shards) + bool(plan.new)
    return [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]


def write_weights(plan: Plan, partial: Path, seed: int, progress: Progress | None) -> dict[str, str]:
    """Write all weight files and the index, copying while new tensors are made; return each file's hash.

    All is copied first and hashed afterwards.
    """
    names, total = file_names(plan), plan.disk_bytes
    meter, stop = Meter(progress, "writing", total), threading.Event()
    pool = ThreadPoolExecutor(COPY_THREADS)
    try:
        copies = [
            (name, pool.submit(plan.source.write_shard, shard, partial / name, meter.add, stop))
            for shard, name in zip(plan.source.shards, names, strict=False)
        ]
        hashes = {}
        if plan.new:
            hashes[names[-1]] = write_new_tensors(plan, partial / names[-1], seed, meter)
        hashings = [(name, pool.submit(copy.result())) for name, copy in copies]
        hashes |= {name: hashing.result() for name, hashing in hashings}
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    files = {
        tensor.name: name
        for shard, name in zip(plan.source.shards, names, strict=False)
        for tensor in shard.tensors
    }
    write_index(plan, partial, files | {tensor.name: names[-1] for tensor in plan.new})
    return dict(sorted(hashes.items()))


def write_new_tensors(plan: Plan, path: Path, seed: int, meter: Meter) -> str:
    """Stream the student's own tensors into one file, one in memory at a time; return the file's hash."""
    import torch

    from supra.models import init_new_tensors

    dtype = getattr(torch, FLOAT_DTYPES[plan.dtype])
    with ShardWriter(path, plan.new, meter.add) as writer:
        for name, tensor in init_new_tensors(plan.config, seed, dtype):
            writer.write(name, tensor_blocks(tensor))
    return writer.digest


def check_target(plan: Plan, out: Path, overwrite: bool) -> None:
    """UserError when `out` cannot or must not be written."""
    _check_parent(out)
    source = plan.source.local_path()
    if source is not None:
        source, target = source.resolve(), out.resolve()
        if target == source or source in target.parents:
            raise UserError(
                str(out), "it lies in the teacher's own folder", "Choose a place outside of it with -o"
            )
        if target in source.parents:
            raise UserError(str(out), "the teacher lies inside of it", "Choose another place with -o")
    _check_existing(out, overwrite)


def check_place(out: Path, overwrite: bool) -> None:
    """UserError when there is no place for a folder `out`, whatever is to be converted."""
    _check_parent(out)
    _check_existing(out, overwrite)


def _check_parent(out: Path) -> None:
    if not out.parent.is_dir():
        raise UserError(
            str(out), f"the folder {out.parent} does not exist", f"Create it first: mkdir -p {out.parent}"
        )
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(str(out), f"the folder {out.parent} is not writable", "Choose another place with -o")


def _check_existing(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not overwrite:
        raise UserError(str(out), "it already exists", "Choose another place with -o, or pass --overwrite")
    if not out.is_dir() or (any(out.iterdir()) and not (out / "supra.json").exists()):
        raise UserError(
            str(out), "it exists and is no converted model, so it is not overwritten", "Remove it yourself"
        )


def check_disk(plan: Plan, out: Path) -> None:
    """SupraError when the disk has less room than the plan needs."""
    free, needed = shutil.disk_usage(out.parent).free, plan.disk_bytes
    if free < needed:
        raise SupraError(
            str(out.parent),
            f"the disk is too full: {human_bytes(needed)} needed, {human_bytes(free)} free",
            "Free some space, or choose another disk with -o",
        )


@contextmanager
def _partial_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, removed on any error; an OSError becomes a SupraError."""
    partial = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
        yield partial
    except OSError as error:
        raise disk_error(error, out) from error
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def _give_name(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`, an older `out` being removed only once the new one stands."""
    umask = os.umask(0)
    os.umask(umask)
    partial.chmod(0o777 & ~umask)  # mkdtemp makes it private
    if not out.exists():
        partial.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f"{out.name}.old-", dir=out.parent))
    out.rename(old / out.name)
    try:
        partial.rename(out)
    except OSError:
        (old / out.name).rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
