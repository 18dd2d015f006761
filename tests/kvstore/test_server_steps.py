"""What workers of an elastic job keep of their servers' optimizers, and whom they give it to."""

import pytest

from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.server_steps import _by_slice, _said, keepers


@pytest.mark.parametrize(
    ("hosts", "server", "expected"),
    [
        (((0,), (1,), (2,)), 0, {0, 1}),
        (((0,), (1,), (2,)), 2, {0, 2}),
        (((0, 1), (2, 3)), 0, {0, 2}),
        (((0, 1), (2, 3)), 1, {2, 1}),
        (((0, 1), (2, 3)), 2, {1, 3}),
        (((0, 1, 2),), 1, {1, 2}),
        (((0, 1, 2),), 2, {2, 0}),
        (((4,),), 1, {4}),
    ],
)
def test_two_workers_keep_a_servers_state_on_two_hosts_if_there_are_two_and_all_share_the_work(hosts, server, expected):
    assert keepers(View(1, 0, hosts, (0, 1, 2)), server) == expected


def test_states_by_slice_and_steps():
    states = {"3/0/7/steps": 7, "3/0/7/state momentum": "m", "3/0/6/value": "v", "4/1/7/steps": 7}
    assert _by_slice(states) == {(3, 0): {7: {"momentum": "m"}, 6: {"value": "v"}}, (4, 1): {7: {}}}


def test_what_is_said():
    assert _said(1, {"a": 2}) == (
        "the optimizer's state of 2 slices, of the keys a (2) is 1 step older than the weights: it is a lost server's "
        "last snapshot"
    )
    many = _said(-1, {f"k{number}": 1 for number in range(7)})
    assert many.startswith("the optimizer's state of 7 slices, of the keys k0 (1), k1 (1)")
    assert many.endswith("k4 (1) and 2 others is lost with their server, and begins anew")
