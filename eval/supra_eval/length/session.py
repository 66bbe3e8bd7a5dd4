"""One model after the other: which are read, what is reused of an earlier run, and what became of a failed part."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from supra.checks import require_model_folder
from supra.errors import SupraError, UserError
from supra_eval.contenders import Contender, contender_names, contenders, fingerprint
from supra_eval.results import RESULTS_NAME, Curve, EvalRun, Grid, Score, read_run, refuse_others

from .rope import require_scalings, rope_parameters, scaled_rope

Say = Callable[[str], None]
Part = Score | Curve | Grid
TOKENS = "context (tokens)"
# Settings that are found while measuring; the others decide the numbers.
FOUND = ("fingerprints", "decay_horizon_tokens")


def require_contexts(contexts: Sequence[int]) -> list[int]:
    """The contexts, each once, rising.

    Raises:
        UserError: there is none, or one is below 2 tokens.
    """
    if not contexts:
        raise UserError("--contexts", "is empty", "Give at least one context in tokens")
    if min(contexts) < 2:
        raise UserError(
            f"--contexts {min(contexts)}", "has no token to score", "Use contexts of at least 2 tokens"
        )
    return sorted(set(contexts))


@dataclass(frozen=True)
class Readers:
    """The models to be read, and how.

    Each of the scalings `rope` (`none`: none) is one more reading of the teacher, its positions scaled up to `longest`
    tokens, and with `student_rope` one of the student.
    """

    model: Path
    teacher: Path | None
    rope: Sequence[str]
    longest: int
    ablations: bool
    device: str
    dtype: str
    backend: str
    student_rope: bool = False

    def __post_init__(self) -> None:
        """UserError unless both are model folders, the scalings are known and the models have none of their own."""
        for folder in (self.model, self.teacher):
            if folder is not None:
                require_model_folder(folder)
        require_scalings(self.rope)
        if self.student_rope and "none" in self.rope:
            raise UserError(
                "--student-rope", "has no scaling to read the student with", "Name some with --rope"
            )
        for name in ("teacher", "student"):
            self.rope_factor(name)

    def rope_factor(self, name: str) -> float | None:
        """κ = longest / trained context of a model that is also read scaled, None where it is not.

        Raises:
            UserError: a model that comes with a scaling of its own.
        """
        folder = self._scaled().get(name)
        if folder is None:
            return None
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        factor = self.longest / int(config.max_position_embeddings)
        for kind in self.rope:
            rope_parameters(config, kind, factor)
        return factor if factor > 1 else None

    def _scaled(self) -> dict[str, Path]:
        """The models that are to be read scaled as well."""
        if "none" in self.rope:
            return {}
        teacher = {} if self.teacher is None else {"teacher": self.teacher}
        return teacher | ({"student": self.model} if self.student_rope else {})

    def describe_rope(self) -> str:
        """What is scaled, for the settings of a run."""
        factors = {name: self.rope_factor(name) for name in ("teacher", "student")}
        told = [f"{name} x{factor:g}" for name, factor in factors.items() if factor is not None]
        return f"{', '.join(self.rope)}: {', '.join(told)}" if told else "none"

    def names(self) -> list[str]:
        """Names of the models, in the order in which they are read."""
        names = []
        for name in contender_names(self.model, self.teacher, ablations=self.ablations):
            names += [name, *(f"{name}_{kind}" for kind in self.rope if self.rope_factor(name))]
        return names

    def load(self, say: Say) -> Iterator[Contender]:
        """Yield each model ready to run; a scaled one is the model itself with other positions."""
        wanted = contender_names(self.model, self.teacher, ablations=self.ablations)
        for contender in contenders(
            self.model, self.teacher, wanted,
            device=self.device, dtype=self.dtype, backend=self.backend, say=say,
        ):  # fmt: skip
            yield contender
            factor = self.rope_factor(contender.name)
            if factor is None:
                if contender.name in self._scaled():
                    say(
                        f"--rope: left out, the {contender.name} was trained at {self.longest} tokens or more"
                    )
                continue
            for kind in self.rope:
                with scaled_rope(contender.model, kind, factor):
                    name, how = f"{contender.name}_{kind}", f"{contender.runs_on} · rope {kind} x{factor:g}"
                    say(f"{name}: {how}")
                    digest = fingerprint(contender.model, name)
                    yield Contender(name, contender.model, contender.tokenizer, digest, how)


@dataclass
class Session:
    """A run being measured; with `out`, its results.json is written after each model and taken up again.

    Raises:
        UserError: `out` holds results of another evaluation.
    """

    run: EvalRun
    out: Path | None
    say: Say
    _start: float = field(default_factory=time.perf_counter)
    _earlier_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in FOUND:
            self.run.settings.setdefault(name, {})
        if self.out is None or not (self.out / RESULTS_NAME).is_file():
            return
        earlier = read_run(self.out)
        refuse_others(self.out, _decisive(self.run), _decisive(earlier))
        self.run.scores, self.run.curves, self.run.grids = earlier.scores, earlier.curves, earlier.grids
        self.run.failures, self.run.runs_on = earlier.failures, earlier.runs_on
        self._earlier_seconds = earlier.seconds
        for name in FOUND:
            self.run.settings[name] = earlier.settings[name]

    def measure(self, readers: Readers, work: Callable[[Contender], None]) -> EvalRun:
        """Do `work` on every model that has no whole result yet, and return the run."""
        names = readers.names()
        for contender in readers.load(self.say):
            known = self.run.settings["fingerprints"].get(contender.name) == contender.fingerprint
            if known and not self._failed(contender.name):
                self.say(f"{contender.name}: measured before")
                continue
            self._forget(contender.name)
            self.run.runs_on[contender.name] = contender.runs_on
            work(contender)
            self.run.settings["fingerprints"][contender.name] = contender.fingerprint
            self._order(names)
            self._write()
            release()
        self._write()
        return self.run

    def attempt(
        self, contender: Contender, part: str, work: Callable[..., Sequence[Part]], *args: Any
    ) -> None:
        """Keep what work(*args) measured, or, where it fails, why; the other parts go on."""
        self.say(f"{contender.name}: {part}")
        try:
            self.keep(work(*args))
            return
        except (SupraError, RuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.run.failures[f"{contender.name}: {part}"] = reason
            self.say(f"{contender.name}: {part} failed: {reason}")
        release()  # only here does the error no longer hold what the part had made

    def keep(self, parts: Sequence[Part]) -> None:
        """Sort scores, curves and grids into the run."""
        for part in parts:
            if isinstance(part, Score):
                self.run.scores.append(part)
            elif isinstance(part, Curve):
                self.run.curves.append(part)
            else:
                self.run.grids.append(part)

    def keep_curve(self, name: str, task: str, metric: str, title: str) -> dict[int, float]:
        """Keep a model's scores of one task as a curve by context, and return context -> value; none, no curve."""
        wanted = (task, name, metric)
        scores = [part for part in self.run.scores if (part.task, part.model, part.metric) == wanted]
        points = {part.context_tokens: part for part in scores if part.context_tokens is not None}
        if points:
            errors = known_errors([part.stderr for part in points.values()])
            values = [part.value for part in points.values()]
            self.keep([Curve(title, name, TOKENS, metric, [float(x) for x in points], values, errors)])
        return {context: part.value for context, part in points.items()}

    def _failed(self, name: str) -> bool:
        return any(part.startswith(f"{name}: ") for part in self.run.failures)

    def _forget(self, name: str) -> None:
        self.run.scores = [part for part in self.run.scores if part.model != name]
        self.run.curves = [part for part in self.run.curves if part.model != name]
        self.run.grids = [part for part in self.run.grids if part.model != name]
        failures = self.run.failures.items()
        self.run.failures = {part: why for part, why in failures if not part.startswith(f"{name}: ")}
        for found in FOUND:
            self.run.settings[found].pop(name, None)

    def _order(self, names: Sequence[str]) -> None:
        for parts in (self.run.scores, self.run.curves, self.run.grids):
            parts.sort(key=lambda part: names.index(part.model) if part.model in names else len(names))  # type: ignore[attr-defined]

    def _write(self) -> None:
        self.run.seconds = self._earlier_seconds + time.perf_counter() - self._start
        if self.out is not None:
            self.run.write(self.out)


def known_errors(stderr: Sequence[float | None]) -> list[float] | None:
    """Standard errors of a curve's points, not a number where a point has none; None if none has one."""
    known = [math.nan if error is None else error for error in stderr]
    return None if all(map(math.isnan, known)) else known


def release() -> None:
    """Give back what a part held, so that the next one is neither short of memory nor charged for it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _decisive(run: EvalRun) -> dict[str, Any]:
    """What two runs must share for the one to go on from the other, as JSON would give it back."""
    settings = {name: value for name, value in run.settings.items() if name not in FOUND}
    everything = {**settings, "kind": run.kind, "seed": run.seed, "versions": run.versions}
    decisive: dict[str, Any] = json.loads(json.dumps(everything))
    return decisive
