"""What the launchers would launch: the operators are called with every kernel replaced by a recorder.

So the compiler is shown exactly the specialisations that run (types, constants, warps), and a kernel that somebody adds
is never forgotten. Works without a GPU; results of a recorded call are not computed.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One specialisation of a kernel: each argument's type or constant value, and the compiler's options.

    `signature` holds "*bf16", "i32", "fp32" or "constexpr"; `aligned` the positions of arguments divisible by 16.
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def source(self) -> Any:
        """What `triton.compile` takes."""
        attrs = {(position,): [["tt.divisibility", 16]] for position in self.aligned}
        return triton.compiler.ASTSource(
            fn=self.kernel, signature=dict(self.signature), constexprs=dict(self.constants), attrs=attrs
        )


def _launch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    signature, constants, aligned = [], [], []
    for position, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature.append((parameter.name, "constexpr"))
            constants.append((parameter.name, value))
        elif isinstance(value, torch.Tensor):
            signature.append((parameter.name, "*" + TYPES[value.dtype]))
            aligned.append(position)
        elif isinstance(value, float):
            signature.append((parameter.name, "fp32"))
        elif value == 1:  # Triton makes a constant of it as well
            signature.append((parameter.name, "constexpr"))
            constants.append((parameter.name, 1))
        else:
            signature.append((parameter.name, "i32"))
            if value % 16 == 0:
                aligned.append(position)
    chosen = tuple((name, given[name]) for name in OPTIONS if name in given)
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), chosen)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect every launch in the block instead of making it."""
    launches: list[Launch] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(_launch(self, arguments, options))

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", record):
        yield launches
