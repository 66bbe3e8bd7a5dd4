"""A checkpoint of more than 2 GB: memory stays under 1 GB, and the time is that of copying."""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from supra.config import Conversion
from supra.convert import execute, make_plan
from supra.convert.shard_writer import ShardWriter
from supra.weights.headers import TensorInfo

pytestmark = pytest.mark.slow

# Four layers of Mistral 7B: its own widths, so that the largest tensors are as large as in the real model.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
SHARD_BYTES = 600 << 20
RUN = """
import json, resource, sys
from supra.config import Conversion
from supra.convert import execute, make_plan

source, out, feature_map, verify = sys.argv[1:]
plan = make_plan(source, Conversion(feature_map=feature_map))
result = execute(plan, out, seed=0, recipe_yaml="", overwrite=True, verify=verify == "True")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak_bytes": peak, "planned": plan.convert_memory_bytes, **json.loads(result.to_json())}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded bf16 checkpoint of 2.3 GB with random weights."""
    folder = tmp_path_factory.mktemp("large") / "teacher"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    infos = [TensorInfo(name, "BF16", tuple(value.shape)) for name, value in model.state_dict().items()]
    groups: list[list[TensorInfo]] = [[]]
    for info in infos:
        if sum(member.num_bytes for member in groups[-1]) + info.num_bytes > SHARD_BYTES:
            groups.append([])
        groups[-1].append(info)
    noise = (torch.randn(4 << 20) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    weight_map = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        with ShardWriter(folder / name, group, lambda _: None) as writer:
            for info in group:
                whole, rest = divmod(info.num_bytes, len(noise))
                writer.write(info.name, (*[noise] * whole, noise[:rest]))
        weight_map |= {info.name: name for info in group}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def convert(source: Path, out: Path, feature_map: str, verify: bool) -> dict[str, Any]:
    command = [sys.executable, "-c", RUN, str(source), str(out), feature_map, str(verify)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("feature_map", ["relu_dense", "hedgehog"])
def test_peak_memory_stays_under_one_gigabyte(feature_map: str, checkpoint: Path, tmp_path: Path) -> None:
    facts = convert(checkpoint, tmp_path / "out", feature_map, True)
    peak, written = facts["peak_bytes"] / 1e6, facts["num_bytes"] / 1e6
    print(f"\npeak {peak:.0f} MB while {written:.0f} MB were written, {feature_map}")
    shutil.rmtree(tmp_path / "out")
    assert facts["num_bytes"] > 2 << 30
    assert facts["peak_bytes"] < 1e9


def test_time_is_that_of_copying(checkpoint: Path, tmp_path: Path) -> None:
    seconds: dict[str, list[float]] = {"cp -r": [], "convert": []}
    # In one process and each right after a removal: memory that lay free for some seconds can cost three times as
    # much to fill (a virtual machine gives it back), which a new process's imports would charge to one side only.
    for _ in range(5):
        started = time.monotonic()
        subprocess.run(["cp", "-r", checkpoint, tmp_path / "copy"], check=True)
        seconds["cp -r"].append(time.monotonic() - started)
        shutil.rmtree(tmp_path / "copy")
        plan = make_plan(str(checkpoint), Conversion(feature_map="hedgehog"))
        result = execute(plan, tmp_path / "out", seed=0, recipe_yaml="", verify=False)
        seconds["convert"].append(result.write_seconds)
        shutil.rmtree(tmp_path / "out")
    for name, times in seconds.items():
        print(f"\n{name}: best {min(times):.2f} s, median {statistics.median(times):.2f} s", end="")
    # The least disturbed of the alternating runs: both times are then the machine's, not its neighbours'.
    assert min(seconds["convert"]) <= 1.5 * min(seconds["cp -r"])
