"""The teacher as the same network with every layer softmax, made of the student's own tensors."""

import copy
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from supra.config import Recipe, TeacherWeights
from supra.models import SupraForCausalLM
from supra.train.narrow import narrow
from supra.train.sharding import is_sharded, sharded_teacher


def build_teacher(student: SupraForCausalLM, weights: TeacherWeights = "shared") -> SupraForCausalLM:
    """A frozen teacher that shares every tensor with `student` (one copy in memory) but those that are sharded.

    Must be called before the student trains anything but new parameters: what it shares is what it is. Where `weights`
    are not shared, those of its linear projections are copies of that width; the rest is shared all the same.

    Raises:
        UserError: they are to be int8 or nf4, and bitsandbytes is not installed.
    """
    config = copy.deepcopy(student.config)
    config.layer_types = list(config.teacher_layer_types or [])
    config.window = 0
    if is_sharded(student):
        return sharded_teacher(student, config)
    with torch.device("meta"):
        teacher = SupraForCausalLM(config)
    wanted = teacher.state_dict().keys()
    shared = {name: tensor for name, tensor in student.state_dict().items() if name in wanted}
    teacher.load_state_dict(shared, assign=True)
    teacher.tie_weights()
    teacher.model.rotary_emb = student.model.rotary_emb  # its frequencies are a buffer outside the state dict
    narrow(teacher, weights)
    return teacher.requires_grad_(False).eval()


def moved_teacher(recipe: Recipe, model_dir: Path) -> str | None:
    """What to tell a user whose recipe learns from a teacher that an earlier run has moved away from the original."""
    origin = model_dir / "supra.json"
    earlier = json.loads(origin.read_text(encoding="utf-8")).get("training") if origin.is_file() else None
    moved = [stage["name"] for stage in (earlier or {}).get("stages", ()) if stage["trainable"] != "new"]
    learning = [stage.name for stage in recipe.stages if stage.loss != "ce"]
    if earlier is None or not moved or not learning:
        return None
    return (
        f"the teacher of {', '.join(learning)} is {model_dir} with softmax attention, and run {earlier['recipe']} has "
        f"moved its weights in {', '.join(moved)}: it is not the model that was converted. To distil from that one, "
        "train all stages in one recipe, from the folder that `supra convert` wrote"
    )


def detach_from_teacher(parameters: dict[str, nn.Parameter], teacher: SupraForCausalLM) -> None:
    """Give each parameter that shares the teacher's memory its own, before it trains in place."""
    shared = {tensor.data_ptr() for tensor in teacher.parameters() if not isinstance(tensor, DTensor)}
    for parameter in parameters.values():
        if (
            not isinstance(parameter, DTensor) and parameter.data_ptr() in shared
        ):  # shards are the teacher's own
            parameter.data = parameter.data.clone()


def without_adapters(name: str) -> str:
    """A parameter's name as it is when no adapter wraps its layer."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
