"""Perplexity on held-out text: the student, its ablations, its untrained conversion and its teacher on the same tokens.

Protocol: each text is cut into blocks of `length` tokens, spread evenly over the text; every block is read from an
empty state and its first token is not scored. Perplexity = exp(mean negative log-likelihood per scored token).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from supra.config import Data, Documents
from supra.errors import UserError
from supra.loading import load_tokenizer
from supra.models import SupraForCausalLM
from supra.train.documents import read_documents
from supra.train.sources import find_sources
from supra_eval.contenders import ABLATIONS, contender_names, contenders
from supra_eval.length.losses import loss_by_position
from supra_eval.results import EvalRun, Score

# Longer blocks are read in such pieces, so that memory does not grow with their length beyond the model's cache.
CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of one model on some blocks; `nll` is the mean per token, `nll_stderr` its error over blocks."""

    perplexity: float
    nll: float
    nll_stderr: float
    scored_tokens: int
    seconds: float


def read_blocks(data: Data, tokenizer: Any, length: int, max_tokens: int) -> tuple[Tensor, list[str]]:
    """Blocks [N, length] of the texts in `data.train`, `max_tokens` at most in all, and the names of the texts.

    Where there is not one block for each text, the first ones are read.

    Raises:
        UserError: a text cannot be read, none is as long as one block, or one block is more than `max_tokens`.
    """
    sources, _ = find_sources(data)
    num_blocks = max_tokens // length
    if not num_blocks:
        raise UserError(
            f"--max-tokens {max_tokens}",
            f"is less than one block of {length}",
            "Raise it, or shorten --block-tokens",
        )
    sources = sources[:num_blocks]
    per_source = num_blocks // len(sources)
    blocks = []
    for source in sources:
        text = "\n\n".join(read_documents(source, data))
        if not text:
            reason = "is empty" if data.documents == "all" else f"has no {data.documents} document with text"
            raise UserError(source.name, reason, "Name a file with text")
        ids = torch.tensor(
            tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.int64
        )
        available = ids.shape[0] // length
        count = min(per_source, available)
        blocks += [ids[i * available // count * length :][:length] for i in range(count)]
    if not blocks:
        names = ", ".join(source.name for source in sources)
        raise UserError(
            f"--block-tokens {length}", f"is longer than every text ({names})", "Use a smaller one"
        )
    return torch.stack(blocks), [source.name for source in sources]


def measure(
    model: Any, blocks: Tensor, batch_size: int = 4, autocast_dtype: torch.dtype | None = None
) -> Perplexity:
    """Perplexity of a causal model on blocks [N, length]; `autocast_dtype` is that of the matrix products.

    Raises:
        SupraError: the loss is not finite.
        UserError: a token id outside the model's vocabulary (another tokenizer's text).
    """
    start = time.perf_counter()
    half = autocast_dtype not in (None, torch.float32)
    with torch.autocast(model.device.type, dtype=autocast_dtype, enabled=half):
        losses = loss_by_position(model, blocks, CHUNK_TOKENS, batch_size=batch_size)
    means = losses.double().mean(dim=1)
    nll = float(means.mean())
    stderr = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else float("nan")
    return Perplexity(math.exp(min(nll, 700.0)), nll, stderr, losses.numel(), time.perf_counter() - start)


def measure_with_ablations(
    model: Any, blocks: Tensor, autocast_dtype: torch.dtype | None = None
) -> dict[str, Perplexity]:
    """The model as it is, and where it has a window, the window alone and the linear part alone."""
    rows = {"student": measure(model, blocks, autocast_dtype=autocast_dtype)}
    if isinstance(model, SupraForCausalLM) and model.config.window:
        for branch in ABLATIONS:
            with model.ablation(branch):  # type: ignore[arg-type]
                rows[branch] = measure(model, blocks, autocast_dtype=autocast_dtype)
    return rows


def evaluate_folder(
    model: Path, data: list[str], *, teacher: Path | None, block_tokens: int | None, max_tokens: int,
    documents: Documents = "all", ablations: bool, device: str, dtype: str, backend: str, say: Callable[[str], None],
) -> EvalRun:  # fmt: skip
    """Score a converted model's folder, its teacher and its ablations on the same held-out blocks.

    Raises:
        UserError: a folder or text that is not there, or too little text for one block.
    """
    started = time.monotonic()
    config = json.loads((model / "config.json").read_text())
    # A conversion may have stretched the context; the teacher beside it reads as it always did.
    longest = config.get("teacher_max_position_embeddings") or config.get("max_position_embeddings", 1024)
    length = min(1024, longest) if block_tokens is None else block_tokens
    if length > longest:
        say(f"warning: blocks of {length} tokens are longer than the {longest} that the teacher was made for")
    try:
        blocks, names = read_blocks(
            Data(train=tuple(data), unwrap=True, documents=documents),
            load_tokenizer(model),
            length,
            max_tokens,
        )
    except UserError as error:
        raise UserError(error.thing.replace("data.train", "--data"), error.reason, error.mend) from None
    settings = {"block_tokens": length, "scored_tokens": blocks.shape[0] * (length - 1), "texts": names}
    if documents != "all":
        settings["documents"] = documents
    run = EvalRun("perplexity", str(model), None if teacher is None else str(teacher), settings=settings)
    wanted = contender_names(model, teacher, ablations=ablations)
    for contender in contenders(model, teacher, wanted, device=device, dtype=dtype, backend=backend, say=say):
        row = measure(contender.model, blocks)
        run.runs_on[contender.name] = contender.runs_on
        for metric, value, stderr in (
            ("perplexity", row.perplexity, row.perplexity * row.nll_stderr),
            ("loss", row.nll, row.nll_stderr),
        ):
            run.scores.append(
                Score(
                    "heldout_text", metric, contender.name, value, stderr if math.isfinite(stderr) else None,
                    num_samples=blocks.shape[0], context_tokens=length, higher_is_better=False,
                )
            )  # fmt: skip
    run.seconds = time.monotonic() - started
    return run
