"""The agent itself, over its channel: its protocol, the order of ends, its life line; and a launcher's session."""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.agent import KILL_SECONDS, commands, protocol
from dmltrain_launch.agent.channel import Channel
from dmltrain_launch.agent.ending import Ending
from dmltrain_launch.agent.events import Listing, Measured, Reported
from dmltrain_launch.agent.process import Process, living, members, process, send_signal
from dmltrain_launch.agent.reports import Slowest
from dmltrain_launch.channels import frames
from dmltrain_launch.channels.process import LocalChannel
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.task import Ports
from dmltrain_launch.run import journal
from dmltrain_launch.run.agents import Agents
from dmltrain_launch.run.connection import Connection
from dmltrain_launch.run.intake import EVENTS_AT_ONCE, Frames, Intake
from dmltrain_launch.run.keeping import Keeping, NumberedEvent
from dmltrain_launch.run.session import Session
from dmltrain_launch.run.stream import Stream
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.event import Lost
from dmltrain_launch.run.supervisor.limit import Limits
from dmltrain_launch.run.supervisor.starter import Starter
from dmltrain_launch.terminal.log_folder import LogFolder
from dmltrain_launch.terminal.output import Output, Silent
from tests.scripts import executable, shell_script
from tests.waiting import SECONDS, wait_for

SILENCE = 60.0  # s; the channel's, for tests that are about something else


class Conversation:
    """An agent with a job on a host "here". `channel`: to an agent of the job `mark`; without it, one is started."""

    def __init__(
        self,
        folder: Path,
        python: str = sys.executable,
        silence: float = SILENCE,
        channel: Any = None,
        mark: str = "",
        **job: object,
    ):
        self.mark = mark or f"test-{os.getpid()}-{random.randrange(10**9)}"
        self.channel = channel or LocalChannel(Host("here", "127.0.0.1", python), self.mark)
        self.folder = folder
        self.printed: dict[int, bytes] = {}
        self.heard = self._hear()
        rest = {"key": "00", "grace": 0.5, "silence": silence, "log_folder": str(folder), **job}
        self.send(do="job", mark=self.mark, host="here", **rest)
        self.ready = self.until("ready")

    def send(self, **message: object) -> None:
        self.channel.write(json.dumps(message).encode() + b"\n")

    def start(self, *commands: list[str], leaves: bool = False) -> list[int]:
        """Start one task for each command; their pids."""
        same = {"environment": {"DMLTRAIN_JOB": self.mark}, "workdir": str(self.folder), "leaves": leaves}
        rows = [{"task": task, "argv": argv, **same} for task, argv in enumerate(commands)]
        self.send(do="start", unset=[], tasks=rows)
        return [self.until("started")["pid"] for _ in commands]

    def _hear(self):
        for kind, task, payload in frames(self.channel, SILENCE):
            if kind == protocol.OUTPUT:
                self.printed[task] = self.printed.get(task, b"") + payload
            else:
                yield json.loads(payload)

    def until(self, event: str) -> dict:
        """The next event of that name; what comes before it is passed over."""
        found = next((each for each in self.heard if each["event"] == event), None)
        assert found, f"the channel ended before the event {event}: {self.channel.close()}"
        return found

    def answer(self) -> list[dict]:
        """Ask for something that is always answered; the events before the answer."""
        self.send(do="list", mark="no-such-mark")
        return list(itertools.takewhile(lambda each: each["event"] != "listing", self.heard))

    def stop(self) -> dict:
        self.send(do="stop", grace=0.5)
        return self.until("ended")

    def ending(self) -> str:
        """How the agent has ended by itself. `close` alone would kill one that a busy machine keeps from its end."""
        in_state(self.ready["pid"], "Z")
        return self.channel.close()


def python_after(path: Path, source: str) -> str:
    """A Python for the agent, at this path, that executes `source` first."""
    return str(executable(path, f"{source}\nimport sys\nexec(sys.argv[sys.argv.index('-c') + 1])\n"))


@pytest.fixture(params=["pidfds", "no pidfds"])
def any_python(request, tmp_path):
    """A Python for the agent: as it is, and without pidfd_open, as before Linux 5.3."""
    if request.param == "pidfds":
        return sys.executable
    return python_after(tmp_path / "python", "import os\ndel os.pidfd_open")


