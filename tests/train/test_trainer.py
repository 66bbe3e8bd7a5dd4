"""A whole run: what it writes, what it exports, how it stops, what it plans."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from supra.config import Recipe
from supra.errors import SupraError, UserError
from supra.models import SupraForCausalLM, is_new_parameter
from supra.train import checkpoint
from supra.train.losses import StageLoss
from supra.train.plan import dry_run
from supra.train.precision import resolve_precision
from supra.train.tracking import read_metrics
from supra.train.trainer import run_training


def two_stages(tiny: ModuleType, text: Path, **changes: Any) -> Recipe:
    distill = tiny.stage(name="distill", trainable="adapters", loss="kl", optimizer={"lr": 1e-2})
    return Recipe.model_validate(tiny.raw_recipe(text, tiny.stage(), distill, **changes))


def load(folder: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_export_is_the_trained_model_bit_for_bit(
    dtype: torch.dtype, tiny: ModuleType, tmp_path: Path, text_file: Path
) -> None:
    source = tiny.write_model(tmp_path / "converted", dtype=dtype)
    trained: dict[str, torch.Tensor] = {}

    def remember(name: str, model: SupraForCausalLM) -> None:
        trained.update({key: tensor.clone() for key, tensor in model.state_dict().items()})

    out = run_training(two_stages(tiny, text_file), source, tmp_path / "run", on_stage_end=remember)
    assert out == tmp_path / "run" / "model"
    model = load(out)
    assert model.dtype == dtype
    loaded, original = model.state_dict(), load(source).state_dict()
    assert loaded.keys() == trained.keys() == original.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, trained[name].to(tensor.dtype)), name
    frozen = {name for name in loaded if "mlp" in name or "norm" in name or "embed" in name}
    assert all(torch.equal(loaded[name], original[name]) for name in frozen)
    assert not torch.equal(
        loaded["model.layers.0.self_attn.q_proj.weight"], original["model.layers.0.self_attn.q_proj.weight"]
    )
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    with safe_open(out / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a dict
    assert AutoTokenizer.from_pretrained(out).encode("the cat") == tiny.make_tokenizer().encode("the cat")
    assert Recipe.model_validate_json(
        json.dumps(__import__("yaml").safe_load((out / "recipe.yaml").read_text()))
    )
    facts = json.loads((out / "supra.json").read_text())
    assert facts["source"] == "random"
    assert facts["training"]["tokens_trained"] == 512
    assert [stage["name"] for stage in facts["training"]["stages"]] == ["transfer", "distill"]
    assert (out / "README.md").read_text().startswith("# Tiny\n\n## Training")
    assert not list(tmp_path.glob("**/*.partial"))


def test_taylor_features_and_gates_train_and_gates_are_exported_in_fp32(
    tiny: ModuleType, tmp_path: Path, text_file: Path
) -> None:
    options = {"feature_map": "taylor", "taylor_dim": 4, "decay": "gated", "window": 4}
    source = tiny.write_model(tmp_path / "converted", dtype=torch.bfloat16, **options)
    recipe = two_stages(tiny, text_file, conversion=options, dtype="bfloat16")
    model = load(run_training(recipe, source, tmp_path / "run"))
    assert model.dtype == torch.bfloat16
    loaded, original = model.state_dict(), load(source).state_dict()
    new = [name for name in loaded if is_new_parameter(name)]
    assert len(new) == 2 * 6
    assert all(not torch.equal(loaded[name], original[name]) for name in new)
    for name in (name for name in new if ".decay." in name):
        gate = loaded[name]
        assert gate.dtype == torch.float32 and not torch.equal(gate, gate.bfloat16().float()), name


@pytest.mark.parametrize(
    "lora",
    [{}, {"rank": 2, "dora": True, "targets": ["q_proj", "up_proj", "down_proj"]}],
    ids=["lora", "dora"],
)
def test_kept_adapters_load_with_peft_and_equal_the_merged_model(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, lora: dict[str, Any]
) -> None:
    stage = tiny.stage(name="distill", trainable="adapters", loss="kl", lora=lora)
    kept, merged = (
        run_training(
            Recipe.model_validate(tiny.raw_recipe(text_file, tiny.stage(), stage, adapters=adapters)),
            model_dir,
            tmp_path / adapters,
        )
        for adapters in ("keep", "merge")
    )
    with safe_open(kept / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert any("lora_magnitude_vector" in name for name in file.keys()) == lora.get("dora", False)  # noqa: SIM118
    base = load(kept)
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, kept / "adapter")(ids).logits
        expected = load(merged)(ids).logits
    torch.testing.assert_close(adapted, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, expected, rtol=1e-4, atol=1e-5)


def test_training_lowers_every_loss(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    common = {
        "total_tokens": 64 * 15,
        "checkpoint_every_steps": 100,
        "optimizer": {"lr": 5e-3, "schedule": "constant"},
    }
    recipe = tiny.raw_recipe(
        text_file,
        tiny.stage(**common),
        tiny.stage(name="distill", trainable="adapters", loss="kl", **common),
        tiny.stage(name="tune", trainable="all", loss="ce", **common),
    )
    run_training(Recipe.model_validate(recipe), model_dir, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    for stage in ("transfer", "distill", "tune"):
        losses = [row["loss"] for row in rows if row["stage"] == stage]
        assert sum(losses[-3:]) < 0.95 * sum(losses[:3]), stage
    assert all(row["grad_norm"] > 0 for row in rows)


def test_a_recipe_without_newer_fields_trains_as_it_did_before_they_existed(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    """Losses of a run by the version that had only these fields."""
    optimizer = {"lr": 1e-2, "warmup_steps": 1, "weight_decay": 0.01}
    stages = [
        tiny.stage(),
        tiny.stage(name="before", attention_target="before_o_proj"),
        tiny.stage(
            name="distill", trainable="adapters", loss="kl", kl_temperature=2.0,
            lora={"rank": 2, "dropout": 0.2}, optimizer=optimizer,
        ),
        tiny.stage(name="tune", trainable="all", loss="ce", optimizer={**optimizer, "schedule": "linear"}),
    ]  # fmt: skip
    run_training(Recipe.model_validate(tiny.raw_recipe(text_file, *stages)), model_dir, tmp_path / "run")
    assert [row["loss"] for row in read_metrics(tmp_path / "run")] == pytest.approx(
        [
            *(0.01086035, 0.00708584, 0.00788995, 0.00663787),
            *(0.00510559, 0.00632541, 0.00435729, 0.00471522),
            *(4.9419e-05, 0.00572700, 0.00480925, 0.00405317),
            *(6.12381935, 6.17900896, 5.17208099, 4.59225893),
        ],
        rel=1e-3,
        abs=1e-6,
    )


def test_bfloat16_keeps_master_weights_in_fp32(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dtypes: set[torch.dtype] = set()

    def look(name: str, model: SupraForCausalLM) -> None:
        dtypes.update(parameter.dtype for parameter in model.parameters())

    run_training(
        two_stages(tiny, text_file, dtype="bfloat16"), model_dir, tmp_path / "run", on_stage_end=look
    )
    assert dtypes == {torch.float32}
    assert "dtype bfloat16 (chosen)" in capsys.readouterr().err
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    run_training(two_stages(tiny, text_file), model_dir, tmp_path / "fp32")
    assert losses != [row["loss"] for row in read_metrics(tmp_path / "fp32")]
    assert losses[:4] == pytest.approx([row["loss"] for row in read_metrics(tmp_path / "fp32")][:4], rel=0.2)


def test_auto_precision_says_why() -> None:
    precision = resolve_precision("auto", torch.device("cpu"))
    assert str(precision) in ("bfloat16 (auto: AMX)", "float32 (auto: no AMX)")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(
    value: float,
    tiny: ModuleType,
    tmp_path: Path,
    text_file: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = StageLoss.__call__, [0]

    def poisoned(self: StageLoss, batch: Any, num_targets: int) -> torch.Tensor:
        calls[0] += 1
        return real(self, batch, num_targets) * (value if calls[0] == 6 else 1.0)  # in step 3 of 4

    monkeypatch.setattr(StageLoss, "__call__", poisoned)
    with pytest.raises(SupraError) as caught:
        run_training(Recipe.model_validate(tiny.raw_recipe(text_file)), model_dir, tmp_path / "run")
    text = str(caught.value)
    assert caught.value.exit_code == 1
    for part in (
        "stage transfer, step 3",
        f"loss {value}",
        "sequences (component:epoch:number) 0:",
        "step-00000002-stage-0",
    ):
        assert part in text
    saved = checkpoint.load_newest(tmp_path / "run", print)
    assert saved is not None
    assert saved.position.step == 2
    assert all(tensor.isfinite().all() for tensor in saved.model.values())


def test_two_processes_cannot_train_in_one_folder(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    recipe = two_stages(tiny, text_file)

    def meddle(name: str, model: SupraForCausalLM) -> None:
        with pytest.raises(UserError, match="another process"):
            run_training(recipe, model_dir, tmp_path / "run", resume=True)

    run_training(recipe, model_dir, tmp_path / "run", on_stage_end=meddle)


def test_a_finished_run_resumes_to_its_result(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file))
    out = run_training(recipe, model_dir, tmp_path / "run")
    time_of_weights = (out / "model.safetensors").stat().st_mtime_ns
    assert run_training(recipe, model_dir, tmp_path / "run", resume=True) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == time_of_weights


def test_the_plan_counts_and_writes_nothing(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    plan = dry_run(two_stages(tiny, text_file), model_dir, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    transfer, distill = plan.stages
    assert (transfer.steps, transfer.tokens) == (4, 256)
    assert transfer.epochs == (pytest.approx(16 / (transfer.data_tokens // 16)),)
    new = sum(
        tensor.numel() for name, tensor in load(model_dir).state_dict().items() if is_new_parameter(name)
    )
    assert transfer.num_trainable_parameters == new
    # LoRA of rank 8 on q and o (64 -> 64) and on k and v (64 -> 32), in 2 layers
    assert distill.num_trainable_parameters == new + 2 * 8 * (2 * (64 + 64) + 2 * (64 + 32))
    assert plan.seconds is not None
    assert 0 < plan.seconds < 60
    assert plan.memory_bytes > 4 * plan.num_parameters
    assert json.loads(plan.to_json())["stages"][1]["name"] == "distill"
    assert dry_run(two_stages(tiny, text_file), model_dir, tmp_path / "run", probe=False).seconds is None
    run_training(two_stages(tiny, text_file), model_dir, tmp_path / "run")
    with pytest.raises(UserError, match="not empty"):
        dry_run(two_stages(tiny, text_file), model_dir, tmp_path / "run")
