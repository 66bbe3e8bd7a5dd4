"""The attention transfer of a checkpoint of 6.4 GB, shaped like Llama 3.2 3B, in less than 4 GB of memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LIMIT_BYTES = 4e9
RUN = """
import json, resource, sys
from supra.cli import main
try:
    main()
except SystemExit as stop:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak}), file=sys.stderr)
    raise
"""


def write_teacher(folder: Path) -> Path:
    """Random weights, a shard for each layer and one for the rest."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    shapes.pop("lm_head.weight")
    torch.manual_seed(0)
    files: dict[str, str] = {}
    for number in range(CONFIG["num_hidden_layers"] + 1):
        last = number == CONFIG["num_hidden_layers"]
        names = [n for n in shapes if (f".layers.{number}." in n) or (last and ".layers." not in n)]
        tensors = {
            n: torch.ones(shapes[n].shape, dtype=torch.bfloat16)
            if shapes[n].ndim == 1
            else torch.randn(shapes[n].shape, dtype=torch.bfloat16) * 0.02
            for n in names
        }
        file = f"model-{number + 1:05d}-of-{CONFIG['num_hidden_layers'] + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def supra(*arguments: str) -> tuple[str, int]:
    """Run the command; its stderr and its peak memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, timeout=3000,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr, json.loads(done.stderr.splitlines()[-1])["peak_bytes"]


def test_three_billion_parameters_in_four_gigabytes(
    tiny: ModuleType, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    tiny.make_tokenizer().save_pretrained(teacher)
    num_bytes = sum(path.stat().st_size for path in teacher.iterdir())
    conversion = {"feature_map": "hedgehog", "window": 64, "num_sink_tokens": 1}
    stage = tiny.stage(length=256, micro_batch_size=1, tokens_per_step=256, total_tokens=512, layerwise=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny.raw_recipe(text_file, stage, conversion=conversion)))
    supra("convert", str(teacher), "-o", str(tmp_path / "converted"), "--recipe", str(recipe), "--no-verify")
    shutil.rmtree(teacher)
    start = time.monotonic()
    _, peak_bytes = supra(
        "train", str(recipe), "--model", str(tmp_path / "converted"), "-o", str(tmp_path / "run")
    )
    seconds = time.monotonic() - start
    with capsys.disabled():
        print(f"\n{num_bytes / 1e9:.2f} GB of weights, {seconds:.0f} s, peak {peak_bytes / 1e9:.2f} GB")
    assert num_bytes > 6.3e9
    assert peak_bytes < LIMIT_BYTES
    trained = sum(path.stat().st_size for path in (tmp_path / "run" / "model").glob("*.safetensors"))
    assert trained >= num_bytes * 0.99
