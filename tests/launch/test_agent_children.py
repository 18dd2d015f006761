"""An agent's processes and its end of the channel, without the agent's loop: real processes, pipes and selectors."""

import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launch.agent import Refusal
from launch.agent.channel import BACKLOG_BYTES, SILENCE_SECONDS, Channel, Incoming
from launch.agent.children import Child, Children
from launch.agent.commands import Beat, File, Spawn
from launch.agent.ending import Ending
from launch.agent.events import Alive
from launch.agent.process import Process, members, process, send_signal
from launch.agent.protocol import EVENT, HEADER, HELLO, ProtocolError
from launch.agent.spawn import spawn
from tests.descriptors import descriptors
from tests.launch.conftest import DEADLINE, wait_for
from tests.readable import readable, writable


class Bench:
    """The `children` of an agent whose launcher has read nothing yet."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.stdin, self.to_agent = os.pipe()
        self.from_agent, self.stdout = os.pipe()
        self.channel = Channel(self.selector, self.stdin, self.stdout)
        self.children = Children(self.selector, self.channel, 0.0)

    def start(self, script: str) -> Child:
        child = spawn(Spawn(0, ("sh", "-c", script), {}, "/"), os.environ, "here", None)
        self.children.add(child)
        return child

    def frames(self) -> list[bytes | dict]:
        """What is to be sent since the last call: output as bytes, and events."""
        data, found = bytes(self.channel.backlog).removeprefix(HELLO), []
        self.channel.backlog.clear()
        while data:
            kind, _, length = HEADER.unpack_from(data)
            payload, data = data[HEADER.size : HEADER.size + length], data[HEADER.size + length :]
            found.append(json.loads(payload) if kind == EVENT else payload)
        return found

    def sent(self) -> list[bytes | tuple]:
        """The same, with events as pairs of their name and their code."""
        return [each if isinstance(each, bytes) else (each["event"], each.get("code")) for each in self.frames()]

    def close(self) -> None:
        for child in self.children.by_pid.values():
            if child.popen.poll() is None:
                child.popen.kill()
                child.popen.wait()
        self.selector.close()
        for descriptor in (self.stdin, self.to_agent, self.from_agent, self.stdout):
            os.close(descriptor)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def ended(child: Child) -> None:
    """Wait for the process's exit, and leave it to be collected."""
    os.waitid(os.P_PID, child.popen.pid, os.WEXITED | os.WNOWAIT)


def watched(bench: Bench) -> set[int]:
    return set(bench.selector.get_map())


def test_the_end_of_a_job_collects_exits_and_output_that_nobody_has_looked_at(bench):
    over = bench.start("echo last words; exit 7")
    runs = bench.start("echo still here; exec sleep 120")
    ended(over)
    assert readable([runs.pipe], DEADLINE)
    bench.sent()
    bench.children.collect_all()
    assert bench.sent() == [b"last words\n", ("exited", 7), b"still here\n"]
    bench.children.collect_all()
    assert bench.sent() == [], "each of it once"


def test_a_process_that_exits_while_output_is_paused_is_reported_with_its_output(bench):
    child, other = bench.start("echo out"), bench.start("exec sleep 120")
    ended(child)
    bench.sent()
    bench.channel.send_output(9, bytes(BACKLOG_BYTES))
    bench.children.follow_backlog()
    assert child.pipe not in watched(bench) and other.pipe not in watched(bench)
    bench.sent()
    bench.children.collect(child)  # the launcher has read, but the agent has not looked at the backlog again
    assert bench.sent() == [b"out\n", ("exited", 0)]
    assert child.pipe is None
    bench.children.follow_backlog()
    assert other.pipe in watched(bench) and not bench.children.paused


