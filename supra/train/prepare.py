"""All that a run needs, checked before anything is loaded and loaded before anything is written."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig

from supra.checks import require_model_folder
from supra.config import Conversion, Recipe
from supra.errors import SupraError, UserError
from supra.loading import load_model
from supra.models import SupraConfig, SupraForCausalLM
from supra.train.budget import Budget, available_memory_bytes, check_disk, check_memory, make_budget
from supra.train.parallel import Processes
from supra.train.precision import Precision, make_accelerator
from supra.train.tokens import TokenStore, load_tokens
from supra.train.trackers import require_trackers
from supra.train.tracking import Reporter
from supra.train.trainable import check_trainable


@dataclass
class Prepared:
    """All that a run needs, checked and loaded; nothing is written yet but the token cache."""

    recipe: Recipe
    model_dir: Path
    student: SupraForCausalLM
    tokenizer: Any
    accelerator: Accelerator
    precision: Precision
    backend: str
    stores: list[TokenStore]  # one a stage
    budget: Budget
    available_memory_bytes: int  # before the model was loaded
    model_seconds: float  # to load it

    @property
    def processes(self) -> Processes:
        return Processes(self.accelerator)

    @property
    def data_keys(self) -> dict[str, str]:
        return {stage.name: store.key for stage, store in zip(self.recipe.stages, self.stores, strict=True)}

    def describe(self) -> str:
        """One line naming what runs."""
        count = self.processes.count
        together = f"{count} processes · " if count > 1 else ""
        return (
            f"{together}device {self.accelerator.device} · dtype {self.precision} · backend {self.backend} · "
            f"attention {self.student.config._attn_implementation}"
        )


def prepare(recipe: Recipe, model_dir: Path, run_dir: Path, reporter: Reporter) -> Prepared:
    """Check that recipe, model and machine fit together, then load the model and the tokens.

    Raises:
        UserError: the model is not converted or not as the recipe says, the text is missing or too short, or the
            run needs more disk or memory than there is.
    """
    require_trackers(recipe)
    accelerator, precision = make_accelerator(recipe)
    config = read_config(model_dir)
    check_conversion(recipe.conversion, config)
    with torch.device("meta"):
        skeleton = SupraForCausalLM(config)
    for stage in recipe.stages:
        check_trainable(stage, skeleton)
    budget = make_budget(recipe, skeleton, model_dir)
    check_disk(budget, run_dir)
    available = available_memory_bytes(accelerator.device)
    check_memory(budget.memory_bytes, accelerator.device, "weights, gradients and moments")
    start = time.perf_counter()
    loaded = load_model(
        model_dir, device=str(accelerator.device.type), dtype="float32", backend=recipe.backend
    )
    seconds = time.perf_counter() - start
    stores = load_stores(recipe, loaded.tokenizer, accelerator, reporter)
    for stage, store in zip(recipe.stages, stores, strict=True):
        if len(store.tokens) < stage.length:
            raise UserError(
                f"stages.{stage.name}.length = {stage.length}",
                f"the text has {len(store.tokens)} tokens, less than one sequence",
                "Add text or lower the length.",
            )
        if store.tokens.max() >= config.vocab_size:
            raise UserError(
                str(model_dir), "its tokenizer has more tokens than the model", "Convert it again."
            )
    return Prepared(
        recipe, model_dir, loaded.model, loaded.tokenizer, accelerator, precision, loaded.backend, stores, budget,
        available, seconds,
    )  # fmt: skip


def load_stores(
    recipe: Recipe, tokenizer: Any, accelerator: Accelerator, reporter: Reporter
) -> list[TokenStore]:
    """The tokens of each stage; stages that read the same text share them.

    Raises:
        UserError: the text is missing, unreadable or empty.
    """
    datas = [stage.data or recipe.data for stage in recipe.stages]
    stores: list[TokenStore] = []
    for position, data in enumerate(datas):
        same = datas.index(data)
        with accelerator.main_process_first():  # the others find the cache it wrote
            stores.append(
                stores[same] if same < position else load_tokens(data, tokenizer, report=reporter.say)
            )
    return stores


def read_config(model_dir: Path) -> SupraConfig:
    """The configuration of a converted model.

    Raises:
        UserError: there is no model, or it is not a converted one.
        SupraError: its config.json is damaged.
    """
    require_model_folder(model_dir)
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise SupraError(
            str(model_dir), f"could not be loaded: {error}", "Convert the teacher again"
        ) from error
    if not isinstance(config, SupraConfig):
        raise UserError(str(model_dir), "it is not a converted model", "Run `supra convert` first.")
    return config


def check_conversion(conversion: Conversion, config: SupraConfig) -> None:
    """Raise a UserError that names each field in which the model differs from the recipe's conversion."""
    wanted = conversion.resolve()
    kept = tuple(i for i, kind in enumerate(config.layer_types or []) if kind != "linear_attention")
    pairs = {
        "feature_map": (wanted.feature_map, config.feature_map),
        "rope": (wanted.rope, config.rope_position),
        "decay": (wanted.decay, config.decay),
        "decay_shared": (wanted.decay_shared, config.decay_shared),
        "norm": (wanted.norm, config.attention_norm),
        "norm_affine": (wanted.norm_affine, config.group_norm_affine),
        "window": (wanted.window, config.window),
        "num_sink_tokens": (wanted.num_sink_tokens, config.num_sink_tokens),
        "keep_softmax": (wanted.keep_softmax, kept),
    }
    differing = [
        f"conversion.{name} is {a!r}, the model's is {b!r}" for name, (a, b) in pairs.items() if a != b
    ]
    if differing:
        raise UserError(
            "the model",
            f"it was not converted by this recipe: {'; '.join(differing)}",
            "Convert it with the recipe.",
        )
