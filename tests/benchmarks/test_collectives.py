"""benchmarks/collectives.py: each collective of both backends has its time and bandwidth, and a picture."""

import pytest

from tests.benchmarks.as_a_user import benchmark_module, figures

pytest.importorskip("torch", reason="the benchmark is of torch.distributed")


@pytest.mark.thorough
def test_each_collective_has_its_figures_and_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "collectives.svg"
    result = figures(f"collectives.py --workers 2 --bytes 8,40000 --repeats 2 --plot {picture}")
    collectives = benchmark_module("collectives")
    assert [(row["operation"], row["bytes"]) for row in result["rows"]] == [
        (operation, size) for operation in collectives.OPERATIONS for size in (8, 40000)
    ]
    for row in result["rows"]:
        for name in collectives.BACKENDS:
            assert row[name]["algorithm"] == pytest.approx(row["bytes"] / row[name]["seconds"])
        assert len(row["ratios"]) == 2 and row["ratio"] > 0
    assert "| all_reduce | 2 | 8 B |" in collectives.table(result) and picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("operation", "factor"), [("all_reduce", 1.5), ("broadcast", 1.0), ("all_gather", 0.75), ("reduce_scatter", 0.75)]
)
def test_the_bandwidth_of_the_bus_is_that_of_nccl_tests(operation, factor):
    blocks = [{"dmltrain": [2.0, 1.0, 4.0], "gloo": [4.0, 4.0, 4.0]}, {"dmltrain": [1.0, 2.0, 1.0], "gloo": [1.0] * 3}]
    row = benchmark_module("collectives").row(operation, 8, 4, blocks)
    assert row["dmltrain"] == {"seconds": 2.0, "algorithm": 4.0, "bus": 4.0 * factor} and row["ratio"] == 2.0
