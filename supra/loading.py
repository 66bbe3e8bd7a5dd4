"""Opening a model folder for use: the checks, device and dtype that every command shares."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from supra_kernels import BackendError

from .checks import require_dtype, require_model_folder
from .errors import SupraError, UserError

if TYPE_CHECKING:
    from .models import SupraForCausalLM


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what it runs on."""

    model: Any
    tokenizer: Any
    device: str
    dtype: str
    backend: str
    attention: str

    def describe(self) -> str:
        """One line naming what runs, for stderr."""
        return (
            f"device {self.device} · dtype {self.dtype} · backend {self.backend} · attention {self.attention}"
        )


def resolve_device(device: str) -> str:
    """`auto` is the first CUDA device if there is one, otherwise the CPU.

    Raises:
        UserError: a device that this machine does not have.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" or (device.startswith("cuda") and torch.cuda.is_available()):
        return device
    reason = "torch sees no GPU" if device.startswith("cuda") else "there is no such device"
    raise UserError(f"device {device!r}", reason, "Use --device cpu, or auto")


def load_model(
    path: Path, *, device: str = "auto", dtype: str = "float32", backend: str = "auto", tokenizer: bool = True
) -> Loaded:
    """Load a converted model, or a plain teacher, with its tokenizer.

    Raises:
        UserError: no model folder at `path`, an unknown dtype, device or backend.
        SupraError: files that do not hold a whole model (missing or unexpected tensors).
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from . import models

    # peft probes a deprecated name, and a recurrent model has no maximum length to be warned about.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # a bar for each of a demo's many loads drowns what matters

    require_dtype(dtype)
    require_model_folder(path)
    where = resolve_device(device)
    try:
        model: Any
        report: dict[str, Any]
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), output_loading_info=True, local_files_only=True
        )  # type: ignore[misc]
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise SupraError(str(path), f"could not be loaded: {error}", "Convert the teacher again") from error
    except SafetensorError as error:
        raise SupraError(
            str(path), f"holds a damaged safetensors file: {error}", "Copy or convert it again"
        ) from error
    lost = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
    if lost:
        raise SupraError(
            str(path), f"missing or unexpected tensors: {', '.join(lost[:5])}", "Convert it again"
        )
    model = model.to(where).eval()
    runs = "none"
    if isinstance(model, models.SupraForCausalLM):
        runs = choose_backend(model, backend, where)
    attention = model.config._attn_implementation
    return Loaded(model, load_tokenizer(path) if tokenizer else None, where, dtype, runs, attention)


def choose_backend(model: SupraForCausalLM, backend: str, device: str) -> str:
    """Set the kernel backend of a model that runs on `device`; the one that will run.

    Raises:
        UserError: it is unknown, or cannot run here or with the model's heads.
    """
    try:
        return model.set_backend(backend, device)
    except BackendError as error:
        raise UserError(
            f"backend {backend!r}", str(error), "See `supra doctor` for what runs here"
        ) from error


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        SupraError: there is none, or its files are damaged.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions on damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SupraError(
            f"{path}: the tokenizer", f"could not be loaded: {reason}", "Copy the teacher's files"
        ) from error
