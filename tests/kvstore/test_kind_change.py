"""A change of an elastic job's kvstore waits for the next view, or is refused with a reason."""

import json
from dataclasses import replace

import pytest

from dmltrain.kvstore.scheduler.actions import Log
from dmltrain.kvstore.scheduler.change_file import ChangeFile
from dmltrain.kvstore.scheduler.changes import ENDING, STARTING
from dmltrain.kvstore.scheduler.kind_change import KindChange
from dmltrain.kvstore.transport.message import Change
from dmltrain.kvstore.view import View

SSP = View(1, 0, ((0, 1),), (0,), kvstore="dist_ssp", staleness=2.0)
SYNC = replace(SSP, kvstore="dist_sync", staleness=0.0)


def change(kv_store="", staleness=-1.0, number=1):
    return Change(number, kv_store, staleness, "a test")


def refused(log, number=1):
    assert log[0] == Log(f"change {number} is asked for by a test")
    (said,) = log[1:]
    return said.text.removeprefix(f"change {number} is refused: ")


@pytest.mark.parametrize(
    "asked, kvstore, staleness, shown",
    [
        (change(staleness=0.0), "dist_ssp", 0.0, "kv_store=dist_ssp staleness=0"),
        (change("dist_async"), "dist_async", 0.0, "kv_store=dist_async"),
        (change("dist_ssp", 7.0), "dist_ssp", 7.0, "kv_store=dist_ssp staleness=7"),
    ],
)
def test_it_comes_with_the_next_view_and_with_no_other(asked, kvstore, staleness, shown):
    found = KindChange()
    assert len(found.ask(asked, SSP, ends=False)) == 1 and found.waits
    view = found.next_view(SSP, SSP.without([1], 5), between=False, drained=False)
    assert (view.number, view.members, view.kvstore, view.staleness) == (2, (0,), kvstore, staleness)
    assert found.begins(view) == [Log(f"change 1 from view 2 on: {shown}")]
    after = view.without([], 6)
    assert found.next_view(view, after, between=True, drained=False) == after
    assert (after.kvstore, after.staleness) == (kvstore, staleness)
    assert not found.waits and found.begins(after) == []


@pytest.mark.parametrize(
    "asked, view, ends, why",
    [
        (change(staleness=1.0), None, False, STARTING),
        (change(staleness=1.0), SSP, True, ENDING),
        (change("dist_ssp", 2.0), SSP, False, "kv_store=dist_ssp staleness=2 is what the job has"),
        (change("dist_local"), SSP, False, "can change to dist_sync or dist_async or dist_ssp"),
        (change("dist_async", 4.0), SSP, False, "staleness"),
        (change("dist"), SSP, False, "unknown kvstore"),
        (change("dist_sync"), SYNC, False, "kv_store=dist_sync is what the job has already"),
        (change(staleness=1.0), SYNC, False, "staleness is an option of kvstore dist_ssp"),
        (change(staleness=1.0), replace(SSP, kvstore="", staleness=0.0), False, "it is not known what kvstore"),
    ],
)
def test_what_cannot_change_is_refused_at_once(asked, view, ends, why):
    found = KindChange()
    assert why in refused(found.ask(asked, view, ends)) and not found.waits


def test_one_at_a_time_and_none_after_the_last_view():
    found = KindChange()
    found.ask(change(staleness=1.0), SSP, ends=False)
    assert refused(found.ask(change(staleness=3.0, number=2), SSP, False), 2).startswith("change 1 is not made yet")
    assert found.cancel() == [Log(f"change 1 is refused: {ENDING}")] and found.cancel() == []


def test_a_later_scheduler_does_not_make_what_the_one_before_was_asked_for(tmp_path):
    file = tmp_path / "change"
    asked = {"number": 4, "kv_store": "dist_async", "staleness": -1.0, "by": "me"}
    file.write_text(json.dumps(asked))
    assert ChangeFile(str(file)).newer() == Change(*asked.values())
    later = ChangeFile(str(file), skips=True)
    assert later.newer() is None
    file.write_text(json.dumps(asked | {"number": 5}))
    assert later.newer() == Change(5, "dist_async", -1.0, "me") and later.newer() is None
