"""Perplexity on held-out text: the student, its ablations and its teacher on the same tokens.

Protocol: each text is cut into blocks of `length` tokens, spread evenly over the text; every block is read from an
empty state and its first token is not scored. Perplexity = exp(mean negative log-likelihood per scored token).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from supra.config import Data
from supra.errors import SupraError, UserError
from supra.loading import Loaded, load_model, load_tokenizer
from supra.models import SupraForCausalLM
from supra.train.sources import find_sources, read_documents

# Rows of logits made at a time: 256 x 128k vocabulary in fp32 is 131 MB.
HEAD_TOKENS = 256


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of one model on some blocks; `nll` is the mean per token, `nll_stderr` its error over blocks."""

    perplexity: float
    nll: float
    nll_stderr: float
    scored_tokens: int
    seconds: float


@dataclass
class PerplexityTable:
    """What `supra eval` prints."""

    length: int
    sources: list[str]
    runs_on: str
    rows: dict[str, Perplexity] = field(default_factory=dict)

    def to_json(self) -> str:
        """All of it, with ratios to the teacher where there is one."""
        rows = {
            name: {**asdict(row), "ratio_to_teacher": self.ratio(name)} for name, row in self.rows.items()
        }
        return json.dumps(
            {"length": self.length, "sources": self.sources, "runs_on": self.runs_on, "rows": rows}, indent=2
        )

    def ratio(self, name: str) -> float | None:
        """Perplexity over the teacher's."""
        teacher = self.rows.get("teacher")
        return None if teacher is None else self.rows[name].perplexity / teacher.perplexity

    def render(self) -> object:
        """A table for a terminal."""
        from rich.table import Table

        scored = next(iter(self.rows.values())).scored_tokens
        table = Table(
            "model", "perplexity", "x teacher", "loss ± stderr",
            title=f"{scored} tokens in blocks of {self.length} · {', '.join(self.sources)}",
            caption=self.runs_on,
        )  # fmt: skip
        for name, row in self.rows.items():
            ratio = self.ratio(name)
            shown = "–" if ratio is None else f"{ratio:.3f}"
            table.add_row(name, f"{row.perplexity:.2f}", shown, f"{row.nll:.4f} ± {row.nll_stderr:.4f}")
        return table


