"""What a call must move and multiply: static counts of the kernels, their roofline time, and the choices that follow.

The counts follow the kernels' structure (kernels/README.md). Memory: every kernel reads each of its inputs and writes
each of its outputs once; what a program reads again comes from cache. Products: whole C × C tiles, the masked half
included, 2 operations for a multiply and add; a last chunk counts as a full one. Not counted: decays that do not
depend on the token (a few bytes), tiles computed again where a head dim needs several, and how well few programs fill
a GPU. So a roofline time is a lower bound, never a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DecayKind = Literal["none", "key head", "query head", "token and key head", "token and query head"]
# Tiles of 128 × 128 scores beside their decays spill registers (kernels/benchmarks/compile_report.py).
CHUNK_SIZES = (32, 64)
STATE_BYTES = 4  # states and accumulated decays are fp32
DECAY_BYTES = 8  # b of a token and head, as two fp32 parts


@dataclass(frozen=True)
class Card:
    """Dense peaks in operations per second and memory bandwidth in bytes per second, as the data sheet gives them."""

    name: str
    bf16: float
    tf32: float
    fp32: float
    bandwidth: float
    source: str

    def peak(self, element_bytes: int, exact: bool = False) -> float:
        """The peak of products of 2 or 4 byte numbers; `exact`: fp32 without TF32."""
        return self.bf16 if element_bytes == 2 else self.fp32 if exact else self.tf32


# Hopper's sheets give the sparse peaks of tensor cores; half of each is dense.
CARDS = {
    card.name: card
    for card in (
        Card("A100-80GB SXM", 312e12, 156e12, 19.5e12, 2.039e12, "NVIDIA A100 Tensor Core GPU data sheet"),
        Card("H100 SXM", 989.5e12, 494.5e12, 67e12, 3.35e12, "NVIDIA H100 Tensor Core GPU data sheet"),
        Card("H200", 989.5e12, 494.5e12, 67e12, 4.8e12, "NVIDIA H200 Tensor Core GPU data sheet"),
    )
}


@dataclass(frozen=True)
class Cost:
    """Operations and bytes of memory traffic."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


Costs = Mapping[str, Cost]


@dataclass(frozen=True)
class Shape:
    """One call: B rows of T tokens, H query heads and G key/value heads, head dims K and V (D and V for a window),
    bytes of an element of q and k, and of v and o."""

    B: int
    T: int
    H: int
    G: int
    K: int
    V: int
    decay: DecayKind = "none"
    qk_bytes: int = 2
    v_bytes: int = 2

    @property
    def state_heads(self) -> int:
        """S: a state per query head where queries of a group decay differently, else per key head."""
        return self.H if "query head" in self.decay else self.G

    @property
    def tokens(self) -> int:
        return self.B * self.T

    @property
    def q(self) -> int:
        """Bytes of q, and of its gradient."""
        return self.qk_bytes * self.tokens * self.H * self.K

    @property
    def k(self) -> int:
        return self.qk_bytes * self.tokens * self.G * self.K

    @property
    def v(self) -> int:
        return self.v_bytes * self.tokens * self.G * self.V

    @property
    def o(self) -> int:
        """Bytes of the output, and of its gradient."""
        return self.v_bytes * self.tokens * self.H * self.V

    @property
    def decays(self) -> int:
        """Bytes that one kernel reads of accumulated decays."""
        return DECAY_BYTES * self.tokens * self.state_heads if self.decay.startswith("token") else 0

    def chunks(self, C: int) -> int:
        return self.B * math.ceil(self.T / C)

    def states(self, C: int) -> int:
        """Bytes of the states between chunks of C tokens; rows are padded to 16 numbers."""
        return STATE_BYTES * self.chunks(C) * self.state_heads * self.K * math.ceil(self.V / 16) * 16

    @property
    def sequence_states(self) -> int:
        """Bytes of one state per row of the batch."""
        return STATE_BYTES * self.B * self.state_heads * self.K * self.V


def _states(s: Shape, C: int) -> dict[str, Cost]:
    S, KV = s.state_heads, s.K * s.V
    products = 2 * s.chunks(C) * C * S * KV
    entries = 2 * s.chunks(C) * S * KV
    return {
        "chunk_states": Cost(products, s.k + s.v + s.decays + s.states(C)),
        "state_scan": Cost(entries, 2 * s.states(C) + s.sequence_states),
    }


def forward(s: Shape, C: int) -> dict[str, Cost]:
    """Costs by kernel of `linear_attention` in chunks of C tokens, from a state of zeros to the final state."""
    decay = {}
    if s.decay.startswith("token"):
        decay["decay_sum"] = Cost(s.tokens * s.state_heads, STATE_BYTES * s.tokens * s.state_heads + s.decays)
    per_head = 2 * C * C * (s.K + s.V) + 2 * C * s.K * s.V
    moved = s.q + s.k + s.v + s.states(C) + s.decays + s.o
    return decay | _states(s, C) | {"chunk_output": Cost(s.chunks(C) * s.H * per_head, moved)}


