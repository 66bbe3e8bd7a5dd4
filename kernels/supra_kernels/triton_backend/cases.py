"""What the compiler must accept: each file of kernels lists its specialisations, and one report compiles them all."""

from dataclasses import dataclass, field
from typing import Any

import torch

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
}


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel.

    `signature` names every argument's type ("*bf16", "i32", "constexpr"), `constexprs` the values of the constant ones.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1