def read_blocks(data: Data, tokenizer: Any, length: int, max_tokens: int) -> tuple[Tensor, list[str]]:
    """Blocks [N, length] of the texts in `data.train`, and the sources' names.

    Raises:
        UserError: a text cannot be read, or none is as long as one block.
    """
    sources, _ = find_sources(data)
    per_source = max(1, max_tokens // length // len(sources))
    blocks = []
    for source in sources:
        text = "\n\n".join(read_documents(source, data))
        if not text:
            raise UserError(source.name, "is empty", "Name a file with text")
        ids = torch.tensor(
            tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.int64
        )
        available = ids.shape[0] // length
        count = min(per_source, available)
        blocks += [ids[i * available // count * length :][:length] for i in range(count)]
    if not blocks:
        names = ", ".join(source.name for source in sources)
        raise UserError(
            f"--length {length}", f"is longer than every text ({names})", "Use a smaller --length"
        )
    return torch.stack(blocks), [source.name for source in sources]


@torch.inference_mode()
def measure(
    model: Any, blocks: Tensor, batch_size: int = 4, autocast_dtype: torch.dtype | None = None
) -> Perplexity:
    """Perplexity of a causal model on blocks [N, length]; `autocast_dtype` is that of the matrix products.

    Raises:
        SupraError: the loss is not finite.
        UserError: a token id outside the model's vocabulary (another tokenizer's text).
    """
    if int(blocks.max()) >= model.config.vocab_size:
        raise UserError(
            "the text",
            f"holds token {int(blocks.max())} of another vocabulary",
            "Use the teacher of this model",
        )
    start, losses = time.perf_counter(), []
    half = autocast_dtype not in (None, torch.float32)
    for batch in blocks.to(model.device).split(batch_size):
        targets = batch[:, 1:]
        with torch.autocast(batch.device.type, dtype=autocast_dtype, enabled=half):
            hidden = model.model(batch, use_cache=False).last_hidden_state[:, :-1]
            per_token = [
                F.cross_entropy(model.lm_head(hidden[:, i : i + HEAD_TOKENS]).float().transpose(1, 2),
                                targets[:, i : i + HEAD_TOKENS], reduction="none")
                for i in range(0, targets.shape[1], HEAD_TOKENS)
            ]  # fmt: skip
        losses.append(torch.cat(per_token, dim=1).double().mean(dim=1).cpu())
    means = torch.cat(losses)
    nll = float(means.mean())
    if not math.isfinite(nll):
        raise SupraError(
            "the model's loss",
            "is not finite on this text",
            "Look for NaN weights: supra inspect, or retrain",
        )
    stderr = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else float("nan")
    scored = blocks.shape[0] * (blocks.shape[1] - 1)
    return Perplexity(math.exp(min(nll, 700.0)), nll, stderr, scored, time.perf_counter() - start)


def measure_with_ablations(
    model: Any, blocks: Tensor, autocast_dtype: torch.dtype | None = None
) -> dict[str, Perplexity]:
    """The model as it is, and where it has a window, the window alone and the linear part alone."""
    rows = {"student": measure(model, blocks, autocast_dtype=autocast_dtype)}
    if isinstance(model, SupraForCausalLM) and model.config.window:
        for branch in ("window_only", "linear_only"):
            with model.ablation(branch):
                rows[branch] = measure(model, blocks, autocast_dtype=autocast_dtype)
    return rows


def evaluate_folder(
    model: Path, data: list[str], *, teacher: Path | None, length: int | None, max_tokens: int, ablations: bool,
    device: str, dtype: str, backend: str, say: Callable[[str], None],
) -> PerplexityTable:  # fmt: skip
    """Score a converted model's folder, and its teacher's, on the same held-out blocks.

    Raises:
        UserError: a folder or text that is not there, or too little text for one block.
    """
    student = load_model(model, device=device, dtype=dtype, backend=backend)
    say(student.describe())
    longest = student.model.config.max_position_embeddings
    length = min(1024, longest) if length is None else length
    if length > longest:
        say(f"warning: blocks of {length} tokens are longer than the {longest} that the teacher was made for")
    try:
        blocks, names = read_blocks(
            Data(train=tuple(data), unwrap=True), student.tokenizer, length, max_tokens
        )
    except UserError as error:
        raise UserError(error.thing.replace("data.train", "--data"), error.reason, error.mend) from None
    table = PerplexityTable(length, names, student.describe())
    if teacher is not None:
        say("scoring the teacher")
        table.rows["teacher"] = measure(_same_vocabulary(teacher, student, device, dtype, backend), blocks)
    say("scoring the student" + (" and its ablations" if ablations else ""))
    table.rows |= (
        measure_with_ablations(student.model, blocks)
        if ablations
        else {"student": measure(student.model, blocks)}
    )
    return table


def _same_vocabulary(teacher: Path, student: Loaded, device: str, dtype: str, backend: str) -> Any:
    loaded = load_model(teacher, device=device, dtype=dtype, backend=backend, tokenizer=False)
    if loaded.model.config.vocab_size != student.model.config.vocab_size:
        raise UserError(
            f"--teacher {teacher}",
            f"has a vocabulary of {loaded.model.config.vocab_size}, the student {student.model.config.vocab_size}",
            "Give the model that was converted",
        )
    if load_tokenizer(teacher).get_vocab() != student.tokenizer.get_vocab():
        raise UserError(
            f"--teacher {teacher}",
            "has another tokenizer than the student",
            "Give the model that was converted",
        )
    return loaded.model
