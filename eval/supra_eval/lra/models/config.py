"""What an encoder is made of: its mixer, its direction, its positions, its sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from supra.config.conversion import TAYLOR_DIM, Conversion, Decay, FeatureMap, Norm, RopePosition
from supra.config.fields import Count, PositiveCount, Section

if TYPE_CHECKING:
    from supra.models import SupraConfig

Mixer = Literal["softmax", "linear", "s4d"]
Direction = Literal["bidirectional", "causal"]
Positions = Literal["rope", "sinusoidal", "alibi", "xpos", "none"]
Pooling = Literal["mean", "last", "max"]
S4DStart = Literal["lin", "inv"]

LINEAR_MAP: FeatureMap = (
    "relu"  # a matrix per head: SUPRA's dense one mixes heads, which tiny heads gain nothing by
)
STATE_SIZE = 64


class EncoderConfig(Section):
    """One encoder for long-range tasks; `null` is the default of the mixer, or of the feature map's method.

    The input is token ids (`num_tokens`, padding counted) or numbers (`channels` a position). `feature_map`, `decay`
    and `norm` are `supra convert`'s. `block_tokens` cuts the sequence into blocks whose softmax also sees the
    neighbouring blocks (the one before alone, where causal). xPos fades by ζ within `xpos_tokens`. `two_towers`: one
    encoder reads two documents, which are compared.
    """

    mixer: Mixer
    direction: Direction = "bidirectional"
    positions: Positions = "rope"
    num_layers: PositiveCount
    hidden_size: PositiveCount
    num_heads: PositiveCount | None = None
    intermediate_size: Annotated[Count, Field(ge=0)]  # of the MLP; 0: no MLP, as in S4's own models
    pooling: Pooling = "mean"
    num_tokens: PositiveCount | None = None
    channels: PositiveCount | None = None
    two_towers: bool = False
    feature_map: FeatureMap | None = None
    decay: Decay | None = None
    norm: Norm | None = None
    block_tokens: PositiveCount | None = None
    xpos_tokens: PositiveCount | None = None
    state_size: PositiveCount | None = None
    state_start: S4DStart | None = None

    @property
    def causal(self) -> bool:
        """Whether a position reads none behind it."""
        return self.direction == "causal"

    @property
    def head_dim(self) -> int:
        """Width of a head (of softmax and linear)."""
        assert self.num_heads is not None
        return self.hidden_size // self.num_heads

    @property
    def conversion(self) -> Conversion:
        """What a linear layer is, as a recipe of `supra convert` says it, with every default filled in."""
        feature_map = self.feature_map or LINEAR_MAP
        taylor_dim = min(TAYLOR_DIM, self.head_dim) if feature_map == "taylor" else None
        # RoPE behind the map would let the denominator change sign, so there is one place for it.
        rope_position: RopePosition | None = "before" if self.norm == "denominator" else None
        return Conversion(
            feature_map=feature_map,
            taylor_dim=taylor_dim,
            norm=self.norm,
            rope_position=rope_position,
            decay=self.decay,
        ).resolve()

    def layer_config(self) -> SupraConfig:
        """The configuration of the project's attention layers, for softmax (RoPE) and linear."""
        from supra.models import SupraConfig

        sizes: dict[str, Any] = dict(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            num_hidden_layers=1,
            head_dim=self.head_dim,
        )
        if self.mixer != "linear":
            return SupraConfig(layer_types=["full_attention"], **sizes)
        own = self.conversion
        assert own.rope_position is not None and own.decay is not None and own.norm is not None
        return SupraConfig(
            feature_map=own.feature_map, taylor_dim=own.taylor_dim, rope_position=own.rope_position,
            decay=own.decay, attention_norm=own.norm, **sizes,
        )  # fmt: skip

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        """The first thing that does not fit, as one sentence."""
        for problem in (self._input_problem(), self._foreign_field(), self._size_problem()):
            if problem:
                raise ValueError(problem)
        if self.mixer == "linear":
            try:
                _ = self.conversion
            except ValidationError as error:
                raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        if problem := self._position_problem():
            raise ValueError(problem)
        return self

    def _input_problem(self) -> str | None:
        if (self.num_tokens is None) == (self.channels is None):
            return "the input is either tokens or numbers: set one of num_tokens and channels"
        return None

    def _foreign_field(self) -> str | None:
        owners = {"num_heads": ("softmax", "linear"), "block_tokens": ("softmax",)}
        owners |= dict.fromkeys(("feature_map", "decay", "norm"), ("linear",))
        owners |= dict.fromkeys(("state_size", "state_start"), ("s4d",))
        for field, mixers in owners.items():
            if self.mixer not in mixers and getattr(self, field) is not None:
                why = ": its cost grows with the length alone" if field == "block_tokens" else ""
                return (
                    f"{self.mixer} has no {field}{why}: leave it out, or set mixer to {' or '.join(mixers)}"
                )
        if self.mixer == "s4d" and self.positions not in ("sinusoidal", "none"):
            return "s4d has no queries and keys to rotate: set positions to none or sinusoidal"
        return None

    def _position_problem(self) -> str | None:
        if self.positions == "alibi" and self.mixer == "linear":
            return "linear has ALiBi as its decay: set decay to alibi and positions to none"
        if self.positions == "alibi" and self.block_tokens:
            return "blocks have no bias by distance: leave out block_tokens, or choose other positions"
        if (self.positions == "xpos") != (self.xpos_tokens is not None):
            return "xpos_tokens belongs to positions xpos, which needs it"
        if self.positions == "xpos" and not self.causal:
            return "xpos fades towards the past, so it needs direction causal"
        if self.positions == "xpos" and self.mixer == "linear" and self.conversion.rope_position != "after":
            return f"xpos scales mapped features, and {self.feature_map or LINEAR_MAP} has its RoPE before the map"
        return None

    def _size_problem(self) -> str | None:
        if self.mixer == "s4d":
            if (self.state_size or STATE_SIZE) % 2:
                return "s4d's states are conjugate pairs: give an even state_size"
        elif self.num_heads is None:
            return f"{self.mixer} needs num_heads"
        elif self.hidden_size % self.num_heads:
            return f"hidden_size {self.hidden_size} does not divide into {self.num_heads} heads"
        elif self.head_dim % 2:
            return (
                f"a head of {self.head_dim} dimensions is not made of pairs: change num_heads or hidden_size"
            )
        elif not self.intermediate_size:
            return f"{self.mixer} needs an MLP: set intermediate_size above 0"
        if self.positions == "sinusoidal" and self.hidden_size % 2:
            return f"sinusoidal positions are pairs: hidden_size {self.hidden_size} must be even"
        return None
