"""Launches go to the tensors' own GPU, whichever is current."""

import contextlib

import torch


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current GPU, as Triton launches on that one; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
