"""Views: members, places and the next view; invalid ones are refused."""

import re
from dataclasses import replace

import pytest

from dmltrain.kvstore.view import Lost, View

FOUR = View(1, 0, ((2, 0), (3, 1)), (0, 1))


def test_members_are_in_ascending_order_whatever_the_order_of_summing_and_the_first_leads():
    assert FOUR.members == (0, 1, 2, 3)
    assert [FOUR.place(member) for member in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert FOUR.without([0, 2], 5).place(3) == 1
    with pytest.raises(ValueError):
        FOUR.without([0], 5).place(0)
    assert [view.leader for view in (FOUR, FOUR.without([0], 5), FOUR.without([0, 1], 5))] == [0, 1, 2]


def test_a_removal_keeps_the_order_of_summing_and_leaves_out_hosts_without_members():
    lost = (Lost(0, "end of stream"),)
    assert FOUR.without([0], 7, lost) == View(2, 7, ((2,), (3, 1)), (0, 1), lost=lost)
    assert FOUR.without([2, 0], 7).hosts == ((3, 1),)
    with pytest.raises(ValueError, match="with hosts"):
        FOUR.without([0, 1, 2, 3], 7)


def test_residuals_go_to_the_first_that_stays_and_has_been_there():
    view = View(2, 7, ((0, 1), (2, 3)), (0,), joined=(1,), hands_over=(0, 3))
    assert view.receiver == 2 and view.shares_state
    assert View(2, 7, ((0, 1), (2, 3)), (0,), joined=(1,), hands_over=(0, 2, 3)).receiver == 1


def test_a_view_that_drains_has_no_other_change():
    view = View(2, 7, ((0, 1),), (0,), until=8, drains=True)
    assert view.is_passing and not view.without([1], 8).drains
    for more in ({"joined": (1,)}, {"behind": (1,)}, {"hands_over": (1,)}):
        with pytest.raises(ValueError, match="view 2 drains"):
            replace(view, **more)


ONE, TWO = ((0,),), ((0, 1),)


@pytest.mark.parametrize(
    "number, base, hosts, servers, more, said",
    [
        (0, 0, ONE, (0,), {}, "view 0 with base 0, expected 1 or more"),
        (1, -1, ONE, (0,), {}, "base -1, expected 1 or more and 0 or more"),
        (1, 5, ONE, (0,), {"until": 4}, "view 1 until op 4, expected 5 or more, or -1"),
        (1, 0, (), (0,), {}, "expected each member once"),
        (1, 0, ((0,), ()), (0,), {}, "and no empty host"),
        (1, 0, ((0, 1), (1,)), (0,), {}, "expected each member once"),
        (1, 0, ((-1,),), (0,), {}, "expected each member once"),
        (1, 0, ONE, (), {}, "with servers (), expected one or more"),
        (1, 0, ONE, (0, 0), {}, "with servers (0, 0), expected one or more, each once"),
        (1, 0, ONE, (-1,), {}, "expected one or more"),
        (1, 0, TWO, (0,), {"shares": (4,)}, "view 1 with shares (4,), expected 1 or more for each member"),
        (1, 0, TWO, (0,), {"shares": (4, 0)}, "with shares (4, 0), expected 1 or more"),
        (1, 0, TWO, (0,), {"hands_over": (0, 1)}, "workers (0, 1) that hand over, expected some members, each once"),
        (1, 0, TWO, (0,), {"hands_over": (2,)}, "workers (2,) that hand over"),
        (1, 0, ((0, 1, 2),), (0,), {"hands_over": (0, 0)}, "workers (0, 0) that hand over"),
    ],
)
def test_invalid_views_are_refused(number, base, hosts, servers, more, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        View(number, base, hosts, servers, **more)
