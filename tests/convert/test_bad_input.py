"""Every kind of bad input gives one clear error (thing, reason, mend) and leaves nothing half-written."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from supra.config import Conversion
from supra.convert import execute, make_plan
from supra.convert import shard_writer as shard_writer_module
from supra.convert import write as write_module
from supra.errors import SupraError, UserError

Spoil = Callable[[Path], None]


def edit_config(**fields: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return spoil


def rope(**settings: Any) -> Spoil:
    return edit_config(rope_parameters={"rope_theta": 1e4, **settings})


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
        )

    return spoil


def shard(folder: Path, **changes: str) -> None:
    """Split the weights into two files with an index; `changes` are made to the index's weight_map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({name: tensors[name] for name in members}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, members in halves.items() for name in members} | changes
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()


def duplicated_tensor(folder: Path) -> None:
    shard(folder)
    both = load_file(folder / "b.safetensors") | {
        "lm_head.weight": load_file(folder / "a.safetensors")["lm_head.weight"]
    }
    save_file(both, folder / "b.safetensors", {"format": "pt"})


def index_without_map(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def garbage_header(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[8:60] = b"\xff" * 52
    (folder / "model.safetensors").write_bytes(data)


def absurd_header_length(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    no_weights(folder)


def only_gguf(folder: Path) -> None:
    no_weights(folder)
    (folder / "weights.gguf").write_bytes(b"GGUF")


def halve(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:3]


def as_bytes(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")


# kind -> (how to spoil a good teacher, words that the message must hold)
FOLDERS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no-config": (lambda f: (f / "config.json").unlink(), ("config.json", "there is no config.json")),
    "config-no-json": (
        lambda f: (f / "config.json").write_text("{nope") and None,
        ("config.json", "not valid JSON"),
    ),
    "config-binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe") and None, ("not valid JSON",)),
    "config-no-object": (lambda f: (f / "config.json").write_text("[1]") and None, ("list", "not an object")),
    "no-model-type": (edit_config(model_type=...), ("model_type", "llama, mistral")),
    "unknown-model-type": (edit_config(model_type="qwen2_vl"), ("'qwen2_vl'", "Nearest known: qwen2")),
    "moe-model-type": (edit_config(model_type="mixtral"), ("mixtral", "mixture of experts")),
    "moe-field": (edit_config(num_local_experts=8), ("num_local_experts", "mixture of experts")),
    "quantised-config": (edit_config(quantization_config={"bits": 4}), ("quantization_config", "quantised")),
    "quantised-tensor": (edit_tensors(as_bytes), ("lm_head.weight", "I8", "quantised")),
    "soft-capping": (edit_config(attn_logit_softcapping=50.0), ("attn_logit_softcapping", "soft-capped")),
    "attention-sinks": (edit_config(attention_sinks=True), ("attention_sinks", "sinks")),
    "own-code": (edit_config(auto_map={"AutoModel": "x.Y"}), ("auto_map", "trust_remote_code")),
    "wrong-head": (edit_config(architectures=["LlamaForSequenceClassification"]), ("LlamaForCausalLM",)),
    "heads-not-divisible": (edit_config(num_key_value_heads=3), ("num_key_value_heads 3",)),
    "hidden-not-divisible": (edit_config(hidden_size=33, head_dim=...), ("hidden_size 33", "4 heads")),
    "odd-head-dim": (edit_config(head_dim=7), ("head_dim 7", "even")),
    "negative-layers": (edit_config(num_hidden_layers=-1), ("num_hidden_layers = -1", "positive")),
    "text-for-number": (edit_config(hidden_size="big"), ("hidden_size = 'big'", "whole number")),
    "wrong-type-field": (edit_config(rms_norm_eps="small"), ("rms_norm_eps",)),
    "dynamic-rope": (rope(rope_type="dynamic", factor=2.0), ("'dynamic'", "frequencies move")),
    "longrope": (rope(rope_type="longrope", factor=2.0), ("'longrope'", "frequencies move")),
    "old-dynamic-rope": (
        edit_config(rope_parameters=..., rope_scaling={"type": "dynamic", "factor": 2.0}),
        ("'dynamic'", "frequencies move"),
    ),
    "unknown-rope": (rope(rope_type="lama3"), ("'lama3'", "Did you mean 'llama3'")),
    "partial-rope": (rope(rope_type="default", partial_rotary_factor=0.5), ("partial_rotary_factor",)),
    "rope-without-factor": (rope(rope_type="linear"), ("factor",)),
    "missing-shard": (missing_shard, ("b.safetensors", "missing")),
    "index-wrong": (
        lambda f: shard(f, **{"lm_head.weight": "b.safetensors"}),
        ("lm_head.weight", "does not hold it"),
    ),
    "index-escapes": (lambda f: shard(f, **{"lm_head.weight": "../x"}), ("'../x'", "outside")),
    "index-empty": (index_without_map, ("index.json", "no weight_map")),
    "duplicated-tensor": (duplicated_tensor, ("lm_head.weight", "both a.safetensors and b.safetensors")),
    "truncated": (truncate, ("model.safetensors", "cut short")),
    "garbage-header": (garbage_header, ("model.safetensors", "garbage")),
    "absurd-header": (absurd_header_length, ("not a safetensors file",)),
    "no-weights": (no_weights, ("neither model.safetensors nor",)),
    "only-pickle": (only_pickle, ("pickled", "--allow-pickle")),
    "only-gguf": (only_gguf, ("GGUF", "weights.gguf")),
    "wrong-shape": (edit_tensors(halve), ("lm_head.weight", "[3, 32]", "[96, 32]")),
    "missing-tensor": (
        edit_tensors(lambda t: t.pop("model.norm.weight")),
        ("model.norm.weight", "no file holds it"),
    ),
    "foreign-tensor": (
        edit_tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})),
        ("q_proj.bias", "llama architecture has no such tensor"),
    ),
    "nan-weights": (edit_tensors(with_nan), ("not finite", "model.layers.1.mlp.up_proj.weight")),
}


