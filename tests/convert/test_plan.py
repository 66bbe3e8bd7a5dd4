"""The plan: read from headers alone, printed and as JSON, with the paper's parameter counts."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from supra.config import Conversion
from supra.convert import execute, make_plan
from supra.convert.card import model_card
from supra.convert.shard_writer import file_bytes, header_bytes
from supra.errors import UserError
from supra.weights.headers import read_header

GOLDEN = Path(__file__).parent / "golden"


def printed(plan: Any, width: int = 100) -> str:
    stream = io.StringIO()
    Console(width=width, force_terminal=False, color_system=None, file=stream).print(plan.render())
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


@pytest.fixture
def golden_teacher(make_teacher: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Mistral with a sliding window, a YaRN scaling and tied embeddings, named by a relative path."""
    folder = make_teacher(
        "mistral",
        sliding_window=4096,
        tie_word_embeddings=True,
        max_shard_size="20KB",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
        },
    )
    monkeypatch.chdir(folder.parent)
    return "teacher"


def test_printed_plan_and_json(golden_teacher: str) -> None:
    plan = make_plan(golden_teacher, Conversion(decay="learned", norm_affine=True, keep_softmax=(1,)))
    assert printed(plan) == (GOLDEN / "plan.txt").read_text()
    found, expected = json.loads(plan.to_json()), json.loads((GOLDEN / "plan.json").read_text())
    # The tokenizer's size is the library's affair; the weights' is not.
    weights = sum(shard.num_bytes for shard in plan.source.shards) + file_bytes(plan.new)
    assert found.pop("disk_bytes") == weights + plan.source.small_bytes() + (1 << 20)
    assert found.pop("conversion") == plan.conversion.model_dump(mode="json")
    assert found == expected


def test_printed_plan_of_taylor_features_and_a_gated_decay(golden_teacher: str, tmp_path: Path) -> None:
    conversion = Conversion(feature_map="taylor", taylor_dim=4, window=16, decay="gated", decay_shared=True)
    plan = make_plan(golden_teacher, conversion)
    assert printed(plan).partition("\nNew\n")[2] == (GOLDEN / "plan_taylor.txt").read_text()
    assert "taylor feature map of 4 dimensions, rotary positions before it" in printed(plan)
    card = model_card(plan, 0, tmp_path)
    assert "| `taylor` of 4 dimensions, rotary positions before it |" in card
    assert "| decay | `gated`, shared within each key/value group |" in card


def test_a_head_narrower_than_the_taylor_map_is_refused(llama: Path) -> None:
    with pytest.raises(UserError, match=r"taylor_dim=16 must be even.*head_dim of 8"):
        make_plan(str(llama), Conversion(feature_map="taylor"))


def test_window_and_sinks_are_stated(llama: Path, tmp_path: Path) -> None:
    plan = make_plan(str(llama), Conversion(feature_map="hedgehog", window=16, num_sink_tokens=2))
    assert "softmax window of 16 tokens and the first 2" in printed(plan)
    assert "the last 16 tokens, and the first 2" in model_card(plan, 0, tmp_path)


def test_printed_plan_with_refused_tensors(
    make_teacher: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_teacher("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 97, "mlp_bias": True}))
    plan = make_plan(str(folder), Conversion())
    text = printed(plan)
    assert "Refused" in text
    assert "its shape is [96, 32] where config.json asks for [97, 32]" in text
    assert {item["name"] for item in json.loads(plan.to_json())["refused"]} >= {
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.bias",
    }
    with pytest.raises(UserError, match="7 more such tensors"):
        execute(plan, tmp_path / "out", seed=0, recipe_yaml="")
    assert not (tmp_path / "out").exists()


LLAMA2_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
MISTRAL_7B = LLAMA2_7B | {
    "model_type": "mistral",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


def fake_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of headers and holes: it takes no disk, and reading all of it would take 14 GB."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from supra.weights.headers import TensorInfo

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    infos = [TensorInfo(name, "BF16", tuple(value.shape)) for name, value in model.state_dict().items()]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        header = header_bytes(infos)
        file.write(header)
        file.truncate(len(header) + sum(info.num_bytes for info in infos))
    return folder


@pytest.mark.parametrize(
    ("config", "kept", "added", "state"),
    [
        # The figures of the models released with the paper; the state is 32 layers of [heads, 128, 128] fp32.
        (LLAMA2_7B, 6_738_415_616, 537_001_984, 32 * 32 * 128 * 128 * 4),
        (MISTRAL_7B, 7_241_732_096, 570_589_184, 32 * 32 * 128 * 128 * 4),
    ],
    ids=["llama-2-7b", "mistral-7b"],
)
def test_seven_billion_parameters_are_planned_from_headers(
    config: dict[str, Any], kept: int, added: int, state: int, tmp_path: Path
) -> None:
    folder = fake_checkpoint(tmp_path / "teacher", config)
    assert len(read_header(folder / "model.safetensors")) > 290
    plan = make_plan(str(folder), Conversion())
    assert (plan.parameters_kept, plan.parameters_added) == (kept, added)
    assert plan.dtype == "BF16"
    rows = {row["num_tokens"]: row for row in plan.context_bytes}
    assert {row["student_bytes"] for row in rows.values()} == {state}
    width = 32 * 2 * config["num_key_value_heads"] * 128 * 2
    window = config.get("sliding_window", 1 << 30)
    for length, row in rows.items():
        assert row["teacher_kv_cache_bytes"] == width * min(length, window)
    assert plan.convert_memory_bytes < 1 << 30
    shutil.rmtree(folder)


def test_mixed_dtypes_are_kept_and_listed(make_teacher: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_teacher("llama", dtype=torch.bfloat16)
    tensors = {k: v.float() if "norm" in k else v for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    plan = make_plan(str(folder), Conversion())
    assert {tensor.dtype for tensor in plan.kept} == {"F32", "BF16"}
    assert plan.dtype == "BF16"
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="")


def test_a_teacher_without_stated_dtype_has_that_of_its_weights(make_teacher: Any) -> None:
    import torch

    folder = make_teacher("llama", dtype=torch.float16)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    assert make_plan(str(folder), Conversion()).dtype == "F16"


def test_old_spelling_of_rope_scaling_is_understood(make_teacher: Any) -> None:
    folder = make_teacher("llama")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps(config))
    plan = make_plan(str(folder), Conversion())
    rope = plan.config.rope_parameters
    assert rope is not None
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 4.0, 5e5)
    assert any("linear" in note for note in plan.notes)
