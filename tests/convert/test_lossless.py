"""With softmax in every layer, the converted model is the teacher, bit for bit, in every architecture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from supra.config import Conversion
from supra.convert import execute, make_plan

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-proportional-rope": ("llama", {"rope_parameters": PROPORTIONAL}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "llama-9-heads": ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama-12-heads": ("llama", {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}),
    "llama-24-heads": ("llama", {"hidden_size": 96, "num_attention_heads": 24, "num_key_value_heads": 8}),
    "llama-40-heads": ("llama", {"hidden_size": 160, "num_attention_heads": 40, "num_key_value_heads": 40}),
    "llama-head-dim-16": ("llama", {"hidden_size": 64}),
    "llama-head-dim-80": ("llama", {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama-head-dim-256": ("llama", {"head_dim": 256}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-head-dim": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-window": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases-tied": ("qwen3", {"head_dim": 128, "attention_bias": True, "tie_word_embeddings": True}),
}


def all_softmax(teacher: Path, out: Path, num_layers: int = 2) -> None:
    plan = make_plan(str(teacher), Conversion(keep_softmax=tuple(range(num_layers))))
    assert plan.new == ()
    execute(plan, out, seed=0, recipe_yaml="", verify=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_teachers_bit_for_bit(
    case: str, dtype: torch.dtype, make_teacher: Any, tmp_path: Path
) -> None:
    model_type, fields = CASES[case]
    teacher_folder = make_teacher(model_type, dtype=dtype, **fields)
    all_softmax(teacher_folder, tmp_path / "out")
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder).eval()
    student, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert type(student).__name__ == "SupraForCausalLM"
    assert teacher.dtype == student.dtype == dtype
    ids = torch.randint(0, teacher.config.vocab_size, (2, 100), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    with torch.inference_mode():
        expected, found = (model.eval()(ids, attention_mask=mask).logits for model in (teacher, student))
    # Padded positions themselves attend to nothing defined; the real ones must agree to the last bit.
    assert torch.equal(expected[mask.bool()], found[mask.bool()])


def test_the_comparison_can_fail(make_teacher: Any, tmp_path: Path) -> None:
    teacher_folder = make_teacher("llama", rope_parameters=LLAMA3)
    all_softmax(teacher_folder, tmp_path / "out")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    teacher = AutoModelForCausalLM.from_pretrained(
        teacher_folder, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    ).eval()
    ids = torch.arange(60).unsqueeze(0)
    with torch.inference_mode():
        assert not torch.equal(teacher(ids).logits, student(ids).logits)
