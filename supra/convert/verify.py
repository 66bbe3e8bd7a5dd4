"""After writing: is every tensor there, is the teacher's every bit the same, and does the model run?"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supra.convert.plan import FLOAT_DTYPES, Plan
from supra.convert.shard_writer import hash_file
from supra.convert.write import COPY_THREADS, Meter, Progress
from supra.errors import SupraError
from supra.weights.headers import TensorInfo, index_map, read_header

if TYPE_CHECKING:
    from torch import Tensor

# Up to this many bytes of weights `from_pretrained` is tried; larger models are streamed, to stay under 1 GB.
RELOAD_BYTES = 256 << 20
NUM_TOKENS = 16
_MEND = "Convert again; if it happens twice, report it with the plan (`supra inspect --json`)"


def verify_folder(plan: Plan, folder: Path, hashes: dict[str, str], progress: Progress | None = None) -> None:
    """SupraError when `folder` is not what `plan` promised; `hashes` are those of the bytes written to it."""
    places = check_tensors(plan, folder)
    check_hashes(folder, hashes, progress)
    check_forward(plan, folder, places)


def check_tensors(plan: Plan, folder: Path) -> dict[str, tuple[Path, TensorInfo]]:
    """Compare index and headers with the plan; return where each tensor is."""
    index = index_map(folder) or {}
    files = {name: {t.name: t for t in read_header(folder / name)} for name in sorted(set(index.values()))}
    planned = {tensor.name: tensor for tensor in (*plan.kept, *plan.new)}
    if planned.keys() != index.keys():
        odd = sorted(planned.keys() ^ index.keys())
        raise SupraError(f"{folder}: tensor {odd[0]}", "the index and the plan do not agree on it", _MEND)
    for name, tensor in planned.items():
        found = files[index[name]].get(name)
        if found is None or (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            raise SupraError(f"{folder}: tensor {name}", "it was not written as planned", _MEND)
    return {name: (folder / file, files[file][name]) for name, file in index.items()}


def check_hashes(folder: Path, hashes: dict[str, str], progress: Progress | None = None) -> None:
    """Read every weight file back and compare its hash with that of the teacher's bytes, or the new ones."""
    total = sum((folder / name).stat().st_size for name in hashes)
    meter, stop = Meter(progress, "verifying", total), threading.Event()
    pool = ThreadPoolExecutor(COPY_THREADS)
    try:
        read = {name: pool.submit(hash_file, folder / name, meter.add, stop) for name in hashes}
        for name, expected in hashes.items():
            if read[name].result() != expected:
                raise SupraError(
                    str(folder / name),
                    "what the disk gives back differs from what was written",
                    "Check the disk",
                )
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def check_forward(plan: Plan, folder: Path, places: dict[str, tuple[Path, TensorInfo]]) -> None:
    """Run the model; SupraError for a logit that is not finite or, all layers softmax, not the teacher's."""
    import torch

    ids = torch.arange(NUM_TOKENS).remainder(plan.config.vocab_size).unsqueeze(0)
    small = plan.load_memory_bytes <= RELOAD_BYTES
    with torch.inference_mode():
        logits = _reloaded_logits(folder, ids) if small else _streamed_logits(plan, places, ids)
        if not torch.isfinite(logits).all():
            raise SupraError(
                str(plan.source.location),
                "the converted model's output is not finite",
                _broken_tensor_hint(places),
            )
        teacher = plan.source.local_path()
        if (
            small
            and plan.config.num_linear_layers == 0
            and plan.source.kind == "folder"
            and teacher is not None
        ):
            check_equal_to_teacher(logits, teacher, ids, plan)


def _reloaded_logits(folder: Path, ids: Tensor) -> Tensor:
    """Logits [1, T, vocab] of the folder loaded as a user would; SupraError when a tensor has no match."""
    from transformers.utils import logging

    from supra.models import SupraForCausalLM

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = SupraForCausalLM.from_pretrained(folder, output_loading_info=True)
    finally:
        if shown:
            logging.enable_progress_bar()
    model, report = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            raise SupraError(
                f"{folder}: {sorted(map(str, report[kind]))[0]}", f"loading reports it among {kind}", _MEND
            )
    return model.eval()(ids, use_cache=False).logits


def _streamed_logits(plan: Plan, places: dict[str, tuple[Path, TensorInfo]], ids: Tensor) -> Tensor:
    import torch

    from supra.convert.streamed import streamed_model

    model = streamed_model(plan.config, places, getattr(torch, FLOAT_DTYPES[plan.dtype]))
    return model(ids, use_cache=False).logits


def _broken_tensor_hint(places: dict[str, tuple[Path, TensorInfo]]) -> str:
    """Say which tensor holds NaN or infinity, if one does."""
    import torch

    from supra.weights.reader import TensorReader

    name = TensorReader(places, torch.float32).first_broken()
    if name is None:
        return "All weights are finite: the model overflows in this dtype"
    return f"The teacher's tensor {name} holds NaN or infinity: download it again"


def check_equal_to_teacher(logits: Tensor, teacher: Path, ids: Tensor, plan: Plan) -> None:
    """SupraError unless `logits` are the teacher's, with its RoPE scaled as the plan does, bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    config = plan.config
    scaled = {
        "rope_parameters": config.rope_parameters,
        "max_position_embeddings": config.max_position_embeddings,
    }
    model = AutoModelForCausalLM.from_pretrained(
        teacher,
        dtype=getattr(torch, FLOAT_DTYPES[plan.dtype]),
        **(scaled if config.rope_scaled_by else {}),
    ).eval()
    if not torch.equal(model(ids, use_cache=False).logits, logits):
        raise SupraError(
            str(teacher), "with softmax in every layer the logits differ from the teacher's", _MEND
        )
