"""Saved states of servers, loaded by a job that divides keys in another way."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain import npz
from dmltrain.errors import UserError
from dmltrain.kvstore.worker import resharding, sharding

SIZES = [7, 1, 20, 4]


def ranges(servers, slice_bytes, sizes=SIZES):
    plan = sharding.cut(sizes, [4] * len(sizes), [0] * servers, slice_bytes=slice_bytes)
    return [each for slices in plan for each in slices]


def states(slices, servers, step=3.0):
    """What servers would save: each value is its key and place, each momentum the negative of that."""
    saved = []
    for server in range(servers):
        arrays = {}
        for each in slices:
            if each.server == server:
                values = 100 * each.key + np.arange(each.start, each.start + each.length, dtype=np.float32)
                name = f"{each.key}/{each.index}"
                arrays |= {f"{name}/value": values, f"{name}/momentum": -values, f"{name}/step": np.float64(step)}
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        saved.append(stream.getvalue())
    return saved


def content(saved):
    return [{name: array.tolist() for name, array in npz.read(state).items()} for state in saved]


@given(st.integers(1, 4), st.sampled_from([4, 12, 40, 400]), st.integers(1, 4), st.sampled_from([4, 12, 40, 400]))
def test_states_are_those_that_the_new_division_would_have_saved(servers, size, more, other):
    saved, wanted = states(ranges(servers, size), servers), states(ranges(more, other), more)
    assert content(resharding.fit(saved, ranges(more, other), more)) == content(wanted)


def test_states_of_the_same_division_are_not_touched():
    saved = states(ranges(2, 12), 2)
    assert resharding.fit(saved, ranges(2, 12), 2) is saved


def test_scalars_are_those_of_the_slice_in_which_a_new_one_begins_or_zero():
    stream = io.BytesIO()
    old = {"0/0/value": np.zeros(2), "0/0/step": np.float64(5), "0/1/value": np.ones(2), "0/1/step": np.float64(6)}
    np.savez(stream, **old)
    (found,) = content(resharding.fit([stream.getvalue()], ranges(1, 4, [4]), 1))
    assert [found[f"0/{index}/step"] for index in range(4)] == [5.0, 5.0, 6.0, 6.0]
    stream = io.BytesIO()
    np.savez(stream, **{"0/0/value": np.ones(2), "0/0/momentum": np.full(2, 7.0), "0/1/value": np.ones(1)})
    (found,) = content(resharding.fit([stream.getvalue()], ranges(1, 400, [3]), 1))
    assert found == {"0/0/value": [1.0] * 3, "0/0/momentum": [7.0, 7.0, 0.0]}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda saved: saved[:1], "another model|a slice of key . is missing"),
        (lambda saved: [saved[0][:-30], saved[1]], "cannot be read"),
        (lambda saved: states(ranges(2, 12, [7, 1, 20]), 2), r"another model: it has 3 keys, this job 4; key 3 has 0"),
        (lambda saved: states(ranges(2, 12, [7, 2, 20, 4]), 2), "key 1 has 2 elements there and 1 here"),
        (lambda saved: [], "another model: it has 0 keys"),
        (lambda saved: [*saved, saved[0]], "slice . of key . is in two servers' states"),
    ],
)
def test_states_of_another_model_and_damaged_ones_are_named(change, words):
    with pytest.raises(UserError, match=words):
        resharding.fit(change(states(ranges(2, 12), 2)), ranges(3, 12), 3)
