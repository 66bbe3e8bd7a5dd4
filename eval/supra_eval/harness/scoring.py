"""Log-likelihoods of many continuations: shared prefixes are read once and their state is forked.

Notable: logits are made only where a target stands; a segment longer than a chunk is read chunk by chunk, so memory
does not grow with the length of a request beyond the model's own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from supra.generate import cache_bytes, require_finite
from supra_eval.harness.forks import Row, can_fork, gather, new_cache
from supra_eval.harness.prefixes import Request, Segment, num_read_tokens, plan_segments, shorten

# Rows of logits made at a time: 256 x 128k vocabulary in fp32 is 131 MB.
HEAD_TOKENS = 256
# A forked state costs a copy of it; fewer saved tokens than this are read again faster.
MIN_SAVED_TOKENS = 24
# Segments with children are read together where the longest exceeds the shortest by no more; what is cut off each child
# reads again. A batch has a fixed cost, of about 70 tokens of a 135M model on a CPU.
MAX_CUT_TOKENS = 8
# Leaves are padded to the longest: beyond this share of pads a batch is closed, once it is worth its fixed cost.
MAX_PAD_SHARE, MIN_BATCH_TOKENS = 0.12, 256
# Leaves wait for each other up to this many, or until the caches that they hold alive take this much.
POOL_LEAVES, HELD_BYTES = 128, 1 << 30


@dataclass(frozen=True)
class Outcome:
    """Sum of a request's target log-probabilities, and whether each target was the most likely token."""

    request: int
    log_likelihood: float
    is_greedy: bool


@dataclass(frozen=True)
class _Ready:
    """A segment whose parent has been read: `parent` is where its state lies."""

    segment: Segment
    parent: Row | None


@dataclass(frozen=True)
class Limits:
    """Sizes of a batch: rows, tokens with pads, and the chunk in which a long segment is read."""

    batch_size: int = 64
    batch_tokens: int = 4096
    chunk_tokens: int = 512