def test_output_is_paused_above_a_backlog_and_resumes_below_half_of_it_also_that_of_who_starts_meanwhile(bench):
    child, late = bench.start("exec sleep 120"), None
    paused = []
    for size in (BACKLOG_BYTES, BACKLOG_BYTES + 1, BACKLOG_BYTES // 2, BACKLOG_BYTES // 2 - 1):
        bench.channel.backlog[:] = bytes(size)
        bench.children.follow_backlog()
        paused.append(child.pipe not in watched(bench))
        if paused[-1]:
            late = late or bench.start("exec sleep 120")
            assert late.pipe not in watched(bench)
    assert paused == [False, True, True, False] and late.pipe in watched(bench)


def test_an_exit_is_noticed_by_the_selector_and_a_pipe_that_all_have_closed_is_watched_no_more(bench):
    child, ends = bench.start("exec >&- 2>&-; exec sleep 120"), bench.start("exit 3")
    pipe = child.pipe
    assert readable([pipe], DEADLINE)
    ended(ends)

    def noticed() -> bool:
        for key, _ in bench.selector.select(DEADLINE):
            key.data()
        return child.pipe is None and ends.popen.returncode == 3

    wait_for(noticed, "the exit and the end of the pipe")
    assert ("exited", 3) in bench.sent() and not {pipe, ends.pidfd} & watched(bench)
    with pytest.raises(OSError):
        os.fstat(pipe)


def test_a_task_that_is_stopped_for_5_seconds_is_reported_at_every_look(bench):
    child = bench.start("exec sleep 120")
    bench.sent()

    def look(now: float) -> list[tuple]:
        bench.children.look_for_frozen(now)
        assert bench.children.look_at == now + 1.0
        return [(each["event"], each["task"], each["seconds"]) for each in bench.frames()]

    def signalled(number: int, stopped: bool) -> None:
        os.kill(child.popen.pid, number)
        wait_for(lambda: (process(child.popen.pid).state == "T") is stopped, "the signal to work")

    assert look(99.0) == []
    signalled(signal.SIGSTOP, True)
    assert look(100.0) == look(104.9) == []
    assert look(105.0) == [("frozen", 0, 5)] and look(106.6) == [("frozen", 0, 7)]
    signalled(signal.SIGCONT, False)
    assert look(107.0) == []
    signalled(signal.SIGSTOP, True)
    assert look(108.0) == look(112.0) == [], "that counts anew"
    child.popen.kill()
    child.popen.wait()
    assert look(120.0) == []


def test_the_task_of_a_process_is_that_of_its_nearest_ancestor(bench):
    child = bench.start("exec sleep 120")
    pid = child.popen.pid
    found = {each: Process(each, parent, "S", 0) for each, parent in ((pid, 1), (2, pid), (3, 2), (4, 1))}
    assert [bench.children.task_of(each, found) for each in (pid, 2, 3, 4, 5)] == [0, 0, 0, None, None]


def test_the_exit_of_a_process_is_reported_while_its_descendant_prints_without_end(bench):
    child = bench.start("yes & exit 3")
    ended(child)
    bench.children.collect(child)
    assert bench.sent()[-1] == ("exited", 3)
    os.killpg(child.popen.pid, signal.SIGKILL)


def test_neither_a_process_that_cannot_be_started_nor_a_signal_leaves_a_descriptor_open():
    before = descriptors()
    listener = socket.create_server(("127.0.0.1", 0))
    for task in (Spawn(0, ("no-such-program",), {}, "/"), Spawn(0, ("true",), {}, "/", script="none.py")):
        with pytest.raises(Refusal):
            spawn(task, os.environ, "here", listener if not task.script else None)
    with subprocess.Popen(["sleep", "120"]) as victim:
        for number in (signal.SIGURG, signal.SIGKILL):
            send_signal(process(victim.pid), number)
    send_signal(Process(victim.pid, 1, "S", 0), signal.SIGKILL)
    assert descriptors() <= before


# -- the end -------------------------------------------------------------------------------------------------------


PROGRAM = "import signal, time; signal.signal(signal.SIGABRT, signal.{}); print('up', flush=True); time.sleep(120)"


@pytest.mark.parametrize(("stopped", "handler"), [(False, "SIG_IGN"), (True, "SIG_DFL")])
def test_a_python_that_shall_print_its_stacks_writes_no_core_and_runs_if_it_was_stopped(stopped, handler):
    command = [sys.executable, "-c", PROGRAM.format(handler)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as python, subprocess.Popen(["sleep", "120"]) as other:
        assert python.stdout.readline() == b"up\n"
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.prlimit(python.pid, resource.RLIMIT_CORE, (hard, hard))
        if stopped:
            python.send_signal(signal.SIGSTOP)
            wait_for(lambda: process(python.pid).state == "T", "its stop")
        ending = Ending("a mark", 0.0, 5.0, lambda mark, root: {})
        found = {pid: process(pid) for pid in (python.pid, other.pid)}
        ending.dump(found)
        if stopped:
            assert python.wait(DEADLINE) == -signal.SIGABRT
        else:
            assert resource.prlimit(python.pid, resource.RLIMIT_CORE) == (0, 0)
        assert other.poll() is None, "it has no stacks to print"
        ending.terminate(found)
        assert other.wait(DEADLINE) == -signal.SIGTERM
        assert python.poll() == (-signal.SIGABRT if stopped else None), "it gets one signal only"
        python.kill()


def test_a_snapshot_of_processes_may_have_a_circle():
    everyone = {pid: Process(pid, parent, "S", 0) for pid, parent in ((11, 12), (12, 11), (13, 12))}
    assert sorted(members("no-such-mark", 12, lambda: everyone)) == [11, 13]


# -- the channel ---------------------------------------------------------------------------------------------------


def test_what_is_sent_is_written_when_the_launcher_can_take_it(bench):
    bench.channel.send(Alive("here"))
    bench.channel.watch_output()
    for key, _ in bench.selector.select(DEADLINE):
        key.data()
    written = os.read(bench.from_agent, 1000)
    assert written.startswith(HELLO)
    assert json.loads(written[len(HELLO) + HEADER.size :]) == {"event": "beat", "filler": ""}
    bench.channel.watch_output()
    assert bench.stdout not in watched(bench), "nothing is left"
    bench.channel.send_output(0, bytes(BACKLOG_BYTES))
    while not (blocked := len(bench.channel.backlog)) or writable(bench.stdout):
        bench.channel.write()
    bench.channel.write()
    assert len(bench.channel.backlog) == blocked and not bench.channel.lost, "a full pipe is no failure"


def test_a_launcher_that_reads_no_more_is_lost_and_nothing_more_is_kept_for_it():
    bench = Bench()
    bench.selector.register(bench.stdin, selectors.EVENT_READ, bench.channel.read)
    bench.channel.watch_output()
    os.close(bench.from_agent)
    bench.channel.write()
    reason = bench.channel.lost
    assert "Broken pipe" in reason and not bench.channel.backlog and not watched(bench)
    bench.channel.send(Alive("here"))
    bench.channel.lose("another reason")
    assert not bench.channel.backlog and bench.channel.lost == reason, "the first reason stays"
    bench.from_agent = os.dup(bench.stdin)
    bench.close()


def test_commands_and_the_bytes_of_files_are_told_apart_however_they_are_cut():
    incoming = Incoming()
    line = b'{"do": "file", "entry": 1, "bytes": 5}\n'
    incoming.feed(line[:10])
    assert list(incoming) == []
    incoming.feed(line[10:] + b"ab")
    assert list(incoming) == [File(1, 5), b"ab"]
    assert list(incoming) == []
    incoming.feed(b'c\ne{"do": "beat"}\n')
    assert list(incoming) == [b"c\ne", Beat()]
    incoming.feed(b'{"do": "file", "entry": 2, "bytes": 0}\n{"do": "beat"}\n')
    assert list(incoming) == [File(2, 0), Beat()]
    incoming.feed(b'\nnonsense\n{"do": "beat"}\n')
    for _ in range(2):
        with pytest.raises(ProtocolError):
            incoming.take()
    assert list(incoming) == [Beat()], "a line that is no command is passed over"


def test_silence_counts_from_the_last_byte(bench):
    heard = bench.channel.received_at
    assert bench.channel.deadline == heard + SILENCE_SECONDS
    bench.channel.read()
    assert bench.channel.received_at == heard and not bench.channel.lost, "nothing has come"
    os.write(bench.to_agent, b"x")
    bench.channel.read()
    assert bench.channel.received_at > heard and bench.channel.incoming.data == b"x"
    bench.channel.check_silence(bench.channel.deadline - 0.001)
    assert not bench.channel.lost
    bench.channel.check_silence(bench.channel.deadline)
    assert bench.channel.lost == "missed heartbeats from the launcher for 10 s"


def test_a_process_that_dies_at_once_when_it_is_asked_to_leave_is_reported(bench, monkeypatch):
    child, kill = bench.start("sleep 60"), os.kill

    def slowly(pid, number):
        kill(pid, number)
        wait_for(lambda: process(pid).state == "Z", "the process to die")

    monkeypatch.setattr(os, "kill", slowly)
    bench.children.ask_to_leave([child.task])
    bench.children.collect(child)
    assert bench.sent()[-1] == ("exited", -signal.SIGTERM)
    bench.children.ask_to_leave([child.task])
    bench.children.collect(child)
    assert bench.sent() == [], "it was reported, and its number may be another process's"
