"""Text generation with a converted model (or its teacher): chunked prefill, then one token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from .checks import Sampling
from .errors import SupraError, UserError


@torch.no_grad()
def prefill(model: Any, input_ids: Tensor, chunk_tokens: int, cache: Any = None) -> tuple[Tensor, Any]:
    """Read input_ids [B, T] in chunks, so that memory does not grow with T beyond the cache itself.

    Returns the last position's logits [B, vocab] and the cache.
    """
    logits = None
    for chunk in input_ids.split(chunk_tokens, dim=1):
        output = model(chunk, cache=cache, use_cache=True, logits_to_keep=1)
        logits, cache = output.logits[:, -1], output.cache
    assert logits is not None
    return logits, cache


@torch.no_grad()
def greedy(
    model: Any, ids: Tensor, max_new_tokens: int, *, ends: Collection[int], chunk_tokens: int,
    until: Callable[[list[int]], bool] | None = None,
) -> list[int]:  # fmt: skip
    """The likeliest continuation of ids [1, T], up to one of `ends` (left out), `until` or `max_new_tokens`.

    Raises:
        SupraError: logits that are not finite.
    """
    logits, cache = prefill(model, ids, chunk_tokens)
    written: list[int] = []
    while True:
        require_finite(logits)
        token = int(logits.argmax(-1))
        if token in ends:
            return written
        written.append(token)
        if len(written) == max_new_tokens or (until is not None and until(written)):
            return written
        output = model(torch.tensor([[token]], device=model.device), cache=cache, use_cache=True)
        logits, cache = output.logits[:, -1], output.cache


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a text: the generation settings' and the tokenizer's own."""
    ends = model.generation_config.eos_token_id
    return {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}


def require_finite(logits: Tensor) -> None:
    """SupraError where a logit is not finite."""
    if not bool(logits.isfinite().all()):
        raise SupraError(
            "the model's logits", "are not finite", "Look for NaN weights: supra inspect, or retrain"
        )


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    sampling: Sampling,
    *,
    chunk_tokens: int = 512,
    chat: bool = False,
) -> Iterator[str]:
    """Yield the continuation of `prompt` piece by piece as it is generated.

    Raises:
        UserError: an empty prompt, a sampling value out of range, or a chat without a chat template.
    """
    from transformers import GenerationConfig, TextIteratorStreamer

    sampling.check()
    if chat:
        if not tokenizer.chat_template:
            raise UserError("--chat", "the model has no chat template", "Leave --chat out")
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    input_ids = tokenizer(
        prompt, return_tensors="pt", add_special_tokens=not chat, verbose=False
    ).input_ids.to(model.device)
    if input_ids.shape[1] == 0:
        raise UserError("the prompt", "is empty", "Give at least one token of text")
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=sampling.temperature > 0,
        temperature=sampling.temperature or None,
        top_p=sampling.top_p if sampling.temperature else None,
        top_k=sampling.top_k if sampling.temperature else None,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=model.generation_config.eos_token_id,
        bos_token_id=model.generation_config.bos_token_id,
        pad_token_id=model.generation_config.pad_token_id or tokenizer.eos_token_id,
    )
    cache = None
    if input_ids.shape[1] > 1:
        # Everything but the last token in chunks; generate() then goes on from the cache.
        _, cache = prefill(model, input_ids[:, :-1], chunk_tokens)
    torch.manual_seed(sampling.seed)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    failure: list[BaseException] = []

    def run() -> None:
        try:
            model.generate(input_ids, generation_config=config, cache=cache, streamer=streamer)
        except BaseException as error:  # handed to the reader below, which raises it
            failure.append(error)
            streamer.end()

    thread = Thread(target=run, daemon=True)
    thread.start()
    yield from streamer
    thread.join()
    if failure:
        raise failure[0]


@torch.no_grad()
def decode_time_along(
    model: Any, input_ids: Tensor, contexts: tuple[int, ...], num_steps: int, chunk_tokens: int = 512
) -> list[tuple[int, float, int]]:
    """Read input_ids [1, T] once, stopping at each of the rising `contexts` to decode `num_steps` tokens.

    Returns for each context (tokens, median milliseconds per decoded token, bytes that the cache holds there).
    """
    rows: list[tuple[int, float, int]] = []
    cache, read = None, 0
    for context in contexts:
        # The tokens decoded at earlier stops are in the cache too and count as context.
        position = 0 if cache is None else cache.get_seq_length()
        logits, cache = prefill(model, input_ids[:, read : read + context - position], chunk_tokens, cache)
        read += context - position
        num_bytes = cache_bytes(cache)
        times_ms = []
        for _ in range(num_steps):
            start = time.perf_counter()
            output = model(logits.argmax(-1, keepdim=True), cache=cache, use_cache=True)
            times_ms.append((time.perf_counter() - start) * 1000)
            logits, cache = output.logits[:, -1], output.cache
        rows.append((context, sorted(times_ms)[num_steps // 2], num_bytes))
    return rows


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache of either kind of model holds: recurrent states and windows, or keys and values."""
    if hasattr(cache, "num_bytes"):
        return int(cache.num_bytes())
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
