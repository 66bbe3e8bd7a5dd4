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
from supra.train.checkpoint import sync_folder
from supra.train.run_folder import versions, write_whole
from supra.weights.reader import TORCH_DTYPES, tensor_places

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_OURS = {"README.md", "recipe.yaml", "supra.json"}


def export_model(
    tensors: dict[str, Tensor],
    adapters: PeftModel | None,
    *,
    recipe: Recipe,
    model_dir: Path,
    target: Path,
    training: dict[str, Any],
) -> Path:
    """Write `target` beside, then rename it: the conversion in `model_dir` with `tensors` in the place of its own.

    So what was not trained is the conversion's bit for bit, and the model need not be in memory. Adapters, where they
    are kept, lie in `target/adapter` for peft.

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
        _write_weights(tensors, model_dir, partial)
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


def _write_weights(tensors: dict[str, Tensor], model_dir: Path, folder: Path) -> None:
    """Copy the conversion's weight files, then overwrite the bytes of `tensors` in the dtype they have there."""
    places = tensor_places(model_dir)
    if (
        _EMBEDDING in tensors
        and _HEAD in places
        and json.loads((model_dir / "config.json").read_text()).get("tie_word_embeddings")
    ):
        tensors = {**tensors, _HEAD: tensors[_EMBEDDING]}
    for path in sorted({path for path, _ in places.values()}):
        shutil.copyfile(path, folder / path.name)
    for name, tensor in tensors.items():
        path, info = places[name]
        value = tensor.detach().to("cpu", TORCH_DTYPES[info.dtype]).contiguous()
        with open(folder / path.name, "r+b") as file:
            file.seek(info.start)
            file.write(value.view(torch.uint8).numpy().data)


def _share_with_group(folder: Path) -> None:
    """Give weights the rights of the other files: safetensors writes them for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o666 & ~umask)


def exported_bytes(model_dir: Path) -> int:
    """Size of the folder that `export_model` makes of `model_dir`, adapters left out."""
    weights = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    return weights + sum(path.stat().st_size for path in _the_rest(model_dir))


def _copy_the_rest(model_dir: Path, folder: Path) -> None:
    for path in _the_rest(model_dir):
        shutil.copyfile(path, folder / path.name)


def _the_rest(model_dir: Path) -> list[Path]:
    """Configuration, index, tokenizer, chat template, licence: all that is not weights or ours to write."""
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


def _positions(stage: dict[str, Any]) -> str:
    """The positions of a stage where they are not the plain ones."""
    return f" (positions {stage['positions']})" if stage["positions"] else ""


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
            f"| {stage['name']}{_positions(stage)} | {stage['trainable']} | {stage['loss']} | {stage['tokens']:,} "
            f"| {stage['steps']:,} | {stage['first_loss']:.4g} | {stage['last_loss']:.4g} |"
        )
    return "\n".join(lines) + "\n"
