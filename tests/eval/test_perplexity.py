"""Perplexity equals transformers' own loss, and the table keeps teacher, student and ablations apart."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from supra.config import Data
from supra.errors import SupraError, UserError
from supra.loading import load_model
from supra_eval.contenders import conversion_seed, fingerprint, untrain
from supra_eval.perplexity import evaluate_folder, measure, read_blocks


def test_equals_transformers_loss(teacher_dir: Path, text_file: Path) -> None:
    loaded = load_model(teacher_dir)
    blocks, _ = read_blocks(Data(train=(str(text_file),)), loaded.tokenizer, 300, 1500)
    assert blocks.shape == (5, 300)
    losses = [loaded.model(block[None], labels=block[None]).loss.item() for block in blocks]
    row = measure(loaded.model, blocks, batch_size=2)
    assert row.nll == pytest.approx(sum(losses) / 5, abs=1e-5)
    assert row.perplexity == pytest.approx(math.exp(sum(losses) / 5), rel=1e-5)
    assert row.scored_tokens == 5 * 299
    assert row.nll_stderr == pytest.approx(float(torch.tensor(losses).std() / 5**0.5), rel=1e-3)


def test_blocks_are_spread_over_each_text_and_never_overlap(tmp_path: Path, teacher_dir: Path) -> None:
    tokenizer = load_model(teacher_dir).tokenizer
    for name, size in (("short", 100), ("long", 1000)):
        (tmp_path / f"{name}.txt").write_text("".join(chr(97 + i % 26) for i in range(size)))
    data = Data(train=(str(tmp_path / "short.txt"), str(tmp_path / "long.txt")))
    blocks, names = read_blocks(data, tokenizer, 40, 400)
    assert names == ["short.txt", "long.txt"]
    assert blocks.shape == (2 + 5, 40)  # the short text has room for two only
    with pytest.raises(UserError, match="longer than every text"):
        read_blocks(data, tokenizer, 2000, 2000)


def test_table_holds_teacher_student_ablations_and_the_untrained_conversion(
    teacher_dir: Path, student_dir: Path, text_file: Path
) -> None:
    said: list[str] = []
    run = score(
        student_dir,
        text_file,
        teacher=teacher_dir,
        block_tokens=128,
        max_tokens=512,
        ablations=True,
        say=said.append,
    )
    models = ["teacher", "student", "window_only", "linear_only", "untrained"]
    found = {row.model: row.value for row in run.scores if row.metric == "perplexity"}
    assert list(found) == models
    losses = {row.model: row.value for row in run.scores if row.metric == "loss"}
    assert all(found[name] == pytest.approx(math.exp(losses[name])) for name in models)
    assert len({found[name] for name in models[:4]}) == 4, "each is a measurement of its own"
    assert found["untrained"] == found["student"], "nothing was trained"
    assert all("backend" in where for where in run.runs_on.values())
    assert any("backend torch" in line for line in said)
    assert json.loads(run.to_json())["settings"]["texts"] == ["book.txt"]


def test_the_untrained_conversion_is_that_of_the_teacher(
    teacher_dir: Path, student_dir: Path, tmp_path: Path
) -> None:
    first = load_model(student_dir).model.state_dict()
    trained = load_model(student_dir).model
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1)
    untrain(trained, load_model(teacher_dir).model, conversion_seed(student_dir))
    assert all(torch.equal(tensor, first[name]) for name, tensor in trained.state_dict().items())


def test_a_fingerprint_tells_weights_and_ablations_apart(student_dir: Path, teacher_dir: Path) -> None:
    model = load_model(student_dir).model
    prints = [
        fingerprint(model),
        fingerprint(model, "window_only"),
        fingerprint(load_model(teacher_dir).model),
    ]
    assert fingerprint(load_model(student_dir).model, "student") == prints[0]
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    assert len({*prints, fingerprint(model)}) == 4


def test_a_fingerprint_tells_tokenizers_and_generation_settings_apart(student_dir: Path) -> None:
    loaded = load_model(student_dir)
    first = fingerprint(loaded.model, "", loaded.tokenizer)
    loaded.tokenizer.add_tokens(["<new>"])
    second = fingerprint(loaded.model, "", loaded.tokenizer)
    loaded.model.generation_config.repetition_penalty = 1.9
    assert len({first, second, fingerprint(loaded.model, "", loaded.tokenizer)}) == 3


def test_no_more_tokens_are_scored_than_asked_for(tmp_path: Path, teacher_dir: Path) -> None:
    tokenizer = load_model(teacher_dir).tokenizer
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("text " * 40)
    data = Data(train=(str(tmp_path / "*.txt"),))
    blocks, names = read_blocks(data, tokenizer, 64, 130)
    assert (blocks.shape, names) == ((2, 64), ["a.txt", "b.txt"])
    with pytest.raises(UserError, match="less than one block"):
        read_blocks(data, tokenizer, 64, 10)


def test_a_teacher_of_another_vocabulary_is_refused(
    student_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(other).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="vocabulary of 50"):
        score(student_dir, text_file, teacher=tmp_path)


def score(student: Path, text: Path, **options):
    fields = {
        "teacher": None,
        "block_tokens": 64,
        "max_tokens": 64,
        "ablations": False,
        "say": lambda _: None,
        **options,
    }
    return evaluate_folder(student, [str(text)], device="cpu", dtype="float32", backend="auto", **fields)


def test_a_teacher_with_another_tokenizer_is_refused(
    student_dir: Path, teacher_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(teacher_dir, tmp_path / "other")
    words = json.loads((other / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(UserError, match="another tokenizer"):
        score(student_dir, text_file, teacher=other)


def test_a_loss_that_is_not_finite_is_no_score(teacher_dir: Path, text_file: Path) -> None:
    loaded = load_model(teacher_dir)
    blocks, _ = read_blocks(Data(train=(str(text_file),)), loaded.tokenizer, 64, 64)
    with torch.no_grad():
        loaded.model.model.norm.weight[0] = float("nan")
    with pytest.raises(SupraError, match="not finite"):
        measure(loaded.model, blocks)


def test_blocks_longer_than_the_teachers_context_are_warned_of(student_dir: Path, text_file: Path) -> None:
    said: list[str] = []
    score(student_dir, text_file, block_tokens=600, max_tokens=600, say=said.append)
    assert any("600" in line and "512" in line for line in said)
    assert score(student_dir, text_file, block_tokens=None, max_tokens=600).settings["block_tokens"] == 512


@pytest.mark.parametrize(("content", "named"), [(b"", "empty"), (b"\x00\xff\xfe" * 500, "binary")])
def test_a_file_that_is_no_text_is_refused(
    tmp_path: Path, teacher_dir: Path, content: bytes, named: str
) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(UserError, match=named):
        read_blocks(Data(train=(str(tmp_path / "x.txt"),)), load_model(teacher_dir).tokenizer, 64, 64)