def test_a_task_from_start_to_end(tmp_path, any_python):
    talk = Conversation(tmp_path, any_python)
    (pid,) = talk.start(["sh", "-c", 'echo out; echo "agent: $DMLTRAIN_AGENT" >&2; printf end; exit 7'])
    assert talk.until("exited") == {"event": "exited", "task": 0, "code": 7}
    # a later agent of the job ends those that carry DMLTRAIN_AGENT: processes must not pass for agents
    assert talk.printed == {0: b"out\nagent: \nend"}, "all of it before the exit"
    assert talk.stop()["left"] == []
    assert talk.ending() == "exited with 0"
    assert not Path(f"/proc/{pid}").exists()


def test_orphans_are_adopted_and_collected(tmp_path, any_python):
    talk = Conversation(tmp_path, any_python)
    (pid,) = talk.start(["sh", "-c", "(setsid sh -c 'echo $$ >orphan; exec sleep 0.2' &) ; exec sleep 120"])
    said = tmp_path / "orphan"
    wait_for(lambda: said.exists() and said.read_text().endswith("\n"), "the orphan")
    wait_for(lambda: not process(int(said.read_text())), "its end, and that it is collected")
    assert children(talk.ready["pid"]) == [pid], "the orphan is no zombie"
    assert talk.stop()["left"] == []


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def waits(thread: threading.Thread) -> bool:
    """Whether it sleeps until something happens."""
    return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def in_state(pid: int, state: str) -> None:
    """Wait until the process is in this state of ps."""
    wait_for(lambda: process(pid).state == state, f"{state} of {pid}")


def test_ends_are_reported_in_the_order_they_happened(talk):
    """Also when the agent was busy meanwhile: it stands still here while all of them die."""
    pids = talk.start(*[["sleep", "120"] for _ in range(20)])
    order = list(range(20))
    random.Random(3).shuffle(order)
    os.kill(talk.ready["pid"], signal.SIGSTOP)
    for task in order:
        os.kill(pids[task], signal.SIGKILL)
        in_state(pids[task], "Z")
    os.kill(talk.ready["pid"], signal.SIGCONT)
    assert [talk.until("exited")["task"] for _ in order] == order


class AgentClock:
    """The time of an agent whose interpreter is `python`: that of this machine, and what it was `advance`d by."""

    def __init__(self, folder: Path):
        self.seconds, self._file = 0.0, folder / "advanced"
        self.advance(0.0)
        later = f"monotonic() + float(open({str(self._file)!r}).read())"
        source = f"import time\nmonotonic = time.monotonic\ntime.monotonic = lambda: {later}"
        self.python = python_after(folder / "python-with-a-clock", source)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
        draft = self._file.with_suffix(".draft")
        draft.write_text(str(self.seconds))
        draft.rename(self._file)


def test_missing_heartbeats_end_the_job_after_the_requested_time(tmp_path):
    clock = AgentClock(tmp_path)
    talk = Conversation(tmp_path, clock.python, silence=60.0)
    one, pid = talk.start(*[["sleep", "120"]] * 2)
    clock.advance(45.0)
    talk.send(do="beat")
    talk.until("beat")
    clock.advance(45.0)
    os.kill(one, signal.SIGKILL)  # wakes the agent
    talk.until("exited")
    assert process(pid), "45 s of silence are not 60, since a word has come"
    clock.advance(20.0)
    os.kill(talk.ready["pid"], signal.SIGCHLD)
    assert "ended" not in [each["event"] for each in talk.heard]
    assert talk.ending() == "exited with 1: missed heartbeats from the launcher for 60 s"
    assert not process(pid)
    said = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d agent on here \(pid {talk.ready['pid']}\): "
    said += "missed heartbeats from the launcher for 60 s; ended the job\n0 processes left on 1 host\n"
    assert re.fullmatch(said, (tmp_path / "agent-here.log").read_text())


def test_an_agent_that_gets_a_signal_reports_it_and_ends_the_job(tmp_path):
    talk = Conversation(tmp_path)
    (pid,) = talk.start(["sleep", "120"])
    os.kill(talk.ready["pid"], signal.SIGTERM)
    refused = talk.until("refused")
    assert (refused["code"], refused["message"]) == (125, "the agent on here was ended by SIGTERM")
    assert talk.until("ended")["left"] == []
    assert not process(pid)
    assert talk.ending() == "exited with 0"


LEAVES = "trap 'echo leaves; exit 0' TERM; echo ready; while :; do sleep 0.01; done"


