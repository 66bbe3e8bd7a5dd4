"""The tokenizer, chat template and generation settings of a GGUF file, as a Hugging Face folder has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from supra.errors import UserError

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# Pre-tokenizers (`tokenizer.ggml.pre`) whose split transformers does not know and would take for GPT-2's.
_SPLITS: dict[str, dict[str, Any]] = {
    "default": _BYTE_LEVEL,
    "gpt-2": _BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}
# As llama.cpp has it: where a word that is itself a token is never taken apart, and where text is made NFC.
_IGNORE_MERGES = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
_NFC = {"qwen2", "deepseek-r1-qwen"}


def write_tokenizer(path: Path, fields: dict[str, Any], out: Path) -> None:
    """Write tokenizer, chat template and generation_config.json; UserError if the tokenizer is unknown."""
    from transformers import AutoTokenizer, GenerationConfig

    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre") or "default"
    if kind is not None:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer.save_pretrained(str(out))
        mend_tokenizer(
            out / "tokenizer.json", str(kind), str(pre), fields.get("tokenizer.ggml.add_space_prefix")
        )
        mend_settings(out / "tokenizer_config.json")
    ids = {f"{name}_token_id": fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _ID_FIELDS}
    GenerationConfig(**ids).save_pretrained(str(out))


_ID_FIELDS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def check_tokenizer(path: Path, fields: dict[str, Any]) -> None:
    """UserError when the file's way of cutting text is unknown: a guess would change what the model reads."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre") or "default"
    if kind not in (None, "gpt2", "llama"):
        raise UserError(
            f"{path}: tokenizer.ggml.model {kind!r}", "this kind is not known", "Convert from the HF folder"
        )
    if kind == "gpt2" and pre not in _SPLITS and pre not in GGUF_PRE_TOKENIZER_SPLITS:
        raise UserError(
            f"{path}: tokenizer.ggml.pre {pre!r}",
            "this pre-tokenizer is not known",
            "Convert from the HF folder",
        )


def mend_tokenizer(file: Path, kind: str, pre: str, space_prefix: bool | None) -> None:
    """Set in tokenizer.json what transformers' reading of a GGUF file leaves out."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    if kind == "gpt2":
        if pre in _SPLITS:
            tokenizer["pre_tokenizer"] = _SPLITS[pre]
        if pre in _NFC:
            tokenizer["normalizer"] = {"type": "NFC"}
        tokenizer["model"]["ignore_merges"] = pre in _IGNORE_MERGES
    else:
        tokenizer |= sentencepiece_spaces(space_prefix is not False)
    file.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=2), encoding="utf-8")


def sentencepiece_spaces(prefix: bool) -> dict[str, Any]:
    """Spaces as sentencepiece and llama.cpp treat them: one is put before the text, even before another space."""
    prepend = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    restore = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def mend_settings(file: Path) -> None:
    """Take out of tokenizer_config.json what only described the reading."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):
        settings.pop(name, None)
    file.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