class Scorer:
    """Reads the segments of a plan in batches and sums up each request's log-likelihood."""

    def __init__(self, model: Any, limits: Limits, *, share: bool = True) -> None:
        self.model, self.limits = model, limits
        self.shares = share and can_fork(model)
        self.tokens_read = 0

    @torch.inference_mode()
    def score(
        self, requests: Sequence[Request], on_tokens: Callable[[int, int], None] | None = None
    ) -> Iterator[Outcome]:
        """Yield the outcome of every request as soon as it is known; `on_tokens` hears (tokens read, in all)."""
        roots = plan_segments(requests, MIN_SAVED_TOKENS if self.shares else None)
        total, done = num_read_tokens(roots), 0
        sums = [0.0] * len(requests)
        greedy = [True] * len(requests)
        missing = [len(request.targets) for request in requests]
        inner, leaves = _sorted_apart([_Ready(root, None) for root in roots])
        held_bytes, draining = 0, False
        while inner or leaves:
            # Leaves are pooled, so that those of one batch are alike, until the states they go on from weigh too much.
            draining = bool(leaves) and (
                draining or not inner or held_bytes > HELD_BYTES or len(leaves) > POOL_LEAVES
            )
            batch = self._take(leaves if draining else inner)
            children, outcomes, num_bytes = self._read(batch)
            held_bytes = num_bytes + (held_bytes if leaves else 0)
            for number, log_likelihood, is_greedy, count in outcomes:
                sums[number] += log_likelihood
                greedy[number] &= is_greedy
                missing[number] -= count
                if not missing[number]:
                    yield Outcome(number, sums[number], greedy[number])
            if children:
                # The last is taken first: children before the next roots, so that few states are alive at a time.
                new_inner, new_leaves = _sorted_apart(children)
                inner, leaves = inner + new_inner, sorted(leaves + new_leaves, key=_length)
            done += sum(map(_length, batch))
            if on_tokens is not None:
                on_tokens(done, max(total, done))  # what was cut off and read again was not in the plan
        self.tokens_read += done
        assert not any(missing), "a request was left without its score"

    def _take(self, waiting: list[_Ready]) -> list[_Ready]:
        """Take a batch from the end of `waiting`: leaves of similar length, or inner segments, cut to the same."""
        batch = [waiting.pop()]
        inner, rooted = bool(batch[0].segment.children), batch[0].parent is None
        longest = real_tokens = _length(batch[0])
        while waiting and len(batch) < self.limits.batch_size:
            ready, length = waiting[-1], _length(waiting[-1])
            padded_tokens = max(longest, length) * (len(batch) + 1)
            if (ready.parent is None) != rooted or padded_tokens > self.limits.batch_tokens:
                break
            # A pad would enter an inner segment's state; after a leaf's last token nothing looks at it.
            if inner and abs(longest - length) > min(MAX_CUT_TOKENS, longest // 2):
                break
            pads = padded_tokens - real_tokens - length
            if not inner and real_tokens >= MIN_BATCH_TOKENS and pads > MAX_PAD_SHARE * padded_tokens:
                break
            longest, real_tokens = max(longest, length), real_tokens + length
            batch.append(waiting.pop())
        if inner:
            shortest = min(map(_length, batch))
            for ready in batch:
                shorten(ready.segment, shortest)
        return batch

    def _read(self, batch: list[_Ready]) -> tuple[list[_Ready], list[tuple[int, float, bool, int]], int]:
        """Read a batch of segments.

        Returns their children, (request, log-likelihood, greedy, targets) of each readout, and the bytes of the cache
        that the children go on from.
        """
        segments = [ready.segment for ready in batch]
        inner = bool(segments[0].children)
        longest = max(len(segment.tokens) for segment in segments)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, segment in enumerate(segments):
            ids[row, : len(segment.tokens)] = torch.tensor(segment.tokens)
        starts = torch.tensor([segment.start for segment in segments])
        cache, mask = None, None
        parents = [ready.parent for ready in batch if ready.parent is not None]
        if parents:
            cache, mask = gather(self.model, parents)
        elif inner or longest > self.limits.chunk_tokens:
            cache = new_cache(self.model)
        hidden = self._hidden_at_targets(ids, starts, cache, mask, segments)
        rows = [
            Row(cache, row, segment.start + len(segment.tokens)) if inner else None
            for row, segment in enumerate(segments)
        ]
        children = [
            _Ready(child, row)
            for segment, row in zip(segments, rows, strict=True)
            for child in segment.children
        ]
        return children, self._outcomes(hidden, segments), cache_bytes(cache) if inner else 0

    def _hidden_at_targets(
        self, ids: Tensor, starts: Tensor, cache: Any, mask: Tensor | None, segments: list[Segment]
    ) -> dict[tuple[int, int], Tensor]:
        """Hidden states [hidden] at every (row, column) that predicts a target."""
        wanted = sorted(
            {
                (row, readout.column + i)
                for row, segment in enumerate(segments)
                for readout in segment.readouts
                for i in range(len(readout.targets))
            }
        )
        found: dict[tuple[int, int], Tensor] = {}
        device = self.model.device
        for begin in range(0, ids.shape[1], self.limits.chunk_tokens):
            chunk = ids[:, begin : begin + self.limits.chunk_tokens].to(device)
            positions = starts[:, None] + torch.arange(begin, begin + chunk.shape[1])
            if mask is not None:
                mask = torch.cat((mask, mask.new_ones(chunk.shape)), dim=1)
            hidden = self.model.model(
                chunk,
                position_ids=positions.to(device),
                attention_mask=mask,
                cache=cache,
                use_cache=cache is not None,
            ).last_hidden_state
            here = [(row, column) for row, column in wanted if begin <= column < begin + chunk.shape[1]]
            if here:
                index = torch.tensor(here, device=device)
                picked = hidden[index[:, 0], index[:, 1] - begin]
                found |= dict(zip(here, picked, strict=True))
        return found

    def _outcomes(
        self, hidden: dict[tuple[int, int], Tensor], segments: list[Segment]
    ) -> list[tuple[int, float, bool, int]]:
        """(request, log-likelihood, greedy, number of targets) of every readout of the batch."""
        if not hidden:
            return []
        place = {where: number for number, where in enumerate(hidden)}
        states = torch.stack(list(hidden.values()))
        readouts = [(row, readout) for row, segment in enumerate(segments) for readout in segment.readouts]
        owner = [n for n, (_, readout) in enumerate(readouts) for _ in readout.targets]
        at = [
            place[row, readout.column + i] for row, readout in readouts for i in range(len(readout.targets))
        ]
        target = [token for _, readout in readouts for token in readout.targets]
        require_finite(states)
        log_probs, best = self._log_probs(states, torch.tensor(at), torch.tensor(target))
        sums = torch.zeros(len(readouts), dtype=torch.float64).index_add_(0, torch.tensor(owner), log_probs)
        wrong = torch.zeros(len(readouts)).index_add_(0, torch.tensor(owner), (~best).float())
        return [
            (readout.request, float(sums[n]), not wrong[n], len(readout.targets))
            for n, (_, readout) in enumerate(readouts)
        ]

    def _log_probs(self, states: Tensor, at: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """log p [M] (fp64) of each `target` [M] after `states[at]`, and whether it is the most likely token."""
        order = at.argsort(stable=True)
        log_probs = torch.empty(len(at), dtype=torch.float64)
        best = torch.empty(len(at), dtype=torch.bool)
        bounds = torch.searchsorted(at[order], torch.arange(0, len(states) + HEAD_TOKENS, HEAD_TOKENS))
        for number, begin in enumerate(range(0, len(states), HEAD_TOKENS)):
            logits = self.model.lm_head(states[begin : begin + HEAD_TOKENS]).float()
            mine = order[bounds[number] : bounds[number + 1]]
            rows, tokens = (at[mine] - begin).to(logits.device), target[mine].to(logits.device)
            of_targets = logits[rows, tokens]
            log_probs[mine] = (of_targets - logits.logsumexp(dim=-1)[rows]).double().cpu()
            # Of equal logits the first counts as the most likely; that is looked at only where it can matter.
            is_best = of_targets == logits.amax(dim=-1)[rows]
            is_best[is_best.clone()] = logits[rows[is_best]].argmax(dim=-1) == tokens[is_best]
            best[mine] = is_best.cpu()
        return log_probs, best


def _length(ready: _Ready) -> int:
    return len(ready.segment.tokens)


def _sorted_apart(ready: list[_Ready]) -> tuple[list[_Ready], list[_Ready]]:
    """Segments with children, and leaves, each with the longest last: a batch too large fails at once."""
    ordered = sorted(ready, key=_length)
    return [r for r in ordered if r.segment.children], [r for r in ordered if not r.segment.children]
