"""One stage of a recipe: what trains, against which loss, for how long."""

from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from supra.config.data import Data
from supra.config.fields import Count, PositiveCount, Real, Section
from supra.config.optimizer import Lora, MlpProjection, Optimizer

_LOSS_OF_OPTION = {"attention_target": "attention", "kl_temperature": "kl", "ce_weight": "kl"}


class PositionScheme(NamedTuple):
    """How the tokens of a sequence are spread over the positions 0 … `span` − 1, written `kind:span`."""

    kind: Literal["random", "pose"]
    span: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.span}"


class WindowDropout(Section):
    """How often a layer trains without its window (arXiv 2510.05901): linearly from `start` to `end`."""

    start: Annotated[Real, Field(ge=0, le=1)]
    end: Annotated[Real, Field(ge=0, le=1)] = 0.0


class Stage(Section):
    """What trains, against which loss, at which length, with which optimiser, for how many tokens."""

    name: str = Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_-]*$"
    )  # a word, so that `stages.NAME.field=…` can address it
    trainable: Literal["new", "adapters", "all"]
    train_new: bool = True  # with adapters: the new parameters train too
    train_only: tuple[str, ...] = ()  # fnmatch patterns of parameter names: of what would train, only these
    freeze: tuple[str, ...] = ()  # likewise, not these
    loss: Literal["attention", "attention_weights", "hidden", "kl", "ce"]
    layerwise: bool = False  # one layer after the other, in the memory of the largest layer; first stage only
    attention_target: Literal["after_o_proj", "before_o_proj"] = "after_o_proj"
    kl_temperature: Annotated[Real, Field(gt=0)] = 1.0
    ce_weight: Annotated[Real, Field(ge=0, lt=1)] = 0.0  # of kl: (1 − ce_weight)·KL + ce_weight·cross-entropy
    window_dropout: WindowDropout | None = None  # null = the window is always there
    activation_checkpointing: bool = False  # recompute each decoder layer in the backward pass
    length: Annotated[Count, Field(ge=2)]
    positions: str | None = None  # random:N or pose:N spreads them over 0 … N − 1; null = 0 … length − 1
    micro_batch_size: PositiveCount = 1
    tokens_per_step: PositiveCount
    total_tokens: PositiveCount
    optimizer: Optimizer
    ema: Annotated[Real, Field(gt=0, lt=1)] | None = None  # decay of a moving average, the stage's result
    lora: Lora | None = None
    max_loss_ratio: Annotated[Real, Field(gt=1)] | None = (
        None  # stop before a step whose loss exceeds the median of the stage's last 32 by this factor
    )
    checkpoint_every_steps: PositiveCount = 100
    data: Data | None = None  # null = the recipe's

    @property
    def num_steps(self) -> int:
        return self.total_tokens // self.tokens_per_step

    @property
    def sequences_per_step(self) -> int:
        return self.tokens_per_step // self.length

    @property
    def position_scheme(self) -> PositionScheme | None:
        return None if self.positions is None else _position_scheme(self.positions)

    @property
    def title(self) -> str:
        """The name, and the positions where they are not the plain ones."""
        return self.name if self.positions is None else f"{self.name} (positions {self.positions})"

    @field_validator("train_new")
    @classmethod
    def _train_new_is_for_adapters(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and info.data.get("trainable") in ("new", "all"):
            raise ValueError(f"trainable: {info.data['trainable']} always trains the new parameters")
        return value

    @field_validator("loss")
    @classmethod
    def _attention_stays_in_attention(cls, value: str, info: ValidationInfo) -> str:
        if value == "attention" and info.data.get("trainable") == "all":
            raise ValueError(
                "attention transfer reaches attention blocks only: set trainable to new or adapters"
            )
        if value == "attention_weights" and info.data.get("trainable") in ("adapters", "all"):
            raise ValueError("attention weights are learned by the new parameters: set trainable to new")
        return value

    @field_validator("layerwise")
    @classmethod
    def _layers_learn_alone(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (info.data.get("trainable"), info.data.get("loss")) != ("new", "attention"):
            raise ValueError("only attention transfer of the new parameters works layer by layer")
        return value

    @field_validator(*_LOSS_OF_OPTION)
    @classmethod
    def _option_of_another_loss(cls, value: Any, info: ValidationInfo) -> Any:
        wanted = _LOSS_OF_OPTION[str(info.field_name)]
        is_default = value == cls.model_fields[str(info.field_name)].default
        if "loss" in info.data and info.data["loss"] != wanted and not is_default:
            raise ValueError(f"used only with loss: {wanted}")
        return value

    @field_validator("activation_checkpointing")
    @classmethod
    def _attention_keeps_one_layer(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("loss") in ("attention", "attention_weights"):
            raise ValueError("attention transfer keeps one layer's activations at a time already")
        return value

    @field_validator("positions")
    @classmethod
    def _positions_hold_a_sequence(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        scheme = _position_scheme(value)
        if scheme.span < info.data.get("length", 0):
            raise ValueError(
                f"{scheme.span} positions are fewer than the {info.data['length']} tokens of a sequence: raise it"
            )
        return str(scheme)

    @field_validator("tokens_per_step")
    @classmethod
    def _whole_micro_batches(cls, value: int, info: ValidationInfo) -> int:
        if "length" in info.data and "micro_batch_size" in info.data:
            unit = info.data["length"] * info.data["micro_batch_size"]
            if value % unit:
                nearest = max(1, round(value / unit)) * unit
                raise ValueError(
                    f"must be a multiple of length × micro_batch_size = {unit}; nearest is {nearest}"
                )
        return value

    @field_validator("total_tokens")
    @classmethod
    def _at_least_one_step(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("tokens_per_step", 0):
            raise ValueError(f"less than one step of {info.data['tokens_per_step']} tokens")
        return value

    @field_validator("optimizer")
    @classmethod
    def _schedule_fits_stage(cls, value: Optimizer, info: ValidationInfo) -> Optimizer:
        if "total_tokens" in info.data and "tokens_per_step" in info.data:
            steps = info.data["total_tokens"] // info.data["tokens_per_step"]
            if value.warmup_steps and value.warmup_steps >= steps:
                raise _in_field("warmup_steps", f"must end within the stage's {steps} steps")
            falling = value.decay_steps(steps)
            if value.schedule == "wsd" and value.warmup_steps + falling > steps:
                both = f"{value.warmup_steps} warm-up and {falling} falling steps"
                raise _in_field("decay_ratio", f"{both} exceed the stage's {steps}")
        return value

    @field_validator("lora")
    @classmethod
    def _lora_is_for_adapters(cls, value: Lora | None, info: ValidationInfo) -> Lora | None:
        if value is not None and info.data.get("trainable") in ("new", "all"):
            raise ValueError("used only with trainable: adapters")
        in_mlp = [] if value is None else [t for t in value.targets if t in get_args(MlpProjection)]
        if in_mlp and info.data.get("loss") == "attention":
            raise _in_field("targets", f"attention transfer does not reach {', '.join(in_mlp)}")
        return value


def _position_scheme(text: str) -> PositionScheme:
    """`random:8192` as a scheme; ValueError if it is none."""
    kind, _, span = (part.strip() for part in text.partition(":"))
    if kind not in ("random", "pose") or not span.isdecimal():
        raise ValueError("must be random:N or pose:N, with N the number of positions, like pose:8192")
    return PositionScheme(kind, int(span))  # type: ignore[arg-type]


def _in_field(field: str, message: str) -> PydanticCustomError:
    """An error of a section that names one field of it; the report reads the field from the context."""
    return PydanticCustomError("in_field", message, {"field": field})  # type: ignore[arg-type]
