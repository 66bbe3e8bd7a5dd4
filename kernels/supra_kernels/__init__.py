"""Linear attention operators: one public API, several backends (see kernels/README.md)."""

from supra_kernels.autograd import (
    available_backends,
    fused_operators,
    linear_attention,
    linear_attention_step,
    resolve_backend,
    window_attention,
)
from supra_kernels.errors import BackendError

__all__ = [
    "BackendError",
    "available_backends",
    "fused_operators",
    "linear_attention",
    "linear_attention_step",
    "resolve_backend",
    "window_attention",
]
