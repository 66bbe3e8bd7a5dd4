"""Choose warps and stages of the chunk kernels on the GPU that is here, and write them into the table that ships.

    python kernels/benchmarks/tune.py [--out kernels/supra_kernels/triton_backend/tuned.json]

Every launch of a forward and backward pass is timed under each of a few options (`supra_kernels.triton_backend.tuned`);
those that do not fit into shared memory are skipped. Entries of other cards in the table are kept. Exits with 2 without
a GPU.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from supra_kernels.triton_backend import chunked, tuned

# Query heads, key heads, head dim: SmolLM2-135M; Llama-3-8B and Mistral-7B.
SHAPES = ((9, 3, 64), (32, 8, 128))
KERNELS = ("chunk_states", "chunk_output", "chunk_dq", "chunk_dk", "chunk_dv")
Run = Callable[..., Any]


def fastest(run: Run, bench: Callable[[Callable[[], Any]], float]) -> dict[str, int]:
    """The options of `tuned.SPACE` under which `run(**options)` takes least, of those that compile and fit."""
    times = []
    for options in tuned.SPACE:
        with contextlib.suppress(triton.runtime.errors.OutOfResources, triton.CompilationError):
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
            key = tuned.key(tuned.card(like.device), name, like.dtype, sizes)
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
    """Forward and backward at 16,384 tokens of what a model runs: each decay, a normaliser's column, and fused with
    map, RoPE and norm, in chunks of 32 and 64."""
    for H, G, D in SHAPES:
        angles = torch.rand(1, 4096, D, device=device)
        bias, affine = torch.zeros(H, D, device=device), torch.ones(H * D, device=device)
        relu = chunked.Front("relu", bias, bias[:G], angles, angles)
        decays = (
            None,
            -torch.rand(H, device=device),
            -torch.rand(4, 4096, H, device=device).requires_grad_(),
        )
        for chunk_size, decay in itertools.product((32, 64), decays):
            for V, fused in (
                (D, {}), (D + 1, {}), (D + 1, {"front": chunked.Front("hedgehog")}),
                (D, {"front": relu, "norm": chunked.Norm(affine, affine)}),
            ):  # fmt: skip
                shapes = ((4, 4096, H, D), (4, 4096, G, D), (4, 4096, G, V))
                yield functools.partial(_call, shapes, device, decay, chunk_size, fused)


def _call(shapes: Any, device: torch.device, decay: Any, chunk_size: int, fused: dict[str, Any]) -> None:
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes)
    o, _ = chunked.linear_attention(q, k, v, decay, chunk_size=chunk_size, **fused)
    o.sum().backward()


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
    if not options.out.parent.is_dir():
        parser.error(f"{options.out.parent} is no folder")
    found: dict[str, dict[str, int]] = {}
    with tuning(found, lambda call: triton.testing.do_bench(call, return_mode="median")):
        for call in calls(torch.device("cuda")):
            call()
            write(options.out, found)  # as soon as it is known: a stop costs one call
    print(f"{len(found)} entries for {tuned.card(torch.device('cuda'))} in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
