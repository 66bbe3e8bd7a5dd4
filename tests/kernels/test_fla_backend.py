"""The fla backend computes our operators with fla's own kernels, and names what it refuses.

Without a GPU the kernels run in Triton's interpreter, which lacks two things that they use: a driver to time
configurations with, and loop indices that can be cast.
"""

import builtins
import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import torch

from supra_kernels import BackendError, fla_backend, reference

pytest.importorskip("fla", reason="the extra `fla` is not installed")

Make = Callable[..., Any]
KINDS = ("none", "query head", "key head", "token and query head", "token and key head")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Index(int):
    """A loop index of the interpreter, which a kernel may cast."""

    def to(self, dtype: Any) -> "Index":
        return self


@pytest.fixture(autouse=True)
def kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    if DEVICE == "cpu":
        from fla.ops.common import chunk_h
        from triton.runtime.autotuner import Autotuner

        monkeypatch.setattr(Autotuner, "_bench", lambda self, *args, config, **options: [1.0, 1.0, 1.0])
        indices = lambda *bounds: map(Index, builtins.range(*map(int, bounds)))  # noqa: E731
        monkeypatch.setattr(chunk_h, "range", indices, raising=False)


def forms(case: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`case` through the backend in fp32 and through the reference in fp64."""
    ours = case.to(torch.float32)
    return ours.run(fla_backend.linear_attention), case.run(reference.linear_attention_chunked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 37, 70]])
def test_outputs_states_and_gradients_equal_the_reference(
    problem: Make, near: Make, kind: str, bounds: list[int] | None
) -> None:
    found, wanted = forms(problem(T=70, H=4, G=2, K=8, V=6, kind=kind, bounds=bounds))
    near(found, wanted, 1e-5)


@pytest.mark.parametrize(("K", "V"), [(65, 33), (1, 1), (16, 80)])
def test_head_dims_in_fp32(problem: Make, near: Make, K: int, V: int) -> None:
    near(*forms(problem(T=17, H=1, G=1, K=K, V=V, kind="token and query head")), 1e-5)


@pytest.mark.parametrize("chunk_size", fla_backend.CHUNK_SIZES)
def test_chunk_sizes(problem: Make, near: Make, chunk_size: int) -> None:
    case = problem(T=40, H=2, G=1, kind="query head")
    found = case.to(torch.float32).run(fla_backend.linear_attention, chunk_size=chunk_size)
    near(found, case.run(reference.linear_attention_chunked), 1e-5)


@pytest.mark.parametrize("T", [1, 64, 65])
def test_a_strong_fixed_decay_leaves_a_finite_state(problem: Make, near: Make, T: int) -> None:
    case = problem(T=T, H=4, G=2, kind="query head", initial=False)
    case.log_decay.mul_(0).sub_(3.0)
    found, wanted = forms(case)
    # fla takes the decay's gradient as a difference of two large sums, which cancel where the decay is strong.
    near({"d": found.pop("d log_decay")}, {"d": wanted.pop("d log_decay")}, 1e-3)
    near(found, wanted, 1e-5)
    assert torch.equal(case.log_decay, torch.full((4,), -3.0, dtype=torch.float64))


def test_g_gamma_itself_is_not_finite_there(problem: Make) -> None:
    """Why a fixed decay is spread over the tokens: should fla mend it, `MAPPED` and the detour can go."""
    from fla.ops.simple_gla import chunk_simple_gla

    case = problem(T=1, H=2, G=2, K=16, V=16, initial=False, dtype=torch.float32)
    _, final = chunk_simple_gla(
        case.q, case.k, case.v, g_gamma=torch.full((2,), -3.0), output_final_state=True
    )
    assert final.isnan().any()


@pytest.mark.parametrize(
    ("kind", "final", "T", "learned", "sent"),
    [
        ("none", True, 65, False, {}),
        ("query head", False, 65, False, {"g_gamma": (4,)}),
        ("query head", True, 64, False, {"g_gamma": (4,)}),
        ("query head", True, 65, False, {"g": (1, 65, 4)}),
        ("query head", False, 65, True, {"g": (1, 65, 4)}),
        ("key head", False, 65, False, {"g_gamma": (4,)}),
        ("token and key head", False, 65, False, {"g": (1, 65, 4)}),
    ],
)
def test_what_fla_is_given(
    problem: Make,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    final: bool,
    T: int,
    learned: bool,
    sent: dict[str, Any],
) -> None:
    given: dict[str, Any] = {}

    def spy(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.update(q=q, k=k, v=v, **options)
        return torch.zeros(*q.shape[:3], v.shape[-1]), torch.zeros(1, 4, q.shape[-1], v.shape[-1])

    monkeypatch.setattr(fla_backend, "_kernels", lambda: (spy, spy))
    case = problem(T=T, H=4, G=2, kind=kind, initial=False, dtype=torch.float32)
    decay = case.log_decay.requires_grad_() if learned else case.log_decay
    q, k = case.q.bfloat16(), case.k.half()
    o, state = fla_backend.linear_attention(q, k, case.v, decay, scale=0.7, output_final_state=final)
    assert {name: tuple(given[name].shape) for name in ("g", "g_gamma") if given[name] is not None} == sent
    assert given["scale"] == 0.7
    assert {given[x].dtype for x in "qkv"} == {torch.float32} == {o.dtype}
    assert {given[x].shape[2] for x in "qkv"} == {4}
    heads = 2 if kind in ("none", "key head", "token and key head") else 4
    assert state is None if not final else state.shape[1] == heads


@pytest.mark.parametrize("T", [0, 1])
def test_the_shortest_sequences(problem: Make, near: Make, T: int) -> None:
    for kind in ("none", "query head"):
        near(*forms(problem(T=T, kind=kind)), 1e-5)


def test_16_bit_inputs(problem: Make) -> None:
    """The interpreter multiplies the bits of bf16 tiles as integers; fp16 takes the same path through the backend."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    case = problem(T=40, H=2, G=1, K=16, V=16, kind="token and query head", initial=False)
    low = case.to(dtype)
    exact = low.to(torch.float64).run(reference.linear_attention_chunked)
    theirs = low.run(fla_backend.linear_attention)
    assert theirs["o"].dtype == dtype
    for name in ("o", "final_state", "d q", "d k", "d v"):
        error = (theirs[name].double() - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 2e-2, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_equals_the_reference_with_gradients(problem: Make, near: Make, kind: str) -> None:
    case = problem(B=2, T=1, H=4, G=2, K=8, V=6, kind=kind)
    found = []
    for form, dtype in (
        (reference.linear_attention_step, torch.float64),
        (fla_backend.linear_attention_step, torch.float32),
    ):
        q, k, v = (x[:, 0].to(dtype).requires_grad_() for x in (case.q, case.k, case.v))
        state = case.initial_state.to(dtype).requires_grad_()
        inputs, decay = [q, k, v, state], case.log_decay
        if decay is not None:
            decay = (decay[:, 0] if decay.dim() == 3 else decay).to(dtype).requires_grad_()
            inputs.append(decay)
        before = state.detach().clone()
        o, new = form(q, k, v, state, decay, scale=0.7)
        assert torch.equal(state, before)
        gradients = torch.autograd.grad(
            (o * case.do[:, 0]).sum() + (new * case.d_final).sum(),
            inputs,
            allow_unused=True,
            materialize_grads=True,
        )
        found.append({"o": o, "state": new} | {f"d {i}": g for i, g in enumerate(gradients)})
    near(found[1], found[0], 1e-5)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def test_refusals_name_setting_reason_and_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, step = fla_backend.linear_attention, fla_backend.linear_attention_step
    wide, odd, plain = x(1, 2, 1, 4, dtype=torch.float64), x(1, 2, 1, 5, dtype=torch.bfloat16), x(1, 2, 1, 4)
    cases: list[tuple[str, Callable[[], Any]]] = [
        (r"refuses window_attention: .* no attention over a window; use", lambda: fla_backend.window_attention(
            plain, plain, plain, window=2, scale=1.0)),
        (r"refuses fp64 inputs: its kernels accumulate in fp32; use", lambda: attention(wide, wide, wide)),
        (r"refuses fp64 inputs", lambda: step(wide[:, 0], wide[:, 0], wide[:, 0], x(1, 1, 4, 4).double())),
        (r"refuses an odd K or V in bf16 or fp16 \(K = 5, V = 5, torch.bfloat16\): .*; pad K and V",
         lambda: attention(odd, odd, odd)),
        (r"refuses a chunk_size other than 16, 32, 64 \(48\): ", lambda: attention(plain, plain, plain, chunk_size=48)),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(BackendError, match=message):
            call()
    monkeypatch.setattr(fla_backend, "_products_in_tf32", lambda q: True)
    with pytest.raises(
        BackendError, match=r"refuses fp32 inputs while .* 'highest': .* TF32, .*TRITON_F32_DEFAULT"
    ):
        attention(plain, plain, plain)
    half = plain.bfloat16()
    assert attention(half, half, plain)[0].dtype == torch.float32
    monkeypatch.setattr(fla_backend, "_gated_backward_is_wrong", lambda: True)
    with pytest.raises(BackendError, match=r"decay per token on Hopper GPUs .*; install triton>=3.7.1"):
        attention(half, half, half, -x(1, 2, 1).requires_grad_())
    assert attention(half, half, half, -x(1, 2, 1))[0].shape == half.shape


def test_the_hopper_condition_reads_flas_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    from fla import utils

    for name, value in (
        ("IS_NVIDIA_HOPPER", True),
        ("TRITON_ABOVE_3_4_0", True),
        ("TRITON_ABOVE_3_7_1", False),
    ):
        monkeypatch.setattr(utils, name, value)
    assert fla_backend._gated_backward_is_wrong.__wrapped__()
    monkeypatch.setattr(utils, "TRITON_ABOVE_3_7_1", True)
    assert not fla_backend._gated_backward_is_wrong.__wrapped__()


def test_why_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(found: str | None) -> Callable[[str], str]:
        def of(package: str) -> str:
            if found is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return found

        return of

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter" in str(fla_backend.unavailable(None))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "needs a GPU" in str(fla_backend.unavailable(torch.device("cpu")))
    monkeypatch.setattr(importlib.metadata, "version", version("0.5.2"))
    assert "fla-core 0.5.2 is older than 0.6" in str(fla_backend.unavailable(None))
    monkeypatch.setattr(importlib.metadata, "version", version(None))
    assert "pip install 'supra-lm[fla]'" in str(fla_backend.unavailable(None))
    monkeypatch.setattr(importlib.metadata, "version", version("0.10.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fla_backend.unavailable(torch.device("cuda")) is None


def test_both_tables_as_markdown() -> None:
    lines = fla_backend.markdown().splitlines()
    assert len(lines) == len(fla_backend.MAPPED) + len(fla_backend.REFUSED) + 5
    assert all(line.count("|") == 4 for line in lines if line)
