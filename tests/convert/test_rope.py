"""Conversions that scale the rotary positions: as transformers scales them, or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typer.testing import CliRunner

from supra import config
from supra.cli import app
from supra.config import Conversion
from supra.convert import execute, make_plan
from supra.convert.card import model_card
from supra.errors import UserError

CONTEXT, HEAD_DIM = 512, 8  # of the tiny teachers
# What a user of transformers would write into config.json for a context four times as long.
BY_HAND: dict[str, dict[str, Any]] = {
    "linear:4": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "ntk:4": {"rope_type": "default", "rope_theta": 1e4 * 4 ** (HEAD_DIM / (HEAD_DIM - 2))},
    "yarn:4": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": CONTEXT,
    },
    "llama3:4": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": CONTEXT,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", BY_HAND)
def test_all_softmax_equals_transformers_with_the_same_scaling(
    rope: str, llama: Path, tmp_path: Path
) -> None:
    plan = make_plan(str(llama), Conversion(rope=rope, keep_softmax=(0, 1)))
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    options = {"rope_parameters": BY_HAND[rope], "max_position_embeddings": 4 * CONTEXT}
    scaled = AutoModelForCausalLM.from_pretrained(llama, **options).eval()
    plain = AutoModelForCausalLM.from_pretrained(llama).eval()
    ids = torch.randint(0, 96, (1, 700), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, expected, unscaled = (model(ids).logits for model in (student, scaled, plain))
    assert torch.equal(found, expected)
    assert not torch.equal(found, unscaled)


@pytest.mark.parametrize("rope", BY_HAND)
def test_a_linear_layer_gets_the_angles_of_transformers(rope: str, llama: Path) -> None:
    from supra.models import SupraForCausalLM

    config = make_plan(str(llama), Conversion(feature_map="hedgehog", window=4, rope=rope)).config
    model = SupraForCausalLM(config).eval()
    own = LlamaConfig(
        hidden_size=32, num_attention_heads=4, rope_parameters=dict(BY_HAND[rope]),
        max_position_embeddings=4 * CONTEXT,
    )  # fmt: skip
    positions = torch.tensor([[0, 1, 511, 512, 2047]])
    expected = LlamaRotaryEmbedding(own)(torch.zeros(1), positions)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.linear_layers()[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]), with_kwargs=True
    )
    with torch.inference_mode():
        model(torch.zeros(1, 5, dtype=torch.int64), position_ids=positions)
    for found, wanted in zip(seen[0], expected, strict=True):
        assert torch.equal(found, wanted)


def test_the_plan_the_card_and_the_folder_say_it(llama: Path, tmp_path: Path) -> None:
    plan = make_plan(str(llama), Conversion(rope="yarn:4.0"))
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="")
    words = "RoPE scaled by yarn:4, from the teacher's 512 tokens to 2,048"
    assert f"| positions | {words} |" in model_card(plan, 0, tmp_path)
    expected = {
        "rope": "yarn:4",
        "rope_parameters": BY_HAND["yarn:4"],
        "teacher_max_position_embeddings": 512,
        "max_position_embeddings": 2048,
    }
    assert json.loads(plan.to_json())["positions"] == expected
    assert json.loads((tmp_path / "out/supra.json").read_text())["positions"] == expected
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["rope_parameters"] == BY_HAND["yarn:4"]
    assert (written["max_position_embeddings"], written["rope_scaled_by"]) == (2048, "yarn:4")


def test_without_it_the_positions_are_the_teachers(llama: Path) -> None:
    plan = make_plan(str(llama), Conversion())
    assert plan.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert plan.config.max_position_embeddings == CONTEXT
    assert plan.config.rope_scaled_by is plan.config.teacher_max_position_embeddings is None


def test_convert_by_command(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["convert", str(llama), "-o", str(out), "--rope", "ntk:2"])
    assert result.exit_code == 0, result.output
    assert "RoPE scaled by ntk:2, from the teacher's 512 tokens to 1,024" in " ".join(result.stderr.split())
    assert "--set 'conversion.rope=\"ntk:2\"'" in " ".join(result.stderr.split())
    theta = json.loads((out / "config.json").read_text())["rope_parameters"]["rope_theta"]
    assert math.isclose(theta, 1e4 * 2 ** (8 / 6))


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ("dynamic:4", "frequencies move.*cannot be rotated again: use yarn:4"),
        ("longrope:8", "frequencies move.*use yarn:8"),
        ("proportional:2", "use linear:2"),
        ("yarm:4", "did you mean `yarn`"),
        ("yarn", "write yarn:4"),
        ("yarn:", "write yarn:4"),
        ("yarn:1", "above 1"),
        ("yarn:nan", "above 1"),
        ("linear:inf", "above 1"),
        ("before", "called rope_position: set it to before"),
    ],
)
def test_what_is_no_fixed_scaling_is_refused(rope: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Conversion(rope=rope)


def test_the_command_refuses_it_with_the_mend(llama: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["convert", str(llama), "-o", str(tmp_path / "out"), "--rope", "dynamic:4"]
    )
    assert isinstance(result.exception, UserError)
    assert "rope = 'dynamic:4'" in str(result.exception)
    assert "cannot be rotated again: use yarn:4" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_an_older_recipe_is_told_the_new_name() -> None:
    with pytest.raises(
        UserError, match=r"conversion.rope = 'after'.*is called rope_position: set it to after"
    ):
        config.load("supra", ["conversion.rope=after"])


def test_a_teacher_with_a_scaling_of_its_own_is_refused(make_teacher: Any) -> None:
    folder = make_teacher("llama", rope_parameters=BY_HAND["linear:4"])
    with pytest.raises(
        UserError, match=r"rope yarn:4: the teacher has a scaling of its own already \(linear\)"
    ):
        make_plan(str(folder), Conversion(rope="yarn:4"))


def test_ntk_needs_a_second_frequency(make_teacher: Any) -> None:
    folder = make_teacher("llama", head_dim=2)
    with pytest.raises(UserError, match="heads of 2 have one frequency"):
        make_plan(str(folder), Conversion(rope="ntk:4"))
