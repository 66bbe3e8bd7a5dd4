"""What a context costs: bytes of the cache, milliseconds per decoded token, peak memory."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from supra.generate import decode_time_along

from .session import release

DECODE_STEPS = 12
SAMPLE_SECONDS = 0.005


@dataclass(frozen=True)
class Cost:
    """What one context of one model needs; `peak_bytes` holds the weights too."""

    context_tokens: int
    decode_ms: float
    cache_bytes: int
    peak_bytes: int


def memory_method(device: str) -> str:
    """How `Cost.peak_bytes` is measured on a device, for the reader."""
    if device.startswith("cuda"):
        return "largest sum of tensors on the GPU (torch.cuda.max_memory_allocated), weights included"
    return (
        f"largest resident memory of the whole process (psutil, every {SAMPLE_SECONDS * 1000:g} ms), weights, Python "
        "and what the allocator keeps included"
    )


def measure_cost(
    model: Any,
    ids: Tensor,
    contexts: Sequence[int],
    *,
    chunk_tokens: int = 512,
    num_steps: int = DECODE_STEPS,
) -> list[Cost]:
    """Read ids [1, T] up to each of `contexts` from an empty state, then decode `num_steps` tokens greedily.

    Each context is read anew, so its peak memory is its own; decoded tokens come on top of the context.
    """
    ids = ids.to(model.device)
    timed, rows = _Finished(model), []
    release()
    for context in contexts:
        _trim()
        with PeakMemory(model.device) as peak:
            [(_, decode_ms, num_bytes)] = decode_time_along(
                timed, ids[:, :context], (context,), num_steps, chunk_tokens
            )
        rows.append(Cost(context, decode_ms, num_bytes, peak.num_bytes))
    return rows


class PeakMemory:
    """Largest memory while the block runs; see `memory_method` for what is counted."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes = device, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.num_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            self._done.set()
            self._thread.join()

    def _sample(self) -> None:
        process = psutil.Process()
        finished = False
        while not finished:
            finished = self._done.wait(SAMPLE_SECONDS)  # one more sample after the end
            self.num_bytes = max(self.num_bytes, process.memory_info().rss)


class _Finished:
    """A model whose call returns when the device has done the work: a GPU is otherwise timed while it still runs."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return output


def _trim() -> None:
    """Hand freed memory back to the system where glibc can, or the next peak would contain the last one's."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
