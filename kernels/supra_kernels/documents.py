"""Bounds of packed documents on the host, read once a tensor: every layer asks, and each reading waits for the GPU."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def remembered(cu_seqlens: Tensor, key: Any, make: Callable[[], T]) -> T:
    """`make()` for this tensor and key, made anew after the tensor was changed in place."""
    if cu_seqlens.is_inference():  # keeps no count of its changes
        return make()
    kept: tuple[int | None, dict[Any, Any]] = getattr(cu_seqlens, "_supra_remembered", (None, {}))
    version, known = kept
    if version != cu_seqlens._version:
        known = {}
        cu_seqlens._supra_remembered = (cu_seqlens._version, known)  # type: ignore[attr-defined]
    if key not in known:
        known[key] = make()
    return known[key]  # type: ignore[no-any-return]


def bounds_of(cu_seqlens: Tensor) -> list[int]:
    """`cu_seqlens` [N + 1] as numbers."""
    return remembered(cu_seqlens, "bounds", cu_seqlens.tolist)