def backward(s: Shape, C: int, *, saved: bool, decay_gradient: bool = False) -> dict[str, Cost]:
    """Costs by kernel of the gradients; `saved`: the forward pass kept its states, else they are computed again."""
    chunks, S, KV, states, read = s.chunks(C), s.state_heads, s.K * s.V, s.states(C), s.decays
    between = decay_gradient and s.decay.startswith("token")
    d_token = STATE_BYTES * s.tokens if decay_gradient else 0  # bytes of one number per token
    tile_K, tile_V, through = 2 * C * C * s.K, 2 * C * C * s.V, 2 * C * KV
    costs = {} if saved else {f"{name}, again": cost for name, cost in _states(s, C).items()}
    costs["chunk_state_gradients"] = Cost(chunks * s.H * through, s.q + s.o + read + states)
    costs["state_scan_reversed"] = Cost(
        2 * chunks * S * KV * (2 if decay_gradient else 1),
        (3 if decay_gradient else 2) * states + 2 * s.sequence_states,
    )
    costs["chunk_dq"] = Cost(
        chunks * s.H * (tile_V + tile_K + through + (tile_K if between else 0)),
        (s.q if decay_gradient else 0) + s.k + s.v + s.o + states + read + s.q + d_token * s.H,
    )
    costs["chunk_dk"] = Cost(
        chunks * (s.H * (tile_V + tile_K + (tile_K if decay_gradient else 0)) + S * through),
        s.q + (s.k if decay_gradient else 0) + s.v + s.o + states + read + s.k + d_token * (s.H + S),
    )
    costs["chunk_dv"] = Cost(
        chunks * (s.H * (tile_K + tile_V) + S * through), s.q + s.k + s.o + states + read + s.v
    )
    if decay_gradient:
        written = d_token * S if between else 0
        costs["decay_gradient"] = Cost(s.tokens * (2 * s.H + S), d_token * (2 * s.H + S) + written)
    return costs


def step(s: Shape) -> dict[str, Cost]:
    """Costs of one token for each of B sequences (T is not used): the states are read and written once."""
    one = Shape(s.B, 1, s.H, s.G, s.K, s.V, s.decay, s.qk_bytes, s.v_bytes)
    S = s.state_heads
    flops = s.B * s.K * s.V * (2 * S + 2 * s.H + (0 if s.decay == "none" else S))
    decays = STATE_BYTES * s.B * S if s.decay.startswith("token") else 0
    return {"step": Cost(flops, 2 * one.sequence_states + one.q + one.k + one.v + one.o + decays)}


def _window_tiles(s: Shape, window: int, block: int) -> int:
    """Pairs of a query tile and a key tile which hold a pair of tokens in the window, over all rows of the batch."""
    tiles = math.ceil(s.T / block)
    behind = math.ceil((window - 1) / block)
    full = max(0, tiles - behind)
    return s.B * (full * (behind + 1) + sum(range(1, min(tiles, behind) + 1)))


def window_forward(s: Shape, window: int, block: int = 64) -> dict[str, Cost]:
    """Costs of `window_attention` without a past, in tiles of `block` × `block` tokens."""
    pairs = _window_tiles(s, window, block) * s.H
    lse = STATE_BYTES * s.tokens * s.H
    flops = pairs * 2 * block * block * (s.K + s.V)
    return {"window_forward": Cost(flops, s.q + s.k + s.v + s.o + lse)}


def window_backward(s: Shape, window: int, block: int = 64) -> dict[str, Cost]:
    """Costs of its gradients: the weights are computed again in each of two kernels."""
    pairs = _window_tiles(s, window, block) * s.H
    row = STATE_BYTES * s.tokens * s.H  # lse, its gradient, delta
    tile = 2 * block * block
    dq = Cost(pairs * tile * (2 * s.K + s.V), s.q + s.k + s.v + 2 * s.o + 2 * row + s.q + row)
    dkv = Cost(pairs * tile * (2 * s.K + 2 * s.V), s.q + s.k + s.v + s.o + 2 * row + s.k + s.v)
    return {"window_dq": dq, "window_dkv": dkv}


def total(costs: Costs) -> Cost:
    """The sum over kernels."""
    return sum(costs.values(), Cost())


def roofline_seconds(cost: Cost | Costs, peak_flops: float, bandwidth: float) -> float:
    """The least time in seconds: the larger of a kernel's two limits; the sum over kernels, which run in turn."""
    if isinstance(cost, Cost):
        return max(cost.flops / peak_flops, cost.bytes / bandwidth)
    return sum(roofline_seconds(each, peak_flops, bandwidth) for each in cost.values())


def save_states(s: Shape, C: int) -> bool:
    """Whether the forward pass keeps its states for the backward pass: iff they take no more bytes than q, k and v."""
    return s.states(C) <= s.q + s.k + s.v


def choose_chunk_size(
    s: Shape, card: Card = CARDS["H100 SXM"], *, training: bool = True, exact: bool = False
) -> int:
    """The chunk size of `CHUNK_SIZES` with the least roofline time whose states take no more bytes than q, k and v.

    With a and w bytes an element of q, k and of v, that is 4·S·K·V / C ≤ a·(H + G)·K + w·G·V a token, so

        C ≥ 4·S·K·V / (a·(H + G)·K + w·G·V) ;

    for H = G = S, K = V = D in bf16 it is C ≥ 2 D / 3. If none is large enough: the size with the smallest states,
    the largest unless the sequences are shorter. `training`: forward and backward count, else forward only; `exact`:
    fp32 products without TF32. Packed documents: give their number as B and their mean length as T.
    """
    fitting = [C for C in CHUNK_SIZES if save_states(s, C)]
    if not fitting:
        return min(CHUNK_SIZES, key=lambda C: (s.states(C), C))
    peak = card.peak(s.qk_bytes, exact)

    def seconds(C: int) -> float:
        costs = forward(s, C) | (backward(s, C, saved=save_states(s, C)) if training else {})
        return roofline_seconds(costs, peak, card.bandwidth)

    return min(fitting, key=lambda C: (seconds(C), C))
