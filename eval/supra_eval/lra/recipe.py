"""The recipe of a comparison: which models, with and without self-pretraining, on which task, under which budget.

Notable: a comparison is a grid of cells (model × mode × share × fraction × seed); each cell is one training run from
random weights to one test accuracy, known from its key alone, so that any process can take any of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from supra import recipe_io
from supra.config import Optimizer
from supra.config.fields import Count, Documented, PositiveCount, Real, Section
from supra_eval.lra.models.config import EncoderConfig

Mode = Literal["scratch", "masked", "scratch_causal", "causal"]
PRETRAINED: tuple[Mode, ...] = ("masked", "causal")
KIND = "lra"  # the folder of shipped recipes

Share = Annotated[Real, Field(gt=0, lt=1)]
Fraction = Annotated[Real, Field(gt=0, le=1)]


class TaskSource(Section):
    """The task by name, in a folder of its own, or generated there on first use from `settings` and `seed`."""

    name: str = Field(min_length=1)
    folder: str | None = None  # null = generated, beside the runs
    seed: Annotated[Count, Field(ge=0)] = 0
    settings: dict[str, Any] = {}


class ModelSettings(Section):
    """One model of the comparison: what of its encoder and of the training is its own."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    encoder: dict[str, Any] = {}  # fields of EncoderConfig
    lr: Annotated[Real, Field(gt=0)] | None = None  # null = the training's


class Training(Section):
    """AdamW on the task, and the same on the task's own inputs before it (arXiv 2310.02980, section 3).

    `tied`: `epochs` in all, of which a share goes to self-pretraining; `extra`: self-pretraining comes on top.
    """

    epochs: PositiveCount
    budget: Literal["tied", "extra"] = "tied"
    batch_size: PositiveCount
    optimizer: Optimizer
    pretrain_lr: Annotated[Real, Field(gt=0)] | None = None  # null = the optimizer's
    mask_rate: Annotated[Real, Field(gt=0, lt=1)] = 0.5

    def epochs_of(self, cell: Cell) -> tuple[int, int]:
        """Epochs of self-pretraining and of the task."""
        before = round(self.epochs * cell.share)
        return before, self.epochs - before if self.budget == "tied" else self.epochs


class Cell(NamedTuple):
    """One run of the grid; `share` of the epochs is self-pretraining (0 in the scratch modes)."""

    model: str
    mode: Mode
    share: float
    fraction: float
    seed: int

    @property
    def key(self) -> str:
        """A file name that says all of it."""
        return f"{self.model}-{self.mode}-share{self.share:g}-data{self.fraction:g}-seed{self.seed}"

    @property
    def is_causal(self) -> bool:
        return self.mode in ("causal", "scratch_causal")

    @property
    def is_pretrained(self) -> bool:
        return self.mode in PRETRAINED


class Comparison(Documented):
    """A whole grid of runs on one task."""

    task: TaskSource
    encoder: dict[str, Any] = {}  # fields of EncoderConfig that all models share
    models: tuple[ModelSettings, ...] = Field(min_length=1)
    modes: tuple[Mode, ...] = Field(default=("scratch", "masked"), min_length=1)
    shares: tuple[Share, ...] = Field(default=(0.4,), min_length=1)
    fractions: tuple[Fraction, ...] = Field(default=(1.0,), min_length=1)  # of the training examples, nested
    seeds: tuple[Annotated[Count, Field(ge=0)], ...] = Field(default=(0, 1, 2), min_length=1)
    training: Training

    @field_validator("training")
    @classmethod
    def _each_part_lasts_an_epoch(cls, value: Training, info: ValidationInfo) -> Training:
        probes = [
            Cell("", mode, share, 1.0, 0)
            for mode in info.data.get("modes", ())
            for share in info.data.get("shares", ())
        ]
        for probe in probes:
            if probe.is_pretrained and min(value.epochs_of(probe)) < 1:
                raise ValueError(f"{value.epochs} epochs leave none for a part with share {probe.share:g}")
        return value

    @field_validator("models", "modes", "shares", "fractions", "seeds")
    @classmethod
    def _nothing_twice(cls, value: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        names = [item.name if isinstance(item, ModelSettings) else item for item in value]
        if repeated := sorted({str(name) for name in names if names.count(name) > 1}):
            raise ValueError(f"named twice: {', '.join(repeated)}")
        return value

    @field_validator("models")
    @classmethod
    def _encoders_are_whole(
        cls, value: tuple[ModelSettings, ...], info: ValidationInfo
    ) -> tuple[ModelSettings, ...]:
        for model in value:
            try:
                EncoderConfig.model_validate({"channels": 1, **info.data.get("encoder", {}), **model.encoder})
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                raise ValueError(f"{model.name}: {where + ': ' if where else ''}{first['msg']}") from None
        return value

    def encoder_of(self, cell: Cell, *, num_tokens: int | None, channels: int) -> EncoderConfig:
        """The encoder of one run, for inputs of `num_tokens` ids or of `channels` numbers a position."""
        own = next(model.encoder for model in self.models if model.name == cell.model)
        inputs: dict[str, Any] = {"channels": channels} if num_tokens is None else {"num_tokens": num_tokens}
        direction = "causal" if cell.is_causal else "bidirectional"
        return EncoderConfig.model_validate({**self.encoder, **own, **inputs, "direction": direction})

    def lr_of(self, cell: Cell) -> float:
        """The learning rate of one run's task."""
        own = next(model.lr for model in self.models if model.name == cell.model)
        return own if own is not None else self.training.optimizer.lr

    def cells(self) -> list[Cell]:
        """Every run of the grid; seeds vary slowest, so that a grid cut short has whole comparisons."""
        return [
            Cell(model.name, mode, share, fraction, seed)
            for seed in self.seeds
            for fraction in self.fractions
            for model in self.models
            for mode in self.modes
            for share in (self.shares if mode in PRETRAINED else (0.0,))
        ]


def load(path_or_name: str | Path, overrides: list[str] | None = None) -> Comparison:
    """A recipe file of this kind, or a shipped one by name, with `a.b=c` overrides applied, validated.

    Raises:
        UserError: not found, not YAML (with the line), or invalid (every error at once).
    """
    path = recipe_io.locate(path_or_name, KIND)
    return recipe_io.load_as(Comparison, path, overrides or [], name=str(path_or_name))
