"""How a recipe turns softmax attention into linear attention."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from supra.config.fields import Count, Section, comma_list
from supra.rope import parse_scaling

FeatureMap = Literal["relu_dense", "relu", "hedgehog", "t2r", "elu", "taylor", "identity"]
RopePosition = Literal["before", "after"]
Decay = Literal["none", "alibi", "retnet", "learned", "gated"]
Norm = Literal["group_norm", "denominator"]


class _Method(NamedTuple):
    rope_position: RopePosition
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
    "taylor": _Method("before", "denominator", "none"),
}
TAYLOR_DIM = 16


class Conversion(Section):
    """How softmax attention becomes linear; `null` = the default of the feature map's method."""

    feature_map: FeatureMap = "relu_dense"
    taylor_dim: Annotated[Count, Field(ge=2)] | None = None  # dimensions that `taylor` expands
    norm: Norm | None = None
    rope_position: RopePosition | None = Field(default=None, validate_default=True)
    rope: str | None = None  # yarn:4 stretches the teacher's context 4 times; null = as the teacher has it
    decay: Decay | None = None
    decay_shared: bool | None = None
    norm_affine: bool | None = None
    window: Annotated[Count, Field(ge=0)] | None = None
    num_sink_tokens: Annotated[Count, Field(ge=0)] | None = (
        None  # first tokens that stay exact beside the window
    )
    keep_softmax: Annotated[tuple[Annotated[Count, Field(ge=0)], ...], BeforeValidator(comma_list)] = ()

    def resolve(self) -> "Conversion":
        """The same conversion with every `null` filled by its method's default."""
        return self.model_copy(
            update={
                "taylor_dim": (self.taylor_dim or TAYLOR_DIM) if self.feature_map == "taylor" else None,
                "rope_position": self.rope_position or _METHODS[self.feature_map].rope_position,
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
    @field_validator("taylor_dim")
    @classmethod
    def _taylor_dim_is_taylors_and_even(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and info.data.get("feature_map", "taylor") != "taylor":
            raise ValueError("only the taylor map projects to so many dimensions: set feature_map to taylor")
        if value and value % 2:
            raise ValueError("RoPE rotates pairs of dimensions: give an even number")
        return value

    @field_validator("decay_shared")
    @classmethod
    def _shared_needs_decay(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and _effective("decay", info.data) == "none":
            raise ValueError("there is no decay to share: set decay to alibi, retnet, learned or gated")
        return value

    @field_validator("norm")
    @classmethod
    def _denominator_needs_positive_features(cls, value: Norm | None, info: ValidationInfo) -> Norm | None:
        if value == "denominator" and info.data.get("feature_map") == "identity":
            raise ValueError(
                "identity features can be negative, so their denominator can be zero: use group_norm"
            )
        return value

    @field_validator("rope_position")
    @classmethod
    def _some_features_need_rope_before(
        cls, value: RopePosition | None, info: ValidationInfo
    ) -> RopePosition | None:
        position = _effective("rope_position", {**info.data, "rope_position": value})
        if position == "after" and info.data.get("feature_map") == "taylor":
            raise ValueError("taylor features are products, not pairs to rotate: set rope_position to before")
        if position == "after" and _effective("norm", info.data) == "denominator":
            raise ValueError(
                "RoPE after the features lets the denominator change sign: set rope_position to before"
            )
        return value

    @field_validator("rope")
    @classmethod
    def _rope_is_a_fixed_scaling(cls, value: str | None) -> str | None:
        return None if value is None else str(parse_scaling(value))

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