def prints(talk: Conversation, task: int, text: bytes) -> None:
    """Until the task has printed this."""
    while text not in talk.printed.get(task, b""):
        assert not [each for each in talk.answer() if each["event"] == "exited"]


def test_a_notice_asks_these_tasks_to_leave(talk):
    talk.start(*[["sh", "-c", LEAVES]] * 3)
    for task in range(3):
        prints(talk, task, b"ready")
    talk.send(do="notice", tasks=[2, 0])
    assert {talk.until("exited")["task"], talk.until("exited")["task"]} == {0, 2}
    assert b"leaves" not in talk.printed[1] and not [each for each in talk.answer() if each["event"] == "exited"]


def test_a_process_that_starts_while_hosts_come_leaves_them_the_port(talk):
    talk.start(["true"])
    talk.send(do="bind", address="127.0.0.1", reach=True)
    port = talk.until("bound")["ports"]["reach"]
    talk.start(["true"])
    socket.create_connection(("127.0.0.1", port)).close()
    talk.start()
    talk.answer()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_the_jobs_processes_learn_where_the_newest_scheduler_is(talk, tmp_path):
    show = 'echo "at $DMLTRAIN_SCHEDULER_FILE"; until cat "$DMLTRAIN_SCHEDULER_FILE" 2>/dev/null; do sleep 0.01; done'
    task = {"task": 0, "argv": ["sh", "-c", f"{show}; sleep 100"], "environment": {}, "workdir": str(tmp_path)}
    talk.send(do="start", unset=[], tasks=[task], follows=True)
    prints(talk, 0, b"/scheduler\n")
    talk.send(do="scheduler", incarnation=2, address="10.0.0.3", port=40000)
    prints(talk, 0, b'{"incarnation": 2, "host": "10.0.0.3", "port": 40000}')


REPORTS = """
import json, os, socket, sys
agent = socket.socket(fileno=int(os.environ["DMLTRAIN_AGENT_FD"]))
for message in map(json.loads, sys.argv[1:]):
    agent.send(message.encode())
"""
VIEW, SAID = '{"op": "view", "view": 3, "workers": [0, 4]}', {"op": "view", "view": 3, "workers": [0, 4]}


def reporter(talk: Conversation, *messages: str, then: str = "", listens: bool = True) -> dict:
    """A task that sends these messages on its connection with the agent. `then`: what it does after that."""
    argv = [sys.executable, "-c", REPORTS + then, *map(json.dumps, messages)]
    same = {"environment": {"DMLTRAIN_JOB": talk.mark}, "workdir": str(talk.folder)}
    return {"task": 0, "argv": argv, "listens": listens, **same}


CHANGE = json.dumps({"op": "change", "number": 2, "kv_store": "dist_ssp", "by": "me"})


def test_a_scheduler_reports_and_is_asked_for_changes(talk):
    """What it has reported comes before its end, also if it has not read all that it was asked."""
    answers = "print(agent.recv(1000).decode(), flush=True); agent.recv(1000, socket.MSG_PEEK)\n"
    then = f"{answers}agent.send({VIEW!r}.encode())"
    talk.send(do="start", unset=[], tasks=[reporter(talk, VIEW, then=then)])
    assert talk.until("reported") == {"event": "reported", "task": 0, "report": SAID}
    talk.send(do="tell", task=7, message=CHANGE)
    talk.send(do="tell", task=0, message=CHANGE)
    prints(talk, 0, CHANGE.encode())
    talk.send(do="tell", task=0, message=CHANGE)
    assert [talk.until(each)["event"] for each in ("reported", "exited")] == ["reported", "exited"]
    talk.send(do="tell", task=0, message=CHANGE)
    assert talk.answer() == []


def test_what_is_no_report_is_skipped_and_said_once(talk):
    """Nor is it one to print its words: no event follows."""
    line = "2026-11-25 02:16:31,204 view 1 after op 0: workers 0"
    strange = ["{}", '{"op": "view"}', VIEW.replace("4", "-4"), "[" * 1000, " " * 70_000 + VIEW, '{"op": "stop"}']
    then = f"print({line!r}, flush=True)"
    talk.send(do="start", unset=[], tasks=[reporter(talk, *strange, VIEW, then=then)])
    assert talk.until("reported")["report"] == SAID
    talk.until("exited")
    assert line.encode() in talk.printed[0] and talk.answer() == []
    assert talk.printed[0].count(b"the agent has ignored a message of this process: op is None, expected one of ") == 1


