"""Triton kernels for GPUs: chunked linear attention, its one-token step, and window attention."""
