"""Forward and backward of one layer's linear attention against torch's causal SDPA, on a CPU.

The shape is one SmolLM2-135M layer (9 query heads, 3 key/value heads of 64) in fp32. SDPA runs with
`enable_gqa` and with repeated keys; the faster of the two is the baseline. The contestants take turns
within a round, so that a change in the machine's load meets all of them, and the ratio is the median over
the rounds.

    python kernels/benchmarks/cpu_layer.py --lengths 2048 16384 --threads 2
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from supra_kernels import linear_attention

H, G, D = 9, 3, 64


def decays() -> dict[str, Tensor | None]:
    """The paper's ALiBi-type decay per query head, its per-group mean, a learned one, one per token, and
    none."""
    alibi = -torch.pow(2.0, -8.0 * torch.arange(1, H + 1) / H)
    return {
        "no decay": None,
        "decay shared in the group": alibi.view(G, H // G).mean(1),
        "decay per head": alibi,
        "decay per head, learned": alibi.clone().requires_grad_(),
    }


def contestants(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Callable[[], None]]:
    """Name → one forward and backward pass; q, k, v `[1, T, H | G, D]` as a model's projections leave
    them."""

    def softmax(repeat: bool) -> None:
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        if repeat:
            k_, v_ = (x.repeat_interleave(H // G, 1) for x in (k_, v_))
        o = scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=not repeat)
        torch.autograd.grad(o.transpose(1, 2), (q, k, v), do)

    def linear(log_decay: Tensor | None) -> None:
        inputs = (q, k, v) if log_decay is None or not log_decay.requires_grad else (q, k, v, log_decay)
        o, _ = linear_attention(q, k, v, log_decay)
        torch.autograd.grad(o, inputs, do)

    runs = {name: lambda d=decay: linear(d) for name, decay in decays().items()}
    return {"SDPA, gqa": lambda: softmax(False), "SDPA, repeated keys": lambda: softmax(True), **runs}


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(T: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds and median ratio to the faster SDPA of every contestant at T tokens."""
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randn(1, T, H, D, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, T, G, D, generator=generator) for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()
    runs = contestants(q, k, v, do)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        if not name.startswith("SDPA") or T <= 4096:
            run()  # warm up
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run))
    softmax = [
        min(pair) for pair in zip(*(t for name, t in times.items() if name.startswith("SDPA")), strict=True)
    ]
    return {
        name: {
            "ms": 1e3 * statistics.median(taken),
            "times_faster": statistics.median(s / t for s, t in zip(softmax, taken, strict=True)),
        }
        for name, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 16384], help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7, help="rounds; each contestant runs once per round")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = {T: measure(T, args.repeats) for T in args.lengths}
    if args.json:
        print(json.dumps({"threads": args.threads, "torch": torch.__version__, "lengths": results}, indent=2))
        return
    print(f"| H={H} G={G} D={D} fp32, {args.threads} threads | T | ms | times faster than SDPA |")
    print("|---|---|---|---|")
    for T, rows in results.items():
        for name, row in rows.items():
            print(f"| {name} | {T} | {row['ms']:.1f} | {row['times_faster']:.1f} |")


if __name__ == "__main__":
    main()
