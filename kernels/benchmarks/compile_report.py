"""Compile every kernel for A100, H100 and MI300 without a GPU: registers, spills and shared memory of each.

    python kernels/benchmarks/compile_report.py [--quick] [--targets sm_80,sm_90,gfx942] [--jobs N] [--json OUT]

The operators are called with their launches recorded (`supra_kernels.triton_backend.recording`), so that what is
compiled is what runs, for every dtype, head dim and kind of decay. Exits with 1 if a kernel does not compile or needs
more shared memory than a block of the target has. Registers and spills (bytes) come from `cuobjdump` and from AMD's
metadata.
"""

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

if os.environ.get("TRITON_INTERPRET") == "1":
    sys.exit("error: TRITON_INTERPRET=1 replaces the compiler by an interpreter. Run without it.")

import torch
import triton
from triton.backends.compiler import GPUTarget

from supra_kernels.triton_backend import (
    chunked,
    linear_attention,
    linear_attention_step,
    tiling,
    window_attention,
)
from supra_kernels.triton_backend.recording import Launch, recording
from supra_kernels.triton_backend.step import StepPlan, StepWeights, decode_step

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
    # Compiled on request only (--targets): consumer Ampere cards, AMD's MI200 and MI350.
    "sm_86": (GPUTarget("cuda", 86, 32), 99 * 1024),
    "gfx90a": (GPUTarget("hip", "gfx90a", 64), 64 * 1024),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160 * 1024),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGEST_FUSED_DIM = 128  # beyond it a decode step runs operator by operator
DECAYS = ("none", "fixed per head", "fixed, shared", "per token and head", "per token, shared")


@dataclass
class Row:
    """One kernel of one call on one target; bytes, and registers a thread (None: the tool is missing)."""

    kernel: str
    call: str
    target: str
    shared_bytes: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    seconds: float = 0.0
    error: str | None = None


def calls(quick: bool) -> list[tuple[str, Any]]:
    """`(description, function that calls an operator forward and backward)` for every shape that is reported."""
    every = ((16, 16), (64, 64), (64, 65), (80, 80), (96, 97), (128, 128), (128, 129), (256, 256))
    dims = ((64, 65),) if quick else every
    dtypes = ("bf16",) if quick else tuple(DTYPES)
    decays = ("per token, shared",) if quick else DECAYS
    found: list[tuple[str, Any]] = []
    for dtype in dtypes:
        for K, V in dims:
            for decay in decays:
                name = f"linear_attention {dtype} K={K} V={V} decay {decay}"
                found.append((name, lambda d=DTYPES[dtype], K=K, V=V, decay=decay: _linear(d, K, V, decay)))
            fused = (
                (("relu", True), ("hedgehog", False))
                if quick or (K == V and K <= chunked.LARGEST_NORM)
                else ()
            )
            for feature_map, norm in fused:
                name = f"fused {dtype} D={K} {feature_map}, RoPE" + (", group_norm" if norm else "")
                found.append((name, lambda d=DTYPES[dtype], K=K, m=feature_map, n=norm: _fused(d, K, m, n)))
            found.append((f"step {dtype} K={K} V={V}", lambda d=DTYPES[dtype], K=K, V=V: _step(d, K, V)))
        for D in sorted({K for K, _ in dims}):
            found.append((f"window {dtype} D={D}", lambda d=DTYPES[dtype], D=D: _window(d, D)))
            if D > LARGEST_FUSED_DIM:
                continue
            for plan in (
                StepPlan("relu", "after", "group_norm"),
                StepPlan("hedgehog", "before", "denominator"),
            ):
                name = f"decode {dtype} D={D} {plan.feature_map} rope {plan.rope} {plan.norm}"
                found.append((name, lambda d=DTYPES[dtype], D=D, plan=plan: _decode(d, D, plan)))
    return found


def _tensors(dtype: torch.dtype, K: int, V: int, H: int = 8, G: int = 2, T: int = 70) -> list[torch.Tensor]:
    shapes = ((1, T, H, K), (1, T, G, K), (1, T, G, V))
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def _linear(dtype: torch.dtype, K: int, V: int, decay: str) -> None:
    q, k, v = _tensors(dtype, K, V)
    shape = {"none": None, "fixed per head": (8,), "fixed, shared": (2,)}.get(
        decay, (1, 70, 2 if "shared" in decay else 8)
    )
    log_decay = None if shape is None else torch.zeros(shape, requires_grad=True)
    state = torch.zeros(1, 8 if "head" in decay else 2, K, V, requires_grad=True)
    o, final = linear_attention(q, k, v, log_decay, initial_state=state, output_final_state=True)
    assert final is not None
    (o.sum() + final.sum()).backward()


def _fused(dtype: torch.dtype, D: int, feature_map: Any, norm: bool) -> None:
    q, k, v = _tensors(dtype, D, D)
    angles = torch.zeros(1, 70, D)
    biases = (
        (torch.zeros(8, D, requires_grad=True), torch.zeros(2, D)) if feature_map == "relu" else (None, None)
    )
    affine = chunked.Norm(torch.zeros(8 * D, requires_grad=True), torch.zeros(8 * D)) if norm else None
    front = chunked.Front(feature_map, *biases, angles, angles)
    log_decay = None if feature_map == "hedgehog" else torch.zeros(8)  # as the methods have it
    o, _ = chunked.linear_attention(q, k, v, log_decay, front=front, norm=affine)
    o.sum().backward()


def _step(dtype: torch.dtype, K: int, V: int) -> None:
    with torch.no_grad():
        q, k, v = (x[:, 0].detach() for x in _tensors(dtype, K, V))
        for heads in (2, 8):
            linear_attention_step(q, k, v, torch.zeros(1, heads, K, V), torch.zeros(heads))


