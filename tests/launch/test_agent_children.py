"""Parts of an agent without its loop: processes, its end of the channel, and what it keeps for the next launcher."""

import json
import os
import random
import resource
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.alone.attach import Lease
from dmltrain_launch.agent.alone.spool import MOST_BYTES, LeftSpool, Spool
from dmltrain_launch.agent.channel import BACKLOG_BYTES, SILENCE_SECONDS, UNCONFIRMED_BYTES, Channel
from dmltrain_launch.agent.children import Child, Children
from dmltrain_launch.agent.commands import Beat, File, Spawn
from dmltrain_launch.agent.ending import Ending
from dmltrain_launch.agent.events import Alive
from dmltrain_launch.agent.incoming import Incoming
from dmltrain_launch.agent.process import Process, members, process, send_signal
from dmltrain_launch.agent.protocol import EVENT, HEADER, HELLO, NO_TASK, OUTPUT, ProtocolError
from dmltrain_launch.agent.spawn import spawn
from dmltrain_launch.run.journal import Kept
from dmltrain_launch.run.stream import Stream
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
        return [frame if isinstance(frame, bytes) else (frame["event"], frame.get("code")) for frame in self.frames()]

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
        return [(frame["event"], frame["task"], frame["seconds"]) for frame in bench.frames()]

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


# -- what is kept for the next launcher: random schedules --------------------------------------------------------------


class Killed(Exception):
    pass


def private(folder: Path) -> str:
    folder.mkdir(0o700)
    return str(folder)


def split(data: bytes) -> tuple[list[tuple[int, int, bytes]], bytes]:
    """Whole frames (kind, task, content), and what is left."""
    found = []
    while len(data) >= HEADER.size:
        kind, task, length = HEADER.unpack_from(data)
        if len(data) < HEADER.size + length:
            break
        found.append((kind, task, data[HEADER.size : HEADER.size + length]))
        data = data[HEADER.size + length :]
    return found, data


