"""Several texts drawn from in proportion: which of them the n-th sequence of a stage comes from.

The order is no lottery: after any number of sequences each component has had its share to within one sequence, so
that short stages and every step get the mix that was asked for. It depends on the weights alone.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import numpy as np

from supra.config import PositionScheme
from supra.train.data import Batch, PackedData, collate, derived_seed
from supra.train.positions import draw_positions
from supra.train.streaming import StreamedData, TokenStream
from supra.train.token_store import TokenStore


@dataclass(frozen=True)
class Mixture:
    """The tokens of each component, and the components' shares as whole numbers without a common divisor."""

    stores: tuple[TokenStore | TokenStream, ...]
    shares: tuple[int, ...]

    @property
    def key(self) -> str:
        return "+".join(store.key for store in self.stores)

    @property
    def num_tokens(self) -> int | None:
        """None where a component is streamed: nobody has counted it."""
        counts = [len(store.tokens) for store in self.stores if isinstance(store, TokenStore)]
        return sum(counts) if len(counts) == len(self.stores) else None


class MixedData:
    """The sequences of one stage; each component runs through epochs and orders of its own.

    `positions`: how the tokens of each sequence get positions, 0, 1, … unless given.
    `makes_shards`: whether this process is the one of its machine that makes the shards of streamed components.

    Raises:
        UserError: a component has fewer tokens than one sequence holds, or a streamed one cannot be read.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        length: int,
        seed: int,
        positions: PositionScheme | None = None,
        makes_shards: bool = True,
    ) -> None:
        self.mixture, self.shares = mixture, mixture.shares
        self.positions, self.seed = positions, seed
        self.parts = [
            _sequences(store, length, derived_seed(seed, index) if index else seed, makes_shards)
            for index, store in enumerate(mixture.stores)
        ]

    def batch(self, first: int, size: int) -> Batch:
        """Sequences number `first` to `first + size - 1` of the stage."""
        turns, ranks = _turns(self.shares)
        rows = []
        for number in range(first, first + size):
            cycle, place = divmod(number, len(turns))
            component = int(turns[place])
            nth = cycle * self.shares[component] + int(ranks[place])
            rows.append((component, self.parts[component].sequence(nth)))
        if self.positions is None:
            return collate(rows)
        drawn = [
            draw_positions(self.positions, sequence.document_lengths, seed=self.seed, number=first + row)
            for row, (_, sequence) in enumerate(rows)
        ]
        return collate(rows, drawn)

    def epochs(self, num_sequences: int) -> tuple[float | None, ...]:
        """How often each component is gone through in so many sequences; None of those that are streamed."""
        return tuple(
            num_sequences * share / sum(self.shares) / part.num_sequences
            if isinstance(part, PackedData)
            else None
            for share, part in zip(self.shares, self.parts, strict=True)
        )


def _sequences(
    store: TokenStore | TokenStream, length: int, seed: int, makes_shards: bool
) -> PackedData | StreamedData:
    if isinstance(store, TokenStream):
        return StreamedData(store, length=length, seed=seed, makes_shards=makes_shards)
    return PackedData(store, length=length, seed=seed)


@lru_cache(maxsize=4)
def _turns(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """One cycle of sum(shares) turns: whose each is, and how many that component had before in the cycle.

    Tijdeman, The chairman assignment problem (Discrete Mathematics 32, 1980): of those that have less than their
    share by 1 / (2k − 2) or more, counting this turn, the one goes next that would soonest have too little. No
    component is ever off by more than 1 − 1 / (2k − 2) of a turn. In whole numbers, so that nothing is rounded.
    """
    cycle, slack = sum(shares), 2 * len(shares) - 2
    if slack == 0:
        return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    unit = lcm(*shares)
    had = [0] * len(shares)
    turns, ranks = [], []
    for turn in range(1, cycle + 1):
        lag = [share * turn - cycle * count for share, count in zip(shares, had, strict=True)]  # × 1 / cycle
        waiting = [i for i in range(len(shares)) if lag[i] * slack >= cycle]
        chosen = min(waiting, key=lambda i: ((slack - 1) * cycle - slack * lag[i]) * (unit // shares[i]))
        turns.append(chosen)
        ranks.append(had[chosen])
        had[chosen] += 1
    return np.array(turns), np.array(ranks)
