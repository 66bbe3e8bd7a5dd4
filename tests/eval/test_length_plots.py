"""Every curve and grid becomes one picture and one table of its numbers."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from supra.errors import SupraError
from supra_eval.length import write_plots
from supra_eval.length.plots import curve_rows, grid_rows
from supra_eval.results import Curve, EvalRun, Grid

CURVES = [
    Curve("loss by position", "teacher", "position", "loss", [128.0, 256.0], [3.0, 2.5], [0.1, 0.2]),
    Curve("loss by position", "student", "position", "loss", [128.0, 256.0], [3.5, float("nan")]),
    Curve("decay horizon", "student", "layer", "tokens", [0.0, 1.0], [90.0, 80.0], log_x=False),
]
GRID = Grid("needle", "student", "context", "depth", [64.0, 128.0], [0.0, 0.5], [[1.0, 0.25], [None, 0.0]])


def read_csv(path: Path) -> list[list[str]]:
    with path.open(newline="") as stream:
        return list(csv.reader(stream))


def test_one_picture_and_table_for_each_name(tmp_path: Path) -> None:
    paths = write_plots(EvalRun("length", "m", curves=CURVES, grids=[GRID]), tmp_path / "plots")
    assert sorted(path.name for path in paths) == [
        "decay-horizon.csv",
        "decay-horizon.png",
        "loss-by-position.csv",
        "loss-by-position.png",
        "needle-student-grid.csv",
        "needle-student-grid.png",
    ]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(p.name for p in paths)
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000
    assert read_csv(tmp_path / "plots/loss-by-position.csv") == [
        ["model", "position", "loss", "stderr"],
        ["teacher", "128.0", "3.0", "0.1"],
        ["teacher", "256.0", "2.5", "0.2"],
        ["student", "128.0", "3.5", ""],
        ["student", "256.0", "", ""],
    ]
    assert read_csv(tmp_path / "plots/needle-student-grid.csv") == [
        ["depth / context", "64", "128"],
        ["0", "1.0", "0.25"],
        ["0.5", "", "0.0"],
    ]


def test_what_json_made_null_is_drawn_as_a_gap() -> None:
    curve = Curve("c", "m", "x", "y", [1.0], [None], [None])  # type: ignore[list-item]
    assert curve_rows([curve])[1] == [["m", 1.0, "", ""]]
    assert grid_rows(GRID)[1][1] == ["0.5", "", 0.0]


def test_without_matplotlib_the_mend_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SupraError, match=r"pip install 'supra-lm\[plots\]'"):
        write_plots(EvalRun("length", "m"), tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SupraError, match="cannot be written"):
        write_plots(EvalRun("length", "m", curves=CURVES), tmp_path / "file" / "plots")