def message_of(error: SupraError) -> str:
    """The text, once it is clear that it has all three parts."""
    assert error.thing
    assert error.reason
    assert error.mend
    return str(error)


def assert_nothing_left(folder: Path, *known: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(known)


@pytest.mark.parametrize("kind", FOLDERS)
def test_bad_folder(kind: str, llama: Path, tmp_path: Path) -> None:
    spoil, words = FOLDERS[kind]
    shutil.copytree(llama, tmp_path / "teacher")
    spoil(tmp_path / "teacher")
    with pytest.raises(SupraError) as caught:
        execute(make_plan(str(tmp_path / "teacher"), Conversion()), tmp_path / "out", seed=0, recipe_yaml="")
    message = message_of(caught.value)
    assert all(word in message for word in words), message
    assert caught.value.exit_code == (1 if kind == "nan-weights" else 2)
    assert_nothing_left(tmp_path, "teacher")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("./nowhere", ("nowhere", "no such folder")),
        ("/nowhere/at/all", ("no such folder",)),
        ("nobody/nothing", ("nobody/nothing", "hub cannot be reached")),
        ("nowhere.gguf", ("nowhere.gguf", "no such folder or file")),
    ],
)
def test_missing_source(
    source: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        make_plan(source, Conversion())
    assert all(word in message_of(caught.value) for word in words), str(caught.value)


def test_a_file_instead_of_a_folder(llama: Path) -> None:
    with pytest.raises(UserError, match="this is a file") as caught:
        make_plan(str(llama / "model.safetensors"), Conversion())
    assert str(llama) in caught.value.mend


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"evil": Path("x")}, "no plain file of tensors"),
        ([1, 2], "plain dictionary of tensors"),
        (b"not a pickle at all", "no plain file of tensors"),
    ],
)
def test_bad_pickle(content: Any, words: str, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "teacher")
    no_weights(tmp_path / "teacher")
    file = tmp_path / "teacher" / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(UserError, match=words) as caught:
        make_plan(str(tmp_path / "teacher"), Conversion(), allow_pickle=True)
    message_of(caught.value)


