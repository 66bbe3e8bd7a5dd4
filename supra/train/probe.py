"""What a step, a checkpoint and a row of activations really take, measured in moments on the model to be trained."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch

from supra.errors import UserError
from supra.train import checkpoint
from supra.train.budget import check_memory, existing_folder
from supra.train.checkpoint import Position
from supra.train.stage import StageRunner

clock = time.perf_counter  # seconds by the clock, as a user waits
_BUDGET_SECONDS = 6.0  # of measuring, for each stage
_MAX_REPEATS = 5
_SAMPLE_BYTES = 1 << 26


@dataclass(frozen=True)
class StepTime:
    """`first_s`: what a stage's first step takes more than the others, which take `seconds` each.

    `probed_s` is how long it took to find out.
    """

    first_s: float
    seconds: float
    probed_s: float


def time_steps(runner: StageRunner) -> StepTime:
    """Run a few steps of a stage (the model in memory is thrown away afterwards).

    A step of many micro-batches is not run whole: m micro-batches and the optimiser take T(m) = m a + b, so T(1) and
    T(2) tell it.

    Raises:
        UserError: the device has not the memory for it.
    """
    count, began = runner.num_micro_batches, clock()
    try:
        start = clock()
        _check_activations(runner)
        second = _timed(runner, 0, min(2, count))
        first = clock() - start
        whole = second / min(2, count) * count * _MAX_REPEATS <= _BUDGET_SECONDS
        sizes = [count] if whole or count <= 2 else [1, 2]
        times: dict[int, list[float]] = {number: [] for number in sizes}
        start = clock()
        for step in range(_MAX_REPEATS):
            for number in sizes:
                times[number].append(_timed(runner, step, number))
            if clock() - start > _BUDGET_SECONDS:
                break
    except torch.OutOfMemoryError:
        raise UserError(
            f"stage {runner.stage.name}",
            f"a step does not fit in the memory of {runner.accelerator.device}",
            "Lower micro_batch_size or length, or train adapters instead of all.",
        ) from None
    typical = {number: median(seconds) for number, seconds in times.items()}
    if count in typical:
        seconds = typical[count]
    else:
        micro_batch = min(max(typical[2] - typical[1], 0.0), typical[1])
        seconds = typical[1] + micro_batch * (count - 1)
    return StepTime(max(0.0, first - typical.get(2, seconds)), seconds, clock() - began)


def write_seconds(run_dir: Path, num_bytes: int) -> float:
    """Time to write a checkpoint of so many bytes where `run_dir` will be, from a smaller one written there.

    Raises:
        SupraError: nothing can be written there.
    """
    sample = min(max(num_bytes, 4), _SAMPLE_BYTES)
    tensors = {"sample": torch.rand(sample // 4)}
    with tempfile.TemporaryDirectory(prefix=".supra-probe-", dir=existing_folder(run_dir)) as folder:
        start = clock()
        checkpoint.save(Path(folder), Position(), model=tensors, adapters={}, moments={}, average={})
        return (clock() - start) * max(1.0, num_bytes / sample)


def _timed(runner: StageRunner, step: int, num_micro_batches: int) -> float:
    start = clock()
    runner.train_step(
        step % runner.stage.num_steps, limit=num_micro_batches
    )  # reads the loss back: a GPU is done
    return clock() - start


def _check_activations(runner: StageRunner) -> None:
    """On a CPU, where too large a micro-batch ends the process without a word: what the second row takes, times all.

    The first row's step holds gradients, moments and what libraries set up once; freed memory stays in the process
    (`keep_freed_memory`), so that the process grows by what a row needs.
    """
    rows = runner.stage.micro_batch_size
    if runner.accelerator.device.type != "cpu" or rows <= 2:
        return
    process = psutil.Process()
    runner.train_step(0, limit=1, rows=1)
    before = process.memory_info().rss
    runner.train_step(0, limit=1, rows=2)
    grown = max(0, process.memory_info().rss - before)
    what = (
        f"stage {runner.stage.name}: {rows - 2} further rows of {runner.stage.length} tokens in a micro-batch"
    )
    check_memory(grown * (rows - 2), runner.accelerator.device, what)
