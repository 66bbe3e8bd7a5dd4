"""What a run needs at least, from its recipe and the model's configuration alone: refused before anything is loaded.

The model is built without memory (torch's meta device) and taken through the stages, so that the tensors of every
checkpoint are counted as they will be written.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from supra.config import Recipe
from supra.errors import UserError
from supra.models import SupraForCausalLM, is_new_parameter
from supra.train.checkpoint import KEPT
from supra.train.export import exported_bytes
from supra.train.moments import moments_bytes
from supra.train.narrow import narrowed_bytes
from supra.train.sharding import is_sharded_name
from supra.train.teacher import without_adapters
from supra.train.trainable import enter_stage

_FP32_BYTES = 4
_ROW_BYTES = 300  # of metrics.jsonl, per step
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class StageBudget:
    """`memory_bytes`: weights, gradients and moments while it trains; `checkpoint_bytes`: one inside the stage.

    `end_checkpoint_bytes` is that of the checkpoint after it, None where there is none.
    """

    num_trainable_parameters: int
    memory_bytes: int
    checkpoint_bytes: int
    num_checkpoints: int
    end_checkpoint_bytes: int | None
    scratch_bytes: int = 0  # of disk, that a layerwise stage takes until it ends


@dataclass(frozen=True)
class Budget:
    """`peak_disk_bytes`: the run folder at its largest; `disk_bytes`: what is left of it at the end."""

    num_parameters: int
    stages: tuple[StageBudget, ...]
    export_bytes: int
    peak_disk_bytes: int
    disk_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Weights, gradients and moments of the largest stage: activations come on top."""
        return max(stage.memory_bytes for stage in self.stages)


