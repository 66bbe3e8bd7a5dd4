"""The recipe of an extrapolation: tasks, mixers, methods, seeds, one training for all, and the lengths of the test.

Notable: a run is one training (task × mixer × method × seed), known from its key alone, so that any process can take
any of them; methods that differ in the test alone share one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from supra import recipe_io
from supra.config import Optimizer
from supra.config.fields import Count, Documented, PositiveCount, Section

from .chars import Chars
from .generated import Chain, Passkey, Recall
from .methods import Method, Mixer, left_out, why_not
from .model import Sizes
from .task import Task

KIND = "extrapolate"  # the folder of shipped recipes
GRID = {"tasks", "mixers", "methods", "seeds"}  # may grow from one command to the next
LARGEST_XPOS_MULTIPLE = 32  # twice as far, and its factors leave fp32


class Tasks(Section):
    """Which tasks are run, each with its settings (`chain: {}` is the defaults, null is none)."""

    chain: Chain | None = None
    recall: Recall | None = None
    passkey: Passkey | None = None
    chars: Chars | None = None

    @model_validator(mode="after")
    def _there_is_one(self) -> Self:
        if not self.given():
            raise ValueError(f"name at least one of {', '.join(type(self).model_fields)}")
        return self

    def given(self) -> dict[str, Chain | Recall | Passkey | Chars]:
        """Name -> settings of what is run."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: settings for name, settings in found.items() if settings is not None}


class Training(Section):
    """AdamW for `total_tokens` in steps of about `tokens_per_step`, each at one length drawn from `lengths`."""

    lengths: tuple[PositiveCount, PositiveCount]  # least and most, in tokens, each as likely
    total_tokens: PositiveCount
    tokens_per_step: PositiveCount
    optimizer: Optimizer

    @field_validator("lengths")
    @classmethod
    def _least_comes_first(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError("give the least and then the most")
        return value

    @field_validator("tokens_per_step")
    @classmethod
    def _a_step_is_some_sequence(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("lengths", (1, 1))[1]:
            raise ValueError("a step is at least one sequence of the greatest length")
        if value > info.data.get("total_tokens", value):
            raise ValueError("a step is more than total_tokens")
        return value

    @property
    def num_steps(self) -> int:
        return self.total_tokens // self.tokens_per_step


class Cell(NamedTuple):
    """One training; `method` is the one that it is trained by."""

    task: str
    mixer: Mixer
    method: Method
    seed: int

    @property
    def key(self) -> str:
        """A file name that says all of it."""
        return f"{self.task}-{self.mixer}-{self.method}-seed{self.seed}"


class Extrapolation(Documented):
    """A whole grid; combinations that make no sense are left out and named."""

    tasks: Tasks
    encoder: Sizes
    mixers: tuple[Mixer, ...] = Field(default=tuple(Mixer), min_length=1)
    methods: tuple[Method, ...] = Field(default=tuple(Method), min_length=1, validate_default=True)
    multiples: tuple[PositiveCount, ...] = Field(
        default=(1, 2, 4, 8, 16), min_length=1
    )  # of the greatest length
    test_sequences: PositiveCount = 64  # at each length; of text as many as there are of the longest
    seeds: tuple[Annotated[Count, Field(ge=0)], ...] = Field(default=(0, 1, 2), min_length=1)
    training: Training

    @field_validator("mixers", "methods", "multiples", "seeds")
    @classmethod
    def _nothing_twice(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if repeated := sorted({str(item) for item in value if value.count(item) > 1}):
            raise ValueError(f"named twice: {', '.join(repeated)}")
        return value

    @field_validator("methods")
    @classmethod
    def _something_makes_sense(cls, value: tuple[Method, ...], info: ValidationInfo) -> tuple[Method, ...]:
        mixers = info.data.get("mixers", ())
        reasons = [why_not(mixer, method) for mixer in mixers for method in value]
        if reasons and all(reasons):
            raise ValueError(f"nothing is left to run: {reasons[0]}")
        for mixer in mixers:
            for method in value:
                _require_encoder(info.data.get("encoder"), mixer, method)
        return value

    @field_validator("multiples")
    @classmethod
    def _xpos_stays_in_range(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if Method.XPOS in info.data.get("methods", ()) and max(value) > LARGEST_XPOS_MULTIPLE:
            raise ValueError(f"xpos reaches {LARGEST_XPOS_MULTIPLE} times the training length: leave it out")
        return tuple(sorted(value))

    @field_validator("training")
    @classmethod
    def _every_length_asks_something(cls, value: Training, info: ValidationInfo) -> Training:
        tasks = info.data.get("tasks")
        for name, settings in (tasks.given() if tasks else {}).items():
            if value.lengths[0] < settings.least_tokens:
                raise ValueError(f"lengths: {name} needs {settings.least_tokens} tokens at least")
        return value

    @property
    def train_tokens(self) -> int:
        """The greatest length in training."""
        return self.training.lengths[1]

    @property
    def test_lengths(self) -> dict[int, int]:
        """Multiple -> length in tokens."""
        return {multiple: multiple * self.train_tokens for multiple in self.multiples}

    @property
    def reach(self) -> int:
        """The longest length, up to which random ids are drawn."""
        return self.multiples[-1] * self.train_tokens

    def cells(self) -> list[Cell]:
        """Every run; seeds vary slowest, so that a grid cut short has whole comparisons."""
        trained = dict.fromkeys(method.trained_as for method in self.methods)
        return [
            Cell(task, mixer, method, seed)
            for seed in self.seeds
            for task in self.tasks.given()
            for mixer in self.mixers
            for method in trained
            if why_not(mixer, method) is None
        ]

    def tested(self, trained: Method) -> list[Method]:
        """The methods that a training serves."""
        return [method for method in self.methods if method.trained_as is trained]

    def left_out(self) -> dict[str, str]:
        """Combinations that are not run -> why."""
        return left_out(self.mixers, self.methods)

    def open_task(self, name: str) -> Task:
        """A task ready to draw from.

        Raises:
            UserError: a text that cannot be read or is too short.
        """
        settings = self.tasks.given()[name]
        return settings.make(self.reach) if isinstance(settings, Chars) else settings.make()


def load(path_or_name: str | Path, overrides: list[str] | None = None) -> Extrapolation:
    """A recipe file of this kind, or a shipped one by name, with `a.b=c` overrides applied, validated.

    Raises:
        UserError: not found, not YAML (with the line), or invalid (every error at once).
    """
    path = recipe_io.locate(path_or_name, KIND)
    return recipe_io.load_as(Extrapolation, path, overrides or [], name=str(path_or_name))


def task_differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The tasks that two recipes, as data, both have with other settings."""
    return [
        f"tasks.{name}"
        for name, settings in mine["tasks"].items()
        if settings is not None and theirs["tasks"].get(name) not in (None, settings)
    ]


def _require_encoder(sizes: Sizes | None, mixer: Mixer, method: Method) -> None:
    if sizes is None or why_not(mixer, method):
        return
    try:
        sizes.encoder(mixer, method, num_tokens=1, train_tokens=2)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{mixer} x {method} with this encoder: {message}") from None
