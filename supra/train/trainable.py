"""What a stage trains: chooses the parameters, wraps projections in LoRA, and folds LoRA away again."""

import difflib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import get_args

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from supra.config import Lora, Stage
from supra.config.optimizer import MlpProjection
from supra.errors import UserError
from supra.models import SupraForCausalLM, is_new_parameter
from supra.train.sharding import assign, is_sharded, whole
from supra.train.teacher import detach_from_teacher

_BEYOND_THE_LAYERS = ("model.norm.", "lm_head.")  # where the loss of hidden states has no gradient


@dataclass
class Trainable:
    """The parameters of one stage, by their names in the student, and its adapters if any."""

    parameters: dict[str, nn.Parameter]
    adapters: PeftModel | None

    def merge(self) -> None:
        """Fold the adapters into the weights they adapt; the teacher keeps the tensors it shares."""
        if self.adapters is None:
            return
        if is_sharded(self.adapters):
            _merge_into_shards(self.adapters)
            self.adapters.unload()
        else:
            # safe_merge adds in a copy and points the weight to it: what the teacher holds stays as it was.
            self.adapters.merge_and_unload(safe_merge=True)
        self.adapters = None


def _merge_into_shards(adapters: PeftModel) -> None:
    """Add each adapter's product to the rows of the weight that lie here."""
    for module in adapters.modules():
        if isinstance(module, LoraLayer):
            weight = module.get_base_layer().weight
            assert isinstance(weight, nn.Parameter)
            delta: Tensor = module.get_delta_weight("default")  # type: ignore[operator]  # its Linear has it
            assign(weight, whole(weight.detach()) + delta)


def check_trainable(stage: Stage, student: SupraForCausalLM) -> None:
    """Raise a UserError if the model lacks what the stage trains, or what its loss and dropout are about."""
    field = f"stages.{stage.name}.trainable = {stage.trainable}"
    if stage.trainable != "all" and not student.config.num_linear_layers:
        raise UserError(field, "the model has no linear layer", "Convert at least one layer.")
    if stage.trainable == "new" and not any(is_new_parameter(name) for name, _ in student.named_parameters()):
        mend = "Convert it with a feature map that has weights, or train adapters or all."
        raise UserError(field, "the model has no new parameter", mend)
    if stage.window_dropout is not None and not student.config.window:
        raise UserError(
            f"stages.{stage.name}.window_dropout",
            "the model has no window",
            "Leave it out, or convert with a window.",
        )
    if stage.loss == "attention_weights" and student.config.attention_norm != "denominator":
        raise UserError(
            f"stages.{stage.name}.loss = {stage.loss}",
            f"with {student.config.attention_norm} the model's attention weights do not sum to 1",
            "Convert it with norm: denominator, or use loss: attention.",
        )
    if stage.loss == "attention_weights" and student.config.decay == "gated":
        raise UserError(
            f"stages.{stage.name}.loss = {stage.loss}",
            "a gated decay is made from each token's hidden state, which this loss does not read",
            "Use loss: attention.",
        )
    names = [name for name, _ in student.named_parameters()]
    if stage.trainable == "adapters":
        names += adapter_names(stage.lora or Lora(), student)
    trained_names(stage, names)


def trained_names(stage: Stage, names: Iterable[str]) -> set[str]:
    """Those of a student's parameter names, its adapters' among them, that the stage trains.

    Raises:
        UserError: a pattern of `train_only` or `freeze` matches nothing, or they leave nothing.
    """
    out_of_reach = _BEYOND_THE_LAYERS if stage.loss == "hidden" else ()
    of_kind = [
        name
        for name in names
        if not name.startswith(out_of_reach)
        and (stage.trainable == "all" or ".lora_" in name or (is_new_parameter(name) and stage.train_new))
    ]
    chosen = _matching(stage, "train_only", of_kind) if stage.train_only else set(of_kind)
    chosen -= _matching(stage, "freeze", of_kind)
    if not chosen:
        field = f"stages.{stage.name}"
        raise UserError(
            field, "train_only and freeze leave nothing to train", "Widen one or narrow the other."
        )
    return chosen


def _matching(stage: Stage, field: str, names: list[str]) -> set[str]:
    """The names that any pattern of the field matches."""
    matched: set[str] = set()
    for pattern in getattr(stage, field):
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise UserError(
                f"stages.{stage.name}.{field} = {pattern}",
                f"it matches no parameter of trainable: {stage.trainable}",
                f"Nearest are {', '.join(difflib.get_close_matches(pattern, names, n=3, cutoff=0))}.",
            )
        matched |= found
    return matched


def enter_stage(
    stage: Stage, student: SupraForCausalLM, teacher: SupraForCausalLM | None, seed: int
) -> Trainable:
    """Freeze everything, then open what the stage trains."""
    student.requires_grad_(False)
    adapters = None
    if stage.trainable == "adapters":
        adapters = _add_lora(stage.lora or Lora(), student, seed)
    named = dict(student.named_parameters())
    chosen = trained_names(stage, named)
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
    parameters = {name: p for name, p in named.items() if name in chosen}
    if stage.trainable == "all" and teacher is not None:
        detach_from_teacher(parameters, teacher)
    return Trainable(parameters, adapters)


def adapter_names(lora: Lora, student: SupraForCausalLM) -> list[str]:
    """Names that the adapters' parameters will have in the student."""
    parts = ("lora_A", "lora_B", *(("lora_magnitude_vector",) if lora.dora else ()))
    return [f"{target}.{part}.default.weight" for target in _lora_targets(lora, student) for part in parts]


def _lora_targets(lora: Lora, student: SupraForCausalLM) -> list[str]:
    layers = [i for i, kind in enumerate(student.config.layer_types or []) if kind == "linear_attention"]
    blocks = {target: "mlp" if target in get_args(MlpProjection) else "self_attn" for target in lora.targets}
    return [f"model.layers.{i}.{block}.{target}" for i in layers for target, block in blocks.items()]


def _add_lora(lora: Lora, student: SupraForCausalLM, seed: int) -> PeftModel:
    """Wrap the projections of the linear layers in place; their weights' names gain `.base_layer`."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # annotated int, used as a factor
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        target_modules=_lora_targets(lora, student),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft probes a name that transformers has deprecated
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        torch.manual_seed(seed)
        wrapped = get_peft_model(student, config)
    assert isinstance(wrapped, PeftModel)
    return wrapped