def make_budget(
    recipe: Recipe,
    skeleton: SupraForCausalLM,
    model_dir: Path,
    *,
    num_processes: int = 1,
    hidden_states_dtype: torch.dtype = torch.float32,
) -> Budget:
    """The budget of all stages for `skeleton`, the model on the meta device; memory is that of one process."""
    export_bytes = exported_bytes(model_dir)
    sizes = {name: p.numel() * _FP32_BYTES for name, p in skeleton.named_parameters()}
    sharded = {name for name in sizes if recipe.strategy == "fsdp2" and is_sharded_name(name)}
    held = {name: size / (num_processes if name in sharded else 1) for name, size in sizes.items()}
    narrowed = narrowed_bytes(skeleton, recipe.teacher_weights)
    ever_trained: set[str] = set()
    apart: set[str] = set(sharded)  # what the student does not share with the teacher, or no longer
    stages = []
    for index, stage in enumerate(recipe.stages):
        with torch.device("meta"):
            trainable = enter_stage(stage, skeleton, None, 0)
        added = sum(p.numel() for name, p in trainable.parameters.items() if ".lora_" in name) * _FP32_BYTES
        plain = {without_adapters(name) for name in trainable.parameters if ".lora_" not in name}
        trained = sum(sizes[name] for name in plain) + added
        moments = sum(
            moments_bytes(p.numel(), stage.optimizer.moments) for p in trainable.parameters.values()
        )
        copies = moments / trained + (stage.ema is not None)  # of a trained weight, beside its gradient
        ever_trained |= plain
        if stage.trainable == "all":
            apart |= {name for name in plain if not is_new_parameter(name)}
        has_teacher = any(later.loss != "ce" for later in recipe.stages[index:])
        teacher = sum(held[name] for name in apart - narrowed.keys()) + sum(narrowed.values())
        teacher = teacher if has_teacher else 0
        training = (sum(held[name] for name in plain) + added) * (1 + copies)
        memory = sum(held.values()) + added + teacher + training
        scratch = 0
        if stage.layerwise:
            memory = _largest_layer_bytes(sizes, 1 + copies)
            scratch = 2 * stage.num_steps * stage.tokens_per_step * skeleton.config.hidden_size
            scratch *= hidden_states_dtype.itemsize
        inside = sum(sizes[name] for name in ever_trained) + added + round(trained * copies)
        kept = False
        if trainable.adapters is not None:
            kept = index == len(recipe.stages) - 1 and recipe.adapters == "keep"
            wrapped = {n for n, _ in skeleton.named_parameters() if n.endswith(".base_layer.weight")}
            trainable.adapters.unload()
            export_bytes += added if kept else 0
            merged = set() if kept else {without_adapters(name) for name in wrapped}
            ever_trained, apart = ever_trained | merged, apart | merged
        stages.append(
            StageBudget(
                num_trainable_parameters=trained // _FP32_BYTES,
                memory_bytes=round(memory),
                checkpoint_bytes=0 if stage.layerwise else inside,
                num_checkpoints=0 if stage.layerwise else -(-stage.num_steps // stage.checkpoint_every_steps),
                end_checkpoint_bytes=None if kept else sum(sizes[name] for name in ever_trained),
                scratch_bytes=scratch,
            )
        )
    num_parameters = sum(sizes.values()) // _FP32_BYTES
    rows = _ROW_BYTES * sum(stage.num_steps for stage in recipe.stages)
    if recipe.stages[0].layerwise:
        rows *= skeleton.config.num_linear_layers
    peak, left = _disk(stages, export_bytes)
    return Budget(num_parameters, tuple(stages), export_bytes, peak + rows, left + rows)


def _largest_layer_bytes(sizes: dict[str, int], copies: float) -> float:
    """A layer's weights, and gradients and moments of what is new in it."""
    layers: dict[str, float] = {}
    for name, num_bytes in sizes.items():
        if ".layers." in name:
            layer = name.split(".layers.")[1].split(".")[0]
            layers[layer] = layers.get(layer, 0) + num_bytes * (1 + copies * is_new_parameter(name))
    return max(layers.values())


def _disk(stages: list[StageBudget], export_bytes: int) -> tuple[int, int]:
    """Largest and last size of a folder that holds the newest checkpoints, then the exported model."""
    written: list[int] = []
    for stage in stages:
        written += [stage.checkpoint_bytes] * min(stage.num_checkpoints, KEPT + 1)
        written += [] if stage.end_checkpoint_bytes is None else [stage.end_checkpoint_bytes]
    # The one that is written lies beside those kept until it is whole.
    peaks = [sum(written[max(0, n - KEPT) : n + 1]) for n in range(len(written))]
    left = sum(written[-KEPT:]) + export_bytes
    # A layerwise stage is the first, and lets go of its hidden states when its checkpoint is there.
    scratch = stages[0].scratch_bytes + 2 * (stages[0].end_checkpoint_bytes or 0)
    return max([*peaks, left, scratch if stages[0].scratch_bytes else 0]), left


def check_disk(budget: Budget, run_dir: Path) -> None:
    """Refuse a run whose folder would outgrow the disk (what it holds already, on resume, counts as there).

    Raises:
        UserError: see above.
    """
    used = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
    needed, free = budget.peak_disk_bytes - used, free_disk_bytes(run_dir)
    if needed > free:
        raise UserError(
            str(run_dir),
            f"the run needs {size(needed)} of disk (checkpoints and model) where {size(free)} are free",
            "Free some space, choose another folder with -o, or train adapters instead of all.",
        )


def check_memory(needed_bytes: int, device: torch.device, what: str) -> None:
    """Refuse what does not fit in the memory that `device` has available now.

    Raises:
        UserError: see above.
    """
    available = available_memory_bytes(device)
    if needed_bytes > available:
        raise UserError(
            "memory",
            f"{what} need {size(needed_bytes)} where {size(available)} are available on {device}",
            "Lower micro_batch_size or length, train adapters instead of all, or take a smaller model.",
        )


def free_disk_bytes(run_dir: Path) -> int:
    """Free space where `run_dir` is or will be."""
    return shutil.disk_usage(existing_folder(run_dir)).free


def existing_folder(run_dir: Path) -> Path:
    """`run_dir`, or the nearest folder above it that exists."""
    return next(path for path in [run_dir.resolve(), *run_dir.resolve().parents] if path.is_dir())


def available_memory_bytes(device: torch.device) -> int:
    """What one process can have: of the GPU, or of the machine's (or its container's) memory, shared by those here."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = psutil.virtual_memory().available
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    limited = available if limit == "max" else min(available, int(limit))
    return limited // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def size(num_bytes: int) -> str:
    """Bytes in the unit that a reader would use."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"
