"""A causal encoder with a class at every position, and the same with its RoPE scaled to a longer test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from supra.config.conversion import FeatureMap
from supra.config.fields import PositiveCount, Section
from supra.models.precision import SupraRotaryEmbedding
from supra.rope import RopeScaling, scaled_context, scaled_rope_parameters
from supra_eval.lra.models.config import EncoderConfig, Positions
from supra_eval.lra.models.encoder import Encoder

from .methods import Method, Mixer

_POSITIONS: dict[Method, Positions] = {
    Method.NONE: "none",
    Method.SINUSOIDAL: "sinusoidal",
    Method.SHIFTED: "sinusoidal",
    Method.ALIBI: "alibi",
    Method.ROPE: "rope",
    Method.XPOS: "xpos",
    Method.RANDOM: "rope",
    Method.POSE: "rope",
}
_DECAYS = {Mixer.DECAY: "retnet", Mixer.SUM: "none", Mixer.GATED: "gated"}


class Sizes(Section):
    """What all models share; `feature_map` is the linear ones'."""

    num_layers: PositiveCount
    hidden_size: PositiveCount
    num_heads: PositiveCount
    intermediate_size: PositiveCount
    feature_map: FeatureMap = "relu"

    def encoder(self, mixer: Mixer, method: Method, num_tokens: int, train_tokens: int) -> EncoderConfig:
        """The encoder of a model that is trained at up to `train_tokens` positions.

        Fixed decay is RetNet's (arXiv 2307.08621, section 2.2), with `alibi` ALiBi's. xPos' ζ takes half the training
        length: its authors' 512 for 1,024.

        Raises:
            ValueError: it does not fit together.
        """
        positions = _POSITIONS[method.trained_as]
        more: dict[str, Any] = {}
        if mixer is not Mixer.SOFTMAX:
            more = {"decay": _DECAYS[mixer], "feature_map": self.feature_map}
            if method is Method.ALIBI:
                positions, more["decay"] = "none", "alibi"
        if positions == "xpos":
            more["xpos_tokens"] = max(1, train_tokens // 2)
        sizes = self.model_dump(exclude={"feature_map"})
        return EncoderConfig(
            mixer="softmax" if mixer is Mixer.SOFTMAX else "linear",
            direction="causal",
            positions=positions,
            num_tokens=num_tokens,
            **sizes,
            **more,
        )


class Tagger(nn.Module):
    """An encoder and a linear head; its starting values are a function of the configuration and `seed`."""

    def __init__(self, config: EncoderConfig, num_classes: int, seed: int) -> None:
        super().__init__()
        self.encoder = Encoder(config, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = nn.Linear(config.hidden_size, num_classes)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Token ids [B, T], with ids `positions` [B, T] in the place of 0 to T − 1 -> logits [B, T, classes]."""
        return self.head(self.encoder(tokens, positions=positions))


@contextmanager
def scaled(model: Tagger, scaling: str, factor: float, train_tokens: int) -> Iterator[None]:
    """Run `model` with its rotary frequencies scaled for κ = `factor` times the training length."""
    if scaling == "none" or factor <= 1:
        yield
        return
    own, config = model.encoder.rotary, model.encoder.config.layer_config()
    config.rope_parameters = scaled_rope_parameters(
        dict(config.rope_parameters or {}),
        RopeScaling(scaling, factor),
        head_dim=model.encoder.config.head_dim,
        context_tokens=train_tokens,
        asked=f"rope+{scaling}",
    )
    # transformers warns unless this is κ times the trained context.
    config.max_position_embeddings = scaled_context(train_tokens, factor)
    model.encoder.rotary = SupraRotaryEmbedding(config).to(next(model.parameters()).device)
    try:
        yield
    finally:
        model.encoder.rotary = own
