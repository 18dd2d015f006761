"""benchmarks/scale.py measures real jobs of each size, holds them against the bound, and draws them."""

from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from tests.benchmarks.as_a_user import benchmark_module, figures


@pytest.mark.thorough
def test_a_tiny_cell_has_its_figures_and_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "scale.svg"
    result = figures(f"scale.py --workers 2 --servers 1 --keys 3 --megabytes 0.03 --repeats 1 --plot {picture}")
    (entry,) = result["cells"]
    assert (entry["workers"], entry["servers"], entry["keys"], entry["slices"]) == (2, 1, 3, 3)
    assert entry["bytes"] == pytest.approx(0.03e6, rel=0.01)
    # (n + 1) V bytes, of which memcpy reads one half and writes the other
    assert entry["bound_seconds"] == pytest.approx(1.5 * entry["bytes"] / result["memcpy_bytes_per_second"])
    assert entry["share_of_bound"] == pytest.approx(entry["bound_seconds"] / entry["seconds"]["median"])
    assert entry["slices_alone"]["seconds"] > 0 and entry["worker_cpu_seconds"] > 0
    assert result["fixed_cost"] is None  # of one number of slices
    labels = {element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")}
    assert labels >= {"workers", "servers", "keys", "model, MB", "ms a step", "bound", "time"}


def test_cells_are_the_base_and_one_axis_at_a_time():
    cells = benchmark_module("contest.cells")
    found = cells.cells_of(cells.AXES, full=False)
    assert found[0] == cells.Cell(2, 1, 100, 100.0) and len(found) == len(set(found)) == 1 + 3 + 2 + 2 + 3
    assert len(cells.cells_of(cells.AXES, full=True)) == 4 * 3 * 3 * 4
    assert cells.cells_of({"workers": (3,), "servers": (1, 2), "keys": (7,), "megabytes": (5.0,)}, full=False) == [
        cells.Cell(3, 1, 7, 5.0),
        cells.Cell(3, 2, 7, 5.0),
    ]


@pytest.mark.parametrize("keys", [1, 10, 99, 100, 101, 1000])
def test_any_number_of_keys_has_the_same_bytes(keys: int):
    workload = benchmark_module("contest.workload")
    shapes = workload.shapes_of(20.0, keys)
    assert len(shapes) == keys and workload.bytes_of(shapes) == pytest.approx(20e6, rel=0.01)


def measured(slices: int, seconds: float, other_cores: float = 0.0):
    """A cell's turns where each slice takes 1 ms, a step 2 ms more, and 0.1 and 0.2 ms a slice of worker and server."""
    cells, team = benchmark_module("contest.cells"), benchmark_module("contest.team")
    cell = cells.Cell(2, 1, slices, slices * 16e-6)
    twin = team.Block(1e-3 * slices + 2e-3, 2e-4 * slices, 2e-4 * slices, 0.0)
    blocks = [team.Block(seconds, 0.01, 0.02, other_cores)]
    return SimpleNamespace(cell=cell, bytes=10_000_000, memcpy=[0.010], blocks=blocks, twin=[twin])


def test_what_slices_cost_is_told_apart_from_what_a_step_costs():
    report = benchmark_module("tables.scale")
    result = report.report([measured(50, 0.002), measured(100, 0.004, other_cores=0.5)], {"machine": {"cores": 2}})
    assert [entry["share_of_bound"] for entry in result["cells"]] == pytest.approx([0.75, 0.375])  # 1.5 ms of both
    fixed = result["fixed_cost"]
    assert fixed["step"]["seconds"] == pytest.approx(2e-3)
    assert fixed["slice"] == pytest.approx({"seconds": 1e-3, "worker_cpu_seconds": 1e-4, "server_cpu_seconds": 2e-4})
    (line,) = report.explanations(result)  # of the one below half of the bound
    assert "100 keys" in line and "100 slices take 102 of 4.0 ms" in line
    assert "3 processes on 2 cores: their CPU time takes 15 ms" in line
    assert "processes" not in report.explained(result["cells"][1], cores=4)
    (doubt,) = report.doubts(result)
    assert "1 of 2 cells" in doubt and "0.50 cores" in doubt
