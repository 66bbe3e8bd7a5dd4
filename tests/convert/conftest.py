"""Tiny random teachers of every architecture, saved as a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = ["<s>", "</s>", *(chr(code) for code in range(33, 127))]
TINY: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
MakeTeacher = Callable[..., Path]


def build_teacher(
    folder: Path, model_type: str = "llama", *, dtype: torch.dtype = torch.float32, **fields: Any
) -> Path:
    """Save a random `model_type` model; biases and norms are random too, so that losing one shows."""
    shard_size = fields.pop("max_shard_size", "5GB")
    config = AutoConfig.for_model(model_type, **{**TINY, **fields})
    config.dtype = dtype
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape) * 0.3
                parameter.copy_(noise + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(folder)
    (folder / "LICENSE").write_text("licence of the teacher\n")
    return folder


@pytest.fixture
def make_teacher(tmp_path: Path) -> MakeTeacher:
    """Build a tiny teacher in `tmp_path / "teacher"`."""

    def make(model_type: str = "llama", **options: Any) -> Path:
        return build_teacher(tmp_path / "teacher", model_type, **options)

    return make


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny Llama shared by the tests that do not change it."""
    return build_teacher(tmp_path_factory.mktemp("llama") / "teacher")
