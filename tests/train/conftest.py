"""A tiny converted model with a tokenizer, and a text to train it on, made anew for the test session."""

import json
import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from supra.config import Stage
from supra.models import SupraConfig, SupraForCausalLM
from supra.train import checkpoint
from supra.train.data import Batch, PackedData
from supra.train.losses import StageLoss
from supra.train.teacher import build_teacher
from supra.train.token_store import TokenStore
from supra.train.trainable import enter_stage
from supra.train.trainer import run_training

WORDS = ("the", "a", "cat", "dog", "house", "tree", "river", "runs", "sleeps", "sees", "under", "over", "and")


def write_text(path: Path, seed: int, num_words: int = 1500) -> Path:
    chooser = random.Random(seed)
    lines = [" ".join(chooser.choices(WORDS, k=12)) for _ in range(num_words // 12)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the words above, vocabulary of at most 512."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        show_progress=False,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tiny_config(**options: Any) -> SupraConfig:
    linear = {
        "feature_map": "hedgehog",
        "rope_position": "before",
        "decay": "none",
        "attention_norm": "denominator",
        "window": 4,
    }
    return SupraConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "architectures": ["SupraForCausalLM"],
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": 0,
            **linear,
            **options,
        }
    )


def write_model(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    torch.manual_seed(0)
    model = SupraForCausalLM(tiny_config(**options))
    model.to(dtype=dtype)  # type: ignore[call-arg]
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "supra.json").write_text(json.dumps({"source": "random"}))
    (folder / "README.md").write_text("# Tiny\n")
    return folder


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """This module: test modules cannot import it (there are no packages under tests/)."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "train.txt", seed=1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPRA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _own_precision() -> None:
    """Accelerate keeps the first Accelerator's precision for the whole process: a bf16 run's would stay."""
    AcceleratorState._reset_state(reset_partial_state=True)


def stage(**changes: Any) -> dict[str, Any]:
    """A quick stage: 4 steps of 2 micro-batches of 2 sequences of 16."""
    return {
        "name": "transfer",
        "trainable": "new",
        "loss": "attention",
        "length": 16,
        "micro_batch_size": 2,
        "tokens_per_step": 64,
        "total_tokens": 256,
        "checkpoint_every_steps": 2,
        "optimizer": {"lr": 1e-2, "warmup_steps": 1},
        **changes,
    }


def raw_recipe(text: Path, *stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "conversion": {"feature_map": "hedgehog", "window": 4},
        "data": {"train": [str(text)]},
        "stages": list(stages) or [stage()],
        **changes,
    }


@pytest.fixture
def student() -> SupraForCausalLM:
    torch.manual_seed(1)
    return SupraForCausalLM(tiny_config()).eval()


@pytest.fixture
def batch() -> Batch:
    """2 rows of 12 tokens; documents end inside them."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 512, 40).astype(np.uint16)
    store = TokenStore(tokens, np.array([0, 5, 17, 30, 40]), "key")
    return PackedData(store, length=12, seed=0).batch(0, 2)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run_loss(
    student: SupraForCausalLM, batch: Batch, **changes: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a batch in a stage with these changes."""
    given = Stage.model_validate(stage(**changes))
    teacher = build_teacher(student)
    enter_stage(given, student, teacher, seed=0)
    loss = StageLoss(given, student, teacher, Accelerator(cpu=True))
    value = loss(batch, loss.num_targets([batch]))
    found = gradients(student)
    student.zero_grad()
    return float(value), found


def forward(model: SupraForCausalLM, batch: Batch, **options: Any) -> Any:
    return model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        use_cache=False,
        **options,
    )


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-6), name


class Halting:
    """A tokenizer that stops for ever in its third batch, after saying so."""

    def __init__(self, tokenizer: Any, halted: Any) -> None:
        self.tokenizer, self.halted, self.batches = tokenizer, halted, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, texts: list[str], **options: bool) -> Any:
        self.batches += 1
        if self.batches == 3:
            self.halted.set()
            time.sleep(600)
        return self.tokenizer(texts, **options)


class StopError(Exception):
    """What ends a run in a test, where a kill would end it."""


def stop_after(monkeypatch: pytest.MonkeyPatch, num_checkpoints: int, *args: Any, **kwargs: Any) -> None:
    """`run_training(*args, **kwargs)` that dies as soon as so many checkpoints are written."""
    real, count = checkpoint.save, [0]

    def save(*a: Any, **k: Any) -> Path:
        path, count[0] = real(*a, **k), count[0] + 1
        if count[0] == num_checkpoints:
            raise StopError
        return path

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        with pytest.raises(StopError):
            run_training(*args, **kwargs)
