"""An agent that goes on without its launcher, and what the next launcher gets from it: through real agents."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from dmltrain_launch.agent.alone.detached import TAKEN_CODE
from dmltrain_launch.agent.protocol import HEADER, OUTPUT
from dmltrain_launch.channels.process import LocalChannel
from dmltrain_launch.job.host import Host
from tests.launch.conftest import carriers, wait_for
from tests.launch.test_agent import SILENCE, VIEW, Conversation, reporter


class Next(Conversation):
    """The next launcher of a conversation's agent."""

    def __init__(self, first: Conversation, lease: int, **changed: str):
        mark = first.mark
        self.channel = LocalChannel(Host("here", "127.0.0.1", sys.executable), mark)
        self.printed: dict[int, bytes] = {}
        self.heard = self._hear()
        where = {name: first.ready[name] for name in ("door", "spool")} | changed
        self.send(do="attach", mark=mark, host="here", lease=lease, **where)


def leave(channel: LocalChannel) -> None:
    """End a launcher's part of a channel, and nothing else, as kill -9 does."""
    channel._child.stdin.close()
    channel._child.stdout.close()


@pytest.fixture
def detached(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    talk = Conversation(tmp_path, detach=True)
    yield talk
    for pid in carriers(f"DMLTRAIN_JOB={talk.mark}", f"DMLTRAIN_AGENT={talk.mark}"):
        os.kill(pid, signal.SIGKILL)


WAITS = """
import os, time
print("before", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
print("after")"""


def test_the_next_launcher_gets_all_that_was_not_kept(detached, tmp_path):
    (pid,) = detached.start([sys.executable, "-c", WAITS])
    leave(detached.channel)
    (tmp_path / "go").touch()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}/cwd"), "the end of the process")
    first = Next(detached, 1)
    resumed = first.until("resumed")
    assert (resumed["first"], resumed["commands"], resumed["alive"]) == (1, 2, True)
    assert [first.until(name)["event"] for name in ("ready", "started", "exited")] == ["ready", "started", "exited"]
    assert first.printed == {0: b"before\nafter\n"}
    assert first.stop()["left"] == []
    first.send(do="kept", frame=1 << 40)
    assert first.channel.close() == "exited with 0"
    wait_for(lambda: not list(tmp_path.glob(f"dmltrain-{detached.mark}*")), "the end of what the agent has kept")


def test_what_the_scheduler_reports_without_a_launcher_is_kept_for_the_next_one(detached, tmp_path):
    then = "import time\nopen('ready', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    then += f"for number in range(400): agent.send({VIEW!r}.replace('3', str(number)).encode())"
    detached.send(do="start", unset=[], tasks=[reporter(detached, then=then)])
    wait_for((tmp_path / "ready").exists, "the scheduler")
    leave(detached.channel)
    (tmp_path / "go").touch()
    wait_for(lambda: not carriers(f"DMLTRAIN_JOB={detached.mark}"), "the end of the process")
    later = Next(detached, 1)
    assert [later.until("reported")["report"]["view"] for _ in range(400)] == [*range(400)]
    assert later.until("exited")["code"] == 0


def test_only_a_later_launcher_gets_the_agent(detached, tmp_path):
    detached.start([sys.executable, "-c", WAITS])
    second = Next(detached, 2)  # also while the launcher before it only seems to live
    assert second.until("resumed")["alive"]
    for lease in (1, 2):
        assert Next(detached, lease).until("refused")["code"] == TAKEN_CODE
    third = Next(detached, 3)
    assert third.until("resumed")["alive"]
    assert second.channel.close() == "exited with 0"
    (tmp_path / "go").touch()
    assert third.until("exited")["code"] == 0


@pytest.mark.thorough
def test_what_an_agent_leaves_that_has_ended(detached, tmp_path):
    detached.start([sys.executable, "-c", WAITS])
    leave(detached.channel)
    (tmp_path / "go").touch()
    detached.channel._child.wait(SILENCE)  # after 10 s without a process
    first = Next(detached, 1)
    assert not first.until("resumed")["alive"]
    assert first.until("exited")["code"] == 0
    assert first.until("ended")["left"] == []
    leave(first.channel)  # which has kept nothing of it
    second = Next(detached, 2)
    resumed = second.until("resumed")
    assert (resumed["first"], resumed["alive"]) == (1, False)
    second.until("ended")
    assert second.printed == {0: b"before\nafter\n"}
    second.send(do="kept", frame=resumed["last"])
    assert "it had ended while no launcher was attached" in second.channel.close()
    third = Next(detached, 3)
    assert "no agent of the job is left" in third.until("refused")["message"]
    assert not list(tmp_path.glob(f"dmltrain-{detached.mark}.spool*"))


def test_names_of_a_detached_agent_cannot_be_known_before_and_are_found_with_another_tmpdir(
    detached, tmp_path, monkeypatch
):
    other = Conversation(tmp_path, mark=f"{detached.mark}-2", detach=True)
    assert other.ready["door"] != detached.ready["door"] and other.ready["spool"][-8:] != detached.ready["spool"][-8:]
    other.stop()
    detached.start([sys.executable, "-c", WAITS])
    leave(detached.channel)
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
    assert Next(detached, 1).until("resumed")["alive"]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o700])
def test_what_another_user_can_have_left_is_not_read(detached, tmp_path, mode):
    spool = tmp_path / "left"
    spool.mkdir(mode)
    spool.chmod(mode)
    (spool / f"{1:020d}").write_bytes(frame(b"forged\n"))
    if mode == 0o700:
        if os.geteuid():
            pytest.skip("a folder of another user needs root")
        os.chown(spool, 2002, 2002)
    found = Next(detached, 1, door="no-such-door", spool=str(spool))
    assert "no agent of the job is left" in found.until("refused")["message"]
    assert not found.printed


def frame(data: bytes) -> bytes:
    return HEADER.pack(OUTPUT, 0, len(data)) + data


def test_before_its_first_process_an_agent_ends_with_its_launcher(detached):
    leave(detached.channel)
    detached.channel._child.wait(SILENCE)
