"""Which device and which arithmetic a run uses, said aloud."""

import ctypes
import os
import platform
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from supra.config import Recipe
from supra.errors import UserError


class Precision(NamedTuple):
    """`dtype` is that of matrix products (autocast); weights, gradients and moments stay fp32."""

    dtype: torch.dtype
    why: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} ({self.why})"


def resolve_device(device: str) -> torch.device:
    """`auto`: a GPU if there is one.

    Raises:
        UserError: a GPU is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda", "torch sees no GPU here", "Use --set device=cpu, or auto.")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_precision(dtype: str, device: torch.device) -> Precision:
    """`auto`: bfloat16 where the hardware multiplies it natively (AMX on a CPU, Ampere or later on a GPU)."""
    if dtype != "auto":
        return Precision(getattr(torch, dtype), "chosen")
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return (
            Precision(torch.bfloat16, "auto: native here")
            if native
            else Precision(torch.float32, "auto: no bf16")
        )
    # torch names no public check for AMX; without the tiles bf16 is slower than fp32 on a CPU.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return Precision(torch.bfloat16, "auto: AMX") if has_amx else Precision(torch.float32, "auto: no AMX")


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks instead of giving them back to the system.

    Each large temporary is otherwise mapped and zeroed anew: a third of a training step on a CPU (measured). The
    settings are glibc's M_MMAP_THRESHOLD (-3) and M_TRIM_THRESHOLD (-1); other C libraries are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)
        libc.mallopt(-1, (1 << 31) - 1)


def make_accelerator(recipe: Recipe) -> tuple[Accelerator, Precision]:
    """Accelerate's view of this process: device, autocast, accumulation, and the other processes.

    Raises:
        UserError: the device is not here, or not all processes that were launched take part.
    """
    device = resolve_device(recipe.device)
    if device.type == "cpu":
        keep_freed_memory()
    precision = resolve_precision(recipe.dtype, device)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.strategy == "fsdp2" and launched == 1:
        raise UserError(
            "strategy fsdp2",
            "one process has nobody to share the model with",
            "Start several by `torchrun --nproc-per-node N -m supra train …`, or use --set strategy=ddp",
        )
    if launched > 1 and device.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = (
            "true"  # else Accelerate looks for GPUs and each process stays alone
        )
    # Accelerate keeps the first Accelerator's settings for the whole process; a second run may have others.
    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = "bf16" if precision.dtype == torch.bfloat16 else "no"
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=mixed)
    if accelerator.num_processes != launched:
        raise UserError(
            f"WORLD_SIZE {launched}",
            f"Accelerate sees {accelerator.num_processes} of the processes launched",
            "Start them by `torchrun --nproc-per-node N -m supra train …`, N at most the number of GPUs.",
        )
    return accelerator, precision
