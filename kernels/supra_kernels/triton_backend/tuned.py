"""Warps and pipeline stages of the chunk kernels: a table measured on a card, or what the shapes suggest.

`kernels/benchmarks/tune.py` measures a small space on a GPU and writes `tuned.json`, which ships with the package: no
first call tunes. A card that is not in the table gets the defaults.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).parent / "tuned.json"
# What is tried, before the compiler's shared memory and spills prune it.
SPACE = tuple({"num_warps": warps, "num_stages": stages} for warps in (4, 8) for stages in (1, 2, 3))


DECISIVE = ("K", "V", "C", "BK", "BV", "DECAY", "DECAY_GRADIENT", "REVERSED", "MAP", "ANGLES", "NORM")


def key(card: str, kernel: str, dtype: torch.dtype, constants: Mapping[str, Any]) -> str:
    """The table's name of one specialisation: everything that decides its registers and shared memory."""
    named = " ".join(f"{name}={int(constants[name])}" for name in DECISIVE if name in constants)
    return f"{card} · {kernel} · {str(dtype).removeprefix('torch.')} · {named}"


@functools.lru_cache(maxsize=1)
def table() -> dict[str, dict[str, int]]:
    """Measured options by `key`; empty where nothing was measured yet."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


@functools.lru_cache(maxsize=8)
def card(device: torch.device) -> str:
    """The GPU's name, "" on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def options(kernel: str, like: torch.Tensor, constants: Mapping[str, Any], num_warps: int) -> dict[str, Any]:
    """`num_warps` and `num_stages` of a kernel on the GPU of `like`; by default `num_warps` and one stage."""
    measured = table().get(key(card(like.device), kernel, like.dtype, constants))
    return measured or {"num_warps": num_warps, "num_stages": 1}
