"""The loss of attention weights against the weights that the layers themselves apply, without chunks."""

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from supra.config import Recipe, Stage
from supra.errors import UserError
from supra.models import SupraForCausalLM
from supra.train.data import Batch
from supra.train.losses import attention_weights
from supra.train.teacher import build_teacher
from supra.train.tracking import read_metrics
from supra.train.trainable import check_trainable
from supra.train.trainer import run_training

VARIANTS: dict[str, dict[str, Any]] = {
    "window": {},
    "linear": {"window": 0},
    "elu": {"feature_map": "elu", "num_sink_tokens": 1},
    "learned-decay": {"decay": "learned", "window": 3, "num_sink_tokens": 2},
    "shared-decay": {"decay": "learned", "decay_shared": True, "window": 0},
    "sliding-teacher": {"teacher_layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    "one-softmax-layer": {"layer_types": ["full_attention", "linear_attention"]},
}


def naive_loss(tiny: ModuleType, student: SupraForCausalLM, batch: Batch) -> Tensor:
    """The same mean, document by document, with whole matrices of weights."""
    teacher = build_teacher(student)
    seen: dict[int, dict[str, Any]] = {}
    for i, layer in enumerate(teacher.model.layers):
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, output, i=i: seen.update({i: kwargs}), with_kwargs=True
        )
    with torch.no_grad():
        tiny.forward(teacher, batch)
    terms: list[Tensor] = []
    for i, layer in enumerate(student.model.layers):
        if layer.layer_type != "linear_attention":
            continue
        hidden, rope = seen[i]["hidden_states"].flatten(0, 1), seen[i]["position_embeddings"]
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            own = slice(start, end)
            cos, sin = (x.expand(*batch.input_ids.shape, -1).flatten(0, 1)[None, own] for x in rope)
            theirs = softmax_weights(teacher.model.layers[i].self_attn, hidden[None, own], (cos, sin))
            ours = layer_weights(layer.self_attn, hidden[None, own], (cos, sin))
            looked_at = theirs > 0
            terms.append(-(theirs[looked_at] * ours[looked_at].log()).sum())
    num_terms = (
        batch.input_ids.numel() * student.config.num_attention_heads * student.config.num_linear_layers
    )
    return torch.stack(terms).sum() / num_terms


def softmax_weights(attention: Any, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """[1, H, T, T] of one document."""
    T = hidden.shape[1]
    q, k = (
        projection(hidden).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *rope)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
    age = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    visible = (age >= 0) & (age < (attention.sliding_window or T))
    return torch.softmax(
        (scores * attention.head_dim**-0.5).masked_fill(~visible, -torch.inf), dim=-1
    ).detach()


def layer_weights(layer: Any, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """[1, H, T, T]: what the layer makes of values that are unit vectors are its weights."""
    T = hidden.shape[1]
    q, k, v = layer.project(hidden)
    q, k, mapped_q, mapped_k = layer.map_features(q, k, rope)
    unit = torch.eye(T, v.shape[-1])[None, :, None].expand_as(v)
    log_decay = layer.decay(hidden) if hasattr(layer, "decay") else None
    mixed = layer._attend(q, k, unit, mapped_q, mapped_k, log_decay, None, None, T)
    return mixed[..., :T].transpose(1, 2)


@pytest.mark.parametrize(("variant", "rows"), [*((v, 5) for v in VARIANTS), ("window", 1), ("window", 100)])
def test_weights_equal_the_naive_computation_in_any_chunk(
    tiny: ModuleType, batch: Batch, variant: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    student = SupraForCausalLM(tiny.tiny_config(**VARIANTS[variant])).eval()
    for name, parameter in student.named_parameters():
        if "feature_map" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape)
        elif "_proj" in name:
            parameter.data *= 5  # else softmax is nearly uniform
    monkeypatch.setattr(attention_weights, "_CHUNK_ELEMENTS", rows * 2 * 4 * 12)
    loss, found = tiny.run_loss(student, batch, loss="attention_weights", trainable="new")
    expected = naive_loss(tiny, student, batch)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    tiny.assert_same(found, tiny.gradients(student))


def test_without_its_window_a_layer_answers_for_every_key(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch
) -> None:
    with student.ablation("linear_only"):
        loss, found = tiny.run_loss(student, batch, loss="attention_weights", trainable="new")
        expected = naive_loss(tiny, student, batch)
        expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    tiny.assert_same(found, tiny.gradients(student))
    assert not any("window_mix" in name for name in found)


def test_features_that_are_zero_leave_everything_finite(tiny: ModuleType, batch: Batch) -> None:
    torch.manual_seed(1)
    student = SupraForCausalLM(tiny.tiny_config(feature_map="t2r", window=0)).eval()
    for layer in student.linear_layers():
        layer.feature_map_q.bias.data -= 10  # every feature of every query is 0
    loss, found = tiny.run_loss(student, batch, loss="attention_weights", trainable="new")
    assert 0 < loss < 100
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_a_window_so_peaked_that_the_rest_counts_nothing_leaves_everything_finite(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch
) -> None:
    for layer in student.linear_layers():
        layer.window_mix.weight.data.fill_(-500.0)  # exp of it is 0 in fp32
    loss, found = tiny.run_loss(student, batch, loss="attention_weights", trainable="new")
    assert 100 < loss < 1000
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert all(found[name].abs().max() > 0 for name in found if name.endswith("window_mix.weight"))


def test_no_matrix_of_all_queries_and_keys_exists(
    tiny: ModuleType, student: SupraForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, H, rows = 200, 4, 10
    monkeypatch.setattr(attention_weights, "_CHUNK_ELEMENTS", rows * H * T)
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            if isinstance(output, Tensor):
                largest[0] = max(largest[0], output.numel())
            return output

    ids = torch.randint(0, 512, (1, T))
    places = torch.arange(T)[None]
    batch = Batch(ids, places, ids, torch.tensor([0, T]), ((0, 0),))
    with Watch():
        tiny.run_loss(student, batch, loss="attention_weights", trainable="new")
    assert rows * H * T <= largest[0] < H * T * T / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_norm": "group_norm", "window": 0}, "do not sum to 1"),
        ({"decay": "gated"}, "a gated decay is made"),
    ],
)
def test_models_whose_weights_it_cannot_read_are_refused(
    tiny: ModuleType, options: dict[str, Any], message: str
) -> None:
    student = SupraForCausalLM(tiny.tiny_config(**options))
    stage = Stage.model_validate(tiny.stage(loss="attention_weights"))
    with pytest.raises(UserError, match=message):
        check_trainable(stage, student)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_closer(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, dtype: str
) -> None:
    optimizer = {"lr": 1e-2, "schedule": "constant"}
    stage = tiny.stage(loss="attention_weights", total_tokens=64 * 12, optimizer=optimizer)
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, stage, dtype=dtype))
    run_training(recipe, model_dir, tmp_path / "run")
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    assert sum(losses[-3:]) < sum(losses[:3])
