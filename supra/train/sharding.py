"""FSDP2: the teacher's weights of every layer lie in shards over the processes, each gathered while its block runs.

The same functions run on GPUs and on CPUs. What is small stays whole in every process: norms, embedding and head, the
new parameters, and adapters. So nothing that trains is sharded but in stages that train `all`, and every loss may call
a layer's attention on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from supra.models import SupraConfig, SupraForCausalLM, is_new_parameter
from supra.models.precision import SupraRotaryEmbedding
from supra.weights.reader import TensorReader, tensor_places


def shard(model: SupraForCausalLM, mesh: DeviceMesh) -> SupraForCausalLM:
    """Shard attention and MLP of every layer over `mesh`, in place; gradients of shards are sums, not means."""
    for unit in _units(model):
        new = {parameter for name, parameter in unit.named_parameters() if is_new_parameter(name)}
        fully_shard(unit, mesh=mesh, ignored_params=new)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other way to divide by one
    return model


def load_sharded(
    model_dir: Path, config: SupraConfig, device: torch.device, backend: str
) -> SupraForCausalLM:
    """The student in fp32, every process reading only the rows of its shards."""
    student = shard(_outline(config), init_device_mesh(device.type, (torch.distributed.get_world_size(),)))
    reader = TensorReader(tensor_places(model_dir), torch.float32)
    tensors: dict[str, Tensor] = {}
    for name, parameter in student.named_parameters():
        if isinstance(parameter, DTensor):
            rows, start = _own_rows(parameter)
            tensors[name] = _as_shard(reader.rows(name, start, rows).to(device), parameter)
        else:
            tensors[name] = reader.whole(name).to(device)
    _take(student, tensors, config, device)
    student.set_backend(backend)
    return student


def sharded_teacher(student: SupraForCausalLM, config: SupraConfig) -> SupraForCausalLM:
    """A frozen network of `config` with the student's weights: shards of its own, the rest shared."""
    shards = [parameter for parameter in student.parameters() if isinstance(parameter, DTensor)]
    teacher = shard(_outline(config), shards[0].device_mesh)
    ours = dict(student.named_parameters())
    tensors = {}
    for name, _ in teacher.named_parameters():
        value = ours[name].detach()
        tensors[name] = _as_shard(value.to_local().clone(), value) if isinstance(value, DTensor) else value
    _take(teacher, tensors, config, student.device)
    return teacher


def is_sharded(model: nn.Module) -> bool:
    """Whether the model's layers lie in shards."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def is_sharded_name(name: str) -> bool:
    """Whether `shard` would shard the parameter of this name."""
    return (".self_attn." in name or ".mlp." in name) and not is_new_parameter(name)


def num_sharded_units(model: SupraForCausalLM) -> int:
    """How many blocks really are sharded."""
    return sum(isinstance(unit, FSDPModule) for unit in _units(model))


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, whether it is sharded or not; every process must ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole of each tensor in the first process, sharded ones on the CPU so that a device holds one at a time.

    Every process must ask at the same time; in the others a sharded tensor stays as it is.
    """
    found = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor)
        sharded = isinstance(tensor, DTensor)
        found[name] = gathered.cpu() if sharded and torch.distributed.get_rank() == 0 else tensor
    return found


def assign(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter the value of a whole tensor; of a sharded one, each process takes its rows."""
    if isinstance(parameter, DTensor):
        rows, start = _own_rows(parameter)
        with torch.no_grad():
            parameter.to_local().copy_(value[start : start + rows])
    else:
        # In new memory: a teacher that shares the old memory keeps what it had.
        parameter.data = value.to(parameter.device, parameter.dtype)


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """A whole tensor as a companion of `parameter` (its moments): on its device, and sharded where it is."""
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    rows, start = _own_rows(parameter)
    return _as_shard(value[start : start + rows].to(parameter.device), parameter)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm together is at most `max_norm`; return the norm before."""
    found = [parameter for parameter in parameters if parameter.grad is not None]
    groups: list[list[nn.Parameter]] = [
        [p for p in found if isinstance(p, DTensor)],
        [p for p in found if not isinstance(p, DTensor)],
    ]
    norms = [
        whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups
    ]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _units(model: SupraForCausalLM) -> Iterator[nn.Module]:
    """The blocks that are gathered at once: a loss may call a layer's attention alone, so it is one of them."""
    for layer in model.model.layers:
        yield layer.self_attn
        yield layer.mlp


def _outline(config: SupraConfig) -> SupraForCausalLM:
    with torch.device("meta"):
        return SupraForCausalLM(config)


def _take(
    model: SupraForCausalLM, tensors: dict[str, Tensor], config: SupraConfig, device: torch.device
) -> None:
    """Put the tensors in place of an outline's; what is computed from the configuration is computed again."""
    model.load_state_dict(tensors, assign=True, strict=not config.tie_word_embeddings)
    model.tie_weights()
    model.model.rotary_emb = SupraRotaryEmbedding(config=config).to(device)
    model.requires_grad_(False).eval()


def _own_rows(parameter: DTensor) -> tuple[int, int]:
    """(number, first) of the rows of a sharded parameter that lie in this process."""
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return shape[0], offset[0]


def _as_shard(local: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride(), run_check=False
    )
