"""What is installed, what will really run, and whether it computes the right thing on this machine."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from supra_kernels import (
    BackendError,
    available_backends,
    linear_attention,
    linear_attention_step,
    resolve_backend,
    window_attention,
)

from . import __version__

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "safetensors",
    "triton",
    "fla-core",
    "lm-eval",
)
# A backend's error against the fp64 reference may be this many times the reference's own error in the same dtype, or
# the tolerance of the kernels' tests where that is larger: products of bf16 numbers may round what the reference
# keeps in fp32.
TOLERANCE_RATIO = 2.0
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# SmolLM2-135M's layer: query heads, key/value heads, head dim. Triton's interpreter is some thousand times slower.
H, G, D = 9, 3, 64
TOKENS, INTERPRETED_TOKENS, WINDOW, STEP_ROWS = 1024, 48, 32, 4
OPERATORS = ("forward", "backward", "decay per token", "step", "window")
# Whole layers of a model, prefill, gradients and a decoded token: what a backend fuses is run as a model runs it.
LAYERS: dict[str, dict[str, Any]] = {
    "relu layer": {"feature_map": "relu", "rope_position": "after", "decay": "alibi"},
    "hedgehog layer": {
        "feature_map": "hedgehog", "rope_position": "before", "decay": "none", "attention_norm": "denominator",
    },
}  # fmt: skip


@dataclass
class OperatorCheck:
    """One operator of one backend in one dtype: "passed", "refused: why", "wrong result" or "failed: what"."""

    operator: str
    dtype: str
    result: str
    max_error: float | None = None
    reference_error: float | None = None
    milliseconds: float | None = None
    reference_milliseconds: float | None = None

    @property
    def passed(self) -> bool:
        """True also where the backend said that it does not compute this."""
        return self.result == "passed" or self.result.startswith("refused: ")


@dataclass
class BackendCheck:
    """One backend on this machine: "available", "interpreted", or why it cannot run; and each operator's check."""

    backend: str
    status: str
    operators: list[OperatorCheck] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True where the backend cannot run here, or computes what it accepts within tolerance."""
        return all(check.passed for check in self.operators)


@dataclass
class Examination:
    """Everything `supra doctor` prints."""

    versions: dict[str, str]
    machine: dict[str, str]
    auto_backend: str
    backends: list[BackendCheck] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(check.passed for check in self.backends)

    def to_json(self) -> str:
        """All of it, for a script."""
        return json.dumps({**asdict(self), "healthy": self.healthy}, indent=2)

    def render(self) -> object:
        """Tables for a terminal."""
        from rich.console import Group
        from rich.table import Table

        facts = Table(title="supra doctor", show_header=False)
        for name, value in {
            **self.versions,
            **self.machine,
            "backend that auto runs": self.auto_backend,
        }.items():
            facts.add_row(name, value)
        checks = Table(title=f"kernels, T = {TOKENS} ({INTERPRETED_TOKENS} interpreted)")
        for title in ("backend", "operator", "dtype"):
            checks.add_column(title, no_wrap=True)
        for title in ("result", "max error", "reference's", "ms", "reference's ms"):
            checks.add_column(title)
        absent = Table(title="unavailable", show_header=False)
        for backend in self.backends:
            checks.add_section()
            name = (
                backend.backend if backend.status == "available" else f"{backend.backend}, {backend.status}"
            )
            if not backend.operators:
                absent.add_row(backend.backend, backend.status)
            for check in backend.operators:
                numbers = (
                    check.max_error, check.reference_error, check.milliseconds, check.reference_milliseconds
                )  # fmt: skip
                shown = ["–" if number is None else f"{number:.3g}" for number in numbers]
                result = check.result if check.passed else check.result.upper()
                checks.add_row(name, check.operator, check.dtype, result, *shown)
                name = ""
        return Group(facts, checks, *([absent] if absent.row_count else []))


def examine() -> Examination:
    """Run every operator of every available backend against the fp64 reference, at SmolLM2's layer shape.

    In fp32, and on a GPU in bf16 too.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = Examination(_versions(), _machine(), resolve_backend("auto", device))
    bench = Bench()
    for backend, status in available_backends().items():
        interpreted = (
            status == "available" and backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        )
        check = BackendCheck(backend, "interpreted" if interpreted else status)
        if status == "available":
            place = torch.device("cpu") if interpreted else device
            dtypes = (torch.float32, torch.bfloat16) if place.type == "cuda" else (torch.float32,)
            check.operators = [
                bench.check(
                    backend,
                    operator,
                    dtype,
                    place,
                    INTERPRETED_TOKENS if interpreted else TOKENS,
                    interpreted,
                )
                for dtype in dtypes
                for operator in (*OPERATORS, *(LAYERS if dtype == torch.float32 else ()))
            ]
        result.backends.append(check)
    return result


