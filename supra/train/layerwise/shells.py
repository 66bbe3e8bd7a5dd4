"""One layer of the student and of its teacher as models of their own, the rest left on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from supra.models import SupraConfig, SupraForCausalLM
from supra.models.precision import SupraRotaryEmbedding
from supra.train.layerwise.hidden_states import HiddenStates
from supra.weights.reader import TensorReader


class Passage(nn.Module):
    """In the place of the final norm: writes the layer's outputs [B, T, hidden] to `target`, one after the other."""

    def __init__(self, target: HiddenStates | None) -> None:
        super().__init__()
        self._target, self._next = target, 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self._target is not None:
            self._target.write(self._next, hidden_states)
            self._next += 1
        return hidden_states


def teacher_layer(
    config: SupraConfig, index: int, reader: TensorReader, device: torch.device
) -> SupraForCausalLM:
    """Layer `index` as the teacher has it, in fp32; embedding and final norm are the caller's to set."""
    types = [(config.teacher_layer_types or [])[index]]
    teacher = _shell(config, layer_types=types, teacher_layer_types=types, window=0, num_sink_tokens=0)
    _fill(teacher.model.layers[0], f"model.layers.{index}", reader, device)
    # Computed from the configuration, not stored: it would stay behind on the meta device.
    teacher.model.rotary_emb = SupraRotaryEmbedding(config=config).to(device)
    return teacher.requires_grad_(False).eval()


def student_layer(
    config: SupraConfig, index: int, teacher: SupraForCausalLM, reader: TensorReader, device: torch.device
) -> SupraForCausalLM:
    """The attention of layer `index` as the student has it: the teacher's projections shared, new tensors read."""
    types = (config.teacher_layer_types or [])[index]
    student = _shell(config, layer_types=["linear_attention"], teacher_layer_types=[types])
    theirs = dict(teacher.model.layers[0].self_attn.named_parameters())
    prefix = f"model.layers.{index}.self_attn"
    _fill(student.model.layers[0].self_attn, prefix, reader, device, shared=theirs)
    return student


def _shell(config: SupraConfig, **changes: Any) -> SupraForCausalLM:
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    for name, value in changes.items():
        setattr(one, name, value)
    with torch.device("meta"):
        return SupraForCausalLM(one)


def _fill(
    module: nn.Module,
    prefix: str,
    reader: TensorReader,
    device: torch.device,
    shared: dict[str, nn.Parameter] | None = None,
) -> None:
    tensors = {}
    for name, _ in module.named_parameters():
        known = (shared or {}).get(name)
        tensors[name] = reader.whole(f"{prefix}.{name}").to(device) if known is None else known.data
    module.load_state_dict(tensors, assign=True)
