"""Choose warps and stages of the chunk kernels on the GPU that is here, and write them into the table that ships.

    python kernels/benchmarks/tune.py [--out kernels/supra_kernels/triton_backend/tuned.json]

Every launch of a forward and backward pass is timed under each of a few options (`supra_kernels.triton_backend.tuned`);
those that do not fit into shared memory are skipped. Entries of other cards in the table are kept. Exits with 2 without
a GPU.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from supra_kernels.triton_backend import linear_attention, tuned

# Query heads, key heads, head dim: SmolLM2-135M; Llama-3-8B and Mistral-7B.
SHAPES = ((9, 3, 64), (32, 8, 128))
KERNELS = ("chunk_states", "chunk_output", "chunk_dq", "chunk_dk", "chunk_dv")
Run = Callable[..., Any]


def fastest(run: Run, bench: Callable[[Callable[[], Any]], float]) -> dict[str, int]:
    """The options of `tuned.SPACE` under which `run(**options)` takes least; those that do not fit are skipped."""
    times = []
    for options in tuned.SPACE:
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            times.append((bench(lambda options=options: run(**options)), options))
    if not times:
        raise RuntimeError("no options fit into this GPU's shared memory")
    return min(times, key=lambda pair: pair[0])[1]


@contextlib.contextmanager
def tuning(found: dict[str, dict[str, int]], bench: Callable[[Callable[[], Any]], float]) -> Iterator[None]:
    """Launches in the block are made as always; those of `KERNELS` not in `found` are tuned first."""
    plain = triton.runtime.jit.JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        name = self.fn.__name__
        if name in KERNELS:
            like = arguments[0]
            sizes = dict(zip(self.arg_names, arguments, strict=False)) | options
            key = tuned.key(tuned.card(like.device), name, like.dtype, sizes["K"], sizes["V"], sizes["C"])
            if key not in found:
                found[key] = fastest(
                    lambda **tried: plain(self, *arguments, grid=grid, warmup=warmup, **options | tried),
                    bench,
                )
                print(key, found[key], file=sys.stderr, flush=True)
            options |= found[key]
        return plain(self, *arguments, grid=grid, warmup=warmup, **options)

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", run):
        yield


def calls(device: torch.device) -> Iterator[Callable[[], None]]:
    """Forward and backward at 16,384 tokens for every shape, with and without a normaliser, in chunks of 32 and 64."""
    for H, G, D in SHAPES:
        for V in (D, D + 1):
            for chunk_size in (32, 64):

                def call(
                    H: int = H, G: int = G, D: int = D, V: int = V, chunk_size: int = chunk_size
                ) -> None:
                    shapes = ((4, 4096, H, D), (4, 4096, G, D), (4, 4096, G, V))
                    q, k, v = (
                        torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()
                        for shape in shapes
                    )
                    o, _ = linear_attention(q, k, v, -torch.rand(H, device=device), chunk_size=chunk_size)
                    o.sum().backward()

                yield call


def write(path: Path, found: dict[str, dict[str, int]]) -> None:
    """The table with `found` added, whole or not at all."""
    table = json.loads(path.read_text()) if path.exists() else {}
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(table | found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    os.replace(beside, path)


def main(arguments: list[str] | None = None) -> int:
    """Tune, write the table, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=tuned.TABLE)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "error: no GPU that torch sees, so there is nothing to measure. Run this on the card to tune for.",
            file=sys.stderr,
        )
        return 2
    found: dict[str, dict[str, int]] = {}
    with tuning(found, lambda call: triton.testing.do_bench(call, return_mode="median")):
        for call in calls(torch.device("cuda")):
            call()
    write(options.out, found)
    print(f"{len(found)} entries for {tuned.card(torch.device('cuda'))} in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
