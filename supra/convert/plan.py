"""The plan of a conversion: what is kept, new, dropped and refused, and what it costs; the real run executes
this very object.

Made from config.json and the headers of the weight files alone. The names and shapes of the new tensors come
from the model itself, built without memory: there is no second list that could disagree with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from supra.architectures import DROPPABLE_SUFFIXES
from supra.config import Conversion
from supra.convert.shard_writer import file_bytes
from supra.convert.source import Source, open_source
from supra.convert.student import softmax_layer_types, student_config, teacher_config, teacher_notes
from supra.errors import UserError
from supra.weights.headers import TensorInfo

if TYPE_CHECKING:
    from rich.console import RenderableType

    from supra.models import SupraConfig

CONTEXTS = (4096, 32768, 131072)
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Python with torch and transformers loaded, before any weight: measured, 420 MB.
BASE_MEMORY_BYTES = 420 << 20


@dataclass(frozen=True)
class Refused:
    """A tensor that stops the conversion, and why."""

    tensor: TensorInfo
    reason: str


class LayerError(NamedTuple):
    """A layer, and its attention's relative squared error |student − teacher|² / |teacher|² once it was linear."""

    layer: int
    error: float


@dataclass(frozen=True)
class Plan:
    """What a conversion will do; `new` are the student's own tensors, the other three the teacher's.

    `layer_errors`: by what the softmax layers were chosen, the largest first; empty where the user named them.
    """

    source: Source
    conversion: Conversion
    config: SupraConfig
    teacher: dict[str, Any]
    kept: tuple[TensorInfo, ...]
    new: tuple[TensorInfo, ...]
    dropped: tuple[TensorInfo, ...]
    refused: tuple[Refused, ...]
    notes: tuple[str, ...]
    layer_errors: tuple[LayerError, ...] = ()

    @property
    def dtype(self) -> str:
        """The teacher's dtype as safetensors names it; new tensors have it too."""
        return next(code for code, name in FLOAT_DTYPES.items() if name == _dtype_name(self.config))

    @property
    def parameters_kept(self) -> int:
        return sum(tensor.num_elements for tensor in self.kept)

    @property
    def parameters_added(self) -> int:
        return sum(tensor.num_elements for tensor in self.new)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the converted folder, with a margin for the small JSON files."""
        weights = sum(shard.num_bytes for shard in self.source.shards)
        return weights + (file_bytes(self.new) if self.new else 0) + self.source.small_bytes() + (1 << 20)

    @property
    def convert_memory_bytes(self) -> int:
        """Estimated peak memory of the conversion: libraries, and the largest new tensor in two dtypes."""
        largest = max((tensor.num_elements for tensor in self.new), default=0)
        return BASE_MEMORY_BYTES + 8 * largest + (64 << 20)

    @property
    def load_memory_bytes(self) -> int:
        """Bytes of all weights once the converted model is loaded."""
        return sum(tensor.num_bytes for tensor in (*self.kept, *self.new))

    @cached_property
    def context_bytes(self) -> list[dict[str, int]]:
        """For each of CONTEXTS: bytes of the teacher's cache, and of the student's state and own cache."""
        return [
            {
                "num_tokens": length,
                "teacher_kv_cache_bytes": self._cache_bytes(
                    softmax_layer_types(self.teacher), self.teacher, length
                ),
                "student_bytes": self._state_bytes()
                + self._cache_bytes(self.config.layer_types or [], self.teacher, length),
            }
            for length in CONTEXTS
        ]

    def _state_bytes(self) -> int:
        from supra.models import recurrent_state_bytes

        return recurrent_state_bytes(self.config, window_bytes_per_element=_element_bytes(self.dtype))

    def _cache_bytes(self, layer_types: list[str], teacher: dict[str, Any], num_tokens: int) -> int:
        """Bytes of the key/value cache of those layers that are softmax; a sliding window caps a layer's."""
        width = 2 * teacher["num_key_value_heads"] * teacher["head_dim"] * _element_bytes(self.dtype)
        window = min(num_tokens, teacher.get("sliding_window") or num_tokens)
        per_layer = {"full_attention": num_tokens, "sliding_attention": window}
        return sum(width * per_layer.get(kind, 0) for kind in layer_types)

    def require_convertible(self) -> None:
        """UserError naming the first refused tensor, and how many more there are."""
        if self.refused:
            first, others = self.refused[0], len(self.refused) - 1
            more = f" ({others} more such tensors)" if others else ""
            raise UserError(
                f"{self.source.location}: tensor {first.tensor.name}",
                first.reason + more,
                "See `supra inspect` for the whole list",
            )

    def to_json(self) -> str:
        """The plan as a JSON object."""
        from supra.convert.render import plan_data

        return json.dumps(plan_data(self), indent=2)

    def render(self) -> RenderableType:
        """The plan as a person reads it."""
        from supra.convert.render import plan_view

        return plan_view(self)


