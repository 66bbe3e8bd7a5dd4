"""All that a run needs, checked before anything is loaded and loaded before anything is written."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig

from supra.checks import require_model_folder
from supra.config import Conversion, Data, Recipe, Stage
from supra.errors import SupraError, UserError
from supra.loading import choose_backend, load_model, load_tokenizer
from supra.models import SupraConfig, SupraForCausalLM
from supra.train.bits import require_bitsandbytes
from supra.train.budget import Budget, available_memory_bytes, check_disk, check_memory, make_budget
from supra.train.data import derived_seed
from supra.train.mixture import MixedData, Mixture
from supra.train.parallel import Processes
from supra.train.precision import Precision, make_accelerator
from supra.train.sharding import load_sharded, num_sharded_units
from supra.train.streaming import TokenStream
from supra.train.teacher import moved_teacher
from supra.train.token_store import TokenStore
from supra.train.tokens import load_tokens
from supra.train.trackers import require_trackers
from supra.train.tracking import Reporter, read_metrics
from supra.train.trainable import check_trainable
from supra.weights.reader import tensor_places


@dataclass
class Prepared:
    """All that a run needs, checked and loaded; nothing is written yet but the token cache.

    `student` is without weights (on the meta device) until `load_student`, where the whole model is not needed first.
    """

    recipe: Recipe
    model_dir: Path
    student: SupraForCausalLM
    tokenizer: Any
    accelerator: Accelerator
    precision: Precision
    backend: str
    texts: list[MixedData]  # one a stage
    budget: Budget
    available_memory_bytes: int  # before the model was loaded
    model_seconds: float  # to load it

    @property
    def processes(self) -> Processes:
        return Processes(self.accelerator)

    @property
    def data_keys(self) -> dict[str, str]:
        return {
            stage.name: text.mixture.key for stage, text in zip(self.recipe.stages, self.texts, strict=True)
        }

    def load_student(self) -> None:
        """Load the weights, if they are not loaded yet.

        Raises:
            SupraError: they were to be sharded and are not.
        """
        if self.student.device.type != "meta":
            return
        start, device = time.perf_counter(), self.accelerator.device
        if self.recipe.strategy == "fsdp2":
            config = self.student.config
            self.student = load_sharded(self.model_dir, config, device, self.backend)
            if num_sharded_units(self.student) != 2 * config.num_hidden_layers:
                raise SupraError("strategy fsdp2", "the layers were not sharded", "Use strategy=ddp.")
        else:
            self.student = load_model(
                self.model_dir, device=device.type, dtype="float32", backend=self.backend, tokenizer=False
            ).model
        self.model_seconds = time.perf_counter() - start

    def describe(self) -> str:
        """One line naming what runs."""
        count = self.processes.count
        together = f"{count} processes · strategy {self.recipe.strategy} · " if count > 1 else ""
        teacher = self.recipe.teacher_weights
        return (
            f"{together}device {self.accelerator.device} · dtype {self.precision} · backend {self.backend} · "
            f"attention {self.student.config._attn_implementation}"
            + (f" · teacher's weights {teacher}" if teacher != "shared" else "")
        )

    def training_facts(self, run_dir: Path, skipped: frozenset[int]) -> dict[str, Any]:
        """What the exported model's card and `supra.json` say of the training."""
        rows, stages, first = read_metrics(run_dir), [], 1
        for stage in self.recipe.stages:
            own = [row for row in rows if row["stage"] == stage.name]
            steps = len(set(range(first, first + stage.num_steps)) - skipped)
            first += stage.num_steps
            stages.append(
                {
                    "name": stage.name,
                    "trainable": stage.trainable,
                    "loss": stage.loss,
                    "positions": stage.positions,
                    "steps": steps,
                    "tokens": steps * stage.tokens_per_step,
                    "first_loss": _mean_loss(own, min),
                    "last_loss": _mean_loss(own, max),
                }
            )
        return {
            "seed": self.recipe.seed,
            "tokens_trained": sum(stage["tokens"] for stage in stages),
            **({"skipped_steps": sorted(skipped)} if skipped else {}),
            "precision": str(self.precision),
            "device": str(self.accelerator.device),
            "backend": self.backend,
            "processes": self.processes.count,
            "stages": stages,
        }


def _mean_loss(rows: list[dict[str, Any]], which: Any) -> float:
    """Loss of a stage's first (`min`) or last (`max`) step; a layerwise stage has a row of it for every layer."""
    step = which(row["stage_step"] for row in rows)
    return statistics.fmean(row["loss"] for row in rows if row["stage_step"] == step)


