"""What a conversion leaves on disk: the teacher's bytes, the new tensors, and everything around them."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from supra.config import Conversion
from supra.convert import execute, make_plan, shard_writer
from supra.convert import write as write_module
from supra.convert.shard_writer import ShardWriter, copy_file, hash_file, tensor_blocks
from supra.errors import SupraError
from supra.models import is_new_parameter
from supra.weights.headers import TensorInfo, read_header

CONVERSIONS = {
    "paper": Conversion(),
    "paper-shared-decay": Conversion(decay="learned", decay_shared=True, norm_affine=True),
    "hedgehog-window": Conversion(feature_map="hedgehog", window=8),
    "t2r-one-softmax-layer": Conversion(feature_map="t2r", keep_softmax=(1,)),
    "elu": Conversion(feature_map="elu"),
    "identity": Conversion(feature_map="identity"),
    "taylor-gated": Conversion(feature_map="taylor", taylor_dim=4, window=8, decay="gated"),
}


def convert(teacher: Path, out: Path, conversion: Conversion, seed: int = 0, **options: Any) -> Any:
    return execute(make_plan(str(teacher), conversion), out, seed=seed, recipe_yaml="name: test\n", **options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "partial" in path.name or "old" in path.name)


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_conversion_reloads_without_a_missing_key(
    name: str, dtype: torch.dtype, make_teacher: Any, tmp_path: Path
) -> None:
    teacher = make_teacher("llama", dtype=dtype)
    result = convert(teacher, tmp_path / "out", CONVERSIONS[name])
    assert result.verified
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    assert model.dtype == dtype
    stored, before = weights(tmp_path / "out"), load_file(teacher / "model.safetensors")
    for key, value in model.state_dict().items():
        assert torch.equal(value, stored[key]), key
    for key, value in before.items():
        assert torch.equal(value, stored[key]), key
    assert {key for key in stored if is_new_parameter(key)} == stored.keys() - before.keys()
    assert result.parameters_added == sum(stored[key].numel() for key in stored.keys() - before.keys())


def test_teacher_files_are_copied_byte_for_byte_and_renamed(make_teacher: Any, tmp_path: Path) -> None:
    teacher = make_teacher("qwen3", head_dim=16, max_shard_size="40KB")
    shards = sorted(teacher.glob("*.safetensors"))
    assert len(shards) > 2
    convert(teacher, tmp_path / "out", Conversion(feature_map="hedgehog"))
    total = len(shards) + 1
    for number, shard in enumerate(shards, 1):
        copy = tmp_path / "out" / f"model-{number:05d}-of-{total:05d}.safetensors"
        assert copy.read_bytes() == shard.read_bytes()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    facts = json.loads((tmp_path / "out" / "supra.json").read_text())
    assert list(facts["source_files"]) == [shard.name for shard in shards]
    assert set(facts["files"]) == {path.name for path in (tmp_path / "out").glob("*.safetensors")}


def test_out_is_complete(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "out", Conversion(), seed=7)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a b").input_ids == AutoTokenizer.from_pretrained(llama)("a b").input_ids
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(llama).chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 1
    assert (tmp_path / "out" / "recipe.yaml").read_text() == "name: test\n"
    facts = json.loads((tmp_path / "out" / "supra.json").read_text())
    assert facts["seed"] == 7
    assert set(facts["versions"]) == {"supra", "torch", "transformers"}
    assert facts["source"]["location"] == str(llama)
    assert facts["conversion"]["decay"] == "alibi"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "import supra" in card
    assert "not a finished model" in card
    assert (tmp_path / "out" / "LICENSE").read_text() == "licence of the teacher\n"
    assert leftovers(tmp_path) == []
    assert (tmp_path / "out").stat().st_mode & 0o055  # as readable as any folder, not mkdtemp's 0700


def test_new_tensors_are_a_function_of_the_seed(llama: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        convert(llama, tmp_path / name, Conversion(), seed=seed, verify=False)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    new = [key for key in a if is_new_parameter(key)]
    assert new
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not any(torch.equal(a[key], c[key]) for key in new)


def test_overwrite_replaces_a_converted_model(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "out", Conversion(), verify=False)
    convert(llama, tmp_path / "out", Conversion(feature_map="elu"), overwrite=True, verify=False)
    assert not any(map(is_new_parameter, weights(tmp_path / "out")))
    assert leftovers(tmp_path) == []


def test_a_failed_overwrite_leaves_the_old_model(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(llama, tmp_path / "out", Conversion(), verify=False)
    before = weights(tmp_path / "out")

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write_module, "write_small_files", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(llama, tmp_path / "out", Conversion(feature_map="elu"), overwrite=True)
    assert leftovers(tmp_path) == []
    assert weights(tmp_path / "out").keys() == before.keys()


def test_old_buffers_are_dropped_and_the_model_still_loads_cleanly(make_teacher: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    teacher = make_teacher("llama")
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, teacher / "model.safetensors", {"format": "pt"})
    plan = make_plan(str(teacher), Conversion())
    assert [tensor.name for tensor in plan.dropped] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="")
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["unexpected_keys"]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-torch-1.6"])
def test_pickled_weights_are_rewritten(zipped: bool, make_teacher: Any, tmp_path: Path) -> None:
    teacher = make_teacher("llama", dtype=torch.bfloat16)
    tensors = load_file(teacher / "model.safetensors")
    (teacher / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, members in files.items():
        part = {name: tensors[name] for name in members}
        torch.save(part, teacher / file, _use_new_zipfile_serialization=zipped)
    weight_map = {name: file for file, members in files.items() for name in members}
    (teacher / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    plan = make_plan(str(teacher), Conversion(feature_map="hedgehog"), allow_pickle=True)
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="")
    stored = weights(tmp_path / "out")
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    facts = json.loads((tmp_path / "out" / "supra.json").read_text())
    assert set(facts["source_files"]) == set(files)


def test_a_byte_changed_after_writing_is_found(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = write_module.write_small_files

    def flip(plan: Any, out: Path, **options: Any) -> None:
        original(plan, out, **options)
        with next(out.glob("model-00001*")).open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))

    monkeypatch.setattr(write_module, "write_small_files", flip)
    with pytest.raises(SupraError, match="differs from what was written"):
        convert(llama, tmp_path / "out", Conversion())
    assert list(tmp_path.iterdir()) == []


def test_large_models_are_verified_by_streaming_and_give_the_same_logits(
    make_teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from supra.convert import verify
    from supra.convert.plan import FLOAT_DTYPES
    from supra.weights import reader

    monkeypatch.setattr(verify, "RELOAD_BYTES", 0)
    monkeypatch.setattr(reader, "BLOCK_ELEMENTS", 100)
    seen = []
    original = verify._streamed_logits
    monkeypatch.setattr(verify, "_streamed_logits", lambda *args: seen.append(original(*args)) or seen[-1])
    teacher = make_teacher("qwen2", tie_word_embeddings=True)
    plan = make_plan(str(teacher), Conversion(feature_map="hedgehog", window=8, keep_softmax=(0,)))
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.inference_mode():
        expected = model(torch.arange(verify.NUM_TOKENS).unsqueeze(0)).logits
    assert FLOAT_DTYPES[plan.dtype] == "float32"
    torch.testing.assert_close(seen[0], expected, rtol=1e-5, atol=1e-5)


def test_progress_reaches_the_whole(llama: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    convert(llama, tmp_path / "out", Conversion(), progress=lambda *call: calls.append(call))
    assert {what for what, _, _ in calls} == {"writing", "verifying"}
    assert all(done <= total for _, done, total in calls)
    verifying = [(done, total) for what, done, total in calls if what == "verifying"]
    assert verifying[-1][0] == verifying[-1][1]


names = st.text(alphabet="abc._0", min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(
    [("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16), ("F64", torch.float64)]
)


@given(st.dictionaries(names, st.tuples(shapes, dtypes), max_size=5))
def test_shard_writer_writes_what_safetensors_reads(tensors: dict[str, Any]) -> None:
    import tempfile

    values = {name: torch.randn(shape).to(dtype) for name, (shape, (_, dtype)) in tensors.items()}
    infos = [TensorInfo(name, code, shape) for name, (shape, (code, _)) in tensors.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        with ShardWriter(path, infos, lambda _: None) as writer:
            for name, value in values.items():
                writer.write(name, tensor_blocks(value))
        found = load_file(path)
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert {(t.name, t.dtype, t.shape) for t in read_header(path)} == {
            (t.name, t.dtype, t.shape) for t in infos
        }
        stop = threading.Event()
        copied = copy_file(path, Path(folder) / "y", lambda _: None, stop)()
        assert copied == writer.digest == hash_file(path, lambda _: None, stop)


@pytest.mark.parametrize("failure", ["no such call", "other file system", "copies nothing"])
def test_files_are_copied_where_the_kernel_does_not_do_it(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "COPY_BYTES", 1000)
    monkeypatch.setattr(shard_writer, "BLOCK_BYTES", 300)
    if failure == "no such call":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    elif failure == "other file system":
        monkeypatch.setattr(os, "copy_file_range", Mock(side_effect=OSError(errno.EXDEV, "cross-device")))
    else:
        monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    (tmp_path / "a").write_bytes(os.urandom(2500))
    counts: list[int] = []
    digest = copy_file(tmp_path / "a", tmp_path / "b", counts.append, threading.Event())()
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert sum(counts) == 2500
    assert digest == hash_file(tmp_path / "b", lambda _: None, threading.Event())


def test_copying_stops_when_asked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    stop = threading.Event()
    stop.set()
    with pytest.raises(shard_writer.CancelledError):
        copy_file(tmp_path / "a", tmp_path / "b", lambda _: None, stop)