def _decode(dtype: torch.dtype, D: int, plan: StepPlan) -> None:
    with torch.no_grad():
        q, k, v = (x[:, 0].detach() for x in _tensors(dtype, D, D))
        angles = torch.zeros(1, D)
        maps = torch.zeros(8, D, D), torch.zeros(2, D, D)
        biases = (torch.zeros(8, D), torch.zeros(2, D)) if plan.feature_map == "relu" else (None, None)
        norms = (torch.zeros(8, D), torch.zeros(8, D)) if plan.norm == "group_norm" else (None, None)
        weights = StepWeights(maps[0], biases[0], maps[1], biases[1], *norms)
        features = 2 * D if plan.feature_map == "hedgehog" else D
        state = torch.zeros(1, 2, features, D + (plan.norm == "denominator"))
        decode_step(plan, q, k, v, state, torch.zeros(2), cos=angles, sin=angles, weights=weights)


def _window(dtype: torch.dtype, D: int) -> None:
    """Rows alone, and documents with a past that wants its gradients; under autocast q and k are fp32 and v is not."""
    q, k, v = _tensors(dtype, D, D)
    for values in {dtype, torch.bfloat16} if dtype == torch.float32 else {dtype}:
        past = [x[:, :64].detach().clone().requires_grad_() for x in (k, v.to(values))]
        for more in ({}, {"past_k": past[0], "past_v": past[1], "cu_seqlens": torch.tensor([0, 70])}):
            o, lse = window_attention(q, k, v.to(values), window=64, scale=D**-0.5, **more)
            (o.sum() + lse.sum()).backward()


def work(quick: bool, target: str, shard: tuple[int, int]) -> list[Row]:
    """Rows of every `shard[1]`-th call, in this process."""
    rows, seen = [], set()
    with mock.patch.object(tiling, "AMD", TARGETS[target][0].backend == "hip"):
        for name, call in calls(quick)[shard[0] :: shard[1]]:
            with recording() as launches:
                call()
            for launch in launches:
                key = (launch.name, launch.signature, launch.constants, launch.options)
                if str(key) not in seen:
                    seen.add(str(key))
                    rows.append(_compile(name, launch, target))
                    print(f"{rows[-1].target} {rows[-1].kernel}: {name}", file=sys.stderr, flush=True)
    return rows


def _compile(call: str, launch: Launch, target: str) -> Row:
    row, start = Row(launch.name, call, target), time.perf_counter()
    gpu, limit = TARGETS[target]
    try:
        built = triton.compile(launch.source(), target=gpu, options=dict(launch.options))
    except Exception as error:  # whatever the compiler says belongs into the report
        row.error = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return row
    row.shared_bytes, row.seconds = built.metadata.shared, round(time.perf_counter() - start, 2)
    if row.shared_bytes > limit:
        row.error = f"needs {row.shared_bytes} bytes of shared memory; a block of {target} has {limit}"
    if gpu.backend == "cuda":
        row.registers, row.spilled_bytes = _nvidia_usage(built.asm["cubin"])
    else:
        row.registers, row.spilled_bytes = _amd_usage(built.asm["amdgcn"])
    return row


def _nvidia_usage(cubin: bytes) -> tuple[int | None, int | None]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)


def _amd_usage(assembly: str) -> tuple[int | None, int | None]:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spilled = re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    return (int(registers[1]) if registers else None, int(spilled[1]) if spilled else None)


def summary(target: str, rows: list[Row]) -> str:
    """One line: how many kernels a target has, the most shared memory, and how many spill how much, by dtype."""
    most = max((row.shared_bytes or 0 for row in rows), default=0)
    parts = [
        f"{target}: {len(rows)} kernels, at most {most / 1024:.0f} of {TARGETS[target][1] / 1024:.0f} KB shared"
    ]
    for dtype in DTYPES:
        spilled = [row.spilled_bytes or 0 for row in rows if f" {dtype} " in row.call]
        if spilled:
            much = sum(value > 1024 for value in spilled)
            parts.append(
                f"{dtype}: {sum(map(bool, spilled))} of {len(spilled)} spill, {much} above 1 KB, most {max(spilled)} B"
            )
    return "; ".join(parts)


def main() -> int:
    """Compile, print a table on stdout, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one dtype, one shape, one decay: what `make test` runs"
    )
    parser.add_argument("--targets", default="sm_80,sm_90,gfx942", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    targets = options.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"unknown targets {', '.join(sorted(unknown))}; known: {', '.join(TARGETS)}")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"{options.json.parent} is no folder")
    jobs = [(target, (i, options.jobs)) for target in targets for i in range(options.jobs)]
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(work, options.quick, target, shard) for target, shard in jobs]
        rows = [row for future in futures for row in future.result()]
    print(f"{'target':7} {'kernel':22} {'shared B':>9} {'registers':>9} {'spilled B':>9}  call")
    for row in rows:
        values = [
            ("–" if x is None else str(x)) for x in (row.shared_bytes, row.registers, row.spilled_bytes)
        ]
        print(
            f"{row.target:7} {row.kernel:22} {values[0]:>9} {values[1]:>9} {values[2]:>9}  {row.call}",
            row.error or "",
        )
    for target in targets:
        print(summary(target, [row for row in rows if row.target == target]))
    failed = [row for row in rows if row.error]
    print(f"{len(rows)} compiled on triton {triton.__version__}, {len(failed)} failed")
    if options.json:
        options.json.write_text(
            json.dumps({"triton": triton.__version__, "rows": [asdict(row) for row in rows]}, indent=1)
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
