"""The hosts file of a running job is watched for changes."""

import queue

import pytest

from launch.job import hosts
from launch.run import watch
from launch.run.event import Listed, Unlisted
from launch.run.watch import HostsWatch


@pytest.fixture
def events(tmp_path, monkeypatch):
    """What the watch reports about `hosts` in this folder."""
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    found: queue.SimpleQueue = queue.SimpleQueue()
    file = tmp_path / "hosts"
    file.write_text("h1\nh2\n")
    made = HostsWatch([str(file)], lambda: hosts.read(file), found.put)
    yield found
    made.close()
    with pytest.raises(queue.Empty):
        found.get_nowait()


def names(event: Listed) -> list[str]:
    return [host.name for host in event.hosts]


def test_each_change_is_reported_once(tmp_path, events):
    file = tmp_path / "hosts"
    file.write_text("h1\nh2\nh3 slots=2\n")
    found = events.get(timeout=60)
    assert names(found) == ["h1", "h2", "h3"] and found.hosts[2].slots == 2
    (tmp_path / "new").write_text("h1\nh4\n")
    (tmp_path / "new").rename(file)
    assert names(events.get(timeout=60)) == ["h1", "h4"], "also a file that takes its place"


def test_a_file_that_is_broken_or_gone_is_reported_and_the_next_one_is_read(tmp_path, events):
    file = tmp_path / "hosts"
    file.write_text("h1 slots=many\n")
    found = events.get(timeout=60)
    assert isinstance(found, Unlisted) and "hosts:1" in found.message and "many" in found.message
    file.unlink()
    assert "no such file" in events.get(timeout=60).message
    file.write_text("h7\n")
    assert names(events.get(timeout=60)) == ["h7"]
