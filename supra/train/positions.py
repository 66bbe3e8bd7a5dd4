"""Positions that skip, drawn anew for each sequence, so that training at one length meets the angles of a longer one.

A model that trains on T tokens at positions 0 … T − 1 has never turned a key by more. Two schemes spread T tokens over
0 … N − 1, of which each document draws its own, as it is a sequence of its own to every layer:

- `random`: sorted draws without replacement (randomised positions, arXiv 2305.16843, section 3);
- `pose`: two runs, cut at a random place, with a random skip between them (PoSE, arXiv 2309.10400, section 3.2 with
  two chunks; the first begins at 0).
"""

import numpy as np

from supra.config import PositionScheme

_PURPOSE = 5  # of draws from a stage's seed, beside those of data.py and streaming.py


def draw_positions(scheme: PositionScheme, lengths: np.ndarray, *, seed: int, number: int) -> np.ndarray:
    """Positions [T] int64 of sequence `number` of a stage, whose documents have these lengths, none of them 0.

    They rise within each document. Pure: nothing but the arguments decides, so that a resume, another number of
    processes and each layer of a layerwise stage draw the same.
    """
    generator = np.random.Generator(np.random.PCG64([seed, number, _PURPOSE]))
    draw = _random if scheme.kind == "random" else _pose
    return np.concatenate([draw(int(length), scheme.span, generator) for length in lengths])


def _random(length: int, span: int, generator: np.random.Generator) -> np.ndarray:
    return np.sort(generator.choice(span, size=length, replace=False, shuffle=False))


def _pose(length: int, span: int, generator: np.random.Generator) -> np.ndarray:
    positions = np.arange(length)
    if length > 1:
        cut = generator.integers(1, length)
        positions[cut:] += generator.integers(span - length + 1)
    return positions
