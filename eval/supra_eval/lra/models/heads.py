"""From hidden states to classes: pooling over the real positions, one document or two."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import Pooling
from .encoder import Encoder, real_positions


def pool(hidden: Tensor, lengths: Tensor | None, pooling: Pooling) -> Tensor:
    """hidden [B, T, D] -> [B, D]: the mean, the largest or the last over the first `lengths` [B] positions."""
    real = real_positions(lengths, hidden.shape[1], hidden.device)
    if pooling == "last":
        if real is None:
            return hidden[:, -1]
        last = real.sum(1) - 1
        return hidden[torch.arange(len(hidden), device=hidden.device), last]
    if real is None:
        return hidden.mean(1) if pooling == "mean" else hidden.amax(1)
    real = real.unsqueeze(-1)
    if pooling == "mean":
        return hidden.masked_fill(~real, 0).sum(1) / real.sum(1)
    return hidden.masked_fill(~real, float("-inf")).amax(1)


class Classifier(nn.Module):
    """An encoder and a linear head; with two towers one encoder reads both documents and an MLP compares them.

    The MLP sees [a, b, a·b, a − b], as Long Range Arena's (arXiv 2011.04006) does.
    """

    def __init__(self, encoder: Encoder, num_classes: int, seed: int = 0) -> None:
        super().__init__()
        self.encoder, size = encoder, encoder.config.hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if encoder.config.two_towers:
                self.head = nn.Sequential(nn.Linear(4 * size, size), nn.GELU(), nn.Linear(size, num_classes))
            else:
                self.head = nn.Sequential(nn.Linear(size, num_classes))

    def forward(
        self,
        inputs: Tensor,
        lengths: Tensor | None = None,
        second: Tensor | None = None,
        second_lengths: Tensor | None = None,
    ) -> Tensor:
        """inputs [B, T] or [B, T, C], and with two towers the other documents as `second` -> logits [B, classes].

        Raises:
            ValueError: a second document for one tower, or none for two.
        """
        if (second is not None) != self.encoder.config.two_towers:
            raise ValueError("two towers read two documents, one tower reads one")
        a = self._read(inputs, lengths)
        if second is None:
            return self.head(a)
        b = self._read(second, second_lengths)
        return self.head(torch.cat((a, b, a * b, a - b), dim=-1))

    def _read(self, inputs: Tensor, lengths: Tensor | None) -> Tensor:
        return pool(self.encoder(inputs, lengths), lengths, self.encoder.config.pooling)