class Bench:
    """The reference's answers, each computed once, and a backend's beside them."""

    def __init__(self) -> None:
        self.reference = functools.cache(functools.partial(_run, "reference"))

    def check(
        self,
        backend: str,
        operator: str,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int,
        interpreted: bool,
    ) -> OperatorCheck:
        """One operator of one backend; times mean nothing in the interpreter, so it runs once there."""
        check = OperatorCheck(operator, SHORT[dtype], "passed")
        exact, _ = self.reference(operator, torch.float64, dtype, device, tokens, 1)
        rounded, reference_ms = self.reference(operator, dtype, dtype, device, tokens, 1)
        try:
            if backend == "reference":
                got, ms = rounded, reference_ms
            else:
                got, ms = _run(backend, operator, dtype, dtype, device, tokens, 1 if interpreted else 3)
        except BackendError as refusal:
            check.result = f"refused: {refusal}"
            return check
        except Exception as error:  # whatever a driver or compiler raises is what the user must see
            check.result = f"failed: {type(error).__name__}: {error}"
            return check
        check.max_error, check.reference_error = _error(got, exact), _error(rounded, exact)
        if not interpreted:
            check.milliseconds, check.reference_milliseconds = ms, reference_ms
        # Written so that an error of NaN does not pass.
        if not check.max_error <= max(TOLERANCE_RATIO * check.reference_error, FLOOR[dtype]):
            check.result = "wrong result"
        return check


