"""The models of one comparison: the teacher, the student, its ablations and its untrained conversion.

They are loaded one after the other, so that no more than one lies in memory (two while the untrained one is made).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from supra.errors import UserError
from supra.loading import Loaded, load_model, load_tokenizer
from supra.models import SupraForCausalLM, init_new_tensors

ABLATIONS = ("window_only", "linear_only")
SIZES = {
    "vocab_size": "a vocabulary",
    "hidden_size": "a hidden size",
    "num_hidden_layers": "a number of layers",
    "num_attention_heads": "a number of heads",
}
ALL = ("teacher", "student", *ABLATIONS, "untrained")


@dataclass(frozen=True)
class Contender:
    """A model to be scored under `name`; `fingerprint` is a hash of its weights, configuration and ablation."""

    name: str
    model: Any
    tokenizer: Any
    fingerprint: str
    runs_on: str


def contender_names(model: Path, teacher: Path | None, *, ablations: bool) -> tuple[str, ...]:
    """Which of `ALL` can be had: a teacher and an untrained conversion need `teacher`, ablations a window."""
    config = json.loads((model / "config.json").read_text())
    converted = config.get("model_type") == "supra"
    wanted = ["teacher"] if teacher is not None else []
    wanted.append("student")
    if ablations and converted and "linear_attention" in (config.get("layer_types") or []):
        wanted += list(ABLATIONS) if config.get("window") else []
        wanted += ["untrained"] if teacher is not None else []
    return tuple(wanted)


def contenders(
    model: Path, teacher: Path | None, names: Sequence[str], *, device: str, dtype: str, backend: str,
    say: Callable[[str], None],
) -> Iterator[Contender]:  # fmt: skip
    """Yield each of `names` (see `contender_names`) ready to run; an ablation holds until the next one is asked for.

    Raises:
        UserError: a folder or setting that is wrong, or a teacher of another vocabulary.
        SupraError: a folder that does not hold a whole model.
    """

    def load(path: Path) -> Loaded:
        return load_model(path, device=device, dtype=dtype, backend=backend)

    def ready(name: str, loaded: Loaded) -> Contender:
        say(f"{name}: {loaded.describe()}")
        return Contender(
            name,
            loaded.model,
            loaded.tokenizer,
            fingerprint(loaded.model, name, loaded.tokenizer),
            loaded.describe(),
        )

    if teacher is not None:
        require_teacher_of(model, teacher)
    if "teacher" in names:
        assert teacher is not None
        yield ready("teacher", load(teacher))
    loaded = load(model)
    if "student" in names:
        yield ready("student", loaded)
    for branch in ABLATIONS:
        if branch in names:
            with loaded.model.ablation(branch):
                yield ready(branch, loaded)
    if "untrained" in names:
        assert teacher is not None
        untrain(loaded.model, load(teacher).model, conversion_seed(model))
        yield ready("untrained", loaded)


def untrain(student: SupraForCausalLM, teacher: Any, seed: int) -> None:
    """Give `student` back what it had right after its conversion: the teacher's weights and its first new tensors."""
    dtype = next(student.parameters()).dtype
    config = copy.deepcopy(student.config)
    wanted = student.state_dict().keys()
    state = {name: tensor for name, tensor in teacher.state_dict().items() if name in wanted}
    state |= dict(init_new_tensors(config, seed, dtype))
    student.load_state_dict(state, strict=True)


def conversion_seed(model: Path) -> int:
    """The seed of a converted folder's new tensors; 0 where the folder does not say."""
    path = model / "supra.json"
    return int(json.loads(path.read_text()).get("seed", 0)) if path.is_file() else 0


def require_teacher_of(model: Path, teacher: Path) -> None:
    """UserError unless `teacher` can be what `model` came from: softmax, of the same sizes and tokenizer."""
    own, its = (json.loads((path / "config.json").read_text()) for path in (model, teacher))
    if "linear_attention" in (its.get("layer_types") or []):
        raise UserError(
            f"--teacher {teacher}",
            "is a converted model itself",
            "Give the model it came from; were the two swapped?",
        )
    for field, what in SIZES.items():
        if own.get(field) != its.get(field):
            raise UserError(
                f"--teacher {teacher}",
                f"has {what} of {its.get(field)}, the student {own.get(field)}",
                "Give the model that was converted",
            )
    if load_tokenizer(teacher).get_vocab() != load_tokenizer(model).get_vocab():
        raise UserError(
            f"--teacher {teacher}",
            "has another tokenizer than the student",
            "Give the model that was converted",
        )


def fingerprint(model: Any, ablation: str = "", tokenizer: Any = None) -> str:
    """Hash of a model's weights, dtype, configuration, generation settings, ablation and tokenizer.

    It is what the model's results depend on.
    """
    digest = xxhash.xxh3_128()
    config = model.config.to_dict()
    config.pop("_name_or_path", None)  # the same model in another folder is the same model
    config.pop("transformers_version", None)
    branch = ablation if ablation in ABLATIONS else ""
    generation = model.generation_config.to_dict() if model.generation_config is not None else {}
    generation.pop("transformers_version", None)
    parts: list[Any] = [config, branch, generation]
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        words = tokenizer.get_vocab() if backend is None else backend.to_str()
        parts += [words, tokenizer.special_tokens_map, tokenizer.chat_template]
    digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        )
    return digest.hexdigest()
