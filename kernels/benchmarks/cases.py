"""What is measured: shapes of real models, kinds of decay, passes, and each contender as a call on given tensors.

Every contender of a case computes on the same q, k, v in bf16. Ours takes grouped keys as they are. fla has no grouped
heads, so "fla" repeats keys and values inside the measured call, as any caller with grouped heads must, and "fla, keys
repeated before" shows the kernels alone. The decay per query head is retention's own, so that `chunk_retention` is
among them. SDPA is softmax attention, which knows no decay; at a step it reads `CACHED_TOKENS` cached keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from supra_kernels import BackendError, cost, fla_backend, linear_attention, linear_attention_step, reference
from supra_kernels.step import linear_attention_step_torch

FORWARD, BOTH, STEP = "forward", "forward+backward", "step"
DECAYS: dict[str, cost.DecayKind] = {
    "per query head": "query head",
    "shared in the group": "key head",
    "none": "none",
    "per token": "token and query head",
}
CACHED_TOKENS = 4096
OURS, FLA, FLA_REPEATED, SDPA, COMPILED = (
    "ours",
    "fla",
    "fla, keys repeated before",
    "SDPA flash",
    "torch.compile",
)

Call = Callable[[], Any]


@dataclass(frozen=True)
class Model:
    """Head counts and head dim of one layer."""

    name: str
    H: int
    G: int
    D: int


MODELS = (Model("Llama-3-8B and Mistral-7B", 32, 8, 128), Model("SmolLM2-135M", 9, 3, 64))
TOY = (Model("toy", 4, 1, 16),)


@dataclass(frozen=True)
class Case:
    """One pass at one size: B rows of T tokens, or of one token at a step."""

    model: Model
    decay: str
    operation: str
    T: int
    B: int

    @property
    def shape(self) -> cost.Shape:
        m = self.model
        return cost.Shape(self.B, self.T, m.H, m.G, m.D, m.D, DECAYS[self.decay])

    def costs(self) -> cost.Costs:
        """Costs by kernel of our backend, in the chunks and with the saved states that the cost model chooses."""
        s = self.shape
        if self.operation == STEP:
            return cost.step(s)
        C = cost.choose_chunk_size(s)
        wanted = s.decay.startswith("token")
        gradients = cost.backward(s, C, saved=cost.save_states(s, C), decay_gradient=wanted)
        return cost.forward(s, C) | (gradients if self.operation == BOTH else {})

    def describe(self) -> str:
        return f"{self.model.name}, {self.operation}, decay {self.decay}, T = {self.T}, B = {self.B}"


@dataclass(frozen=True)
class Preset:
    """Lengths at a fixed number of tokens per call, batch sizes of the step, rounds, and the time all may take."""

    lengths: tuple[int, ...]
    tokens: int
    step_batches: tuple[int, ...]
    rounds: int
    case_seconds: float
    budget_seconds: float
    models: tuple[Model, ...] = MODELS


PRESETS = {
    # The process itself, imports and report included, stays below 4 minutes.
    "quick": Preset((4096, 16384, 1024, 131072), 131072, (64, 1), 30, 4.0, 215.0),
    "full": Preset(tuple(1024 << i for i in range(8)), 131072, (1, 8, 64, 256), 100, 30.0, 5400.0),
}
DRY = Preset((16, 32), 32, (1, 2), 1, 60.0, 600.0, TOY)


def cases(preset: Preset) -> Iterator[Case]:
    """All cases, those that a goal reads first: when time runs out, the least is lost."""
    goals, rest = ("per query head", "shared in the group"), ("none", "per token")
    batches = sorted(preset.step_batches, reverse=True)
    steps = [Case(m, decay, STEP, 1, B) for B in batches for m in preset.models for decay in DECAYS]
    passes = [
        Case(m, decay, operation, T, preset.tokens // T)
        for decays in (goals, rest)
        for operation in (BOTH, FORWARD)
        for m in preset.models
        for T in preset.lengths
        for decay in decays
    ]
    first = [
        case
        for case in passes
        if case.operation == BOTH and case.decay in goals and case.model is preset.models[0]
    ]
    # fla tunes other kernels for a decay per token, which takes it minutes the first time: those come last.
    later = [case for case in passes if case not in first]
    last = [case for case in (*later, *steps) if case.decay == "per token"]
    yield from first
    yield from (case for case in steps if case not in last)
    yield from (case for case in later if case not in last)
    yield from last


@dataclass
class Inputs:
    """Tensors of one call; `made` keeps what a contender prepares from them outside the measured time."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    do: Tensor
    state: Tensor | None
    made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    @property
    def recurrent_state(self) -> Tensor:
        assert self.state is not None, "only a step has one"
        return self.state

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.do, self.state) if x is not None)


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Unit normal values, keys of unit length, retention's decays or ones between them."""
    m, gradients, generator = case.model, case.operation == BOTH, torch.Generator(device).manual_seed(seed)
    lead = (case.B,) if case.operation == STEP else (case.B, case.T)

    def normal(heads: int, size: float = 1.0) -> Tensor:
        x = torch.randn(*lead, heads, m.D, generator=generator, device=device, dtype=dtype) * size
        return x.requires_grad_(gradients)

    retention = torch.log1p(-torch.exp2(-5.0 - torch.arange(m.H, device=device, dtype=torch.float32)))
    log_decay = {"none": None, "shared in the group": retention.view(m.G, -1)[:, 0].contiguous()}.get(
        case.decay, retention
    )
    if case.decay == "per token":
        log_decay = F.logsigmoid(
            torch.randn(*lead, m.H, generator=generator, device=device) + 3
        ).requires_grad_(gradients)
    state = None
    if case.operation == STEP:
        state = torch.randn(case.B, case.shape.state_heads, m.D, m.D, generator=generator, device=device)
    return Inputs(normal(m.H), normal(m.G, m.D**-0.5), normal(m.G), log_decay, normal(m.H).detach(), state)


