"""How a stage's parameters move: AdamW, its schedule, and the adapters it may train."""

from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from supra.config.fields import Count, PositiveCount, Real, Section

AttentionProjection = Literal["q_proj", "k_proj", "v_proj", "o_proj"]
MlpProjection = Literal["gate_proj", "up_proj", "down_proj"]


class Optimizer(Section):
    """AdamW; its rate warms up linearly, then follows the schedule down to lr × min_lr_ratio.

    `wsd` (warmup-stable-decay, arXiv 2404.06395) stays at lr until the last `decay_ratio` of the steps, then falls
    by 1 − √progress (arXiv 2405.18392).
    """

    lr: Annotated[Real, Field(gt=0)]
    new_lr_ratio: Annotated[Real, Field(gt=0)] = 1.0  # rate of the new parameters, as a multiple of lr
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay_ratio: Annotated[Real, Field(gt=0, le=1)] = 0.2  # of wsd: share of steps that fall
    warmup_steps: Annotated[Count, Field(ge=0)] = 0
    min_lr_ratio: Annotated[Real, Field(ge=0, le=1)] = 0.0
    grad_clip: Annotated[Real, Field(gt=0)] | None = 1.0
    moments: Literal["float32", "int8"] = "float32"  # int8: 2 bytes a weight instead of 8 (bitsandbytes)

    def decay_steps(self, num_steps: int) -> int:
        """The last steps of a stage of `num_steps`, in which the rate of `wsd` falls."""
        return max(1, round(self.decay_ratio * num_steps))

    @field_validator("decay_ratio")
    @classmethod
    def _decay_ratio_is_of_wsd(cls, value: float, info: ValidationInfo) -> float:
        if value != cls.model_fields["decay_ratio"].default and info.data.get("schedule", "wsd") != "wsd":
            raise ValueError("used only with schedule: wsd")
        return value


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on projections of the layers that are linear.

    `dora` splits each weight into direction, which the adapter moves, and magnitude, which trains too (arXiv
    2402.09353, eq. 5).
    """

    rank: PositiveCount = 8
    alpha: Annotated[Real, Field(gt=0)] = 16.0
    dropout: Annotated[Real, Field(ge=0, lt=1)] = 0.0
    dora: bool = False
    targets: tuple[Literal[AttentionProjection, MlpProjection], ...] = Field(
        default=get_args(AttentionProjection), min_length=1
    )
