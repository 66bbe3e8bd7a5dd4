"""The Triton decode step: one launch equals the fp64 reference, alone and with all that a layer does around it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from supra_kernels import BackendError, reference
from supra_kernels.step import linear_attention_step_torch

pytest.importorskip("triton")
from supra_kernels.triton_backend.step import (
    StepPlan,
    StepWeights,
    decode_step,
    linear_attention_step,
    why_not_fused,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = (torch.bfloat16, torch.float16)
Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def _outputs_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.empty` hands out NaN, so that an element nobody wrote is seen."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def error(found: Tensor, exact: Tensor) -> float:
    """Largest difference relative to the largest exact value."""
    assert found.shape == exact.shape
    assert found.isfinite().all()
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max().clamp(min=1e-3))


def assert_as_exact_as(found: Tensor, same_dtype: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """1e-5 in fp32; in half precision at most twice the error of the same computation in PyTorch."""
    allowed = 0.0 if dtype == torch.float32 else 2 * error(same_dtype, exact)
    assert error(found, exact) <= max(allowed, 1e-5)


def step_arguments(case: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Arguments of the step from a problem of one token."""
    case = case.to(dtype)
    decay = case.log_decay
    decay = decay[:, 0] if decay is not None and decay.dim() == 3 else decay
    arguments = [case.q[:, 0], case.k[:, 0], case.v[:, 0], case.initial_state, decay]
    return [None if x is None else x.to(DEVICE) for x in arguments]


def double(arguments: list[Any]) -> list[Any]:
    return [None if x is None else x.double() for x in arguments]


def check_step(arguments: list[Any], dtype: torch.dtype) -> None:
    exact, exact_state = reference.linear_attention_step(*double(arguments), scale=0.7)
    same = [x if i != 3 else x.clone() for i, x in enumerate(arguments)]
    same_o, same_state = linear_attention_step_torch(*same, scale=0.7)
    state = arguments[3]
    o, new = linear_attention_step(*arguments, scale=0.7)
    assert new is state and o.dtype == arguments[2].dtype
    assert_as_exact_as(o, same_o, exact, dtype)
    assert_as_exact_as(state, same_state, exact_state, torch.float32)


