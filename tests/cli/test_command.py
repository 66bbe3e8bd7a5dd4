"""The command line as a user meets it: quick to start, results on stdout, one clear line for a mistake."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPRA = [str(Path(sys.executable).with_name("supra"))]


def run(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*SUPRA, *arguments], capture_output=True, text=True, env=environment, timeout=300, **kwargs
    )


def test_help_starts_fast() -> None:
    # CPU seconds of the child: what a quiet machine would take, also where the tests share theirs.
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert result.returncode == 0
    for command in ("inspect", "convert", "train", "generate", "eval", "doctor", "recipes", "demo"):
        assert command in result.stdout
    assert min(times) < 0.6, times


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["convert", "--help"], ["recipes", "ls"]])
def test_light_commands_do_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys; sys.argv = ['supra'] + sys.argv[1:]\n"
        "from supra.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_version_and_module_form() -> None:
    from supra import __version__

    assert run("--version").stdout == f"supra {__version__}\n"
    result = subprocess.run(
        [sys.executable, "-m", "supra", "--version"], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == f"supra {__version__}\n"


@pytest.mark.parametrize("order", ["import supra; import transformers", "import transformers; import supra"])
def test_import_supra_registers_with_the_auto_classes(order: str) -> None:
    code = (
        f"{order}\nfrom transformers import AutoConfig, AutoModelForCausalLM\n"
        "config = AutoConfig.for_model('supra', num_hidden_layers=1, hidden_size=16, num_attention_heads=2,"
        " num_key_value_heads=2, intermediate_size=16, vocab_size=8)\n"
        "print(type(AutoModelForCausalLM.from_config(config)).__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "SupraForCausalLM", result.stderr


def test_results_on_stdout_and_chatter_on_stderr() -> None:
    result = run("recipes", "ls", "--json")
    names = {row["name"] for row in json.loads(result.stdout)}
    assert {"supra", "hedgehog-window", "demo"} <= names
    assert "next:" in run("recipes", "ls").stderr


# Arguments, exit code and what the one line of the error must name.
MISTAKES = {
    "no such model": (["generate", "/nowhere/model", "hello"], 2, "/nowhere/model"),
    "prompt and file": (["generate", ".", "hello", "--file", "x.txt"], 2, "prompt"),
    "no prompt": (["generate", "."], 2, "prompt"),
    "missing prompt file": (["generate", ".", "--file", "/nowhere.txt"], 2, "/nowhere.txt"),
    "empty prompt": (["generate", ".", ""], 2, "empty"),
    "temperature below zero": (["generate", ".", "hello", "--temperature", "-1"], 2, "--temperature"),
    "top-p above one": (["generate", ".", "hello", "--top-p", "1.5"], 2, "--top-p"),
    "no tokens asked for": (["generate", ".", "hello", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
    "folder without config": (["generate", ".", "hello"], 2, "config.json"),
    "unknown dtype": (["generate", ".", "hello", "--dtype", "int4"], 2, "int4"),
    "eval without a model": (["eval", "/nowhere/model", "--data", "x.txt"], 2, "/nowhere/model"),
    "eval without a teacher": (
        ["eval", ".", "--data", "x.txt", "--teacher", "/nowhere/teacher"],
        2,
        "config.json",
    ),
    "unknown recipe": (["recipes", "show", "hedgehog-windw"], 2, "hedgehog-window"),
    "copy over a file": (["recipes", "cp", "demo", "README.md"], 2, "README.md"),
    "train without a model": (["train", "demo"], 2, "--model"),
    "train an unknown recipe": (["train", "demoo", "--model", "x"], 2, "demo"),
    "set an unknown field": (["train", "demo", "--model", "x", "--set", "sed=1"], 2, "seed"),
    "unknown command": (["transmogrify"], 2, "transmogrify"),
    "unknown option": (["convert", "x", "-o", "y", "--windw", "3"], 2, "--windw"),
    "negative threads": (["doctor", "--threads", "-1"], 2, "threads"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_gets_one_clear_error(kind: str, tmp_path: Path) -> None:
    arguments, code, named = MISTAKES[kind]
    (tmp_path / "README.md").write_text("kept")
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md"], "nothing was left behind"
    assert (tmp_path / "README.md").read_text() == "kept"


def test_debug_shows_the_traceback() -> None:
    result = run("--debug", "recipes", "show", "nothing-like-it")
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_stdin_that_is_no_text_is_a_mistake() -> None:
    done = subprocess.run([*SUPRA, "generate", ".", "-"], input=b"\xff\xfe", capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"stdin" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_says_so_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    # Reading a prompt from an open stdin is where the command waits for ever.
    process = subprocess.Popen(
        [*SUPRA, "generate", ".", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True
    )
    time.sleep(3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "stopped" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
