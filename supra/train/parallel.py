"""Several processes on one run: they share out a step's micro-batches, and every sum is over all of them.

A step's batches are known from its number alone, so each process takes its own without talking to the others; what
travels are gradients and the loss. All processes hold the same weights and take the same step, so any of them could
write the checkpoint, and a run may go on with another number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from supra.errors import SupraError, UserError

T = TypeVar("T")
BUCKET_ELEMENTS = 1 << 24  # gradients that travel together: 64 MB in fp32


class Processes:
    """This process among those of the run; alone, everything here does nothing."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.count, self.index = accelerator.num_processes, accelerator.process_index

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def share(self, items: list[T]) -> list[T]:
        """This process's part of a step's work; the parts differ in length by one at most."""
        return items[self.index :: self.count]

    def rounds(self, num_items: int) -> int:
        """The largest number of items that falls to one process."""
        return -(-num_items // self.count)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the processes; one that had nothing to do counts as zero."""
        if self.count == 1:
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            torch.distributed.all_reduce(flat)
            for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def sum(self, value: Tensor) -> Tensor:
        """A scalar, summed over the processes."""
        if self.count > 1:
            torch.distributed.all_reduce(value)
        return value

    def wait(self) -> None:
        """Until every process is here."""
        self.accelerator.wait_for_everyone()

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Run `action` in the main process while the others wait; its result there, None elsewhere.

        Raises:
            SupraError: the main process's, in every process.
        """
        if self.count == 1:
            return action()
        result, failure = None, None
        if self.is_main:
            try:
                result = action()
            except SupraError as error:
                failure = error
        told = [None if failure is None else (isinstance(failure, UserError), *_parts(failure))]
        broadcast_object_list(told)
        if failure is not None:
            raise failure
        if told[0] is not None:
            by_user, thing, reason, mend = told[0]
            raise (UserError if by_user else SupraError)(thing, reason, mend)
        return result


def _parts(error: SupraError) -> tuple[str, str, str]:
    return error.thing, error.reason, error.mend


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype, of at most `BUCKET_ELEMENTS` where one alone is no larger."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(g.numel() for g in bucket) + gradient.numel() > BUCKET_ELEMENTS
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
