"""Losses and gradients against the plain computation, the shared teacher, the schedule."""

import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from supra.config import Optimizer, Stage
from supra.models import SupraForCausalLM, is_new_parameter
from supra.train.data import Batch, PackedData
from supra.train.losses import StageLoss, logits
from supra.train.optim import build_optimizer, lr_multiplier
from supra.train.stage import put_tensors
from supra.train.teacher import build_teacher
from supra.train.tokens import TokenStore
from supra.train.trainable import enter_stage


def make_stage(tiny: ModuleType, **changes: Any) -> Stage:
    return Stage.model_validate(tiny.stage(**changes))


@pytest.mark.parametrize("target", ["after_o_proj", "before_o_proj"])
def test_attention_transfer_equals_the_plain_computation(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch, target: str
) -> None:
    loss, found = tiny.run_loss(student, batch, attention_target=target)
    assert found
    assert all(is_new_parameter(name) for name in found)

    # One forward of the teacher that keeps all, then all layers' errors in one graph and one backward pass.
    teacher = build_teacher(student)
    kept: dict[Any, Any] = {}

    def keep(key: Any) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            kept[key] = (args, kwargs, output)

        return hook

    for i, layer in enumerate(teacher.model.layers):
        layer.self_attn.register_forward_hook(keep(i), with_kwargs=True)
        layer.self_attn.o_proj.register_forward_hook(keep(("before", i)), with_kwargs=True)
    with torch.no_grad():
        tiny.forward(teacher, batch)
    packing = student.model._packing(None, batch.cu_seqlens, *batch.input_ids.shape)
    errors = []
    for i, layer in enumerate(student.model.layers):
        _, kwargs, (wanted, _) = kept[i]
        layer.self_attn.o_proj.register_forward_hook(keep(("ours", i)), with_kwargs=True)
        names = ("hidden_states", "position_embeddings")
        output, _ = layer.self_attn(**{name: kwargs[name] for name in names}, packing=packing)
        if target == "before_o_proj":
            output, wanted = (kept[whose, i][0][0] for whose in ("ours", "before"))
        errors.append(F.mse_loss(output, wanted) / wanted.square().mean())
    expected = torch.stack(errors).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    tiny.assert_same(found, tiny.gradients(student))


