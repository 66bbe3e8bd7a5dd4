"""`SupraLM`: a converted model, or any causal model, behind lm-eval's interface, under the name `supra`.

Everything that decides a score (tokenisation, truncation, stop sequences, chat templates) is lm-eval's own HFLM; what
differs is how log-likelihoods are computed: a prefix that requests share is read once (`supra_eval.harness.scoring`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from supra.errors import UserError
from supra.loading import load_model
from supra_eval.harness.prefixes import Request
from supra_eval.harness.scoring import Limits, Scorer

# What of HFLM's options reaches it; the others concern how it makes a model, which is done here.
HFLM_OPTIONS = {
    "add_bos_token", "chat_template_args", "enable_thinking", "logits_cache", "mixed_precision_dtype",
    "prefix_token_id", "softmax_dtype", "think_end_token", "truncation",
}  # fmt: skip


@register_model("supra")
class SupraLM(HFLM):
    """lm-eval's HFLM with log-likelihoods from forked states.

    `pretrained` is a folder, or a loaded model with its `tokenizer`. `batch_size` bounds the rows of a batch,
    `batch_tokens` its tokens, `chunk_tokens` the piece in which a long text is read. `share_prefixes=False` reads every
    request whole.
    """

    def __init__(
        self,
        pretrained: Any,
        tokenizer: Any = None,
        *,
        batch_size: int | str = 64,
        batch_tokens: int | str = 4096,
        chunk_tokens: int | str = 512,
        share_prefixes: bool = True,
        device: str | None = None,
        dtype: str | None = None,
        kernel_backend: str = "auto",
        max_length: int | None = None,
        max_batch_size: int | None = None,
        on_tokens: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        unknown = sorted(name for name in kwargs.keys() - HFLM_OPTIONS if kwargs[name] not in (None, False))
        if unknown:
            raise UserError(
                f"model_args {', '.join(unknown)}",
                "is not known to the model class supra",
                "Leave it out, or use hf",
            )
        kwargs = {name: value for name, value in kwargs.items() if name in HFLM_OPTIONS}
        if isinstance(pretrained, (str, Path)):
            if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
                # lm-eval's command asks for cuda:0 where nobody asked for anything.
                warnings.warn(f"device {device}: torch sees no GPU; running on the CPU", stacklevel=2)
                device = "cpu"
            loaded = load_model(
                Path(pretrained),
                device=device or "auto",
                dtype="float32" if dtype in (None, "auto") else str(dtype),
                backend=kernel_backend,
            )
            pretrained, tokenizer = loaded.model, loaded.tokenizer
        size = 64 if str(batch_size).startswith("auto") else int(batch_size)
        super().__init__(
            pretrained,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=size,
            max_length=max_length,
            **kwargs,
        )
        limits = Limits(size, int(batch_tokens), int(chunk_tokens))
        self.scorer = Scorer(self.model, limits, share=share_prefixes)
        self.on_tokens = on_tokens

    # lm-eval's evaluator does not pass `disable_tqdm` on, and its bars would break the one over all tokens.
    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        return super().generate_until(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each (texts, context tokens, continuation tokens), in the given order."""
        plan = [self._request(context, continuation) for _, context, continuation in requests]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for outcome in self.scorer.score(plan, self.on_tokens):
            results[outcome.request] = (outcome.log_likelihood, outcome.is_greedy)
            texts = requests[outcome.request][0]
            if texts is not None:  # rolling windows are cached whole by lm-eval
                self.cache_hook.add_partial("loglikelihood", texts, results[outcome.request])
        return results

    def _model_generate(
        self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Continuations of context [B, T], whose prompt is read in chunks so that memory does not grow with T."""
        chunk_tokens = self.scorer.limits.chunk_tokens
        if context.shape[1] > chunk_tokens:
            generation_kwargs["prefill_chunk_size"] = chunk_tokens
        return super()._model_generate(context, max_length, stop, **generation_kwargs)

    def _request(self, context: list[int], continuation: list[int]) -> Request:
        """What is read and what is predicted, cut from the left where it exceeds the window, as HFLM does."""
        if not 0 < len(continuation) <= self.max_length:
            raise UserError(
                f"a continuation of {len(continuation)} tokens",
                f"does not fit the model's window of {self.max_length}",
                "Raise max_length, or leave the task out",
            )
        whole = (*context, *continuation)[-(self.max_length + 1) :]
        return Request(whole[:-1], whole[len(whole) - len(continuation) :])
