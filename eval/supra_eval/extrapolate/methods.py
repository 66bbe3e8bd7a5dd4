"""What is compared: mixers, methods of positions, which of them go together, and the ids that training draws."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import product

import numpy as np
import torch
from torch import Tensor

from supra.config import PositionScheme
from supra.train.positions import draw_positions


class Mixer(StrEnum):
    """How positions are mixed; a linear one keeps a state, which fades (`linear-decay`), is gated, or only grows."""

    SOFTMAX = "softmax"
    DECAY = "linear-decay"
    SUM = "linear"
    GATED = "linear-gated"


class Method(StrEnum):
    """How a model knows where a token stands, and what is done about lengths that it was not trained at.

    | method | positions | source |
    |---|---|---|
    | `none` | none; a causal model may count by itself | NoPE, arXiv 2305.19466 |
    | `sinusoidal` | sinusoids added to the input | arXiv 1706.03762, section 3.5 |
    | `shifted` | the same, all ids of a training sequence moved by one random offset | SHAPE, arXiv 2109.05644 |
    | `alibi` | softmax: bias −m·distance; linear-decay: γ = e^(−m), which is the same factor | arXiv 2108.12409 |
    | `rope` | rotated queries and keys | arXiv 2104.09864 |
    | `rope+linear` | `rope`, tested with every frequency divided by κ | arXiv 2306.15595 |
    | `rope+ntk` | `rope`, tested with a larger base | arXiv 2309.00071, definition 1 |
    | `rope+yarn` | `rope`, tested with YaRN's frequencies and temperature | arXiv 2309.00071, section 3.4 |
    | `xpos` | `rope` and a decay of each pair of dimensions | arXiv 2212.10554 |
    | `random` | `rope` on sorted random ids, in training and in the test | arXiv 2305.16843, section 3 |
    | `pose` | `rope`, in training with the ids of a later part moved ahead | arXiv 2309.10400, section 3 |

    κ is the tested length over the longest one in training. What draws ids draws them up to the longest tested length.
    """

    NONE = "none"
    SINUSOIDAL = "sinusoidal"
    SHIFTED = "shifted"
    ALIBI = "alibi"
    ROPE = "rope"
    ROPE_LINEAR = "rope+linear"
    ROPE_NTK = "rope+ntk"
    ROPE_YARN = "rope+yarn"
    XPOS = "xpos"
    RANDOM = "random"
    POSE = "pose"

    @property
    def trained_as(self) -> Method:
        """The method whose trained model this one tests: one run serves `rope` and all that scale it."""
        return Method(self.value.partition("+")[0])

    @property
    def scaling(self) -> str:
        """What is done to the frequencies in the test, as `scaled_rope_parameters` calls it."""
        return self.value.partition("+")[2] or "none"


_OWN_DECAY = {
    (Mixer.SUM, Method.ALIBI): "ALiBi is a decay to a linear model: that is linear-decay x alibi",
    (Mixer.GATED, Method.ALIBI): "the gates are a decay already",
    (Mixer.DECAY, Method.XPOS): "xPos is a decay of its own: take it with linear",
    (Mixer.GATED, Method.XPOS): "xPos is a decay of its own: take it with linear",
}


def why_not(mixer: Mixer, method: Method) -> str | None:
    """Why a mixer and a method make no sense together; None where they do."""
    return _OWN_DECAY.get((mixer, method))


def left_out(mixers: Iterable[Mixer], methods: Iterable[Method]) -> dict[str, str]:
    """`mixer x method` that make no sense -> why."""
    pairs = [(mixer, method, why_not(mixer, method)) for mixer, method in product(mixers, methods)]
    return {f"{mixer} x {method}": reason for mixer, method, reason in pairs if reason}


def positions_in_training(
    method: Method, rows: int, length: int, reach: int, generator: torch.Generator
) -> Tensor | None:
    """Ids [rows, length] below `reach` for one batch of training; None: 0 to length − 1.

    - `shifted`: one offset a sequence, uniform;
    - `random` and `pose`: as the stages of `supra train` draw them.
    """
    free, counted = reach - length + 1, torch.arange(length)
    if method is Method.SHIFTED:
        return counted + torch.randint(free, (rows, 1), generator=generator)
    if method in (Method.RANDOM, Method.POSE):
        scheme = PositionScheme("random" if method is Method.RANDOM else "pose", reach)
        seed = int(torch.randint(1 << 62, (), generator=generator))
        drawn = [draw_positions(scheme, np.array([length]), seed=seed, number=row) for row in range(rows)]
        return torch.from_numpy(np.stack(drawn))
    return None


def positions_in_test(
    method: Method, rows: int, length: int, reach: int, generator: torch.Generator
) -> Tensor | None:
    """Ids for a test batch: only `random` draws them there as well (2305.16843); at `reach` they are 0 to T − 1."""
    return positions_in_training(method, rows, length, reach, generator) if method is Method.RANDOM else None
