"""What is installed, what will really run, and whether it computes the right thing on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from dataclasses import asdict, dataclass, field

import torch

from supra_kernels import available_backends, linear_attention, resolve_backend

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
# A backend's error against the fp64 reference may be this many times the fp32 reference's own error.
TOLERANCE_RATIO = 2.0


@dataclass
class BackendCheck:
    """One backend on this machine: either why it cannot run, or its error and speed against the reference."""

    backend: str
    status: str
    max_error: float | None = None
    reference_error: float | None = None
    milliseconds: float | None = None
    reference_milliseconds: float | None = None

    @property
    def passed(self) -> bool:
        """True where the backend cannot run here, or runs within tolerance."""
        if self.max_error is None or self.reference_error is None:
            return True
        return self.max_error <= TOLERANCE_RATIO * max(self.reference_error, 1e-7)


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
        checks = Table(
            "backend",
            "status",
            "max error",
            "reference's",
            "ms",
            "reference's ms",
            title="kernels, fp32, T = 1024",
        )
        for check in self.backends:
            numbers = [
                check.max_error,
                check.reference_error,
                check.milliseconds,
                check.reference_milliseconds,
            ]
            shown = ["–" if number is None else f"{number:.3g}" for number in numbers]
            verdict = check.status if check.passed else "WRONG RESULT"
            checks.add_row(check.backend, verdict, *shown)
        return Group(facts, checks)


def examine() -> Examination:
    """Run every available backend against the fp64 reference, forward and backward, at SmolLM2's layer shape."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = Examination(_versions(), _machine(), resolve_backend("auto", torch.device(device)))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1024, 9, 64), (1, 1024, 3, 64), (1, 1024, 3, 64)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) / 8 for shape in shapes]
    log_decay = -torch.exp2(-torch.arange(1, 10, dtype=torch.float64))
    exact, _ = _run("reference", inputs, log_decay, device, torch.float64)
    rounded, reference_ms = _run("reference", inputs, log_decay, device, torch.float32)
    for backend, status in available_backends().items():
        check = BackendCheck(backend, status)
        if status == "available":
            got, check.milliseconds = _run(backend, inputs, log_decay, device, torch.float32)
            check.max_error, check.reference_error = _error(got, exact), _error(rounded, exact)
            check.reference_milliseconds = reference_ms
        result.backends.append(check)
    return result


def _run(
    backend: str, inputs: list[torch.Tensor], log_decay: torch.Tensor, device: str, dtype: torch.dtype
) -> tuple[list[torch.Tensor], float]:
    """Output and gradients, and the fastest of three times in milliseconds."""
    best = float("inf")
    for _ in range(3):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in inputs)
        start = time.perf_counter()
        output, _ = linear_attention(q, k, v, log_decay.to(device, dtype), backend=backend)
        gradients = torch.autograd.grad(output.sum(), (q, k, v))
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return [output.detach(), *gradients], best * 1000


def _error(got: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest difference relative to each tensor's largest entry."""
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, exact, strict=True))


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
