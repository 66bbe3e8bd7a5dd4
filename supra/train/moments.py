"""AdamW's moments: how many bytes they take, and their way to a checkpoint and back, in fp32 or in 8 bits."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from supra.train.sharding import like

# bitsandbytes' blockwise AdamW (arXiv 2110.02861, section 2.1): one fp32 scale for so many moments, and weights with
# fewer elements than this keep theirs in fp32.
BLOCK_ELEMENTS, FEWEST_ELEMENTS = 256, 4096
# What each step finds anew: the tables from codes to values are the same for every weight.
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}


def moments_bytes(numel: int, moments: Literal["float32", "int8"]) -> int:
    """Bytes of both moments of a weight with `numel` elements."""
    if moments == "float32" or numel < FEWEST_ELEMENTS:
        return 8 * numel
    return 2 * (numel + 4 * -(-numel // BLOCK_ELEMENTS))


def moments_of(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """The optimiser's state by parameter name: its tensors, and the step counter as one."""
    return {
        name: {key: _as_tensor(value) for key, value in optimizer.state[p].items() if key not in _TABLES}
        for name, p in parameters.items()
        if p in optimizer.state
    }


def restore_moments(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    moments: dict[str, dict[str, Tensor]],
) -> None:
    """Put back what `moments_of` gave, where and as each parameter lies (step counters stay on the CPU)."""
    tables = getattr(optimizer, "name2qmap", None)
    for name, saved in moments.items():
        parameter = parameters[name]
        state: dict[str, Any] = {
            key: tensor if key == "step" else like(parameter, tensor) for key, tensor in saved.items()
        }
        if tables is not None:
            state["step"] = int(state["step"])
            if "absmax1" in state:
                state |= {key: tables[table].to(parameter.device) for key, table in _TABLES.items()}
        optimizer.state[parameter] = state


def _as_tensor(value: Tensor | int) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)
