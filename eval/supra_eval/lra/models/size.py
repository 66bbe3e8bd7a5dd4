"""How large a model is and what one example costs it, before it is built."""

from __future__ import annotations

import math

import torch
from torch import nn

from .bidirectional import LONGEST_QUADRATIC
from .config import STATE_SIZE, EncoderConfig
from .encoder import Encoder, Layer
from .heads import Classifier
from .s4d import fft_size


def count_parameters(config: EncoderConfig, num_classes: int) -> dict[str, int]:
    """Trainable parameters of the `embedding`, the `layers` (final norm included) and the `head`, without memory."""
    with torch.device("meta"):
        model = Classifier(Encoder(config), num_classes)
    parts: dict[str, list[nn.Module]] = {
        "embedding": [model.encoder.embedding],
        "layers": [model.encoder.layers, model.encoder.final_norm],
        "head": [model.head],
    }
    return {name: sum(p.numel() for m in modules for p in m.parameters()) for name, modules in parts.items()}


def forward_flops(config: EncoderConfig, num_positions: int) -> int:
    """FLOP of matrix products and FFTs for one example of T positions, forward; training takes about three times that.

    Linear attention beyond `LONGEST_QUADRATIC` counts as its recurrence. Two towers read two examples.
    """
    with torch.device("meta"):
        layer = Layer(config)
        embedding = 0 if config.channels is None else config.channels * config.hidden_size
    weights = embedding + config.num_layers * _weights(layer)
    towers = 2 if config.two_towers else 1
    return towers * (2 * num_positions * weights + config.num_layers * _mixing(config, num_positions))


def _weights(layer: nn.Module) -> int:
    """Entries of the matrices that every position is multiplied by once (not of S4D's kernel, nor of biases)."""
    return sum(p.numel() for name, p in layer.named_parameters() if name.endswith("weight") and p.ndim > 1)


def _mixing(config: EncoderConfig, T: int) -> int:
    """FLOP with which one layer mixes T positions."""
    ways = 1 if config.causal else 2
    if config.mixer == "s4d":
        size = fft_size(2 * T)
        transforms = (2 + ways) * 2.5 * size * math.log2(size)
        kernels = ways * T * 2 * (config.state_size or STATE_SIZE)
        return round(config.hidden_size * (transforms + kernels))
    assert config.num_heads is not None
    if config.mixer == "softmax":
        blocks = config.block_tokens and config.block_tokens < T
        seen = (1 + ways) * config.block_tokens if blocks and config.block_tokens else T
        return 4 * T * seen * config.hidden_size
    layer = config.layer_config()
    if config.conversion.decay == "none" and not config.causal:
        ways = 1
    elif T <= LONGEST_QUADRATIC:
        return 2 * T * T * config.num_heads * (layer.feature_dim + layer.value_dim)
    return ways * 4 * T * config.num_heads * layer.feature_dim * layer.value_dim