def test_only_a_scheduler_has_a_connection(talk):
    talk.send(do="start", unset=["DMLTRAIN_AGENT_FD"], tasks=[reporter(talk, listens=False)])
    assert talk.until("exited")["code"] == 1 and b"KeyError: 'DMLTRAIN_AGENT_FD'" in talk.printed[0]


def test_sigterm_to_an_agent_is_a_notice_for_its_workers_and_the_second_one_ends_the_job(tmp_path):
    talk = Conversation(tmp_path)
    talk.start(["sh", "-c", LEAVES], ["sh", "-c", "trap '' TERM; echo ready; sleep 120"], leaves=True)
    for task in range(2):
        prints(talk, task, b"ready")
    os.kill(talk.ready["pid"], signal.SIGTERM)
    assert talk.until("noticed")["tasks"] == [0, 1]
    assert talk.until("exited") == {"event": "exited", "task": 0, "code": 0}
    assert not [each for each in talk.answer() if each["event"] in ("refused", "exited")], "the other one goes on"
    os.kill(talk.ready["pid"], signal.SIGTERM)
    assert talk.until("refused")["message"] == "the agent on here was ended by SIGTERM"
    assert talk.until("exited")["code"] == -signal.SIGKILL
    assert talk.until("ended")["left"] == []


def test_a_process_that_takes_sigterm_for_a_notice_gets_it_again_at_the_end(tmp_path):
    talk = Conversation(tmp_path, grace=60.0)
    once = "trap 'trap - TERM' TERM; echo ready; while :; do sleep 0.01; done"
    talk.start(["sh", "-c", once], leaves=True)
    prints(talk, 0, b"ready")
    talk.send(do="stop", grace=60.0)
    assert talk.until("exited")["code"] == -signal.SIGTERM
    assert talk.until("ended")["left"] == []


def test_an_agent_without_a_job_ends_at_a_signal_and_with_its_channel():
    before = set(children(os.getpid()))
    channel = LocalChannel(Host("here", "127.0.0.1", sys.executable), "no-such-mark")
    stream = frames(channel, SILENCE)
    channel.write(b'{"do": "list", "mark": "no-such-mark"}\n')
    assert json.loads(next(stream)[2]) == {"event": "listing", "rows": []}, "it has begun to serve"
    (pid,) = agents_beside(before)
    os.kill(pid, signal.SIGTERM)
    refused, ended = [json.loads(payload) for _, _, payload in stream]
    assert (refused["event"], refused["code"]) == ("refused", 125) and "ended by SIGTERM" in refused["message"]
    assert ended == {"event": "ended", "left": []}
    assert channel.close() == "exited with 0"
    channel = LocalChannel(Host("here", "127.0.0.1", sys.executable), "no-such-mark")
    channel._end_input()
    channel._child.wait(SILENCE)  # close would kill one that takes more than a second
    assert channel.close() == "exited with 1: the launcher's end of the channel closed"


def test_a_message_that_cannot_be_parsed_is_refused_and_the_next_one_is_obeyed(talk):
    talk.channel.write(b'{"do": "dance"}\n')
    refused = talk.until("refused")
    assert refused["code"] == 125 and "here cannot parse the launcher's message" in refused["message"]
    assert talk.answer() == []


def test_a_dump_prints_the_stacks_of_python_and_asks_the_others_to_end(tmp_path):
    talk = Conversation(tmp_path)
    program = "import faulthandler, time; faulthandler.enable(); print('up', flush=True); time.sleep(120)"
    talk.start([sys.executable, "-c", program], ["sleep", "120"])
    prints(talk, 0, b"up")
    talk.send(do="stop", grace=SILENCE, dump=True)
    found = [each for each in talk.heard if each["event"] in ("exited", "ended")]
    assert {each["task"]: each["code"] for each in found[:-1]} == {0: -signal.SIGABRT, 1: -signal.SIGTERM}
    assert found[-1] == {"event": "ended", "left": []}
    assert b"Fatal Python error: Aborted" in talk.printed[0] and b'File "<string>", line 1' in talk.printed[0]


def test_stopped_processes_are_reported_with_their_task_and_end_all_the_same(tmp_path):
    talk = Conversation(tmp_path)
    pids = talk.start(["sleep", "120"], ["sh", "-c", "sleep 120; true"])
    (below,) = wait_for(lambda: children(pids[1]), "the process below")
    for pid in (pids[0], below):
        os.kill(pid, signal.SIGSTOP)
        in_state(pid, "T")
    talk.send(do="stop", grace=SILENCE)
    assert sorted(talk.until("stopped")["processes"]) == sorted([[pids[0], 0], [below, 1]])
    assert talk.until("ended")["left"] == []
    assert not any(map(process, (*pids, below)))


