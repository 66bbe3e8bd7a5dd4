"""What this backend fuses beyond the public operators: maps, RoPE and norm around a sequence, and around one token."""

from supra_kernels.triton_backend.chunked import LARGEST_NORM, Front, Norm, linear_attention
from supra_kernels.triton_backend.step import StepPlan, StepWeights, decode_step, why_not_fused

__all__ = [
    "LARGEST_NORM",
    "Front",
    "Norm",
    "StepPlan",
    "StepWeights",
    "decode_step",
    "linear_attention",
    "why_not_fused",
]
