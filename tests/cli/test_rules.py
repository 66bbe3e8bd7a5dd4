"""The rules of the code base: which package may import which, and how long a file may be."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "supra": ROOT / "supra",
    "supra_kernels": ROOT / "kernels/supra_kernels",
    "supra_eval": ROOT / "eval/supra_eval",
}
FILES = [path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))]
COMMANDS = {
    "supra.cli",
    "supra.cli_eval",
    "supra.cli_extrapolate",
    "supra.cli_lra",
    "supra.cli_lra_data",
    "supra.demo",
}  # what a user starts: they alone bring all parts together


def module_name(path: Path) -> str:
    for package, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            return ".".join(parts).removesuffix(".__init__")
    raise AssertionError(path)


def imports(path: Path) -> set[str]:
    """Full names of the modules a file imports, inside functions too, relative ones resolved."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return found


def reaches(path: Path, *targets: str) -> set[str]:
    return {
        name
        for name in imports(path)
        for target in targets
        if name == target or name.startswith(f"{target}.")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path))
def test_imports_point_one_way(path: Path) -> None:
    name = module_name(path)
    forbidden: set[str] = set()
    if name.startswith("supra_kernels"):
        roots = {imported.split(".")[0] for imported in imports(path)}
        forbidden = roots - {"torch", "triton", "supra_kernels", *sys.stdlib_module_names}
        if name == "supra_kernels.fla_backend":
            forbidden -= {"fla"}
        if name != "supra_kernels.autograd":
            forbidden |= reaches(path, "supra_kernels.autograd") if name != "supra_kernels" else set()
    if name == "supra.config":
        forbidden |= reaches(path, "torch", "transformers")
    if name.startswith("supra.models"):
        forbidden |= reaches(
            path,
            "supra.config",
            "supra.train",
            "supra.convert",
            "supra.generate",
            "supra_eval",
            "supra_kernels.triton_backend",
            "supra_kernels.fla_backend",
        )
    for part in ("train", "convert", "generate"):
        if name == f"supra.{part}" or name.startswith(f"supra.{part}."):
            others = {f"supra.{other}" for other in ("train", "convert", "generate")} - {f"supra.{part}"}
            forbidden |= reaches(path, *others, "supra_eval")
    if name.startswith("supra.") and name not in COMMANDS:
        forbidden |= reaches(path, "supra_eval")
    assert not forbidden, f"{name} may not import {sorted(forbidden)}"


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("tests/**/*.py")) + FILES, ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_kernels_and_eval_are_folders_not_packages() -> None:
    # A root package called `kernels` would shadow the one that transformers probes while it is imported.
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not (ROOT / "eval/__init__.py").exists()
