"""A whole recipe, how it is loaded, and what of it decides the result."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from supra.config.conversion import Conversion
from supra.config.data import Data
from supra.config.fields import PROSE, Count, Documented, comma_list
from supra.config.stage import Stage


def _refuse_in_shards(stage: Stage) -> None:
    """ValueError for what cannot work on a sharded weight, or does so outside of the block that is gathered."""
    if stage.optimizer.moments == "int8":
        raise ValueError(f"{stage.name}: moments in int8 take whole weights, which fsdp2 has in shards")
    if stage.loss == "attention_weights":
        raise ValueError(
            f"{stage.name}: attention_weights reads projections alone, fsdp2 gathers whole blocks"
        )
    if stage.lora is not None and stage.lora.dora:
        raise ValueError(f"{stage.name}: DoRA needs the norms of whole weights, which fsdp2 has in shards")


TeacherWeights = Literal["shared", "bfloat16", "int8", "nf4"]


class Recipe(Documented):
    """One documented run: what it converts, what it reads, and its stages."""

    seed: Annotated[Count, Field(ge=0, lt=2**32)] = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: str = Field(default="auto", min_length=1)
    teacher_weights: TeacherWeights = (
        "shared"  # the student's own until those train; else copies of these widths
    )
    strategy: Literal["ddp", "fsdp2"] = (
        "ddp"  # of several processes: each holds the model, or they share it out
    )
    adapters: Literal["merge", "keep"] = (
        "merge"  # in the exported model: folded into the weights, or beside them
    )
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], BeforeValidator(comma_list)
    ] = ()  # that get the metrics too
    conversion: Conversion = Conversion()
    data: Data
    stages: tuple[Stage, ...] = Field(min_length=1)

    @field_validator("strategy")
    @classmethod
    def _a_sharded_teacher_is_whole(cls, value: str, info: ValidationInfo) -> str:
        if value == "fsdp2" and info.data.get("teacher_weights", "shared") != "shared":
            raise ValueError("shares out the teacher's weights as they are: leave out teacher_weights")
        return value

    @field_validator("stages")
    @classmethod
    def _stages_fit_together(cls, value: tuple[Stage, ...], info: ValidationInfo) -> tuple[Stage, ...]:
        names = [stage.name for stage in value]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"two stages share the name {', '.join(repeated)}")
        if late := [stage.name for stage in value[1:] if stage.layerwise]:
            raise ValueError(f"only the first stage can be layerwise, not {', '.join(late)}")
        has_teacher = any(stage.loss != "ce" and not stage.layerwise for stage in value)
        if info.data.get("teacher_weights", "shared") != "shared" and not has_teacher:
            raise PydanticCustomError(
                "in_field", "no stage learns from a teacher in memory", {"field": "teacher_weights"}
            )
        if info.data.get("strategy") == "fsdp2":
            for stage in value:
                _refuse_in_shards(stage)
        return value

    def to_yaml(self) -> str:
        """The whole recipe, defaults included, as YAML that `load` reads back to an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)

    def hash(self) -> str:
        """SHA-256 (hex) of everything that changes the result: prose, trackers and checkpoint rhythm left out."""
        return hashlib.sha256(json.dumps(self.decisive(), sort_keys=True).encode()).hexdigest()

    def decisive(self) -> dict[str, Any]:
        """`{field path: value}` of every leaf that changes the result."""
        leaves = flatten(self.model_dump(mode="json"))
        return {
            path: leaf for path, leaf in leaves.items() if not _WITHOUT_EFFECT.intersection(path.split("."))
        }

    def at_default(self) -> set[str]:
        """Field paths of the leaves that have their default: what a recipe says that was written without them."""
        given = flatten(self.model_dump(mode="json", exclude_defaults=True))
        return flatten(self.model_dump(mode="json")).keys() - given.keys()


# Prose, and what is only watched or kept, or how processes share the work: a resume may change these.
_WITHOUT_EFFECT = PROSE | {"checkpoint_every_steps", "max_loss_ratio", "trackers", "strategy"}


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
