"""Triton kernels for GPUs: chunked linear attention, its one-token step, and window attention."""

from supra_kernels.triton_backend.chunked import linear_attention
from supra_kernels.triton_backend.step import linear_attention_step
from supra_kernels.triton_backend.window import window_attention

__all__ = ["linear_attention", "linear_attention_step", "window_attention"]
