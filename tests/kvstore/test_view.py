"""Views: members, places and the next view; invalid ones are refused."""

from dataclasses import replace

import pytest

from dmltrain.kvstore.view import Lost, View

FOUR = View(1, 0, ((2, 0), (3, 1)), (0, 1))


def test_members_are_in_ascending_order_whatever_the_order_of_summing():
    assert FOUR.members == (0, 1, 2, 3)
    assert [FOUR.place(member) for member in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert FOUR.without([0, 2], 5).place(3) == 1
    with pytest.raises(ValueError):
        FOUR.without([0], 5).place(0)


def test_the_first_member_leads():
    assert FOUR.leader == 0
    assert FOUR.without([0], 5).leader == 1
    assert FOUR.without([0, 1], 5).leader == 2


def test_a_removal_keeps_the_order_of_summing():
    lost = (Lost(0, "end of stream"),)
    assert FOUR.without([0], 7, lost) == View(2, 7, ((2,), (3, 1)), (0, 1), lost=lost)


def test_a_host_without_members_is_left_out():
    assert FOUR.without([2, 0], 7).hosts == ((3, 1),)


def test_someone_must_be_left():
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


HANDS = ((0,), -1, (), (), (), (), (), (), ())  # what comes before `hands_over`


@pytest.mark.parametrize(
    "values, said",
    [
        ((0, 0, ((0,),), (0,)), "view 0 with base 0, expected 1 or more"),
        ((1, -1, ((0,),), (0,)), "base -1, expected 1 or more and 0 or more"),
        ((1, 5, ((0,),), (0,), 4), "view 1 until op 4, expected 5 or more, or -1"),
        ((1, 0, (), (0,)), "expected each member once"),
        ((1, 0, ((0,), ()), (0,)), "and no empty host"),
        ((1, 0, ((0, 1), (1,)), (0,)), "expected each member once"),
        ((1, 0, ((-1,),), (0,)), "expected each member once"),
        ((1, 0, ((0,),), ()), "with servers (), expected one or more"),
        ((1, 0, ((0,),), (0, 0)), "with servers (0, 0), expected one or more, each once"),
        ((1, 0, ((0,),), (-1,)), "expected one or more"),
        ((1, 0, ((0, 1),), (0,), -1, (), (), (4,)), "view 1 with shares (4,), expected 1 or more for each member"),
        (
            (1, 0, ((0, 1),), *HANDS, (0, 1)),
            "workers (0, 1) that hand over, expected some members, each once, and not all",
        ),
        ((1, 0, ((0, 1),), *HANDS, (2,)), "workers (2,) that hand over"),
        ((1, 0, ((0, 1, 2),), *HANDS, (0, 0)), "workers (0, 0) that hand over"),
        ((1, 0, ((0, 1),), (0,), -1, (), (), (4, 0)), "with shares (4, 0), expected 1 or more"),
    ],
)
def test_invalid_views_are_refused(values, said):
    with pytest.raises(ValueError) as error:
        View(*values)
    assert said in str(error.value)
