"""What a stage trains: chooses the parameters, wraps projections in LoRA, and folds LoRA away again."""

import warnings
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from supra.config import Lora, Stage
from supra.errors import UserError
from supra.models import SupraForCausalLM, is_new_parameter
from supra.train.teacher import detach_from_teacher


@dataclass
class Trainable:
    """The parameters of one stage, by their names in the student, and its adapters if any."""

    parameters: dict[str, nn.Parameter]
    adapters: PeftModel | None

    def merge(self) -> None:
        """Fold the adapters into the weights they adapt; the teacher keeps the tensors it shares."""
        if self.adapters is not None:
            # safe_merge adds in a copy and points the weight to it: what the teacher holds stays as it was.
            self.adapters.merge_and_unload(safe_merge=True)
            self.adapters = None


def check_trainable(stage: Stage, student: SupraForCausalLM) -> None:
    """Raise a UserError if the model has nothing of the kind that the stage trains."""
    field = f"stages.{stage.name}.trainable = {stage.trainable}"
    if stage.trainable != "all" and not student.config.num_linear_layers:
        raise UserError(field, "the model has no linear layer", "Convert at least one layer.")
    if stage.trainable == "new" and not any(is_new_parameter(name) for name, _ in student.named_parameters()):
        mend = "Convert it with a feature map that has weights, or train adapters or all."
        raise UserError(field, "the model has no new parameter", mend)


def enter_stage(
    stage: Stage, student: SupraForCausalLM, teacher: SupraForCausalLM | None, seed: int
) -> Trainable:
    """Freeze everything, then open what the stage trains."""
    student.requires_grad_(False)
    adapters = None
    if stage.trainable == "adapters":
        adapters = _add_lora(stage.lora or Lora(), student, seed)
    for name, parameter in student.named_parameters():
        new = is_new_parameter(name)
        is_lora = ".lora_" in name
        if stage.trainable == "all" or is_lora or (new and stage.train_new):
            parameter.requires_grad_(True)
    parameters = {name: p for name, p in student.named_parameters() if p.requires_grad}
    if stage.trainable == "all" and teacher is not None:
        detach_from_teacher(parameters, teacher)
    return Trainable(parameters, adapters)


def _add_lora(lora: Lora, student: SupraForCausalLM, seed: int) -> PeftModel:
    """Wrap the projections of the linear layers in place; their weights' names gain `.base_layer`."""
    layers = [i for i, kind in enumerate(student.config.layer_types or []) if kind == "linear_attention"]
    targets = [f"model.layers.{i}.self_attn.{target}" for i in layers for target in lora.targets]
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # annotated int, used as a factor
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft probes a name that transformers has deprecated
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        torch.manual_seed(seed)
        wrapped = get_peft_model(student, config)
    assert isinstance(wrapped, PeftModel)
    return wrapped