def test_kl_equals_the_plain_computation_in_any_chunk(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "_CHUNK_ELEMENTS", 5 * 512)
    loss, found = tiny.run_loss(student, batch, loss="kl", trainable="all", kl_temperature=2.0)
    teacher = build_teacher(student)
    with torch.no_grad():
        target = F.log_softmax(tiny.forward(teacher, batch).logits / 2, dim=-1)
    ours = F.log_softmax(tiny.forward(student, batch).logits / 2, dim=-1)
    expected = 4 * (target.exp() * (target - ours)).sum(-1).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    tiny.assert_same(found, tiny.gradients(student))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_mixes_with_cross_entropy_as_the_plain_formula_does(
    tiny: ModuleType,
    student: SupraForCausalLM,
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    monkeypatch.setattr(logits, "_CHUNK_ELEMENTS", 5 * 512)
    changes = {"kl_temperature": temperature, "ce_weight": 0.3}
    loss, found = tiny.run_loss(student, batch, loss="kl", trainable="all", **changes)
    with torch.no_grad():
        target = F.log_softmax(
            tiny.forward(build_teacher(student), batch).logits.double() / temperature, dim=-1
        )
    raw = tiny.forward(student, batch).logits.double()
    divergence = F.kl_div(
        F.log_softmax(raw / temperature, dim=-1), target, log_target=True, reduction="none"
    ).sum(-1)
    ce = F.cross_entropy(raw.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    expected = 0.7 * temperature**2 * divergence.mean() + 0.3 * ce
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    tiny.assert_same(found, tiny.gradients(student))


def test_the_gradient_of_a_chunk_is_that_of_autograd_in_fp64(batch: Batch) -> None:
    """`labels` hold ends of documents, where cross-entropy has no gradient."""
    targets = logits._ce_of_chunk(batch, 7)
    raw = torch.randn(24, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    raw.requires_grad_()
    F.cross_entropy(raw, batch.labels.flatten(), ignore_index=-100, reduction="sum").div(7).backward()
    assert raw.grad is not None
    _, gradient = targets(raw.detach().float(), slice(0, 24))
    torch.testing.assert_close(gradient.double(), raw.grad, rtol=1e-5, atol=1e-8)
    assert (gradient[batch.labels.flatten() == -100] == 0).all()


def test_ce_equals_the_plain_computation_and_stops_at_document_ends(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "_CHUNK_ELEMENTS", 7 * 512)
    loss, found = tiny.run_loss(student, batch, loss="ce", trainable="all")
    log_probabilities = F.log_softmax(tiny.forward(student, batch).logits, dim=-1).flatten(0, 1)
    ends = set((batch.cu_seqlens[1:] - 1).tolist())
    flat = batch.input_ids.flatten()
    terms = [-log_probabilities[i, flat[i + 1]] for i in range(len(flat)) if i not in ends]
    expected = torch.stack(terms).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    tiny.assert_same(found, tiny.gradients(student))


def test_micro_batches_add_up_to_the_whole_batch(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch
) -> None:

    store = TokenStore(np.arange(48, dtype=np.uint16), np.array([0, 5, 6, 30, 48]), "key")
    data = PackedData(store, length=12, seed=0)
    whole, parts = data.batch(0, 4), [data.batch(i, 1) for i in range(4)]
    stage = make_stage(tiny, loss="ce", trainable="all")
    enter_stage(stage, student, None, seed=0)
    accelerator = Accelerator(cpu=True)
    loss = StageLoss(stage, student, None, accelerator)
    one = loss(whole, loss.num_targets([whole]))
    expected = tiny.gradients(student)
    student.zero_grad()
    accelerator.gradient_accumulation_steps = 4
    total = sum(loss(part, loss.num_targets(parts)) for part in parts)
    assert float(total) == pytest.approx(float(one), rel=1e-5)
    tiny.assert_same(tiny.gradients(student), expected)


def test_teacher_shares_every_frozen_tensor(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch
) -> None:
    teacher = build_teacher(student)
    ours = {name: p.data_ptr() for name, p in student.named_parameters()}
    assert {name: p.data_ptr() for name, p in teacher.named_parameters()} == {
        name: pointer for name, pointer in ours.items() if not is_new_parameter(name)
    }
    assert not any(p.requires_grad for p in teacher.parameters())
    assert not any(p.is_meta for p in [*teacher.parameters(), *teacher.buffers()])
    assert teacher.lm_head.weight.data_ptr() == teacher.model.embed_tokens.weight.data_ptr()
    # It computes what a softmax model of these weights computes.
    config = tiny.tiny_config(layer_types=["full_attention"] * 2, window=0)
    alone = SupraForCausalLM(config).eval()
    alone.load_state_dict({k: v for k, v in student.state_dict().items() if not is_new_parameter(k)})
    with torch.no_grad():
        assert torch.equal(tiny.forward(teacher, batch).logits, tiny.forward(alone, batch).logits)


@pytest.mark.parametrize("kind", ["new", "adapters", "dora", "all"])
def test_teacher_stays_as_it_was_while_the_student_trains(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch, kind: str
) -> None:
    teacher = build_teacher(student)
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    given = {"trainable": "adapters", "lora": {"dora": True}} if kind == "dora" else {"trainable": kind}
    stage = make_stage(tiny, loss="kl", **given)
    entered = enter_stage(stage, student, teacher, seed=0)
    optimizer = build_optimizer(stage.optimizer, entered.parameters)
    loss = StageLoss(stage, student, teacher, Accelerator(cpu=True))
    for _ in range(2):
        loss(batch, loss.num_targets([batch]))
        optimizer.step()
        optimizer.zero_grad()
    entered.merge()
    put_tensors(student, {"model.norm.weight": torch.zeros(64)})
    for name, parameter in teacher.named_parameters():
        assert torch.equal(parameter, before[name]), name
    changed = {n for n, p in student.named_parameters() if n in before and not torch.equal(p, before[n])}
    projections = {n for n in before if n.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj")}
    expected = {"new": set(), "all": set(before)}.get(kind, projections)
    assert changed == expected | {"model.norm.weight"}


def test_adapters_may_train_without_new_parameters(tiny: ModuleType, student: SupraForCausalLM) -> None:
    with_new = enter_stage(make_stage(tiny, trainable="adapters", loss="kl"), student, None, seed=0)
    assert any(is_new_parameter(name) for name in with_new.parameters)
    with_new.merge()
    without = enter_stage(
        make_stage(tiny, trainable="adapters", train_new=False, loss="kl"), student, None, seed=0
    )
    assert without.parameters
    assert all(".lora_" in name for name in without.parameters)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedule(schedule: str) -> None:
    config = Optimizer.model_validate({"lr": 1, "schedule": schedule, "warmup_steps": 4, "min_lr_ratio": 0.1})
    rates = [lr_multiplier(config, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    if schedule == "cosine":
        assert rates[9] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 5 / 15)) / 2)


@pytest.mark.parametrize("decay_ratio", [0.05, 0.25, 0.8])
def test_wsd_stays_up_then_falls_in_the_last_share_of_the_steps(decay_ratio: float) -> None:
    given = {"lr": 1, "schedule": "wsd", "warmup_steps": 4, "min_lr_ratio": 0.1, "decay_ratio": decay_ratio}
    rates = [lr_multiplier(Optimizer.model_validate(given), step, 20) for step in range(20)]
    falling = round(20 * decay_ratio)
    assert rates[: 20 - falling] == [0.25, 0.5, 0.75, *[1.0] * (17 - falling)]
    expected = [0.1 + 0.9 * (1 - math.sqrt(n / falling)) for n in range(1, falling + 1)]
    assert rates[20 - falling :] == pytest.approx(expected)
    assert rates[-1] == pytest.approx(0.1)


def test_new_parameters_have_a_rate_of_their_own(tiny: ModuleType, student: SupraForCausalLM) -> None:
    config = Optimizer.model_validate({"lr": 1e-4, "new_lr_ratio": 10, "weight_decay": 0.1})
    optimizer = build_optimizer(config, dict(student.named_parameters()))
    names = {id(p): name for name, p in student.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            new = is_new_parameter(names[id(parameter)])
            assert group["base_lr"] == pytest.approx(1e-3 if new else 1e-4)
            assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0)
