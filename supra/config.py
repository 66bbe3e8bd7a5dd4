"""The recipe: what one run converts, trains and reads, as frozen pydantic models (no torch here).

Notable:
- a recipe is a list of stages: what trains, against which loss, at which length, with which optimiser;
- a value left `null` in `conversion` takes the default of its feature map's method (`Conversion.resolve`);
- all errors of a recipe are reported at once: field, value, reason and nearest valid name (`recipe_io`).
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

FeatureMap = Literal["relu_dense", "relu", "hedgehog", "t2r", "elu", "identity"]
RopePosition = Literal["before", "after"]
Decay = Literal["none", "alibi", "retnet", "learned"]
Norm = Literal["group_norm", "denominator"]


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as text and `true` as a number: accept the first, refuse the second."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true/false")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError("a number is needed") from None
    return value


def _comma_list(value: Any) -> Any:
    """A command line gives a list as `0,5,11`."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Real = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, BeforeValidator(_number)]  # 2_000_000, 2e6 and "2e6" alike; 2.5 is refused
PositiveCount = Annotated[Count, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Method(NamedTuple):
    rope: RopePosition
    norm: Norm
    decay: Decay


# SUPRA (arXiv 2405.06640): RoPE after φ, ALiBi-type decay, GroupNorm; identity: RetNet; the rest normalise.
_METHODS: dict[str, _Method] = {
    "relu_dense": _Method("after", "group_norm", "alibi"),
    "relu": _Method("after", "group_norm", "alibi"),
    "identity": _Method("after", "group_norm", "retnet"),
    "hedgehog": _Method("before", "denominator", "none"),
    "t2r": _Method("before", "denominator", "none"),
    "elu": _Method("before", "denominator", "none"),
}


class Conversion(_Section):
    """How softmax attention becomes linear; `null` = the default of the feature map's method."""

    feature_map: FeatureMap = "relu_dense"
    norm: Norm | None = None
    rope: RopePosition | None = Field(default=None, validate_default=True)
    decay: Decay | None = None
    decay_shared: bool | None = None
    norm_affine: bool | None = None
    window: Annotated[Count, Field(ge=0)] | None = None
    num_sink_tokens: Annotated[Count, Field(ge=0)] | None = (
        None  # first tokens that stay exact beside the window
    )
    keep_softmax: Annotated[tuple[Annotated[Count, Field(ge=0)], ...], BeforeValidator(_comma_list)] = ()

    def resolve(self) -> "Conversion":
        """The same conversion with every `null` filled by its method's default."""
        return self.model_copy(
            update={
                "rope": self.rope or _METHODS[self.feature_map].rope,
                "decay": self.decay or _METHODS[self.feature_map].decay,
                "norm": self.norm or _METHODS[self.feature_map].norm,
                "decay_shared": bool(self.decay_shared),
                "norm_affine": bool(self.norm_affine),
                "window": self.window or 0,
                "num_sink_tokens": self.num_sink_tokens or 0,
                "keep_softmax": tuple(sorted(set(self.keep_softmax))),
            }
        )

    # Validators see the valid ones of the fields above theirs: so each field reports its own conflict.
    @field_validator("decay_shared")
    @classmethod
    def _shared_needs_decay(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and _effective("decay", info.data) == "none":
            raise ValueError("there is no decay to share: set decay to alibi, retnet or learned")
        return value

    @field_validator("norm")
    @classmethod
    def _denominator_needs_positive_features(cls, value: Norm | None, info: ValidationInfo) -> Norm | None:
        if value == "denominator" and info.data.get("feature_map") == "identity":
            raise ValueError(
                "identity features can be negative, so their denominator can be zero: use group_norm"
            )
        return value

    @field_validator("rope")
    @classmethod
    def _denominator_needs_rope_before(
        cls, value: RopePosition | None, info: ValidationInfo
    ) -> RopePosition | None:
        rope = _effective("rope", {**info.data, "rope": value})
        if rope == "after" and _effective("norm", info.data) == "denominator":
            raise ValueError("RoPE after the features lets the denominator change sign: set rope to before")
        return value

    @field_validator("norm_affine")
    @classmethod
    def _affine_needs_group_norm(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and _effective("norm", info.data) == "denominator":
            raise ValueError("only group_norm has affine weights")
        return value

    @field_validator("window")
    @classmethod
    def _window_needs_denominator(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and _effective("norm", info.data) == "group_norm":
            raise ValueError("the window shares a normaliser with the linear part: set norm to denominator")
        return value

    @field_validator("num_sink_tokens")
    @classmethod
    def _sinks_need_window(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and "window" in info.data and not info.data["window"]:
            raise ValueError("sinks are scored in the window's softmax: set window")
        return value


def _effective(field: str, data: dict[str, Any]) -> str | None:
    """A method field's value, or its default when null; None when the feature map itself is wrong."""
    if data.get(field) is not None:
        return str(data[field])
    method = _METHODS.get(data.get("feature_map", ""))
    return getattr(method, field) if method and field in data else None


class Data(_Section):
    """Where text comes from: a path, a glob, `package:NAME/inside/*.txt` or a `datasets` name[:config]."""

    train: tuple[str, ...] = Field(min_length=1)
    heldout: tuple[str, ...] = ()  # never trained on, even where `train` matches it too
    exclude: tuple[str, ...] = ()  # fnmatch patterns on file names, left out of both
    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = "auto"
    text_field: str = Field(default="text", min_length=1)
    split: str = Field(default="train", min_length=1)  # of a `datasets` name
    unwrap: bool = False  # join hard-wrapped lines; blank lines keep paragraphs apart
    max_tokens: PositiveCount | None = None  # stop reading after so many; a hub dataset is then streamed


class Optimizer(_Section):
    """AdamW; its rate warms up linearly, then follows the schedule down to lr × min_lr_ratio."""

    lr: Annotated[Real, Field(gt=0)]
    new_lr_ratio: Annotated[Real, Field(gt=0)] = 1.0  # rate of the new parameters, as a multiple of lr
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Annotated[Count, Field(ge=0)] = 0
    min_lr_ratio: Annotated[Real, Field(ge=0, le=1)] = 0.0
    grad_clip: Annotated[Real, Field(gt=0)] | None = 1.0


class Lora(_Section):
    """Low-rank adapters (arXiv 2106.09685) on the linear layers' projections."""

    rank: PositiveCount = 8
    alpha: Annotated[Real, Field(gt=0)] = 16.0
    dropout: Annotated[Real, Field(ge=0, lt=1)] = 0.0
    targets: tuple[Literal["q_proj", "k_proj", "v_proj", "o_proj"], ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), min_length=1
    )


class Stage(_Section):
    """What trains, against which loss, at which length, with which optimiser, for how many tokens."""

    name: str = Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_-]*$"
    )  # a word, so that `stages.NAME.field=…` can address it
    trainable: Literal["new", "adapters", "all"]
    train_new: bool = True  # with adapters: the new parameters train too
    loss: Literal["attention", "kl", "ce"]
    attention_target: Literal["after_o_proj", "before_o_proj"] = "after_o_proj"
    kl_temperature: Annotated[Real, Field(gt=0)] = 1.0
    length: Annotated[Count, Field(ge=2)]
    micro_batch_size: PositiveCount = 1
    tokens_per_step: PositiveCount
    total_tokens: PositiveCount
    optimizer: Optimizer
    lora: Lora | None = None
    checkpoint_every_steps: PositiveCount = 100
    data: Data | None = None  # null = the recipe's

    @property
    def num_steps(self) -> int:
        return self.total_tokens // self.tokens_per_step

    @property
    def sequences_per_step(self) -> int:
        return self.tokens_per_step // self.length

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
        return value

    @field_validator("attention_target", "kl_temperature")
    @classmethod
    def _option_of_another_loss(cls, value: Any, info: ValidationInfo) -> Any:
        wanted = {"attention_target": "attention", "kl_temperature": "kl"}[str(info.field_name)]
        is_default = value == cls.model_fields[str(info.field_name)].default
        if "loss" in info.data and info.data["loss"] != wanted and not is_default:
            raise ValueError(f"used only with loss: {wanted}")
        return value

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
    def _warmup_inside_stage(cls, value: Optimizer, info: ValidationInfo) -> Optimizer:
        if "total_tokens" in info.data and "tokens_per_step" in info.data:
            steps = info.data["total_tokens"] // info.data["tokens_per_step"]
            if value.warmup_steps and value.warmup_steps >= steps:
                message = f"must end within the stage's {steps} steps"
                # The context carries the field, so that the report names it and not its whole section.
                raise PydanticCustomError("in_field", message, {"field": "warmup_steps"})  # type: ignore[arg-type]
        return value

    @field_validator("lora")
    @classmethod
    def _lora_is_for_adapters(cls, value: Lora | None, info: ValidationInfo) -> Lora | None:
        if value is not None and info.data.get("trainable") in ("new", "all"):
            raise ValueError("used only with trainable: adapters")
        return value


class Recipe(_Section):
    """One documented run; the prose fields say what it does, its source, its cost and what to expect."""

    name: str = Field(min_length=1)
    description: str = ""
    source: str = ""
    cost: str = ""
    expected: str = ""
    command: str = ""
    seed: Annotated[Count, Field(ge=0, lt=2**32)] = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: str = Field(default="auto", min_length=1)
    adapters: Literal["merge", "keep"] = (
        "merge"  # in the exported model: folded into the weights, or beside them
    )
    conversion: Conversion = Conversion()
    data: Data
    stages: tuple[Stage, ...] = Field(min_length=1)

    @field_validator("stages")
    @classmethod
    def _names_are_unique(cls, value: tuple[Stage, ...]) -> tuple[Stage, ...]:
        names = [stage.name for stage in value]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"two stages share the name {', '.join(repeated)}")
        return value

    def to_yaml(self) -> str:
        """The whole recipe, defaults included, as YAML that `load` reads back to an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)

    def hash(self) -> str:
        """SHA-256 (hex) of everything that changes the result: prose and checkpoint rhythm left out."""
        return hashlib.sha256(json.dumps(self.decisive(), sort_keys=True).encode()).hexdigest()

    def decisive(self) -> dict[str, Any]:
        """`{field path: value}` of every leaf that changes the result."""
        leaves = flatten(self.model_dump(mode="json"))
        return {path: leaf for path, leaf in leaves.items() if path.split(".")[-1] not in _PROSE}


_PROSE = frozenset({"description", "source", "cost", "expected", "command", "checkpoint_every_steps"})


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict of `a.0.b` paths."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)  # type: ignore[assignment]
    else:
        return {prefix: value}
    leaves: dict[str, Any] = {} if value else {prefix: value}
    for key, inner in items:
        leaves.update(flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def conversion_from_options(options: dict[str, Any]) -> tuple[Conversion, str]:
    """A checked conversion from command-line options, and its YAML with all defaults filled in.

    Raises:
        UserError: with every problem found.
    """
    from supra import recipe_io

    conversion = recipe_io.parse_conversion(options)
    filled = {"conversion": conversion.resolve().model_dump(mode="json")}
    return conversion, yaml.safe_dump(filled, sort_keys=False)


def load(path_or_name: str | Path, overrides: list[str] | None = None) -> Recipe:
    """A recipe file, or a shipped recipe by name, with `a.b=c` overrides applied, validated.

    Raises:
        UserError: not found, not YAML (with the line), or invalid (every error at once).
    """
    from supra import recipe_io  # it validates against the models above

    return recipe_io.load(path_or_name, overrides or [])
