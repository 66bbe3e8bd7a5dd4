"""How a stage's parameters move: AdamW, its schedule, and the adapters it may train."""

from typing import Annotated, Literal

from pydantic import Field

from supra.config.fields import Count, PositiveCount, Real, Section


class Optimizer(Section):
    """AdamW; its rate warms up linearly, then follows the schedule down to lr × min_lr_ratio."""

    lr: Annotated[Real, Field(gt=0)]
    new_lr_ratio: Annotated[Real, Field(gt=0)] = 1.0  # rate of the new parameters, as a multiple of lr
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Annotated[Count, Field(ge=0)] = 0
    min_lr_ratio: Annotated[Real, Field(ge=0, le=1)] = 0.0
    grad_clip: Annotated[Real, Field(gt=0)] | None = 1.0


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on the linear layers' projections."""

    rank: PositiveCount = 8
    alpha: Annotated[Real, Field(gt=0)] = 16.0
    dropout: Annotated[Real, Field(ge=0, lt=1)] = 0.0
    targets: tuple[Literal["q_proj", "k_proj", "v_proj", "o_proj"], ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), min_length=1
    )
