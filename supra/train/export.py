"""The trained model as a Hugging Face folder that `from_pretrained` loads after `import supra`."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor

from supra.config import Recipe
from supra.errors import SupraError
from supra.models import SupraForCausalLM
from supra.train.checkpoint import sync_folder
from supra.train.run_folder import versions, write_whole

_FP32_MODULES = ("decay", "window_mix")  # kept in fp32 whatever the weights' dtype, as the model loads them
_OURS = {"config.json", "README.md", "recipe.yaml", "supra.json", "model.safetensors.index.json"}


def export_model(
    student: SupraForCausalLM,
    adapters: PeftModel | None,
    *,
    recipe: Recipe,
    model_dir: Path,
    target: Path,
    training: dict[str, Any],
) -> Path:
    """Write `target` beside, then rename it.

    Weights have the dtype of the conversion in `model_dir`, whose tokenizer and other files come along.
    Adapters, where they are kept, lie in `target/adapter` for peft.

    Raises:
        SupraError: it cannot be written.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if adapters is not None:
            adapters.peft_config["default"].base_model_name_or_path = str(target)
            adapters.save_pretrained(str(partial / "adapter"), save_embedding_layers=False)
            (partial / "adapter" / "README.md").unlink(missing_ok=True)  # peft's empty template
            adapters.unload()
        _write_weights(student, model_dir, partial)
        _copy_the_rest(model_dir, partial)
        _write_documents(recipe, model_dir, partial, training)
        _share_with_group(partial)
        sync_folder(partial)
        os.rename(partial, target)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SupraError(
            str(target), f"the model cannot be written ({error})", "Free some space, then run with --resume."
        ) from None
    return target


def _share_with_group(folder: Path) -> None:
    """Give weights the rights of the other files: safetensors writes them for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o666 & ~umask)


def stored_dtype(model_dir: Path) -> torch.dtype:
    """The dtype that a model folder's configuration names; fp32 where it names none."""
    config = json.loads((model_dir / "config.json").read_text())
    return getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))


def exported_bytes(student: SupraForCausalLM, model_dir: Path) -> int:
    """Size of the folder that `export_model` makes of `model_dir`, adapters left out."""
    dtype = stored_dtype(model_dir)
    weights = sum(t.numel() * _dtype_of(name, dtype).itemsize for name, t in _stored(student).items())
    return weights + sum(path.stat().st_size for path in _the_rest(model_dir))


def _stored(student: SupraForCausalLM) -> dict[str, Tensor]:
    """What is written of a state dict: a tied head is the embedding's."""
    tensors = student.state_dict()
    if student.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if any(part in _FP32_MODULES for part in name.split(".")) else dtype


def _write_weights(student: SupraForCausalLM, model_dir: Path, folder: Path) -> None:
    dtype = stored_dtype(model_dir)
    tensors = {name: tensor.to(_dtype_of(name, dtype)) for name, tensor in _stored(student).items()}
    student.save_pretrained(folder, state_dict=tensors)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")  # the library wrote that of the weights in memory
    write_whole(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def _copy_the_rest(model_dir: Path, folder: Path) -> None:
    for path in _the_rest(model_dir):
        shutil.copyfile(path, folder / path.name)


def _the_rest(model_dir: Path) -> list[Path]:
    """Tokenizer, generation config, chat template, licence: all that is not weights or ours to write."""
    files = [path for path in model_dir.iterdir() if path.is_file() and path.suffix != ".safetensors"]
    return [path for path in files if path.name not in _OURS]


def _write_documents(recipe: Recipe, model_dir: Path, folder: Path, training: dict[str, Any]) -> None:
    write_whole(folder / "recipe.yaml", recipe.to_yaml())
    origin = model_dir / "supra.json"
    facts = json.loads(origin.read_text()) if origin.exists() else {}
    facts["training"] = {
        "recipe": recipe.name,
        "recipe_hash": recipe.hash(),
        "versions": versions(),
        **training,
    }
    write_whole(folder / "supra.json", json.dumps(facts, indent=2) + "\n")
    card = model_dir / "README.md"
    before = card.read_text(encoding="utf-8").rstrip() if card.exists() else "# A converted model"
    write_whole(folder / "README.md", f"{before}\n\n{_training_section(recipe, training)}")


def _training_section(recipe: Recipe, training: dict[str, Any]) -> str:
    lines = [
        "## Training",
        "",
        f"Recipe `{recipe.name}` (in `recipe.yaml`), seed {recipe.seed}, "
        f"{training['tokens_trained']:,} tokens, {training['precision']}, on {training['device']}.",
        "",
        "| stage | trains | loss | tokens | steps | first loss | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in training["stages"]:
        lines.append(
            f"| {stage['name']} | {stage['trainable']} | {stage['loss']} | {stage['tokens']:,} "
            f"| {stage['steps']:,} | {stage['first_loss']:.4g} | {stage['last_loss']:.4g} |"
        )
    return "\n".join(lines) + "\n"