@pytest.fixture
def counting_python(tmp_path) -> tuple[str, Path]:
    """A Python for the agent that adds a byte to a file before each wait for events; and that file."""
    waits = tmp_path / "waits"
    source = (
        f"import selectors\nwait = selectors.DefaultSelector.select\nwaits = open({str(waits)!r}, 'ab', buffering=0)\n"
    )
    source += "selectors.DefaultSelector.select = lambda self, timeout: (waits.write(b'.'), wait(self, timeout))[1]"
    return python_after(tmp_path / "counting-python", source), waits


STUBBORN = ["sh", "-c", "trap '' TERM; echo up; exec sleep 600"]


def test_an_agent_that_waits_sleeps(tmp_path, counting_python):
    """While a process runs, while it is given time to end, and also when the launcher is gone."""
    python, waits = counting_python

    def begin(silence: float) -> Conversation:
        talk = Conversation(tmp_path, python, silence)
        talk.start(STUBBORN)
        prints(talk, 0, b"up")
        waits.write_bytes(b"")
        return talk

    talk = begin(SILENCE)
    time.sleep(0.3)
    assert waits.stat().st_size < 30, "nothing happens"
    assert talk.stop()["left"] == []
    assert waits.stat().st_size < 100, "it looks for what is left now and then"
    talk = begin(silence=6.0)  # in which a busy machine starts a process
    assert list(talk.heard) == []
    assert talk.ending() == "exited with 1: missed heartbeats from the launcher for 6 s"
    assert waits.stat().st_size < 100


def test_the_port_of_a_dead_scheduler_is_closed(talk):
    talk.send(do="bind", address="127.0.0.1", scheduler=0)
    port = talk.until("bound")["ports"]["scheduler"]
    text = "import os, socket, time; listener = socket.socket(fileno=int(os.environ['DMLTRAIN_LISTEN_FD'])); "
    argv = [sys.executable, "-c", text + "listener.listen(); print('listening', flush=True); time.sleep(120)"]
    row = {"task": 0, "argv": argv, "environment": {"DMLTRAIN_JOB": talk.mark}, "workdir": "/", "listens": True}
    talk.send(do="start", unset=[], tasks=[row])
    pid = talk.until("started")["pid"]
    prints(talk, 0, b"listening")
    socket.create_connection(("127.0.0.1", port), SILENCE).close()
    os.kill(pid, signal.SIGKILL)
    talk.until("exited")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), SILENCE)


def test_members_are_descendants_and_carriers():
    mark = f"members-{os.getpid()}"
    environment = dict(os.environ, DMLTRAIN_JOB=mark)
    marked = subprocess.Popen(["sh", "-c", "env -i /bin/sleep 120; true"], env=environment, start_new_session=True)
    child = subprocess.Popen(["sleep", "120"])
    other = subprocess.Popen(["sleep", "120"], env=dict(os.environ, DMLTRAIN_JOB=mark + "x"), start_new_session=True)
    try:
        below = wait_for(lambda: children(marked.pid), "the process below")
        found = members(mark, root=child.pid)
        assert set(found) == {marked.pid, *below}, "the root itself is none"
        assert child.pid in members(mark, root=os.getpid())
        assert other.pid not in found
    finally:
        for pid in (*children(marked.pid), marked.pid, child.pid, other.pid):
            os.kill(pid, signal.SIGKILL)
        for each in (marked, child, other):
            each.wait()


def test_an_older_agent_of_the_job_is_a_member_and_a_younger_one_is_not():
    mark = f"agents-{os.getpid()}"
    environment = dict(os.environ, DMLTRAIN_AGENT=mark)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    carrier = subprocess.Popen(["cat"], env=environment, start_new_session=True, **pipes)
    assert carrier.stdin and carrier.stdout
    carrier.stdin.write(b"\n")
    assert carrier.stdout.read(1) == b"\n"  # /proc has the environment only after the end of exec
    root, pid = 2**22 + 1, carrier.pid
    try:
        for start, found in ((5, [pid]), (6, [pid]), (7, [])):  # at the same tick the lower pid is older
            everyone = {root: Process(root, 1, "S", 6), pid: Process(pid, 1, "S", start)}
            assert list(members(mark, root, lambda everyone=everyone: everyone)) == found
        assert list(members(mark, root, lambda: {pid: Process(pid, 1, "S", 7)})) == [pid], "root has exited"
        assert list(members(mark + "x", root, lambda: {pid: Process(pid, 1, "S", 5)})) == []
    finally:
        carrier.kill()
        carrier.wait()


