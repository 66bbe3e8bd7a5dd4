"""Decay factors of a block of chunks, and the gradient of the log decay that comes back through them.

`b` is the log decay accumulated from the start of a chunk, the token itself included. Shapes start with M,
B, G, m: chunks of the block, batch, key/value heads, decays of a group (m = 1: shared in the group); M = B
= 1 for a fixed decay.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Place = tuple[int, int, int]  # first token, chunks M, tokens per chunk C


@dataclass(frozen=True)
class Decay:
    """exp(b_i − b_j) `[M, B, G, m, 1, C, C]` (0 for j > i), exp(b_i) `[M, B, G, m, 1, C, 1]`, exp(b_C − b_j)
    `[M, B, G, m, C, 1]` and the whole chunk's exp(b_C) `[M, B, G, m, 1, 1]`."""

    between: Tensor
    from_start: Tensor
    to_end: Tensor
    whole: Tensor

    @staticmethod
    def of(b: Tensor, dtype: torch.dtype) -> "Decay":
        """From `b` `[M, B, G, m, C]` in fp64: what is wanted are small differences of long sums.

        The difference comes first and j > i never reaches exp, so that nothing can overflow.
        """
        difference = (b.unsqueeze(-1) - b.unsqueeze(-2)).to(dtype)
        future = torch.ones(difference.shape[-2:], dtype=torch.bool, device=b.device).triu(1)
        end = b[..., -1:]
        return Decay(
            between=difference.masked_fill_(future, float("-inf")).exp_().unsqueeze(4),
            from_start=b.to(dtype).exp()[..., None, :, None],
            to_end=(end - b).to(dtype).exp_().unsqueeze(-1),
            whole=end.to(dtype).exp().unsqueeze(-1),
        )

    def chunk(self, i: int) -> Tensor:
        """exp(b_C) of chunk i, `[B, G, m, 1, 1]`."""
        return self.whole[i if len(self.whole) > 1 else 0]


def accumulate(log_decay: Tensor, place: Place, G: int) -> Tensor:
    """`b` `[M, B, G, m, C]` of a block, in fp64."""
    start, M, C = place
    m = log_decay.shape[-1] // G
    if log_decay.dim() == 1:
        counts = torch.arange(1, C + 1, dtype=torch.float64, device=log_decay.device)
        return log_decay.to(torch.float64).view(1, 1, G, m, 1) * counts
    block = log_decay[:, start : start + M * C].to(torch.float64)
    return block.view(-1, M, C, G, m).permute(1, 0, 3, 4, 2).cumsum(-1)


def decays(log_decay: Tensor | None, G: int, dtype: torch.dtype) -> Callable[[Place], Decay | None]:
    """A function from a block's place to its decay; a fixed decay is computed once per chunk length."""
    known: dict[int, Decay] = {}

    def of(place: Place) -> Decay | None:
        if log_decay is None:
            return None
        if log_decay.dim() > 1:
            return Decay.of(accumulate(log_decay, place, G), dtype)
        if place[2] not in known:
            known[place[2]] = Decay.of(accumulate(log_decay, place, G), dtype)
        return known[place[2]]

    return of


@dataclass
class DecayGradient:
    """Collects the gradient of `log_decay` block by block. Every factor exp(x) of the operator returns x's
    gradient as the product of what it multiplied with the gradient of that; x is then a sum of log decays.

    Differences that vanish in exact arithmetic (a token with itself) are left out rather than cancelled.
    """

    total: Tensor

    def add(self, place: Place, between: Tensor, from_start: Tensor, to_end: Tensor, whole: Tensor) -> None:
        """Gradients of the exponents of a block's `Decay`: `between` `[M, B, G, m, C, C]`, `from_start` and
        `to_end` `[M, B, G, m, C]`, `whole` `[M, B, G, m]`."""
        start, M, C = place
        if self.total.dim() == 1:
            token = torch.arange(C, dtype=between.dtype, device=between.device)
            gradient = (between.sum((0, 1)) * (token.unsqueeze(1) - token)).sum((-1, -2))
            gradient += (from_start.sum((0, 1)) * (token + 1)).sum(-1)
            gradient += (to_end.sum((0, 1)) * (C - 1 - token)).sum(-1)
            self.total += (gradient + C * whole.sum((0, 1))).view(-1)
            return
        between = between.tril(-1)
        d_b = between.sum(-1) - between.sum(-2) + from_start - to_end
        d_b[..., -1] += to_end.sum(-1) + whole
        d_log_decay = d_b.flip(-1).cumsum(-1).flip(-1).permute(1, 0, 4, 2, 3)
        self.total[:, start : start + M * C] = d_log_decay.reshape(len(self.total), M * C, -1)
