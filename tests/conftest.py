"""Shared by all tests: one CPU thread (two busy torch processes slow each other), no hub, tiny random models."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

# Triton reads this when it is first imported: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Memory that nothing wrote to holds NaN, not what a lucky neighbour left there: torch does this in deterministic mode,
# which on a GPU would also choose other kernels than a user's run.
if not torch.cuda.is_available():
    torch.use_deterministic_algorithms(True)
torch.set_num_threads(int(os.environ.get("SUPRA_TEST_THREADS", "1")))
settings.register_profile("supra", deadline=None, max_examples=20)
settings.load_profile("supra")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Training first: its files take longest, and one begun last would keep one process alone at the end."""
    items.sort(key=lambda item: "train" not in item.path.parts)