@pytest.mark.parametrize(
    "kind", ["none", "query head", "key head", "token and query head", "token and key head"]
)
@pytest.mark.parametrize(("B", "H", "G"), [(1, 1, 1), (3, 3, 1), (1, 4, 1), (2, 8, 1), (1, 6, 2)])
def test_a_step_equals_the_reference(problem: Make, kind: str, B: int, H: int, G: int) -> None:
    check_step(step_arguments(problem(B=B, T=1, H=H, G=G, K=16, V=24, kind=kind)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    ("K", "V"),
    [(64, 64), (80, 80), (96, 33), (128, 129), (65, 65), (153, 65), (512, 17), (5, 1), (256, 96), (1, 3)],
)
def test_widths_that_fill_no_block(problem: Make, K: int, V: int, dtype: torch.dtype) -> None:
    """Among them those of a normaliser behind a round number of values, which has no block of its own."""
    check_step(step_arguments(problem(B=2, T=1, H=2, G=1, K=K, V=V, kind="key head"), dtype), dtype)


def test_steps_equal_one_chunked_pass(problem: Make) -> None:
    case = problem(B=2, T=20, H=4, G=2, K=16, V=17, kind="token and query head").to(torch.float32)
    arguments = (case.q, case.k, case.v, case.log_decay)
    exact, final = reference.linear_attention_chunked(
        *double(list(arguments)),
        initial_state=case.initial_state.double(),
        output_final_state=True,
        chunk_size=8,
    )
    q, k, v, decay, state = (x.to(DEVICE) for x in (*arguments, case.initial_state))
    o = [linear_attention_step(q[:, t], k[:, t], v[:, t], state, decay[:, t])[0] for t in range(20)]
    assert error(torch.stack(o, 1).cpu(), exact) <= 1e-5
    assert final is not None and error(state.cpu(), final) <= 1e-5


def test_rows_of_a_batch_do_not_meet(problem: Make) -> None:
    arguments = step_arguments(problem(B=3, T=1, H=4, G=2, K=24, V=33, kind="token and query head"))
    alone = []
    for row in range(3):
        own = [x[row : row + 1].clone() for x in arguments]
        alone.append(linear_attention_step(*own))
    o, state = linear_attention_step(*arguments)
    assert torch.equal(o, torch.cat([each for each, _ in alone]))
    assert torch.equal(state, torch.cat([each for _, each in alone]))


def test_a_strong_decay_and_odd_strides(problem: Make) -> None:
    """exp(−1e4) is 0 and no NaN; inputs and even the state may be views."""
    q, k, v, state, decay = step_arguments(problem(B=2, T=1, H=4, G=2, K=8, V=8, kind="query head"))
    decay[1:3] = -1e4
    transposed = state.transpose(2, 3).contiguous().transpose(2, 3)
    swap = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    exact, exact_state = reference.linear_attention_step(*double([q, k, v, state, decay]))
    o, new = linear_attention_step(*swap, transposed, decay)
    assert new is transposed
    assert error(o, exact) <= 1e-5
    assert error(transposed, exact_state) <= 1e-5


def test_a_step_that_needs_a_gradient_leaves_the_state_alone(problem: Make) -> None:
    arguments = step_arguments(problem(T=1, H=2, G=1, K=4, V=4, kind="key head"))
    before = arguments[3].clone()
    arguments[0].requires_grad_()
    o, new = linear_attention_step(*arguments)
    assert torch.equal(arguments[3], before) and new is not arguments[3]
    o.sum().backward()
    assert arguments[0].grad is not None
    with torch.no_grad():
        assert linear_attention_step(*arguments)[1] is arguments[3]


def test_float64_and_an_empty_batch() -> None:
    x = torch.zeros(1, 1, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(BackendError, match=r"'triton' computes in fp32"):
        linear_attention_step(x, x, x, torch.zeros(1, 1, 4, 4, dtype=torch.float64))
    nothing = torch.zeros(0, 2, 4, device=DEVICE)
    o, state = linear_attention_step(nothing, nothing, nothing, torch.zeros(0, 2, 4, 4, device=DEVICE))
    assert o.shape == (0, 2, 4) and state.shape == (0, 2, 4, 4)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [B, h, K], D features at a time."""
    pieces = x.unflatten(-1, (-1, cos.shape[-1]))
    first, second = pieces.chunk(2, dim=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return (pieces * cos + torch.cat((-second, first), -1) * sin).flatten(-2)


def mapped(plan: StepPlan, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x if weight is None else torch.einsum("bhd,hkd->bhk", x, weight)
    y = y if bias is None else y + bias
    if plan.feature_map == "hedgehog":
        high = torch.promote_types(y.dtype, torch.float32)
        return torch.softmax(torch.cat((y, -y), -1), -1, dtype=high).to(y.dtype)
    return {"relu": F.relu, "elu": lambda z: F.elu(z) + 1, "identity": lambda z: z}[plan.feature_map](y)


def unfused(
    plan: StepPlan, q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None, **options: Any
) -> Tensor:
    """`decode_step` in PyTorch, in the inputs' dtype but for the state and what comes after it."""
    cos, sin, w = options.get("cos"), options.get("sin"), options.get("weights", StepWeights())
    if plan.rope == "before":
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    q, k = mapped(plan, q, w.q_weight, w.q_bias), mapped(plan, k, w.k_weight, w.k_bias)
    if plan.rope == "after":
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    v = v.to(state.dtype)
    if plan.norm == "denominator":
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    o, _ = linear_attention_step_torch(q, k, v, state, decay, scale=plan.scale)
    if plan.norm == "denominator":
        return o[..., :-1] / o[..., -1:].clamp_min(1e-12)
    if plan.norm == "group_norm":
        weight, bias = (None if x is None else x.to(o.dtype).flatten() for x in (w.norm_weight, w.norm_bias))
        return F.group_norm(o.flatten(1), o.shape[1], weight, bias, plan.eps).view(o.shape)
    return o


def fused_arguments(
    plan: StepPlan,
    B: int = 2,
    H: int = 2,
    G: int = 1,
    D: int = 16,
    V: int | None = None,
    decay: str = "key head",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[list[Any], dict[str, Any]]:
    """Random arguments of a `decode_step`; the state is a sum of features, as it is in a model."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    V = V or D
    S = H if "query" in decay else G
    log_decay = None if decay == "none" else -torch.exp(normal(*((B, S) if "token" in decay else (S,))) - 1)
    columns = V + (plan.norm == "denominator")
    state = normal(B, S, 2 * D if plan.feature_map == "hedgehog" else D, columns)
    if plan.norm == "denominator":
        state[..., -1] = state[..., -1].abs() + 0.1
    options: dict[str, Any] = {}
    if plan.rope != "none":
        angles = (normal(B, D // 2) * 3).repeat(1, 2)
        options |= {"cos": angles.cos(), "sin": angles.sin()}
    weights: dict[str, Tensor] = {}
    if plan.feature_map == "hedgehog" or (plan.feature_map == "relu" and seed % 2 == 0):
        weights |= {"q_weight": normal(H, D, D) * D**-0.5, "k_weight": normal(G, D, D) * D**-0.5}
    if plan.feature_map == "relu":
        weights |= {"q_bias": normal(H, D), "k_bias": normal(G, D)}
    if plan.norm == "group_norm" and seed % 2 == 0:
        weights |= {"norm_weight": normal(H, V), "norm_bias": normal(H, V)}
    weights = {name: x.to(DEVICE, dtype) for name, x in weights.items()}
    options = {name: x.to(DEVICE, dtype) for name, x in options.items()} | {"weights": StepWeights(**weights)}
    inputs = [normal(B, H, D), normal(B, G, D), normal(B, G, V)]
    place = [x.to(DEVICE, dtype) for x in inputs] + [state.to(DEVICE)]
    return [*place, None if log_decay is None else log_decay.to(DEVICE)], options


def in_double(arguments: list[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    named = {name: x.double() for name, x in options.items() if isinstance(x, Tensor)}
    weights = options["weights"]
    held = {name: x.double() for name, x in vars(weights).items() if x is not None}
    return double(arguments), named | {"weights": StepWeights(**held)}


def check_fused(plan: StepPlan, dtype: torch.dtype = torch.float32, **sizes: Any) -> None:
    arguments, options = fused_arguments(plan, dtype=dtype, **sizes)
    exact_arguments, exact_options = in_double(arguments, options)
    exact = unfused(plan, *exact_arguments, **exact_options)
    same_arguments = [x if i != 3 else x.clone() for i, x in enumerate(arguments)]
    same = unfused(plan, *same_arguments, **options).to(dtype)
    out = decode_step(plan, *arguments, **options)
    assert out.dtype == dtype
    assert_as_exact_as(out, same, exact, dtype)
    assert_as_exact_as(arguments[3], same_arguments[3], exact_arguments[3], dtype)


MAPS = ("identity", "elu", "relu", "hedgehog")
# A signed denominator means nothing: the same pairs as a configuration allows, and every part alone.
NORMS = [
    ("none", "none"), ("after", "none"), ("before", "none"), ("none", "group_norm"), ("after", "group_norm"),
    ("before", "group_norm"), ("none", "denominator"), ("before", "denominator"),
]  # fmt: skip


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize(("rope", "norm"), NORMS)
def test_every_fusion_equals_its_parts(feature_map: Any, rope: Any, norm: Any) -> None:
    if norm == "denominator" and feature_map == "identity":
        feature_map = "relu"
    plan = StepPlan(feature_map, rope, norm, scale=0.3)
    for seed in (0, 1):
        check_fused(plan, seed=seed)


@pytest.mark.parametrize(
    "decay", ["none", "query head", "key head", "token and query head", "token and key head"]
)
@pytest.mark.parametrize(("B", "H", "G"), [(1, 1, 1), (3, 3, 1), (1, 4, 1), (1, 8, 2)])
def test_every_decay_and_grouping(decay: str, B: int, H: int, G: int) -> None:
    check_fused(StepPlan("elu", "before", "denominator"), B=B, H=H, G=G, decay=decay, D=8)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("D", "V"), [(64, 64), (80, 80), (96, 65), (128, 128)])
@pytest.mark.parametrize(
    "plan", [StepPlan("relu", "after", "group_norm", 0.1), StepPlan("hedgehog", "before", "denominator")]
)
def test_head_dims_and_dtypes(plan: StepPlan, D: int, V: int, dtype: torch.dtype) -> None:
    check_fused(plan, dtype, B=1, D=D, V=V)


@pytest.mark.parametrize("rope", ["after", "before"])
def test_features_wider_than_a_head(rope: Any) -> None:
    """The hedgehog map done outside: 2D features come in, and RoPE still rotates D at a time."""
    plan = StepPlan("identity", rope, "group_norm")
    (q, k, v, state, decay), options = fused_arguments(plan, D=24)
    q, k, state = (torch.cat((x, x.flip(-1)), dim=dim) for x, dim in ((q, -1), (k, -1), (state, 2)))
    exact_arguments, exact_options = in_double([q, k, v, state, decay], options)
    exact = unfused(plan, *exact_arguments, **exact_options)
    assert error(decode_step(plan, q, k, v, state, decay, **options), exact) <= 1e-5
    assert error(state, exact_arguments[3]) <= 1e-5


def test_repeated_fused_steps_and_independent_rows() -> None:
    plan = StepPlan("relu", "after", "group_norm")
    arguments, options = fused_arguments(plan, B=2, H=4, G=2, decay="token and query head")
    rows = [[x[row : row + 1].clone() for x in arguments] for row in range(2)]
    exact_arguments, exact_options = in_double(arguments, options)
    for _ in range(3):
        out = decode_step(plan, *arguments, **options)
        exact = unfused(plan, *exact_arguments, **exact_options)
        alone = []
        for i, row in enumerate(rows):
            own = {name: options[name][i : i + 1] for name in ("cos", "sin")}
            alone.append(decode_step(plan, *row, **own, weights=options["weights"]))
        assert error(out, exact) <= 1e-5
        assert torch.equal(out, torch.cat(alone))
    assert torch.equal(arguments[3], torch.cat([row[3] for row in rows]))


def test_out_is_written_and_one_rope_row_serves_all() -> None:
    plan = StepPlan("elu", "before", "denominator")
    arguments, options = fused_arguments(plan, B=2)
    one = {name: options[name][:1] for name in ("cos", "sin")}
    both = {name: x.expand(2, -1) for name, x in one.items()}
    twin = [x if i != 3 else x.clone() for i, x in enumerate(arguments)]
    out = torch.full((2, 2, 16), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    assert decode_step(plan, *arguments, **one, out=out) is out
    assert error(out, decode_step(plan, *twin, **both)) <= 2.0**-8


@pytest.mark.skipif(DEVICE == "cpu", reason="a CUDA graph needs a GPU")
def test_a_cuda_graph_replays_the_step() -> None:
    plan = StepPlan("relu", "after", "group_norm")
    arguments, options = fused_arguments(plan, D=64)
    twin = [x if i != 3 else x.clone() for i, x in enumerate(arguments)]
    out = torch.empty(2, 2, 64, device=DEVICE)
    decode_step(plan, *arguments, **options, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_step(plan, *arguments, **options, out=out)
    graph.replay()
    for _ in range(2):
        expected = decode_step(plan, *twin, **options)
    assert torch.equal(out, expected)


def test_bad_arguments_are_named() -> None:
    plan = StepPlan("relu", "after", "group_norm")
    (q, k, v, state, decay), options = fused_arguments(plan)

    def refused(
        message: str, kind: type[Exception] = ValueError, plan: StepPlan = plan, **change: Any
    ) -> None:
        arguments = dict(q=q, k=k, v=v, state=state, log_decay=decay) | options | change
        with pytest.raises(kind, match=message):
            decode_step(plan, **arguments)

    refused(r"k has shape \[2, 1, 8\]; expected \[2, 1, 16\]", k=k[..., :8])
    refused(
        r"state has shape \[2, 1, 16, 16\]; expected \[2, 1, 16, 17\]", plan=replace(plan, norm="denominator")
    )
    refused(r"log_decay has shape \[3\]; expected \[1\] or \[2, 1\]", log_decay=decay.new_zeros(3))
    refused(r"give cos and sin together", cos=None)
    refused(r"expected contiguous fp32", state=state.bfloat16())
    refused(r"needs q_weight", plan=replace(plan, feature_map="hedgehog"), state=state.repeat(1, 1, 2, 1),
            weights=StepWeights())  # fmt: skip
    refused(r"'elu' has no parameters", plan=replace(plan, feature_map="elu"))
    refused(r"norm 'none' has no parameters", plan=replace(plan, norm="none"))
    refused(r"does not take fp64", BackendError, q=q.double())
    large = torch.zeros(1, 1, 256, device=DEVICE)
    with pytest.raises(BackendError, match=r"a state \[256, 256\] takes 65536 lanes"):
        decode_step(StepPlan(), large, large, large, torch.zeros(1, 1, 256, 256, device=DEVICE))
    assert why_not_fused(128, 256, 128) is None
