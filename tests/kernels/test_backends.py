"""Dispatch never falls back silently, and bad arguments are named."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from supra_kernels import (
    BackendError,
    autograd,
    available_backends,
    linear_attention,
    linear_attention_step,
    resolve_backend,
    window_attention,
)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def test_the_table_and_the_auto_rule() -> None:
    assert list(available_backends()) == ["torch", "reference", "triton", "fla"]
    assert all(available_backends()[name] == "available" for name in ("torch", "reference"))
    # Also where TRITON_INTERPRET=1 makes Triton available on a CPU: nobody wants to end up on it unasked.
    assert resolve_backend("auto", "cpu") == "torch"
    assert resolve_backend("reference", torch.device("cpu")) == "reference"


def test_triton_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = zeros(1, 2, 1, 16)
    with pytest.raises(
        BackendError, match=r"'triton' cannot run on cpu: (it needs a GPU|triton is not installed)"
    ):
        linear_attention(x, x, x, backend="triton")


def test_auto_takes_triton_on_a_gpu_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = autograd.BACKENDS["triton"]
    for reason, chosen in ((None, "triton"), ("broken", "torch")):
        monkeypatch.setitem(
            autograd.BACKENDS,
            "triton",
            dataclasses.replace(triton, unavailable=lambda device, reason=reason: reason),
        )
        assert resolve_backend("auto", "cuda") == chosen


def test_auto_passes_over_a_backend_that_cannot_compute_heads_so_wide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    triton = dataclasses.replace(autograd.BACKENDS["triton"], unavailable=lambda device: None)
    monkeypatch.setitem(autograd.BACKENDS, "triton", triton)
    monkeypatch.setitem(autograd.AUTO_ORDER, "cpu", ("triton", "torch"))
    assert resolve_backend("auto", "cpu", (512, 65)) == "triton"
    assert resolve_backend("auto", "cpu", (561, 65)) == "torch"
    with pytest.raises(BackendError, match=r"cannot run on cpu: head dims 64 and 513.*at most 512"):
        resolve_backend("triton", "cpu", (64, 513))
    q = torch.randn(1, 3, 1, 561)
    assert torch.equal(linear_attention(q, q, q)[0], linear_attention(q, q, q, backend="torch")[0])


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(BackendError, match=r"no backend 'tritn'; known: auto, torch, reference"):
        linear_attention(zeros(1, 2, 1, 4), zeros(1, 2, 1, 4), zeros(1, 2, 1, 4), backend="tritn")


def test_an_unavailable_backend_gives_its_reason_and_nothing_runs_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a backend that cannot run was called")

    broken = autograd.Backend(refuse, refuse, refuse, lambda device: "it needs a GPU")
    monkeypatch.setitem(autograd.BACKENDS, "gpu", broken)
    monkeypatch.setitem(autograd.AUTO_ORDER, "cpu", ("gpu", "torch"))
    x = zeros(1, 2, 1, 4)
    calls: list[Callable[[], Any]] = [
        lambda: linear_attention(x, x, x, backend="gpu"),
        lambda: linear_attention_step(x[:, 0], x[:, 0], x[:, 0], zeros(1, 1, 4, 4), backend="gpu"),
        lambda: window_attention(x, x, x, window=2, scale=1.0, backend="gpu"),
    ]
    for call in calls:
        with pytest.raises(BackendError, match=r"'gpu' cannot run on cpu: it needs a GPU"):
            call()
    assert available_backends()["gpu"] == "it needs a GPU"
    assert resolve_backend("auto", "cpu") == "torch"
    monkeypatch.setitem(autograd.AUTO_ORDER, "cpu", ("gpu",))
    with pytest.raises(BackendError, match=r"no backend can run on cpu: gpu: it needs a GPU"):
        resolve_backend("auto", "cpu")


def test_the_backend_asked_for_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def spy(name: str) -> autograd.Backend:
        def call(*args: Any, **options: Any) -> Any:
            ran.append(name)
            return args[0], None

        return autograd.Backend(call, call, call, lambda device: None)

    for name in ("torch", "reference"):
        monkeypatch.setitem(autograd.BACKENDS, name, spy(name))
    x = zeros(1, 2, 1, 4)
    for name in ("torch", "reference", "auto"):
        linear_attention(x, x, x, backend=name)
    assert ran == ["torch", "reference", "torch"]


Q, KV = (2, 5, 4, 8), (2, 5, 2, 8)
BAD_LINEAR: list[tuple[dict[str, Any], str]] = [
    ({"q": zeros(5, 4, 8)}, r"q has shape \[5, 4, 8\]; expected 4 dimensions"),
    ({"k": zeros(2, 6, 2, 8)}, r"k has shape \[2, 6, 2, 8\]; expected \[2, 5, 2, 8\]"),
    ({"k": zeros(2, 5, 2, 7)}, r"k has shape \[2, 5, 2, 7\]; expected \[2, 5, 2, 8\]"),
    ({"v": zeros(2, 5, 1, 8)}, r"v has shape \[2, 5, 1, 8\]; expected \[2, 5, 2, 8\]"),
    ({"q": zeros(2, 5, 3, 8)}, r"q has 3 heads and k 2: the query heads must be a multiple"),
    (
        {"log_decay": zeros(3)},
        r"log_decay has shape \[3\]; expected \[4\] or \[2\] or \[2, 5, 4\] or \[2, 5, 2\]",
    ),
    ({"log_decay": zeros(5, 4)}, r"log_decay has shape \[5, 4\]"),
    ({"log_decay": torch.zeros(4, dtype=torch.int64)}, r"log_decay has dtype torch.int64"),
    (
        {"initial_state": zeros(2, 4, 8, 8)},
        r"initial_state has shape \[2, 4, 8, 8\]; expected \[2, 2, 8, 8\]",
    ),
    (
        {"cu_seqlens": torch.tensor([0, 5])},
        r"cu_seqlens packs sequences into one row, but the batch size is 2",
    ),
    ({"cu_seqlens": torch.tensor([0.0, 5.0])}, r"cu_seqlens has shape \[2\] and dtype torch.float32"),
    ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens has shape \[1\]"),
    ({"chunk_size": 0}, r"chunk_size is 0"),
    ({"v": torch.zeros(KV, device="meta")}, r"v is on meta; q is on cpu"),
]


@pytest.mark.parametrize(("change", "message"), BAD_LINEAR)
def test_bad_arguments_of_linear_attention(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": zeros(*Q), "k": zeros(*KV), "v": zeros(*KV)}
    with pytest.raises(ValueError, match=message):
        linear_attention(**(arguments | change))


@pytest.mark.parametrize("bounds", [[0, 4], [1, 5], [0, 3, 2, 5]])
def test_bad_document_bounds(bounds: list[int]) -> None:
    q, k = zeros(1, 5, 4, 8), zeros(1, 5, 2, 8)
    for call in (linear_attention, lambda *x, **o: window_attention(*x, window=2, scale=1.0, **o)):
        with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to the 5 tokens of q; it is \["):
            call(q, k, k, cu_seqlens=torch.tensor(bounds))


BAD_WINDOW: list[tuple[dict[str, Any], str]] = [
    ({"window": 0}, r"window is 0"),
    ({"past_k": zeros(2, 3, 2, 8)}, r"past_k and past_v must be given together"),
    ({"past_valid": torch.tensor([1, 1])}, r"past_valid is given without past_k"),
    (
        {"past_k": zeros(1, 3, 2, 8), "past_v": zeros(1, 3, 2, 8)},
        r"past_k has shape \[1, 3, 2, 8\]; expected \[2, 3, 2, 8\]",
    ),
    (
        {"past_k": zeros(2, 3, 2, 8), "past_v": zeros(2, 4, 2, 8)},
        r"past_v has shape \[2, 4, 2, 8\]; expected \[2, 3, 2, 8\]",
    ),
    (
        {"past_k": zeros(2, 3, 2, 8), "past_v": zeros(2, 3, 2, 8), "past_valid": torch.tensor([1])},
        r"past_valid has shape \[1\]; expected \[2\]",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_WINDOW)
def test_bad_arguments_of_window_attention(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": zeros(*Q), "k": zeros(*KV), "v": zeros(*KV), "window": 2, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        window_attention(**(arguments | change))


def test_bad_arguments_of_the_step() -> None:
    q, k, state = zeros(2, 4, 8), zeros(2, 2, 8), zeros(2, 2, 8, 8)
    with pytest.raises(ValueError, match=r"state has shape \[2, 2, 8, 8\]; expected \[2, 4, 8, 8\]"):
        linear_attention_step(q, k, k, state, zeros(4))
    with pytest.raises(ValueError, match=r"k has shape \[2, 2, 7\]"):
        linear_attention_step(q, zeros(2, 2, 7), k, state)