def test_a_zombie_is_not_among_the_living():
    ended = subprocess.Popen(["true"])
    in_state(ended.pid, "Z")
    assert ended.pid not in living() and os.getpid() in living()
    ended.wait()
    assert process(ended.pid) is None


def test_parents_come_before_their_children():
    """Also when a child has the lower pid: a shell whose child is ended first would exit with the child's status."""
    chain = [2**15 - 1, 301, 2**22 - 1, 300, 65_536, 17]
    everyone = {pid: Process(pid, parent, "S", 0) for parent, pid in zip([1, *chain], chain, strict=False)}
    assert list(members("no-such-mark", chain[0], lambda: everyone)) == chain[1:]


def test_a_later_process_with_the_same_pid_is_spared():
    victim = subprocess.Popen(["sleep", "120"])
    known = process(victim.pid)
    send_signal(known._replace(start=known.start - 1), signal.SIGKILL)
    send_signal(known, signal.SIGTERM)
    assert victim.wait() == -signal.SIGTERM, "the first signal that it got"


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def victim() -> Iterator[subprocess.Popen]:
    """A process that prints a line for each TERM and URG, in this order, and ends by KILL alone."""
    program = "trap 'echo TERM' TERM; trap 'echo URG' URG; echo ready; while :; do sleep 0.01; done"
    popen = subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, text=True)
    assert popen.stdout.readline() == "ready\n"
    with popen:
        yield popen
        popen.kill()


def test_each_process_gets_one_sigterm_and_after_the_grace_sigkill(victim):
    ending = Ending("a mark", 0.0, 5.0, lambda mark, root: {victim.pid: process(victim.pid)})
    ending.look(0.0)
    assert victim.stdout.readline() == "TERM\n"
    for now in (1.0, 4.9):
        ending.look(now)
        victim.send_signal(signal.SIGURG)
        assert victim.stdout.readline() == "URG\n", "no other TERM"
    assert not ending.over
    ending.look(5.0)
    assert victim.wait(SILENCE) == -signal.SIGKILL


def test_the_end_needs_two_scans_without_processes(victim):
    """A process that forks and ends can be missed by one look: its child appears in the next."""
    found = [{}, {victim.pid: process(victim.pid)}, {}, {}]
    ending = Ending("a mark", 0.0, 5.0, lambda mark, root: found.pop(0))
    overs = []
    while found:
        ending.look(0.0)
        overs.append(ending.over)
    assert overs == [False, False, False, True] and ending.left == []
    assert victim.stdout.readline() == "TERM\n"
    without_a_job = Ending("", 0.0, 5.0, lambda mark, root: pytest.fail("it looked for the processes of any job"))
    for _ in range(2):
        without_a_job.look(0.0)
    assert without_a_job.left == []


def test_what_a_kill_does_not_end_is_left_after_some_seconds():
    """Such as a process that waits for a disk: nobody can end it."""
    stuck = {2**22 + 1: Process(2**22 + 1, 1, "D", 0)}
    ending = Ending("a mark", 0.0, 5.0, lambda mark, root: stuck)
    for now in (0.0, 5.0, 7.5):
        ending.look(now)
        assert not ending.over
    ending.look(5.0 + KILL_SECONDS)
    assert ending.left == [*stuck]


def test_the_interval_between_looks_grows_and_ends_at_the_kill():
    stuck = {2**22 + 1: Process(2**22 + 1, 1, "D", 0)}
    ending, now, waits = Ending("a mark", 0.0, 1.0, lambda mark, root: stuck), 0.0, []
    while now < 1.0:
        ending.look(now)
        waits.append(round(ending.look_at - now, 6))
        now = ending.look_at
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.2, 0.2, 0.2, 0.1]
    assert now == 1.0
    ending.look(now)
    assert ending.look_at == pytest.approx(1.02), "to see whether the kill has ended them"
    gone = Ending("a mark", 0.0, 1.0, lambda mark, root: {})
    gone.look(0.0)
    assert gone.look_at == 0.0, "the second look is at once"


