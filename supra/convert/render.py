"""A plan as a person reads it (tables, like tensors of all layers in one row) and as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from supra.convert.student import describe_positions
from supra.weights.headers import TensorInfo

if TYPE_CHECKING:
    from supra.convert.plan import Plan
    from supra.models import SupraConfig


def human_bytes(count: int) -> str:
    """A number of bytes in the largest unit (of 1024) that leaves at least one."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def plan_data(plan: Plan) -> dict[str, Any]:
    """Everything the plan knows, as JSON types; sizes in bytes."""
    return {
        "source": {
            "kind": plan.source.kind,
            "location": plan.source.location,
            "revision": plan.source.revision,
        },
        "teacher_model_type": plan.config.teacher_model_type,
        "dtype": plan.dtype,
        "conversion": plan.conversion.model_dump(mode="json"),
        "positions": position_data(plan.config),
        "layer_types": list(plan.config.layer_types or []),
        "parameters": {"kept": plan.parameters_kept, "added": plan.parameters_added},
        "context": plan.context_bytes,
        "disk_bytes": plan.disk_bytes,
        "download_bytes": plan.source.bytes_to_download(),
        "memory_bytes": {"convert": plan.convert_memory_bytes, "load": plan.load_memory_bytes},
        "notes": list(plan.notes),
        "layer_errors": [error._asdict() for error in plan.layer_errors],
        "kept": [_tensor_data(tensor) for tensor in plan.kept],
        "new": [_tensor_data(tensor) for tensor in plan.new],
        "dropped": [_tensor_data(tensor) for tensor in plan.dropped],
        "refused": [_tensor_data(item.tensor) | {"reason": item.reason} for item in plan.refused],
    }


def position_data(config: SupraConfig) -> dict[str, Any]:
    """The rotary positions, and the contexts in tokens of the teacher and of the converted model."""
    context = config.max_position_embeddings
    return {
        "rope": config.rope_scaled_by,
        "rope_parameters": config.rope_parameters,
        "teacher_max_position_embeddings": config.teacher_max_position_embeddings or context,
        "max_position_embeddings": context,
    }


def _tensor_data(tensor: TensorInfo) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "num_bytes": tensor.num_bytes,
    }


def plan_view(plan: Plan) -> RenderableType:
    """The plan as rich tables."""
    parts: list[RenderableType] = [_summary(plan), Text()]
    for title, tensors in (("Kept", plan.kept), ("New", plan.new), ("Dropped", plan.dropped)):
        parts += [_tensor_table(title, tensors), Text()]
    if plan.refused:
        parts += [_refused_table(plan), Text()]
    if plan.layer_errors:
        parts += [_ranking_table(plan), Text()]
    parts.append(_context_table(plan))
    parts += [Text(f"note: {note}") for note in plan.notes]
    return Group(*parts)


def _summary(plan: Plan) -> Table:
    conversion, layers = plan.conversion, list(plan.config.layer_types or [])
    model_type = plan.config.teacher_model_type
    kept = len(layers) - layers.count("linear_attention")
    percent = 100 * plan.parameters_added / max(plan.parameters_kept, 1)
    window = f"softmax window of {conversion.window} tokens" if conversion.window else "no softmax window"
    window += f" and the first {conversion.num_sink_tokens}" if conversion.num_sink_tokens else ""
    shared = ", shared in each key/value group" if conversion.decay_shared else ""
    dims = f" of {conversion.taylor_dim} dimensions" if conversion.taylor_dim else ""
    rows = {
        "teacher": f"{plan.source.location} ({plan.source.kind}, {model_type}, {plan.dtype})",
        "layers": f"{len(layers) - kept} linear, {kept} softmax",
        "linear layer": f"{conversion.feature_map} feature map{dims}, rotary positions {conversion.rope_position} it",
        "": f"{conversion.decay} decay{shared}, {conversion.norm}, {window}",
        "positions": describe_positions(plan.config),
        "parameters": f"{plan.parameters_kept:,} kept + {plan.parameters_added:,} new ({percent:.2f} %)",
        "disk": human_bytes(plan.disk_bytes),
        "memory": f"{human_bytes(plan.convert_memory_bytes)} to convert, "
        f"{human_bytes(plan.load_memory_bytes)} of weights to load",
    }
    if plan.source.bytes_to_download():
        rows["download"] = human_bytes(plan.source.bytes_to_download())
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _tensor_table(title: str, tensors: Iterable[TensorInfo]) -> RenderableType:
    """One row for each name that differs from others in its layer number only."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[TensorInfo]] = {}
    for tensor in tensors:
        pattern = re.sub(r"\.\d+\.", ".*.", tensor.name, count=1)
        groups.setdefault((pattern, tensor.dtype, tensor.shape), []).append(tensor)
    if not groups:
        return Text(f"{title}: none")
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for name in ("count", "shape", "dtype", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for (pattern, dtype, shape), members in groups.items():
        size = human_bytes(sum(tensor.num_bytes for tensor in members))
        table.add_row(Text(pattern), str(len(members)), Text(str(list(shape))), dtype, size)
    return table


def _refused_table(plan: Plan) -> Table:
    table = Table(title="Refused", title_justify="left", title_style="bold red", box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("reason", overflow="fold")
    for item in plan.refused:
        table.add_row(Text(item.tensor.name), Text(item.reason))
    return table


def _ranking_table(plan: Plan) -> Table:
    table = Table(
        title="Layers by what they lose", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for name in ("layer", "relative error", "becomes"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer, error in plan.layer_errors:
        table.add_row(
            str(layer), f"{error:.4f}", "softmax" if layer in plan.conversion.keep_softmax else "linear"
        )
    return table


def _context_table(plan: Plan) -> Table:
    table = Table(
        title="Memory of the context", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for name in ("tokens", "teacher's KV cache", "student", "times smaller"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.context_bytes:
        teacher, student = row["teacher_kv_cache_bytes"], row["student_bytes"]
        ratio = f"{teacher / student:.1f}" if student else "-"
        table.add_row(f"{row['num_tokens']:,}", human_bytes(teacher), human_bytes(student), ratio)
    return table
