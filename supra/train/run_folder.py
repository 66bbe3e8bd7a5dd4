"""The folder of one run: made new or taken up again, never by two processes, never for another recipe."""

import fcntl
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from supra import __version__
from supra.config import Recipe, flatten
from supra.errors import SupraError, UserError

_MEBIBYTE = 1 << 20


def fingerprint(model_dir: Path) -> str:
    """Hash of a model folder: its configuration, and size, first and last MiB of every weight file."""
    digest = xxhash.xxh3_128((model_dir / "config.json").read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as stream:
            digest.update(stream.read(_MEBIBYTE))
            stream.seek(max(0, size - _MEBIBYTE))
            digest.update(stream.read(_MEBIBYTE))
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = ["torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers"]
    names += [name for name in ("bitsandbytes",) if name in sys.modules]
    found = {name: metadata.version(name) for name in names}
    return {"supra": __version__, "python": platform.python_version(), **found}


def check_new_or_resumed(run_dir: Path, resume: bool) -> None:
    """Refuse a used folder without resume, and resume where there is no run.

    Raises:
        UserError: see above.
    """
    exists = run_dir.exists()
    if exists and not run_dir.is_dir():
        raise UserError(str(run_dir), "it is a file", "Choose a folder for the run.")
    if resume and not (run_dir / "run.json").exists():
        raise UserError(str(run_dir), "there is no run to resume", "Start it without --resume.")
    if not resume and exists and any(run_dir.iterdir()):
        raise UserError(str(run_dir), "it is not empty", "Continue with --resume, or choose another folder.")


def open_run(run_dir: Path, recipe: Recipe, model_dir: Path, data_keys: dict[str, str]) -> "RunLock":
    """Create the folder's `recipe.yaml` and `run.json`, or compare with those there; return its lock.

    Raises:
        UserError: the run there was started with another recipe, model or text, or another process is at it.
        SupraError: the folder cannot be written.
    """
    now = {"model": fingerprint(model_dir), "data": data_keys, "recipe": recipe.decisive()}
    try:
        if not (run_dir / "run.json").exists():
            header = {"model_dir": str(model_dir.resolve()), "versions": versions()}
            _create(run_dir, recipe.to_yaml(), json.dumps({**header, **now}, indent=1))
        lock = RunLock(run_dir)
    except OSError as error:
        raise SupraError(
            str(run_dir), f"cannot be written ({error.strerror})", "Choose another folder."
        ) from None
    try:
        _compare(run_dir, now, recipe.at_default())
    except BaseException:
        lock.close()
        raise
    return lock


def _create(run_dir: Path, recipe_yaml: str, run_json: str) -> None:
    """Make the folder whole beside, then rename it: where it exists, it can be resumed."""
    partial = run_dir.with_name(f".{run_dir.name}.partial.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        (partial / "recipe.yaml").write_text(recipe_yaml, encoding="utf-8")
        (partial / "run.json").write_text(run_json, encoding="utf-8")
        os.rename(partial, run_dir)  # also onto an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def skipped_steps(run_dir: Path) -> frozenset[int]:
    """The steps, counted over all stages from 1, that the run leaves out."""
    return frozenset(json.loads((run_dir / "run.json").read_text()).get("skipped_steps", []))


def skip_steps(run_dir: Path, steps: Iterable[int], recipe: Recipe, last_done: int) -> None:
    """Record in `run.json` that the run leaves out further steps, so that every later resume does so too.

    Raises:
        UserError: a step is done already or is none of the run's, or a stage would be left without any.
    """
    skipped, first = skipped_steps(run_dir).union(steps), 1
    total = sum(stage.num_steps for stage in recipe.stages)
    for step in sorted(steps):
        if recipe.stages[0].layerwise and step <= recipe.stages[0].num_steps:
            reason = "cannot be skipped: a layerwise stage meets it once in every layer"
            raise UserError(f"step {step}", reason, "Start anew with a lower rate.")
        if not last_done < step <= total:
            known = "is done already" if 1 <= step <= last_done else f"is none of the run's {total}"
            mend = (
                f"Choose among {last_done + 1} to {total}."
                if last_done < total
                else "Leave out --skip-steps."
            )
            raise UserError(f"step {step}", f"cannot be skipped: it {known}", mend)
    for stage in recipe.stages:
        if skipped.issuperset(range(first, first + stage.num_steps)):
            raise UserError(f"stage {stage.name}", "would be left without a step", "Skip fewer steps.")
        first += stage.num_steps
    path = run_dir / "run.json"
    write_whole(
        path, json.dumps({**json.loads(path.read_text()), "skipped_steps": sorted(skipped)}, indent=1)
    )


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside, then rename it over `path`."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    os.replace(beside, path)


class RunLock:
    """An advisory lock on a run folder; the system drops it when the process dies, however it dies."""

    def __init__(self, run_dir: Path) -> None:
        self._file = open(run_dir / ".lock", "w")  # noqa: SIM115 - open as long as the run
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                str(run_dir), "another process is training there", "Wait for it to end."
            ) from None

    def close(self) -> None:
        self._file.close()


def _compare(run_dir: Path, now: dict[str, Any], at_default: set[str]) -> None:
    try:
        then = json.loads((run_dir / "run.json").read_text())
        # A version that did not have a field yet did what the field's default does.
        newer = at_default - then["recipe"].keys()
        recipe = {path: leaf for path, leaf in now["recipe"].items() if path not in newer}
        changed = _changes(then["recipe"], recipe)
        model_changed, data_changed = then["model"] != now["model"], then["data"] != now["data"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SupraError(
            str(run_dir / "run.json"), "it is damaged", "Start anew in another folder."
        ) from None
    mend = "Undo the change, or start a new run in another folder."
    if changed:
        raise UserError(f"{run_dir}", f"the recipe changed since the run began: {'; '.join(changed)}", mend)
    if model_changed:
        raise UserError(f"{run_dir}", "the model to train changed since the run began", mend)
    if data_changed:
        names = [name for name, key in now["data"].items() if then["data"].get(name) != key]
        raise UserError(
            f"{run_dir}", f"the text or tokenizer changed since then (stage {', '.join(names)})", mend
        )


def _changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`field: old -> new` of each leaf that differs."""
    then, now = flatten(then), flatten(now)
    paths = list(dict.fromkeys([*then, *now]))
    return [
        f"{path}: {then.get(path, 'absent')!r} -> {now.get(path, 'absent')!r}"
        for path in paths
        if then.get(path, _ABSENT) != now.get(path, _ABSENT)
    ]


_ABSENT = object()
