"""The encoder: inputs to hidden states, in which padding neither changes anything nor shows.

Pre-norm LayerNorm, GELU, no dropout, as in arXiv 2310.02980. Symbols: B batch, T positions, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from supra.models.initialise import initial_values
from supra.models.precision import SupraRotaryEmbedding

from .config import EncoderConfig
from .linear import LinearAttention
from .positions import Rotary, sinusoids, sinusoids_at, xpos_growth
from .s4d import S4D
from .softmax import SoftmaxAttention

MIXERS = {"softmax": SoftmaxAttention, "linear": LinearAttention, "s4d": S4D}


class Layer(nn.Module):
    """One layer: what mixes the positions, then (unless its size is 0) an MLP for each of them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = nn.LayerNorm(config.hidden_size), MIXERS[config.mixer](config)
        self.mlp: nn.Sequential | None = None
        if config.intermediate_size:
            self.mlp = nn.Sequential(
                nn.LayerNorm(config.hidden_size),
                nn.Linear(config.hidden_size, config.intermediate_size),
                nn.GELU(),
                nn.Linear(config.intermediate_size, config.hidden_size),
            )

    def forward(self, hidden: Tensor, rotary: Rotary | None, real: Tensor | None) -> Tensor:
        """hidden [B, T, D] -> [B, T, D]."""
        hidden = hidden + self.mixer(self.mixer_norm(hidden), rotary, real)
        return hidden if self.mlp is None else hidden + self.mlp(hidden)


class Encoder(nn.Module):
    """A stack of layers over tokens or numbers; its starting values are a function of the configuration and `seed`."""

    def __init__(self, config: EncoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding: nn.Embedding | nn.Linear
            if config.num_tokens is not None:
                self.embedding = nn.Embedding(config.num_tokens, config.hidden_size)
            else:
                assert config.channels is not None
                self.embedding = nn.Linear(config.channels, config.hidden_size)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
            self.final_norm = nn.LayerNorm(config.hidden_size)
        self.rotary: SupraRotaryEmbedding | None = None
        if config.positions in ("rope", "xpos"):
            self.rotary = SupraRotaryEmbedding(config.layer_config())
        for name, module in self.named_modules():
            if hasattr(module, "initial_values"):
                own = dict(module.named_parameters())
                for key, value in initial_values(module, seed, name).items():
                    own[key].data.copy_(value)

    def forward(
        self, inputs: Tensor, lengths: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Token ids [B, T] or numbers [B, T, C], of which the first `lengths` [B] are real -> hidden [B, T, D].

        Hidden states of padding are zero, and what the padding holds changes no other. `lengths` None: all is real.
        `positions` [B, T] are ids in the place of 0 to T − 1 (of sinusoids, RoPE and xPos).
        """
        return self.encode(self.embed(inputs), lengths, positions)

    def embed(self, inputs: Tensor) -> Tensor:
        """inputs [B, T] (integers of any width) or [B, T, C] -> [B, T, D]."""
        return self.embedding(inputs if self.config.num_tokens is None else inputs.long())

    def encode(
        self, embedded: Tensor, lengths: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """`forward` from what `embed` made of the inputs, embedded [B, T, D].

        Raises:
            ValueError: `positions` for an encoder that reads none.
        """
        T = embedded.shape[1]
        real = real_positions(lengths, T, embedded.device)
        hidden = embedded
        if self.config.positions == "sinusoidal":
            size, dtype = hidden.shape[-1], hidden.dtype
            hidden = hidden + (
                sinusoids(T, size, hidden.device, dtype)
                if positions is None
                else sinusoids_at(positions, size, dtype)
            )
        elif positions is not None and self.rotary is None:
            raise ValueError(f"positions are given to an encoder whose positions are {self.config.positions}")
        if real is not None:
            # Not a product: whatever the padding holds, NaN included, ends here.
            hidden = hidden.masked_fill(~real.unsqueeze(-1), 0)
        rotary = self._rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, rotary, real)
        hidden = self.final_norm(hidden)
        return hidden if real is None else hidden.masked_fill(~real.unsqueeze(-1), 0)

    def _rotary(self, hidden: Tensor, positions: Tensor | None) -> Rotary | None:
        if self.rotary is None:
            return None
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        cos, sin = self.rotary(hidden, positions)
        if self.config.positions != "xpos":
            return Rotary(cos, sin)
        assert self.config.xpos_tokens is not None
        growth = xpos_growth(positions, self.config.head_dim, self.config.xpos_tokens, hidden.dtype)
        return Rotary(cos, sin, growth)


def real_positions(lengths: Tensor | None, num_positions: int, device: torch.device) -> Tensor | None:
    """lengths [B] -> which positions are real [B, T]; None where it is seen without waiting for a GPU that all are.

    Raises:
        ValueError: a length below 1 or above T, where `lengths` lies on the CPU.
    """
    if lengths is None:
        return None
    if lengths.device.type == "cpu":
        shortest, longest = (int(x) for x in lengths.aminmax())
        if shortest < 1 or longest > num_positions:
            raise ValueError(f"lengths from {shortest} to {longest} do not fit {num_positions} positions")
        if shortest == num_positions:
            return None
    return torch.arange(num_positions, device=device) < lengths.to(device).unsqueeze(1)
