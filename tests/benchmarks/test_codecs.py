"""benchmarks/codecs.py measures every type, alone and side by side."""

import pytest

from dmltrain.kvstore import codec
from tests.benchmarks.as_a_user import figures, run


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.thorough), "2"])
def test_every_type_has_its_figures(processes):
    result = figures(f"codecs.py --megabytes 4 --repeats 1 --processes {processes}", how=run)
    rates = result["gigabytes_per_cpu_second"]
    assert set(rates) == {"memcpy", *(each.name for each in codec.TABLE)}
    for name, columns in rates.items():
        assert set(columns) >= {"decode", "add"} and ("encode" in columns) == (name != "memcpy")
        assert all(0 < figure < 1000 for figure in columns.values())
    assert result["bytes_to_float32"]["2bit"] == pytest.approx(17 / 256, rel=0.01)