def _run(
    backend: str,
    operator: str,
    dtype: torch.dtype,
    rounded_to: torch.dtype,
    device: torch.device,
    tokens: int,
    times: int,
) -> tuple[list[Tensor], float]:
    """The results, and the fastest of `times` runs in milliseconds, of inputs that `rounded_to` can hold."""
    call = CALLS[operator]
    results, best = list[Tensor](), float("inf")
    for _ in range(times):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, size: float = 1.0, of: torch.dtype = rounded_to) -> Tensor:
            x = torch.randn(*shape, generator=generator, dtype=torch.float64) * size  # noqa: B023
            high = torch.float64 if dtype == torch.float64 else of
            return x.to(of).to(device, high)

        run = call(backend, normal, tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        results = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return [x.detach() for x in results], best * 1000


Normal = Callable[..., Tensor]
Run = Callable[[], list[Tensor]]


def _decay(normal: Normal) -> Tensor:
    """A decay per query head between 0.6 and 0.998, fp32 or fp64."""
    slopes = torch.exp2(-torch.arange(1, H + 1, dtype=torch.float64))
    return -slopes.to(normal(1, of=torch.float32))


def _layer(normal: Normal, tokens: int) -> tuple[Tensor, ...]:
    return normal(1, tokens, H, D), normal(1, tokens, G, D, size=D**-0.5), normal(1, tokens, G, D)


def _forward(backend: str, normal: Normal, tokens: int) -> Run:
    q, k, v = _layer(normal, tokens)
    log_decay = _decay(normal)

    def run() -> list[Tensor]:
        output, state = linear_attention(
            q, k, v, log_decay, scale=D**-0.5, output_final_state=True, backend=backend
        )
        assert state is not None
        return [output, state]

    return run


def _backward(backend: str, normal: Normal, tokens: int) -> Run:
    inputs = [x.requires_grad_() for x in (*_layer(normal, tokens), _decay(normal))]
    d_output = normal(1, tokens, H, D)

    def run() -> list[Tensor]:
        q, k, v, log_decay = inputs
        output, _ = linear_attention(q, k, v, log_decay, scale=D**-0.5, backend=backend)
        return list(torch.autograd.grad(output, inputs, d_output))

    return run


def _gated(backend: str, normal: Normal, tokens: int) -> Run:
    log_decay = -normal(1, tokens, G, of=torch.float32).abs() / 8
    inputs = [x.requires_grad_() for x in (*_layer(normal, tokens), log_decay)]
    d_output = normal(1, tokens, H, D)

    def run() -> list[Tensor]:
        output, _ = linear_attention(*inputs, scale=D**-0.5, backend=backend)
        return [output, *torch.autograd.grad(output, inputs, d_output)]

    return run


def _model_layer(fields: dict[str, Any], backend: str, normal: Normal, tokens: int) -> Run:
    from .models import SupraCache, SupraConfig
    from .models.attention import SupraLinearAttention

    config = SupraConfig(
        vocab_size=8,
        hidden_size=H * D,
        num_hidden_layers=1,
        num_attention_heads=H,
        num_key_value_heads=G,
        **fields,
    )
    hidden = normal(1, tokens, H * D).requires_grad_()
    layer = SupraLinearAttention(config, 0).to(hidden.device, hidden.dtype)
    layer.backend = backend
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(normal(*parameter.shape, size=parameter.shape[-1] ** -0.5))
    d_output = normal(1, tokens, H * D)
    frequencies = 1e4 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = (torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies).repeat(1, 2)[None].to(hidden)
    place = angles.cos(), angles.sin()

    def run() -> list[Tensor]:
        output, _ = layer(hidden, place)
        gradients = torch.autograd.grad(output, [hidden, *layer.parameters()], d_output)
        cache = SupraCache(config)
        with torch.no_grad():
            for part in (slice(0, -1), slice(-1, None)):
                last, _ = layer(hidden[:, part], (place[0][:, part], place[1][:, part]), cache=cache)
        return [output, last, *gradients]

    return run


def _step(backend: str, normal: Normal, tokens: int) -> Run:
    q, k, v = normal(STEP_ROWS, H, D), normal(STEP_ROWS, G, D, size=D**-0.5), normal(STEP_ROWS, G, D)
    state, log_decay = normal(STEP_ROWS, H, D, D, of=torch.float32), _decay(normal)
    return lambda: list(linear_attention_step(q, k, v, state, log_decay, scale=D**-0.5, backend=backend))


def _window(backend: str, normal: Normal, tokens: int) -> Run:
    inputs = [x.requires_grad_() for x in _layer(normal, tokens)]
    d_output = normal(1, tokens, H, D)

    def run() -> list[Tensor]:
        q, k, v = inputs
        output, lse = window_attention(q, k, v, window=WINDOW, scale=1.0, backend=backend)
        return [output, lse, *torch.autograd.grad(output, inputs, d_output)]

    return run


CALLS: dict[str, Callable[[str, Normal, int], Run]] = {
    "forward": _forward, "backward": _backward, "decay per token": _gated, "step": _step, "window": _window,
    **{name: functools.partial(_model_layer, fields) for name, fields in LAYERS.items()},
}  # fmt: skip


def _error(got: list[Tensor], exact: list[Tensor]) -> float:
    """The largest difference relative to each tensor's largest entry; NaN where a result holds one."""
    errors = [
        (a.double() - b.double()).abs().max() / b.double().abs().max()
        for a, b in zip(got, exact, strict=True)
    ]
    return float(torch.stack(errors).max())


def _versions() -> dict[str, str]:
    versions = {"supra": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _machine() -> dict[str, str]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "GPU": ", ".join(gpus) or "none that torch sees",
        "CPU": f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "bfloat16 matrix units (AMX)": "yes" if torch.cpu._is_amx_tile_supported() else "no",
    }