def make_plan(
    source: str, conversion: Conversion, *, revision: str | None = None, allow_pickle: bool = False
) -> Plan:
    """Plan the conversion of `source`: a folder, hub id or .gguf file; UserError when it is unfit.

    Tensors that stand in the way are listed in `refused`; `execute` then refuses the plan.
    """
    teacher_source = open_source(str(source), revision=revision, allow_pickle=allow_pickle)
    conversion = conversion.resolve()
    row, teacher = teacher_config(teacher_source.config, teacher_source.where)
    dtype = _teacher_dtype(teacher_source, teacher_source.config)
    config = student_config(teacher, row, conversion, dtype, teacher_source.where)
    expected, new = _student_tensors(config)
    kept, dropped, refused = _sort_tensors(teacher_source, expected, config)
    notes = [*teacher_source.notes(), *teacher_notes(teacher, config)]
    if dropped:
        notes.append(
            "dropped tensors are buffers which the model computes itself; the copied files still hold them"
        )
    return Plan(teacher_source, conversion, config, teacher, kept, new, dropped, refused, tuple(notes))


def _teacher_dtype(source: Source, raw: dict[str, Any]) -> str:
    """The dtype the teacher is run in: config.json's, or that of its first attention projection."""
    stated = raw.get("dtype") or raw.get("torch_dtype")
    if isinstance(stated, str) and stated in FLOAT_DTYPES.values():
        return stated
    stored = {tensor.name: tensor.dtype for shard in source.shards for tensor in shard.tensors}
    return FLOAT_DTYPES.get(stored.get("model.layers.0.self_attn.q_proj.weight", "F32"), "float32")


def _student_tensors(config: SupraConfig) -> tuple[dict[str, tuple[int, ...]], tuple[TensorInfo, ...]]:
    """(shapes that the student needs of the teacher, its own tensors in the order they are made)."""
    import torch

    from supra.models import SupraForCausalLM, is_new_parameter

    with torch.device("meta"):
        model = SupraForCausalLM(config)
    state = model.state_dict()
    code = next(code for code, name in FLOAT_DTYPES.items() if name == _dtype_name(config))
    in_fp32 = set(model._keep_in_fp32_modules_strict or ())
    expected = {name: tuple(value.shape) for name, value in state.items() if not is_new_parameter(name)}
    new = tuple(
        TensorInfo(name, "F32" if in_fp32 & set(name.split(".")) else code, tuple(value.shape))
        for name, value in state.items()
        if is_new_parameter(name)
    )
    return expected, new


def _sort_tensors(
    source: Source, expected: dict[str, tuple[int, ...]], config: SupraConfig
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...], tuple[Refused, ...]]:
    """(kept, dropped, refused) of the source's tensors; one that is needed but missing is refused too."""
    kept, dropped, refused = [], [], []
    found = {tensor.name: tensor for shard in source.shards for tensor in shard.tensors}
    for name, tensor in found.items():
        if name.endswith(DROPPABLE_SUFFIXES):
            dropped.append(tensor)
        elif name not in expected:
            refused.append(
                Refused(
                    tensor,
                    f"the {config.teacher_model_type} architecture has no such tensor, so it would be lost",
                )
            )
        elif tensor.dtype not in FLOAT_DTYPES:
            refused.append(Refused(tensor, f"its dtype {tensor.dtype} is that of quantised weights"))
        elif tensor.shape != expected[name]:
            needed = list(expected[name])
            refused.append(
                Refused(tensor, f"its shape is {list(tensor.shape)} where config.json asks for {needed}")
            )
        else:
            kept.append(tensor)
    for name, shape in expected.items():
        tied = name == "lm_head.weight" and config.tie_word_embeddings
        if name not in found and not tied:
            refused.append(
                Refused(TensorInfo(name, "F32", shape), "config.json asks for it, but no file holds it")
            )
    return tuple(kept), tuple(dropped), tuple(refused)


def _dtype_name(config: SupraConfig) -> str:
    """The dtype of a configuration as a bare name, whether it holds a torch.dtype or a string."""
    return str(config.dtype).removeprefix("torch.")


def _element_bytes(code: str) -> int:
    return TensorInfo("", code, (1,)).num_bytes
