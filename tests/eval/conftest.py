"""A tiny teacher with a byte tokenizer, its conversion, and a text: what every evaluation test needs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from supra.config import Conversion
from supra.convert import execute, make_plan

VOCAB = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=len(VOCAB) - 1, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCAB)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def student_dir(teacher_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student") / "model"
    conversion = Conversion(feature_map="hedgehog", window=8, num_sink_tokens=1)
    execute(make_plan(str(teacher_dir), conversion), folder, seed=0, recipe_yaml="conversion: {}\n")
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chooser = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(" ".join(chooser.choices(["the", "river", "runs", "under", "a", "tree"], k=600)))
    return path
