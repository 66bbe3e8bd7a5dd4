"""Self-pretraining on a task's own inputs (arXiv 2310.02980): fill in what is masked, or predict what comes next.

A mask falls on each real position independently and always replaces it by the mask symbol; the loss counts masked
positions alone. Tokens are predicted by cross-entropy, numbers by L1. Masking is for encoders that look both ways, the
next position for causal ones: anything else would read the answer, or half of nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from supra.config.fields import Real, Section
from supra.errors import UserError

from .models.config import Direction
from .models.encoder import Encoder, real_positions
from .models.heads import Classifier


class Objective(Section):
    """What self-pretraining predicts; `mask_rate` is the share of positions masked (published: 0.1 to 0.5)."""

    kind: Literal["masked", "causal"]
    mask_rate: Annotated[Real, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _rate_is_the_masks(self) -> Self:
        if (self.mask_rate is None) == (self.kind == "masked"):
            raise ValueError("masked needs mask_rate, and causal has none")
        return self


def check_objective(objective: Objective, direction: Direction) -> None:
    """Refuse an objective that an encoder of this direction cannot learn from.

    Raises:
        UserError: causal for a bidirectional encoder, or masked for a causal one.
    """
    thing = f"objective {objective.kind}"
    if objective.kind == "causal" and direction == "bidirectional":
        reason = "the encoder is bidirectional, so it sees the position that it is to predict"
        raise UserError(thing, reason, "Use the objective masked, or set direction to causal.")
    if objective.kind == "masked" and direction == "causal":
        reason = "the encoder is causal, so it would fill in a mask without what follows it"
        raise UserError(thing, reason, "Use the objective causal, or set direction to bidirectional.")


@dataclass(frozen=True)
class Loss:
    """The sum over the positions predicted, and their number: means over batches weigh each position alike."""

    total: Tensor
    count: int

    @property
    def mean(self) -> Tensor:
        """The mean loss of a position; 0 where none was predicted."""
        return self.total / max(self.count, 1)


class Pretraining(nn.Module):
    """An encoder with the head and the mask symbol of an objective, both of which fine-tuning does without.

    The mask symbol is a vector in the place of a token's embedding. For numbers it is added to the embedding of 0,
    which is one more input channel m beside x·(1 − m).

    Raises:
        UserError: as `check_objective`.
    """

    def __init__(self, encoder: Encoder, objective: Objective, seed: int = 0) -> None:
        super().__init__()
        check_objective(objective, encoder.config.direction)
        self.encoder, self.objective = encoder, objective
        config = encoder.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = nn.Linear(config.hidden_size, config.num_tokens or config.channels or 0)
            if objective.kind == "masked":
                self.mask_vector = nn.Parameter(torch.randn(config.hidden_size))

    def forward(
        self, inputs: Tensor, lengths: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Loss:
        """Token ids [B, T] or numbers [B, T, C] with `lengths` [B] -> the loss; `generator` (CPU) draws the masks."""
        if self.objective.kind == "causal":
            following = self._real(inputs, lengths)[:, 1:]
            hidden = self.encoder(inputs, lengths)
            return self._loss(hidden[:, :-1][following], inputs[:, 1:][following])
        mask = self.draw_mask(inputs, lengths, generator)
        hidden = self.encoder.encode(self.embed_masked(inputs, mask), lengths)
        return self._loss(hidden[mask], inputs[mask])

    def draw_mask(self, inputs: Tensor, lengths: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """Which positions are masked, [B, T]; drawn on the CPU, so that a seed means the same on every device."""
        assert self.objective.mask_rate is not None
        real = self._real(inputs, lengths)
        return real & (torch.rand(real.shape, generator=generator) < self.objective.mask_rate).to(real.device)

    def embed_masked(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """inputs [B, T] or [B, T, C] and mask [B, T] -> embeddings [B, T, D] that know nothing of what is masked."""
        mask = mask.unsqueeze(-1)
        if self.encoder.config.num_tokens is not None:
            embedded = self.encoder.embed(inputs)
            return torch.where(mask, self.mask_vector.to(embedded.dtype), embedded)
        embedded = self.encoder.embed(inputs.masked_fill(mask, 0))
        return embedded + mask * self.mask_vector.to(embedded.dtype)

    def _real(self, inputs: Tensor, lengths: Tensor | None) -> Tensor:
        """Which positions are real, [B, T]."""
        B, T = inputs.shape[:2]
        real = real_positions(lengths, T, inputs.device)
        return torch.ones(B, T, dtype=torch.bool, device=inputs.device) if real is None else real

    def _loss(self, hidden: Tensor, targets: Tensor) -> Loss:
        """hidden [n, D], targets [n] or [n, C] -> their loss; numbers count the mean over their channels."""
        predictions = self.head(hidden)
        if self.encoder.config.num_tokens is not None:
            total = F.cross_entropy(predictions.float(), targets.long(), reduction="sum")
        else:
            total = (predictions - targets).abs().mean(-1).sum()
        return Loss(total, len(targets))


def transfer(pretrained: Pretraining, classifier: Classifier) -> None:
    """Copy the encoder's weights into the classifier's; the head and the mask symbol stay behind.

    Raises:
        UserError: the two encoders are not the same model.
    """
    ours, theirs = (
        model.encoder.config.model_dump(exclude={"pooling", "two_towers"})
        for model in (pretrained, classifier)
    )
    if ours != theirs:
        different = ", ".join(key for key in ours if ours[key] != theirs[key])
        reason = f"it differs from the classifier's in {different}"
        raise UserError("the pretrained encoder", reason, "Pretrain the encoder that is to be fine-tuned.")
    classifier.encoder.load_state_dict(pretrained.encoder.state_dict())
