"""Scaled rotary positions, decay horizons, costs of a context, and the books a measurement reads."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from supra.config import Conversion
from supra.convert import execute, make_plan
from supra.errors import UserError
from supra.generate import cache_bytes
from supra.loading import load_model, load_tokenizer
from supra_eval.length.books import read_books
from supra_eval.length.cost import PeakMemory, measure_cost, memory_method
from supra_eval.length.horizon import decay_horizon, describe_horizon
from supra_eval.length.rope import require_scalings, rope_parameters, scaled_rope


@pytest.fixture
def teacher(teacher_dir: Path) -> Any:
    return load_model(teacher_dir).model


def test_linear_scaling_divides_positions(teacher: Any) -> None:
    ids = torch.arange(20)[None]
    plain = teacher(ids).logits
    with scaled_rope(teacher, "linear", 4.0):
        stretched = teacher(ids, position_ids=4 * torch.arange(20)[None]).logits
        assert not torch.allclose(teacher(ids).logits, plain, atol=1e-3)
    torch.testing.assert_close(stretched, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(teacher(ids).logits, plain)  # put back


def test_ntk_keeps_the_fastest_frequency_and_divides_the_slowest(teacher: Any) -> None:
    before = teacher.model.rotary_emb.inv_freq.clone()
    with scaled_rope(teacher, "ntk", 8.0):
        after = teacher.model.rotary_emb.inv_freq
        assert after[0] == before[0]
        assert float(before[-1] / after[-1]) == pytest.approx(8.0, rel=1e-4)
        # θ' = θ·κ^(d/(d−2)) with θ = 10000, κ = 8, d = 8
        assert teacher.config.rope_parameters["rope_theta"] == pytest.approx(10000 * 8 ** (8 / 6))


def test_yarn_interpolates_by_parts(teacher: Any) -> None:
    before = teacher.model.rotary_emb.inv_freq.clone()
    with scaled_rope(teacher, "yarn", 4.0):
        rotary = teacher.model.rotary_emb
        ratio = before / rotary.inv_freq
        assert float(ratio[0]) == pytest.approx(1.0) and float(ratio[-1]) == pytest.approx(4.0)
        assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)  # YaRN's temperature
    assert teacher.config.max_position_embeddings == 512


def test_scalings_that_do_not_fit_are_refused(teacher: Any) -> None:
    with pytest.raises(UserError, match="Did you mean linear"):
        require_scalings(["liner"])
    teacher.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UserError, match="has a scaling of its own already"):
        rope_parameters(teacher.config, "ntk", 2.0)


def test_horizons_are_worked_by_hand(teacher_dir: Path, tmp_path: Path, student_dir: Path) -> None:
    # 4 heads, the slowest: ALiBi's γ = exp(−2^−8), so exp(−n/256) = 0.01 at n = 256 ln 100; RetNet's γ = 1 − 2^−8.
    alibi, retnet = 256 * math.log(100), math.log(100) / -math.log1p(-(2**-8))
    for decay, expected in {"alibi": alibi, "retnet": retnet, "learned": retnet, "gated": retnet}.items():
        execute(
            make_plan(str(teacher_dir), Conversion(decay=decay)), tmp_path / decay, seed=0, recipe_yaml="{}"
        )
        horizons = decay_horizon(load_model(tmp_path / decay).model)
        assert horizons == pytest.approx([expected] * 2, rel=1e-4)
    assert "1,177" in describe_horizon(horizons)
    assert decay_horizon(load_model(student_dir).model) == []
    assert decay_horizon(load_model(teacher_dir).model) == []
    assert "nothing fades" in describe_horizon([])


def test_cost_of_a_context(teacher_dir: Path, student_dir: Path) -> None:
    ids = torch.zeros(1, 600, dtype=torch.int64)
    rows = {name: measure_cost(load_model(folder).model, ids, (100, 600), chunk_tokens=64, num_steps=3)
            for name, folder in (("teacher", teacher_dir), ("student", student_dir))}  # fmt: skip
    assert [row.context_tokens for row in rows["teacher"]] == [100, 600]
    assert [row.cache_bytes for row in rows["teacher"]] == [100 * 256, 600 * 256]
    assert rows["student"][0].cache_bytes == rows["student"][1].cache_bytes
    assert all(row.decode_ms > 0 and row.peak_bytes > 50e6 for row in rows["teacher"] + rows["student"])
    with torch.no_grad():
        cache = load_model(student_dir).model(ids[:, :100], use_cache=True).cache
    assert rows["student"][0].cache_bytes == cache_bytes(cache)


def test_peak_memory_sees_what_came_and_went() -> None:
    with PeakMemory(torch.device("cpu")) as before:
        pass
    with PeakMemory(torch.device("cpu")) as peak:
        held = torch.ones(50_000_000)  # 200 MB, touched
        time.sleep(0.1)  # twenty samples
        del held
    # Gone again, but seen.
    assert peak.num_bytes - before.num_bytes > 100e6
    assert "resident" in memory_method("cpu") and "max_memory_allocated" in memory_method("cuda:0")


def test_books_are_whole_and_spread(tmp_path: Path, teacher_dir: Path) -> None:
    tokenizer = load_tokenizer(teacher_dir)
    for name, size in (("a", 100), ("b", 350)):
        (tmp_path / f"{name}.txt").write_text("".join(chr(97 + i % 26) for i in range(size)))
    both = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    ids, names = read_books(both, tokenizer, 100, 6)
    assert names == ["a.txt", "b.txt"] and ids.shape == (1 + 3, 100)
    text = tokenizer.decode(ids[2])
    assert text[0] == chr(97 + 100 % 26), "the second sequence of b starts where its first one ends"
    ids, names = read_books(both, tokenizer, 100, 1)
    assert names == ["a.txt"] and ids.shape == (1, 100)


def test_short_books_are_named_with_what_they_have(tmp_path: Path, teacher_dir: Path) -> None:
    tokenizer = load_tokenizer(teacher_dir)
    (tmp_path / "long.txt").write_text("x" * 500)
    (tmp_path / "short.txt").write_text("x" * 123)
    with pytest.raises(UserError) as caught:
        read_books([str(tmp_path / "*.txt")], tokenizer, 400, 8)
    assert "1 of 2 texts" in str(caught.value) and "short.txt has 123" in str(caught.value)
    assert "the 400 tokens" in str(caught.value) and "shorter --contexts" in caught.value.mend
    with pytest.raises(UserError, match=r"absent\.txt"):
        read_books([str(tmp_path / "absent.txt")], tokenizer, 400, 8)
    with pytest.raises(UserError, match="max-sequences 0"):
        read_books([str(tmp_path / "long.txt")], tokenizer, 400, 0)