def test_pickle_without_weights(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "teacher")
    no_weights(tmp_path / "teacher")
    with pytest.raises(UserError, match="neither safetensors nor"):
        make_plan(str(tmp_path / "teacher"), Conversion(), allow_pickle=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature_map": "hedghog"}, "feature_map"),
        ({"window": -1}, "window"),
        ({"keep_softmax": (-1,)}, "keep_softmax"),
        ({"feature_map": "relu_dense", "window": 8}, "window"),
        ({"feature_map": "hedgehog", "rope_position": "after"}, "rope_position"),
        ({"feature_map": "identity", "norm": "denominator"}, "norm"),
    ],
)
def test_bad_conversion_is_refused_before_any_plan(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Conversion(**options)


def test_layer_that_does_not_exist(llama: Path) -> None:
    with pytest.raises(UserError, match=r"layer 2.*layers are 0 to 1"):
        make_plan(str(llama), Conversion(keep_softmax=(0, 2)))


def occupied(out: Path) -> Path:
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    return out


@pytest.mark.parametrize(
    ("place", "overwrite", "words"),
    [
        (lambda tmp, teacher: occupied(tmp / "out"), False, "already exists"),
        (lambda tmp, teacher: occupied(tmp / "out"), True, "no converted model"),
        (lambda tmp, teacher: teacher, True, "teacher's own folder"),
        (lambda tmp, teacher: teacher / "sub", False, "teacher's own folder"),
        (lambda tmp, teacher: teacher.parent, True, "teacher lies inside"),
        (lambda tmp, teacher: tmp / "no" / "such" / "out", False, "does not exist"),
        (lambda tmp, teacher: teacher / "config.json" / "out", False, "does not exist"),
    ],
)
def test_bad_out(place: Any, overwrite: bool, words: str, llama: Path, tmp_path: Path) -> None:
    out = place(tmp_path, llama)
    before = sorted(llama.parent.rglob("*"))
    with pytest.raises(UserError, match=words) as caught:
        execute(make_plan(str(llama), Conversion()), out, seed=0, recipe_yaml="", overwrite=overwrite)
    message_of(caught.value)
    assert sorted(llama.parent.rglob("*")) == before
    assert_nothing_left(tmp_path, *(["out"] if "out" in out.name and out.parent == tmp_path else []))


def test_out_through_a_link_into_the_teacher(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(llama)
    with pytest.raises(UserError, match="teacher's own folder"):
        execute(make_plan(str(llama), Conversion()), tmp_path / "link" / "x", seed=0, recipe_yaml="")


def test_parent_not_writable(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_module.os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(UserError, match="not writable"):
        execute(make_plan(str(llama), Conversion()), tmp_path / "out", seed=0, recipe_yaml="")
    assert_nothing_left(tmp_path)


def test_disk_too_full_to_start(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(write_module.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SupraError, match=r"MB needed, 1000 B free") as caught:
        execute(make_plan(str(llama), Conversion()), tmp_path / "out", seed=0, recipe_yaml="")
    assert caught.value.exit_code == 1
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("where", ["copy", "new tensors", "small files"])
def test_disk_full_while_writing(
    where: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {
        "copy": ("supra.convert.source.copy_file", full),
        "new tensors": ("supra.convert.shard_writer.ShardWriter.write", full),
        "small files": ("supra.convert.write.write_small_files", full),
    }[where]
    monkeypatch.setattr(*target)
    with pytest.raises(SupraError, match="disk is full") as caught:
        execute(make_plan(str(llama), Conversion()), tmp_path / "out", seed=0, recipe_yaml="")
    message_of(caught.value)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("boom"), OSError(errno.EIO, "I/O error")])
def test_anything_that_stops_it_leaves_nothing(
    error: Any, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(shard_writer_module.ShardWriter, "write", stop)
    with pytest.raises(
        SupraError if isinstance(error, OSError) else type(error) if not isinstance(error, type) else error
    ):
        execute(make_plan(str(llama), Conversion()), tmp_path / "out", seed=0, recipe_yaml="")
    assert_nothing_left(tmp_path)