@pytest.mark.parametrize(("grace", "killed_at"), [(0.0, 1.0), (60.0, 5.0)])
def test_a_second_request_can_only_shorten_the_grace(victim, grace, killed_at):
    ending = Ending("a mark", 0.0, 5.0, lambda mark, root: {victim.pid: process(victim.pid)})
    ending.shorten(1.0, grace)
    ending.look(killed_at)
    assert victim.wait(SILENCE) == -signal.SIGKILL


def test_the_agent_needs_nothing_but_the_standard_library():
    command, _ = channels.agent_command(sys.executable)
    flags = command[1 : command.index("-c")]
    bare = subprocess.run([sys.executable, *flags, "-c", "import dmltrain_launch"], capture_output=True, cwd="/")
    assert b"No module named 'dmltrain_launch'" in bare.stderr, "what the other tests run is only what was sent"
    assert sum(map(len, command)) < 1000, "its text is on its standard input"


# -- the launcher's session ------------------------------------------------------------------------------------------


def test_an_agent_that_cannot_start_is_lost_with_its_reason(tmp_path):
    supervisor = run_session(tmp_path, shell_script(tmp_path / "python", "echo 'out of luck' >&2; exit 9"))
    assert supervisor.exit_code == 125
    assert "the agent on here exited with 9: out of luck" in supervisor.cause.text


