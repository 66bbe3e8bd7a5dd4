"""`supra eval --length`: loss by position, by distance and by protocol, and what each context costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from supra.errors import UserError
from supra.loading import load_tokenizer, resolve_device
from supra.recipe_io import require_known
from supra_eval.contenders import ABLATIONS, Contender
from supra_eval.results import Curve, EvalRun, Score

from .books import hash_of, read_books
from .cost import DECODE_STEPS, measure_cost, memory_method
from .horizon import decay_horizon, describe_horizon
from .losses import Mean, by_last_mention, by_position, clustered, non_overlapping, read_losses, sliding
from .session import TOKENS, Part, Readers, Say, Session, known_errors, require_contexts

PROTOCOLS = ("non_overlapping", "sliding", "carried")
SLIDING_STRIDE, SLIDING_WINDOWS = 256, 16
# Tokens of all rows that are read side by side: short contexts are batched, the memory stays that of a long one.
BATCH_TOKENS = 4096


def run_length(
    model: Path, *, teacher: Path | None, data: list[str], contexts: Sequence[int], protocols: Sequence[str],
    rope: Sequence[str], max_sequences: int, ablations: bool, out: Path | None, device: str, dtype: str, backend: str,
    student_rope: bool = False, chunk_tokens: int = 512, seed: int = 0, cost: bool = True, say: Say = print,
) -> EvalRun:  # fmt: skip
    """Measure the student, its ablations, its untrained conversion and the teacher past the training length.

    The losses by position and by distance come from one read of `max_sequences` sequences of the longest context;
    `protocols` (see `PROTOCOLS`) adds perplexity at every context, `cost` state size, decode time and peak memory.
    Each of `rope` other than none adds the teacher with its positions scaled to the longest context, and with
    `student_rope` the student likewise.

    Raises:
        UserError: a folder, text, context, protocol or scaling that is wrong, or `out` holds another evaluation.
        SupraError: a folder that does not hold a whole model, or `out` cannot be written.
    """
    contexts = require_contexts(contexts)
    _require_protocols(protocols, contexts)
    if chunk_tokens < 1:
        raise UserError(f"--chunk-tokens {chunk_tokens}", "is out of range", "Use at least 1")
    readers = Readers(model, teacher, rope, contexts[-1], ablations, device, dtype, backend, student_rope)
    # A sliding window at the longest context still slides: its first windows end before the last ones.
    extra = (SLIDING_WINDOWS - 1) * SLIDING_STRIDE if "sliding" in protocols else 0
    ids, sources = read_books(data, load_tokenizer(model), contexts[-1] + extra, max_sequences)
    settings: dict[str, Any] = {
        "contexts": contexts, "protocols": list(protocols), "rope": readers.describe_rope(),
        "sequences": ids.shape[0], "sources": sources, "tokens_hash": hash_of(ids), "chunk_tokens": chunk_tokens,
        "sliding": f"stride {SLIDING_STRIDE}, {SLIDING_WINDOWS} windows", "device": device,
        "cost": f"peak memory: {memory_method(resolve_device(device))}" if cost else "none",
        "dtype": dtype, "backend": backend,
    }  # fmt: skip
    session = Session(
        EvalRun("length", str(model), str(teacher) if teacher else None, seed, settings), out, say
    )
    say(f"{ids.shape[0]} sequences of {ids.shape[1]:,} tokens from {', '.join(sources)}")
    if cost:
        say(settings["cost"])

    def work(contender: Contender) -> None:
        _tell_horizon(session, contender)
        longest = ids[:, : contexts[-1]]
        carries = "carried" in protocols and bool(_num_linear_layers(contender))
        session.attempt(contender, "positions", _positions, contender, longest, chunk_tokens, carries, say)
        for protocol in (name for name in PROTOCOLS if name in protocols and name != "carried"):
            read = ids if protocol == "sliding" else longest
            for context in contexts:
                session.attempt(
                    contender, f"{protocol} at {context}",
                    _protocol, contender, protocol, read, context, chunk_tokens,
                )  # fmt: skip
            session.keep_curve(contender.name, protocol, "perplexity", f"perplexity {protocol}")
        if cost:
            session.attempt(contender, "cost", _cost, contender, ids[:1], contexts, chunk_tokens)

    return session.measure(readers, work)


def _require_protocols(protocols: Sequence[str], contexts: Sequence[int]) -> None:
    require_known(protocols, PROTOCOLS, "--protocols")
    if "sliding" in protocols and contexts[0] <= SLIDING_STRIDE:
        raise UserError(
            f"--contexts {contexts[0]}",
            f"is no longer than the sliding window's stride of {SLIDING_STRIDE} tokens",
            "Use longer contexts",
        )


def _num_linear_layers(contender: Contender) -> int:
    return int(getattr(contender.model.config, "num_linear_layers", 0))


def _tell_horizon(session: Session, contender: Contender) -> None:
    """Say and keep how far the states reach; an ablation's are the student's."""
    if contender.name in ABLATIONS or not _num_linear_layers(contender):
        return
    horizons = decay_horizon(contender.model)
    session.run.settings["decay_horizon_tokens"][contender.name] = horizons
    session.say(f"{contender.name}: {describe_horizon(horizons)}")
    if horizons and all(math.isfinite(tokens) for tokens in horizons):
        layers = [float(layer) for layer in range(len(horizons))]
        label = "tokens until the slowest head keeps 1 %"
        session.keep(
            [Curve("decay horizon", contender.name, "linear layer", label, layers, horizons, log_x=False)]
        )


def _positions(contender: Contender, ids: Tensor, chunk_tokens: int, carries: bool, say: Say) -> list[Part]:
    """Curves by position and by last mention of one read, and where it applies the perplexity of all of it."""
    name, longest = contender.name, ids.shape[1]
    losses, num_bytes = read_losses(contender.model, ids, chunk_tokens, batch_size=_rows_at_once(longest))
    say(f"{name}: its cache holds {num_bytes / 1e6:,.1f} MB after {longest:,} tokens")
    size = Score("positions", "cache_bytes", name, float(num_bytes), None, ids.shape[0], longest, False)
    mentions, never = by_last_mention(losses, ids)
    parts: list[Part] = [
        size,
        _loss_curve("loss by position", name, "position (tokens, end of the bucket)", by_position(losses)),
        _loss_curve(
            "loss by last mention",
            name,
            "distance to the token's last mention (from 2^k to 2^(k+1) - 1)",
            mentions,
        ),
    ]
    if never is not None:
        parts.append(
            Score(
                "never mentioned", "loss", name, never.value, never.stderr, never.num_tokens, longest, False
            )
        )
    if carries:
        parts.append(_perplexity("carried", name, longest, clustered(losses)))
    return parts


def _protocol(
    contender: Contender, protocol: str, ids: Tensor, context: int, chunk_tokens: int
) -> list[Part]:
    model, batch_size = contender.model, _rows_at_once(context)
    if protocol == "sliding":
        losses = sliding(
            model, ids, context, chunk_tokens,
            stride=SLIDING_STRIDE, max_windows=SLIDING_WINDOWS, batch_size=batch_size,
        )  # fmt: skip
    else:
        losses = non_overlapping(model, ids, context, chunk_tokens, batch_size=batch_size)
    return [_perplexity(protocol, contender.name, context, clustered(losses))]


def _cost(contender: Contender, ids: Tensor, contexts: Sequence[int], chunk_tokens: int) -> list[Part]:
    rows = measure_cost(contender.model, ids, contexts, chunk_tokens=chunk_tokens)
    x = [float(row.context_tokens) for row in rows]
    columns = {
        "cache": ("MB held for the context", [row.cache_bytes / 1e6 for row in rows]),
        "decode time": (f"ms per token (median of {DECODE_STEPS})", [row.decode_ms for row in rows]),
        "peak memory": ("MB at most, weights included", [row.peak_bytes / 1e6 for row in rows]),
    }
    return [Curve(title, contender.name, TOKENS, label, x, y) for title, (label, y) in columns.items()]


def _rows_at_once(context: int) -> int:
    return max(1, BATCH_TOKENS // context)


def _perplexity(task: str, name: str, context: int, mean: Mean) -> Score:
    """exp of the mean loss; its standard error by the delta method, exp(m)·se."""
    value = math.exp(min(mean.value, 700.0))
    stderr = None if mean.stderr is None else value * mean.stderr
    return Score(task, "perplexity", name, value, stderr, mean.num_tokens, context, higher_is_better=False)


def _loss_curve(title: str, name: str, x_label: str, rows: list[tuple[int, Mean]]) -> Curve:
    return Curve(
        title, name, x_label, "loss (nats per token)", [float(x) for x, _ in rows],
        [mean.value for _, mean in rows], known_errors([mean.stderr for _, mean in rows]),
    )  # fmt: skip
