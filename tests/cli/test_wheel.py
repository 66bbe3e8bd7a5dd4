"""The wheel works where the checkout is not: built, installed into an empty environment, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`supra` of a fresh environment that holds the wheel; the libraries are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    python = folder / "venv/bin/python"
    wheel = next(folder.glob("*.whl"))
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True, timeout=120
    )
    # Only the libraries are lent: a .pth file on a site folder would run this checkout's own .pth too.
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    (Path(site.strip()) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv/bin/supra"


def run(supra: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [supra, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result


def test_the_installed_wheel_is_the_one_that_runs(installed: Path, tmp_path: Path) -> None:
    python = installed.with_name("python")
    where = subprocess.check_output(
        [python, "-c", "import supra.errors as m; print(m.__file__)"], text=True, cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(installed.parents[1])


def test_version_and_recipes(installed: Path, tmp_path: Path) -> None:
    assert run(installed, "--version", cwd=tmp_path).stdout.startswith("supra ")
    assert "hedgehog-window" in run(installed, "recipes", "ls", cwd=tmp_path).stdout
    shipped = installed.parents[1].glob("lib/python*/site-packages/supra/_recipes/launch/*.sh")
    assert {path.name for path in shipped} == {path.name for path in (ROOT / "recipes/launch").iterdir()}


def test_conversion(installed: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "teacher")
    result = run(
        installed,
        "convert",
        "teacher",
        "-o",
        "student",
        "--recipe",
        "hedgehog-window",
        "--json",
        cwd=tmp_path,
    )
    json.loads(result.stdout)
    assert json.loads((tmp_path / "student/config.json").read_text())["model_type"] == "supra"
