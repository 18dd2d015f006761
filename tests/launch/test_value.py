"""The base of the messages between launcher and agent: it behaves as a frozen dataclass."""

from dataclasses import FrozenInstanceError, field, fields

import pytest

from launch.agent.value import Value, value


@value(frozen=True)
class Pair(Value):
    first: int
    second: str = "two"
    rest: list[int] = field(default_factory=list)


@value(frozen=True)
class Other(Pair): ...


def test_fields_are_given_by_place_by_name_or_by_their_defaults():
    assert vars(Pair(1)) == {"first": 1, "second": "two", "rest": []}
    assert vars(Pair(1, "b", [3])) == vars(Pair(rest=[3], second="b", first=1)) == vars(Pair(1, rest=[3], second="b"))
    assert Pair(1).rest is not Pair(1).rest, "each has a list of its own"
    assert [each.name for each in fields(Pair)] == ["first", "second", "rest"]


TWICE = r"^Pair takes each of \(first, second, rest\) once: \(1,.*\), \{.*\}$"


@pytest.mark.parametrize(
    ("args", "named", "said"),
    [
        *(((1, "b", [], 4), {}, TWICE), ((1,), {"third": 3}, TWICE), ((1,), {"first": 1}, TWICE)),
        *(((), {}, "^field 'first' is missing$"), ((), {"second": "b"}, "^field 'first' is missing$")),
    ],
)
def test_what_are_no_fields_is_refused(args, named, said):
    with pytest.raises(TypeError, match=said):
        Pair(*args, **named)


def test_values_of_one_class_are_equal_by_their_fields_and_shown_with_them_and_do_not_change():
    made = Pair(1)
    assert made == Pair(1, "two") and repr(Pair(1, "b")) == "Pair(first=1, second='b', rest=[])"
    assert all(made != other for other in (Pair(2), Pair(1, "b"), Other(1), 1))
    assert len({Pair(number % 2, rest=()) for number in range(4)}) == 2
    with pytest.raises(FrozenInstanceError, match="assign to field 'first'"):
        made.first = 2
    with pytest.raises(FrozenInstanceError, match="delete field 'first'"):
        del made.first
    with pytest.raises(TypeError, match="always frozen"):
        value(frozen=False)