def contenders(case: Case, backend: str, dry: bool) -> dict[str, Callable[[Inputs], Call]]:
    """Name → what makes a call of that contender from inputs, the dispensable last.

    Making or calling may raise BackendError: not comparable here, with the reason.
    """
    m, scale = case.model, case.model.D**-0.5
    n = m.H // m.G

    def repeated(x: Tensor, dim: int) -> Tensor:
        return x.repeat_interleave(n, dim)

    if case.operation == STEP:

        def ours_step(x: Inputs) -> Call:
            return lambda: linear_attention_step(
                x.q, x.k, x.v, x.recurrent_state, x.log_decay, scale=scale, backend=backend
            )

        def fla_step(x: Inputs) -> Call:
            _, _, recurrent = fla_functions(dry)
            state = (
                x.recurrent_state
                if x.recurrent_state.shape[1] == m.H
                else x.once("state", lambda: repeated(x.recurrent_state, 1))
            )
            q, k, v = (
                t.unsqueeze(1) for t in (x.q, *x.once("keys", lambda: (repeated(x.k, 1), repeated(x.v, 1))))
            )
            options = fla_decay(x.log_decay, m.H)
            if options.get("g") is not None:
                options["g"] = options["g"].unsqueeze(1)
            return lambda: recurrent(
                q, k, v, scale=scale, initial_state=state, output_final_state=True, **options
            )

        def sdpa_step(x: Inputs) -> Call:
            shape = (case.B, m.G, 32 if dry else CACHED_TOKENS, m.D)
            k, v = x.once(
                "cache", lambda: [torch.randn(shape, device=x.q.device, dtype=x.q.dtype) for _ in range(2)]
            )
            q = x.q.unsqueeze(2)
            return lambda: flash(q, k, v, scale, causal=False)

        def compiled_step(x: Inputs) -> Call:
            step = compiled(linear_attention_step_torch, dry)
            return lambda: step(x.q, x.k, x.v, x.recurrent_state, x.log_decay, scale=scale)

        return {OURS: ours_step, FLA: fla_step, SDPA: sdpa_step, COMPILED: compiled_step}

    def run(
        x: Inputs,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        k: Tensor,
        v: Tensor,
        decayed: bool = True,
    ) -> Call:
        """The pass itself: `attend(q, k, v)`, and the gradients of everything that asks for one."""
        if case.operation == FORWARD:

            def forward() -> Tensor:
                with torch.no_grad():
                    return attend(x.q, k, v)

            return forward
        inputs = [x.q, k, v]
        if decayed and x.log_decay is not None and x.log_decay.requires_grad:
            inputs.append(x.log_decay)
        return lambda: torch.autograd.grad(attend(x.q, k, v), inputs, x.do)

    def ours(x: Inputs) -> Call:
        return run(
            x,
            lambda q, k, v: linear_attention(q, k, v, x.log_decay, scale=scale, backend=backend)[0],
            x.k,
            x.v,
        )

    def fla_attend(x: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        chunked, retention, _ = fla_functions(dry)
        if case.decay == "per query head":
            return lambda q, k, v: retention(q, k, v, scale=scale)[0]
        options = fla_decay(x.log_decay, m.H)
        return lambda q, k, v: chunked(q, k, v, scale=scale, **options)[0]

    def fla(x: Inputs) -> Call:
        attend = fla_attend(x)
        return run(x, lambda q, k, v: attend(q, repeated(k, 2), repeated(v, 2)), x.k, x.v)

    def fla_repeated(x: Inputs) -> Call:
        def make() -> list[Tensor]:
            return [repeated(t.detach(), 2).requires_grad_(t.requires_grad) for t in (x.k, x.v)]

        return run(x, fla_attend(x), *x.once("keys", make))

    def sdpa(x: Inputs) -> Call:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return flash(q, k, v, scale, causal=True).transpose(1, 2)

        return run(x, attend, x.k, x.v, decayed=False)

    def compiled_reference(x: Inputs) -> Call:
        return run(x, lambda q, k, v: reference_in_chunks(q, k, v, x.log_decay, scale, dry), x.k, x.v)

    return {OURS: ours, FLA: fla, SDPA: sdpa, FLA_REPEATED: fla_repeated, COMPILED: compiled_reference}


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Tensor:
    """PyTorch's flash attention and no other; tensors `[B, heads, T, D]`."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def fla_decay(log_decay: Tensor | None, heads: int) -> dict[str, Tensor]:
    """Our decay as fla's keyword argument."""
    if log_decay is None:
        return {}
    spread = log_decay.repeat_interleave(heads // log_decay.shape[-1], -1)
    return {"g_gamma": spread} if log_decay.dim() == 1 else {"g": spread}


def fla_functions(dry: bool) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """`chunk_simple_gla`, `chunk_retention`, `fused_recurrent_simple_gla`; in a dry run fla's naive form instead.

    Raises BackendError if fla cannot run.
    """
    reason = fla_backend.unavailable(None)
    if reason is not None and not (dry and "installed" not in reason):
        raise BackendError(reason)
    if not dry:
        from fla.ops.retention import chunk_retention
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

        return chunk_simple_gla, chunk_retention, fused_recurrent_simple_gla
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    def naive(q: Tensor, k: Tensor, v: Tensor, *, g: Any = None, g_gamma: Any = None, **options: Any) -> Any:
        if g is None:
            g = (q.new_zeros(q.shape[2]) if g_gamma is None else g_gamma).expand(*q.shape[:3])
        return naive_recurrent_simple_gla(q, k, v, g, **options)

    def retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return naive(q, k, v, g_gamma=torch.log1p(-torch.exp2(-5.0 - torch.arange(q.shape[2]))), **options)

    return naive, retention, naive


@functools.cache
def compiled(function: Callable[..., Any], dry: bool) -> Callable[..., Any]:
    """`torch.compile` for each shape anew, never back to eager code; a dry run only traces."""
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False, backend="eager" if dry else "inductor")


def reference_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, dry: bool
) -> Tensor:
    """The reference's chunked form with its chunk compiled: one graph for any length."""
    chunk = compiled(reference._parallel, dry)

    def form(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for start in range(0, q.shape[1], 64):
            own = slice(start, start + 64)
            o, state = chunk(q[:, own], k[:, own], v[:, own], log_decay[:, own], state)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    return reference._per_document(form, q, k, v, log_decay, scale, None, False, None)[0]