LIES = {  # what an agent sends; what of it is the reason for its loss
    "HEADER.pack(EVENT, NO_TASK, 0xFFFFFFFF)": "a frame of kind 2 with 4294967295 bytes",
    "HEADER.pack(OUTPUT, 7, 2) + b'hi'": "a report about task 7, which is not on here",
    "event(Exited('', 60000, 1))": "a report about task 60000, which is not on here",
    "event(Stopped('', (StoppedProcess(5, 1),)))": "a report about task 1, which is not on here",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_agent_is_lost_with_its_lie_as_the_reason(tmp_path, lie):
    source = f"""import os, sys
sys.path.insert(0, {os.getcwd()!r})
from dmltrain_launch.agent.protocol import EVENT, HEADER, HELLO, NO_TASK, OUTPUT, encode_event
from dmltrain_launch.agent.events import Exited, Stopped, StoppedProcess
event = lambda each: HEADER.pack(EVENT, NO_TASK, len(encode_event(each))) + encode_event(each)
os.write(1, HELLO + {lie})
sys.stdin.read()
"""
    supervisor = run_session(tmp_path, executable(tmp_path / "python", source))
    assert supervisor.exit_code == 125
    assert LIES[lie] in supervisor.cause.text, supervisor.cause.text


def test_tasks_that_do_not_fit_into_a_message_are_reported():
    class Unused:
        def write(self, data: bytes) -> None:
            raise AssertionError("it is too long")

    reports: queue.SimpleQueue = queue.SimpleQueue()
    connection = Connection("here", Unused(), 20.0, print, reports.put)
    connection.send(commands.Sync("x" * (5 << 20)))
    connection._write()
    lost = reports.get()
    assert isinstance(lost, Lost) and lost.host == "here"
    assert f"sync: it has {(5 << 20) + 24} bytes, expected at most {4 << 20}" in lost.reason


def test_an_answer_that_does_not_fit_into_a_message_is_refused():
    here, there = os.pipe()
    channel = Channel(selectors.DefaultSelector(), here, there)
    channel.send(Listing("", ({"command": ["x" * (5 << 20)]},)))
    assert len(channel.backlog) < 1000 and b"the agent on this host cannot answer: listing: it has " in channel.backlog
    os.close(here)
    os.close(there)


def waiting_agents(tmp_path: Path, events: object = None) -> tuple[Agents, Callable[..., None]]:
    """The agents of a session that does not run, and how an event of its host comes."""
    host = Host("here", "127.0.0.1")
    supervisor = Supervisor(Job("waits", "waits", ("true",), 1, 0, str(tmp_path)), [host], Limits(0.5))
    agents = Agents(supervisor, OneHost(), Intake(supervisor, None, events or queue.SimpleQueue()))

    def take(frames: Frames | None = None, event: object = None) -> None:
        payload = protocol.encode_event(event or Measured("", "h2", 5, 5))
        agents.intake.take(frames or agents.intake, "here", protocol.EVENT, protocol.NO_TASK, payload)

    return agents, take


def test_events_that_nobody_takes_are_few(tmp_path):
    agents, take = waiting_agents(tmp_path)

    def flood() -> None:
        for _ in range(EVENTS_AT_ONCE + 1):
            take()

    reader = threading.Thread(target=flood)
    reader.start()
    wait_for(lambda: agents.events.qsize() == EVENTS_AT_ONCE and waits(reader), "that it takes no more")
    assert reader.is_alive()
    agents.intake.closing = True
    reader.join(SECONDS)
    assert not reader.is_alive()


def test_a_report_of_another_process_than_a_scheduler_is_refused(tmp_path):
    agents, take = waiting_agents(tmp_path)
    attempt = agents.attempt
    attempt.starter = Starter(attempt.job, [*attempt.hosts.values()], Ports())
    with pytest.raises(protocol.ProtocolError, match="a report of task 0, which is no scheduler"):
        take(event=Reported("", 0, Slowest(0, 5.0)))


def test_an_event_that_is_written_at_once_is_confirmed(tmp_path):
    class Quick:
        """Its main thread is quicker than the thread that reads."""

        def put(self, item: NumberedEvent) -> None:
            item.stream.wrote(item.number)
            confirmed.append(item.stream.kept)

    agents, take = waiting_agents(tmp_path, Quick())
    frames = Keeping(agents, None, journal.Kept(tmp_path), lambda: 1)
    frames.streams["here"] = Stream()
    confirmed: list[int] = []
    take(frames)
    take(frames)
    assert confirmed == [1, 2]


class OneHost:
    """A cluster of this machine, by whatever Python the host says."""

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> LocalChannel:
        return LocalChannel(host, mark)


class BusyHost(OneHost):
    """It refuses some connections after the first one, as an sshd that has too many."""

    def __init__(self, refused: int):
        self.refused, self.asked = refused, 0

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> LocalChannel:
        self.asked += 1
        if 1 < self.asked < 2 + self.refused:
            raise LaunchError("Connection closed by 127.0.0.1 port 22", 125)
        return super().connect(host, mark, timeout)


def run_session(
    tmp_path: Path,
    python: str | Path,
    silence: float = 10.0,
    on_all_started=lambda: None,
    cluster: OneHost | None = None,
):
    """A job of one process on a host "here" with this interpreter, to its end."""
    job = Job("session", f"session-{os.getpid()}-{random.randrange(10**9)}", ("sleep", "600"), 1, 0, str(tmp_path))
    limits = Limits(grace=0.5, silence=silence, agent_silence=silence)
    supervisor = Supervisor(job, [Host("here", "127.0.0.1", str(python))], limits)
    output = Output(LogFolder(tmp_path / "logs"), ["worker-0"], Silent())
    Session(supervisor, cluster or OneHost(), output, on_all_started).run(tmp_path / "logs")
    output.close()
    return supervisor


def agents_beside(others: set[int]) -> list[int]:
    """The agents that are children of this process, but not `others`."""
    found = set(children(os.getpid())) - others
    return [pid for pid in found if b"dmltrain-agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("refused", [2, 3])
def test_three_attempts_are_made_to_replace_a_killed_agent(tmp_path, refused):
    before, cluster = set(children(os.getpid())), BusyHost(refused)
    killed: list[int] = []

    def kill() -> None:
        killed.extend(agents_beside(before))
        os.kill(killed[0], signal.SIGKILL)

    supervisor = run_session(tmp_path, sys.executable, on_all_started=kill, cluster=cluster)
    left = members(supervisor.job.mark, root=killed[0])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert supervisor.exit_code == 125 and "was killed by SIGKILL" in supervisor.cause.text
    assert cluster.asked == min(refused, 2) + 2
    assert supervisor.ending.left == {"here": None if refused > 2 else ()} and bool(left) == (refused > 2)


def test_a_frozen_agent_is_replaced(tmp_path):
    frozen: list[int] = []
    before, threads = set(children(os.getpid())), threading.active_count()

    def freeze() -> None:
        frozen.extend(agents_beside(before))
        os.kill(frozen[0], signal.SIGSTOP)

    supervisor = run_session(tmp_path, sys.executable, silence=4.0, on_all_started=freeze)
    assert supervisor.exit_code == 125
    assert supervisor.cause.text == f"the agent on here (pid {frozen[0]}) sent no heartbeat for 4 s"
    assert supervisor.ending.left == {"here": ()}
    assert members(supervisor.job.mark, root=frozen[0]) == {}
    assert threading.active_count() < threads + 10