def prepare(recipe: Recipe, model_dir: Path, run_dir: Path, reporter: Reporter) -> Prepared:
    """Check that recipe, model and machine fit together, then load the tokens and, where it is needed first, the model.

    Raises:
        UserError: the model is not converted or not as the recipe says, the text is missing or too short, or the
            run needs more disk or memory than there is.
    """
    require_trackers(recipe)
    require_bitsandbytes(recipe)
    accelerator, precision = make_accelerator(recipe)
    if recipe.teacher_weights == "bfloat16" and precision.dtype != torch.bfloat16:
        raise UserError(
            "teacher_weights bfloat16",
            f"the run computes in {precision}",
            "Set dtype to bfloat16 or leave it out.",
        )
    config = read_config(model_dir)
    check_conversion(recipe.conversion, config)
    with torch.device("meta"):
        outline = SupraForCausalLM(config).eval()
    backend = choose_backend(outline, recipe.backend, accelerator.device.type)
    check_files(model_dir, outline)
    for stage in recipe.stages:
        check_trainable(stage, outline)
    if warning := moved_teacher(recipe, model_dir):
        reporter.warn(warning)
    for warning in unknown_positions(recipe, config):
        reporter.warn(warning)
    budget = make_budget(
        recipe,
        outline,
        model_dir,
        num_processes=accelerator.num_processes,
        hidden_states_dtype=precision.dtype,
    )
    check_disk(budget, run_dir)
    available = available_memory_bytes(accelerator.device)
    check_memory(budget.memory_bytes, accelerator.device, "weights, gradients and moments")
    tokenizer = load_tokenizer(model_dir)
    texts = load_texts(recipe, tokenizer, config.vocab_size, accelerator, reporter)
    prepared = Prepared(
        recipe, model_dir, outline, tokenizer, accelerator, precision, backend, texts, budget, available, 0.0
    )
    # A layerwise stage does without the whole model, and a sharded one is read when all processes are there.
    if not recipe.stages[0].layerwise and recipe.strategy == "ddp":
        prepared.load_student()
    return prepared


def check_files(model_dir: Path, outline: SupraForCausalLM) -> None:
    """Raise a UserError unless the folder's weight files hold the model's tensors in their shapes."""
    found = {name: info.shape for name, (_, info) in tensor_places(model_dir).items()}
    wanted = {name: tuple(parameter.shape) for name, parameter in outline.named_parameters()}
    if outline.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # stored by some, and the embedding all the same
    odd = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if odd:
        reason = f"its files do not hold the model: {', '.join(odd[:5])}"
        raise UserError(str(model_dir), reason, "Convert it again")


def load_texts(
    recipe: Recipe, tokenizer: Any, vocab_size: int, accelerator: Accelerator, reporter: Reporter
) -> list[MixedData]:
    """The sequences of each stage; stages that read the same text share its tokens.

    Raises:
        UserError: a text is missing, unreadable, empty, too short, or has tokens that the model does not know.
    """
    datas = [stage.data or recipe.data for stage in recipe.stages]
    loaded: dict[Data, TokenStore | TokenStream] = {}
    for part in dict.fromkeys(part for data in datas for part in data.components()):
        with accelerator.main_process_first():  # the others find the cache it wrote
            loaded[part] = _load_text(part, tokenizer, reporter)
        text = loaded[part]
        ids = len(tokenizer) if isinstance(text, TokenStream) else int(text.tokens.max()) + 1
        if ids > vocab_size:
            raise UserError("the model", "its tokenizer has more tokens than it has", "Convert it again.")
    texts: list[MixedData] = []
    for index, (stage, data) in enumerate(zip(recipe.stages, datas, strict=True)):
        mixture = Mixture(tuple(loaded[part] for part in data.components()), data.shares())
        check_length(stage, mixture)
        with accelerator.main_process_first():
            texts.append(
                MixedData(
                    mixture,
                    length=stage.length,
                    seed=derived_seed(recipe.seed, index),
                    positions=stage.position_scheme,
                    makes_shards=accelerator.is_local_main_process,
                )
            )
    return texts


def _load_text(data: Data, tokenizer: Any, reporter: Reporter) -> TokenStore | TokenStream:
    if data.streaming:
        return TokenStream(data, tokenizer)
    return load_tokens(data, tokenizer, report=reporter.say)


def check_length(stage: Stage, mixture: Mixture) -> None:
    """Raise a UserError if a text that is not streamed has less than one sequence of the stage."""
    for number, store in enumerate(mixture.stores):
        if isinstance(store, TokenStore) and len(store.tokens) < stage.length:
            which = f"component {number} of the mixture" if len(mixture.stores) > 1 else "the text"
            raise UserError(
                f"stages.{stage.name}.length = {stage.length}",
                f"{which} has {len(store.tokens)} tokens, less than one sequence",
                "Add text or lower the length.",
            )


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


def unknown_positions(recipe: Recipe, config: SupraConfig) -> list[str]:
    """What to tell a user whose stages draw positions that the model's RoPE is not made for."""
    context = config.max_position_embeddings
    return [
        f"stages.{stage.name}.positions = {stage.positions}: the model's RoPE is made for {context:,} positions, and "
        "beyond them its teacher is no guide. Convert with --rope, yarn:4 for four times as many"
        for stage in recipe.stages
        if stage.position_scheme is not None and stage.position_scheme.span > context
    ]


def check_conversion(conversion: Conversion, config: SupraConfig) -> None:
    """Raise a UserError that names each field in which the model differs from the recipe's conversion."""
    wanted = conversion.resolve()
    kept = tuple(i for i, kind in enumerate(config.layer_types or []) if kind != "linear_attention")
    pairs = {
        "feature_map": (wanted.feature_map, config.feature_map),
        "taylor_dim": (wanted.taylor_dim, config.taylor_dim),
        "rope_position": (wanted.rope_position, config.rope_position),
        "rope": (wanted.rope, config.rope_scaled_by),
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
