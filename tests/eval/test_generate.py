"""Generation: chunked prefill changes nothing, memory stays constant, options do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from supra.checks import Sampling
from supra.errors import SupraError, UserError
from supra.generate import cache_bytes, decode_time_along, prefill, stream
from supra.loading import load_model

PROMPT = "the river runs under a tree and " * 6


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 10_000])
def test_chunked_prefill_equals_one_forward(student_dir: Path, chunk_tokens: int) -> None:
    loaded = load_model(student_dir)
    ids = loaded.tokenizer(PROMPT, return_tensors="pt").input_ids
    logits, cache = prefill(loaded.model, ids, chunk_tokens)
    torch.testing.assert_close(logits, loaded.model(ids).logits[:, -1], rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == ids.shape[1]


def test_stream_equals_generate_and_does_not_depend_on_the_chunk(student_dir: Path) -> None:
    loaded = load_model(student_dir)
    ids = loaded.tokenizer(PROMPT, return_tensors="pt").input_ids
    whole = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    expected = loaded.tokenizer.decode(whole, skip_special_tokens=True)
    for chunk in (5, 512):
        pieces = stream(
            loaded.model, loaded.tokenizer, PROMPT, Sampling(max_new_tokens=12), chunk_tokens=chunk
        )
        assert "".join(pieces) == expected


def test_the_teacher_streams_too(teacher_dir: Path) -> None:
    loaded = load_model(teacher_dir)
    ids = loaded.tokenizer(PROMPT, return_tensors="pt").input_ids
    whole = loaded.model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    pieces = stream(loaded.model, loaded.tokenizer, PROMPT, Sampling(max_new_tokens=8), chunk_tokens=16)
    assert "".join(pieces) == loaded.tokenizer.decode(whole, skip_special_tokens=True)


def test_sampling_follows_its_seed(student_dir: Path) -> None:
    loaded = load_model(student_dir)

    def sample(seed: int) -> str:
        return "".join(
            stream(
                loaded.model, loaded.tokenizer, "the", Sampling(max_new_tokens=24, temperature=1.0, seed=seed)
            )
        )

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_chat_uses_the_template_and_is_refused_without_one(student_dir: Path) -> None:
    loaded = load_model(student_dir)
    options = Sampling(max_new_tokens=4)
    chatted = "".join(stream(loaded.model, loaded.tokenizer, "hello", options, chat=True))
    assert chatted == "".join(stream(loaded.model, loaded.tokenizer, "[hello]", options))
    loaded.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        next(stream(loaded.model, loaded.tokenizer, "hello", options, chat=True))


def test_context_memory_is_constant_for_the_student_and_grows_for_the_teacher(
    student_dir: Path, teacher_dir: Path
) -> None:
    ids = torch.randint(0, 200, (1, 300))
    student = decode_time_along(load_model(student_dir).model, ids, (20, 100, 280), 3)
    teacher = decode_time_along(load_model(teacher_dir).model, ids, (20, 100, 280), 3)
    assert [row[0] for row in student] == [20, 100, 280]
    assert len({row[2] for row in student}) == 1
    per_token = 2 * 2 * 2 * 8 * 4  # layers x (keys and values) x heads x head_dim x fp32
    assert [row[2] for row in teacher] == [20 * per_token, 100 * per_token, 280 * per_token]


def test_the_measured_state_is_the_one_that_the_plan_promises(student_dir: Path) -> None:
    from supra.models import recurrent_state_bytes

    model = load_model(student_dir).model
    _, cache = prefill(model, torch.randint(0, 200, (1, 50)), 16)
    assert cache_bytes(cache) == recurrent_state_bytes(model.config, window_bytes_per_element=4)


@pytest.mark.parametrize("damage", ["truncated", "missing", "other"])
def test_a_damaged_model_is_named(student_dir: Path, tmp_path: Path, damage: str) -> None:
    import shutil

    folder = shutil.copytree(student_dir, tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[0]
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(b"not a shard at all")
    with pytest.raises(SupraError, match="model"):
        load_model(folder)


def test_a_backend_or_device_that_is_not_there_is_refused(student_dir: Path) -> None:
    with pytest.raises(UserError, match="backend"):
        load_model(student_dir, backend="tritn")
    with pytest.raises(UserError, match=r"no GPU|no such device"):
        load_model(student_dir, device="cuda:99" if not torch.cuda.is_available() else "tpu")
