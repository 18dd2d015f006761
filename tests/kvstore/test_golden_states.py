"""Server states that version 0.4 saved: this version continues from them with the same bits."""

from pathlib import Path

import numpy as np
import pytest

STATES = Path(__file__).parents[1] / "golden" / "server-states"


@pytest.mark.parametrize("name", ["sgd", pytest.param("adam", marks=pytest.mark.thorough)])
def test_states_of_0_4_are_continued_bit_exactly(start_forked, tmp_path, name):
    result = tmp_path / "after.npz"
    start_forked("golden_states.py", STATES, name, result, workers=1, servers=2).succeed()
    with np.load(STATES / f"{name}-after.npz") as expected, np.load(result) as found:
        assert set(found) == set(expected) == {"w", "b"}
        for key in expected:
            assert found[key].tobytes() == expected[key].tobytes(), key