class Launcher:
    """Reads frames as a launcher does: output to a log, then its mark; events to a queue, then to the journal. It is
    killed at a random one of these steps. What is on disk is given to the next one."""

    def __init__(self, folder: Path, chance: random.Random, disk: dict, deadly: bool):
        self.chance, self.disk, self.deadly = chance, disk, deadly
        self.kept = Kept(folder)
        self.stream = Stream(disk["seen"])
        self.queue: list[tuple[int, bytes]] = []
        self.data = b""
        for task, log in disk["logs"].items():
            del log[self.kept.size([task]) :]

    def step(self) -> None:
        if self.deadly and self.chance.random() < 0.02:
            raise Killed

    def feed(self, data: bytes) -> None:
        self.data += data
        whole, self.data = split(self.data)
        for frame in whole:
            self.take(*frame)

    def take(self, kind: int, task: int, payload: bytes) -> None:
        number = self.stream.begin()
        self.step()
        if kind == EVENT:
            if self.stream.is_new(number):
                self.stream.end()
                self.queue.append((number, payload))
        elif number > self.kept.frame(task):
            log = self.disk["logs"].setdefault(task, bytearray())
            for half in (payload[: len(payload) // 2], payload[len(payload) // 2 :]):
                log += half
                self.step()
            self.kept.put(task, number, len(log))
        self.step()
        self.stream.end()

    def handle(self, most: int) -> None:
        for _ in range(min(most, len(self.queue))):
            number, payload = self.queue.pop(0)
            self.step()
            self.disk["seen"] = number
            self.disk["journal"].append(payload)
            self.step()
            self.stream.wrote(number)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_doubled_whenever_launchers_are_killed(tmp_path, seed):
    chance = random.Random(seed)
    spool = Spool(private(tmp_path / "spool"), segment=chance.choice([1, 100, 1000]))
    disk = {"seen": 0, "journal": [], "logs": {}}
    sent: dict[int, bytes] = {0: b"", 1: b""}
    events: list[bytes] = []

    def attach(deadly: bool = True) -> Launcher:
        made = Launcher(tmp_path, chance, disk, deadly)
        spool.rewind()
        made.stream.resume(spool.first, spool.last)
        return made

    launcher = Launcher(tmp_path, chance, disk, True)
    for _ in range(400):
        if chance.random() < 0.3:
            events.append(b"event %d" % len(events))
            spool.append(EVENT, NO_TASK, events[-1])
        else:
            task, data = chance.randrange(2), bytes(chance.choices(b"abc\n", k=chance.randrange(1, 60)))
            sent[task] += data
            spool.append(OUTPUT, task, data)
        try:
            if chance.random() < 0.7:
                launcher.feed(spool.read(chance.choice([1, 50, 500])))
            launcher.handle(chance.randrange(3))
            if chance.random() < 0.2:
                spool.confirm(launcher.stream.kept)
        except Killed:
            launcher = attach()
        if chance.random() < 0.02:  # only the connection is lost
            launcher.data = b""
            spool.rewind()
            launcher.stream.resume(spool.first, spool.last)
    if chance.random() < 0.5:  # the agent ends before the last launcher comes
        spool.close()
        spool = LeftSpool(spool.folder)
    launcher = attach(deadly=False)
    while data := spool.read(100):
        launcher.feed(data)
    launcher.handle(len(launcher.queue))
    assert disk["journal"] == events
    logs = {task: bytes(log) for task, log in disk["logs"].items()}
    assert logs == {task: each for task, each in sent.items() if each}
    assert launcher.stream.kept == spool.last
    spool.confirm(launcher.stream.kept)
    spool.close()
    assert not Path(spool.folder).exists()


def test_of_all_launchers_the_last_one_has_the_agent():
    for seed in range(200):
        chance, lease, holder = random.Random(seed), Lease(), 0
        for _ in range(20):
            number = chance.randrange(1, 12)
            taken = lease.take(number)
            assert taken == (number > holder)
            holder = number if taken else holder


def frames(spool: Spool) -> list[tuple[int, int, bytes]]:
    return split(b"".join(iter(lambda: spool.read(1), b"")))[0]


def test_above_its_limit_output_is_left_out_and_counted(tmp_path):
    spool = Spool(private(tmp_path / "spool"), most=1000, segment=100, share=0)
    for _ in range(20):
        spool.append(OUTPUT, 0, b"x" * 100)
    spool.append(EVENT, NO_TASK, b"event")
    spool.rewind()
    *output, event, note = frames(spool)
    assert len(output) == 9 and event == (EVENT, NO_TASK, b"event")
    assert note[:2] == (OUTPUT, 0) and b"1100 bytes of output are missing here" in note[2]
    spool.confirm(9)
    spool.append(OUTPUT, 0, b"again")
    assert frames(spool) == [(OUTPUT, 0, b"again")]


def test_a_process_that_prints_much_takes_nothing_of_the_others_share(tmp_path):
    spool = Spool(private(tmp_path / "spool"), most=1000, segment=100, share=300)
    for _ in range(50):
        spool.append(OUTPUT, 0, b"x" * 100)
    for _ in range(5):
        spool.append(OUTPUT, 1, b"y" * 93)
    spool.rewind()
    found = frames(spool)
    assert [each[1] for each in found].count(1) == 4 and found[-1][:2] == (OUTPUT, 1), "three lines, and a note"
    assert b"186 bytes of output are missing here: no launcher was attached" in found[-1][2]


def test_whatever_is_left_out_all_reports_of_a_scheduler_are_kept_in_order(bench, tmp_path):
    bench.channel.spool = spool = Spool(private(tmp_path / "spool"), most=3000, segment=500, share=200)
    program = """if True:
        import os, socket
        agent = socket.socket(fileno=int(os.environ["DMLTRAIN_AGENT_FD"]))
        for view in range(500):
            print("x" * 100, flush=True)
            agent.send(b'{"op": "view", "view": %d, "workers": []}' % view)"""
    task = Spawn(7, (sys.executable, "-c", program), {}, "/", listens=True)
    bench.children.add(spawn(task, os.environ, "here", None))
    events: list[dict] = []
    while not events or events[-1]["event"] != "exited":
        for key, _ in bench.selector.select(DEADLINE):
            key.data()
        spool.rewind()
        found = frames(spool)
        events = [json.loads(payload) for kind, _, payload in found if kind == EVENT]
    assert [(each["task"], each["report"]["view"]) for each in events[1:-1]] == [(7, view) for view in range(500)]
    printed = b"".join(payload for kind, _, payload in found if kind == OUTPUT)
    assert len(printed) < 10_000 and b"bytes of output are missing here" in printed


def test_processes_wait_while_a_launcher_has_not_kept_what_it_was_sent(bench, tmp_path):
    """All has been sent, so nothing is unread; but the launcher has not confirmed it."""
    bench.channel.spool = spool = Spool(private(tmp_path / "spool"))
    while not bench.channel.full:
        assert spool.bytes <= UNCONFIRMED_BYTES
        bench.channel.send_output(0, b"x" * 60_000)
        spool.read(1 << 20)
    while bench.channel.unsent and spool.read(1 << 20):
        pass
    assert bench.channel.full and not bench.channel.has_room and spool.bytes < MOST_BYTES // 2
    spool.confirm(spool.last)
    assert bench.channel.has_room and not bench.channel.full
    bench.channel.attached = False
    for _ in range(300):
        bench.channel.send_output(0, b"x" * 60_000)
    assert not bench.channel.full, "without a launcher processes go on"


def test_events_are_kept_without_room_on_the_disk(tmp_path, monkeypatch):
    spool = Spool(private(tmp_path / "spool"))
    spool.append(OUTPUT, 0, b"before")
    (tmp_path / "spool").rename(tmp_path / "away")
    spool.append(OUTPUT, 0, b"12345")
    spool.append(EVENT, NO_TASK, b"one")
    spool.append(EVENT, NO_TASK, b"two")
    (tmp_path / "away").rename(tmp_path / "spool")
    spool.append(OUTPUT, 0, b"after")
    first, one, two, note, last = frames(spool)
    assert (first[2], one[2], two[2], last[2]) == (b"before", b"one", b"two", b"after")
    assert b"5 bytes of output are missing here" in note[2] and b"no room" in note[2]


def test_a_part_of_a_frame_that_a_killed_agent_wrote_is_left_out(tmp_path):
    spool = Spool(private(tmp_path / "spool"))
    spool.append(OUTPUT, 0, b"whole")
    (file,) = (tmp_path / "spool").iterdir()
    with file.open("ab") as more:
        more.write(HEADER.pack(OUTPUT, 0, 100) + b"part")
    left = LeftSpool(str(tmp_path / "spool"))
    assert (left.first, left.last, frames(left)) == (1, 1, [(OUTPUT, 0, b"whole")])
