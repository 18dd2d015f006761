"""Log lines about unauthenticated peers: a few, and then a count, so that nobody can fill a disk from outside."""

from dmltrain.kvstore.transport.unauthenticated import LINES, PERIOD_SECONDS, Unauthenticated


def test_the_first_ones_have_a_line_each_and_the_others_are_counted():
    unauthenticated = Unauthenticated("server 0")
    lines = [unauthenticated.report(f"10.0.0.{each}:1", "it is silent", 100.0) for each in range(LINES + 1000)]
    assert lines[:LINES] == [
        f"server 0: cut off an unauthenticated peer from 10.0.0.{each}:1: it is silent" for each in range(LINES)
    ]
    assert not any(lines[LINES:])
    assert unauthenticated.later(100.0 + PERIOD_SECONDS - 0.1) == ""
    assert unauthenticated.later(100.0 + PERIOD_SECONDS) == (
        "server 0: cut off 1,000 more unauthenticated peers in 10 s, the last from 10.0.0.1004:1: it is silent"
    )
    assert unauthenticated.later(200.0) == ""


def test_a_later_unauthenticated_peer_has_a_line_again_and_those_before_the_end_are_counted():
    unauthenticated = Unauthenticated("server 0")
    for _ in range(LINES):
        assert unauthenticated.report("h", "r", 0.0)
    assert not unauthenticated.report("h", "r", 9.0)
    assert unauthenticated.later(10.0)
    assert not unauthenticated.report("h", "r", 11.0), "this period has a count only"
    assert unauthenticated.later(20.0)
    assert [bool(unauthenticated.report("h", "r", 30.0)) for _ in range(LINES + 2)] == [True] * LINES + [False] * 2
    said = "server 0: cut off 2 more unauthenticated peers in 3 s, the last from h: r"
    assert [unauthenticated.later(33.0, last=True) for _ in range(2)] == [said, ""]


def test_a_flood_without_end_has_one_line_in_each_period():
    unauthenticated, lines = Unauthenticated("s"), 0
    for millisecond in range(100_000):
        lines += bool(unauthenticated.report("h", "r", millisecond / 1000)) + bool(
            unauthenticated.later(millisecond / 1000)
        )
    assert lines <= LINES + 100 / PERIOD_SECONDS
