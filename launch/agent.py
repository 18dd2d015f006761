"""The agent: the one program that runs on each host of a job, beside the job's processes.

Contract: standard library only, one file, Python 3.8 or later, because its text is sent down its own standard
input to hosts that have nothing installed. It knows nothing of roles or of training: it starts what it is told,
passes on what that prints, reports exits in the order they happened, and leaves no process behind.

Theory of operation. Standard input carries one JSON object per line from the launcher:
    {"do": "job", "mark", "host", "key", "bind": {...}, "silence", "grace", "log_folder"}     answered by `ready`
    {"do": "start", "unset": [names], "tasks": [{"task", "argv", "environment", "workdir", ...}]}  by `started`
    {"do": "stop", "grace": seconds}         TERM, after `grace` KILL, answered by `ended`; the agent then exits
    {"do": "beat"}                           the launcher lives; answered by `beat`
Standard output carries HELLO and then frames: kind (1 byte), task (2), length (4), payload. An OUTPUT frame is
what a process wrote, byte for byte; an EVENT frame is a JSON object with "event". When the output backs up, the
agent stops reading from the processes, so a process that prints too much slows itself and costs no memory.

The life line: when standard input ends or is silent for `silence` seconds, the agent does what `stop` does, and
writes its last line into <log_folder>/agent-<host>.log, as nobody else can.

Whose processes: everything that descends from the agent (it is a subreaper, so orphans stay below it), and
everything whose environment has DMLTRAIN_JOB=<mark>, with descendants: daemons and leavings of a killed agent.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

HELLO = b"\0dmltrain-agent 1\n"  # what comes before it on standard output is a login script's chatter
HEADER = struct.Struct("!BHI")  # kind, task, length of the payload in bytes
OUTPUT, EVENT = 1, 2
NO_TASK = 0xFFFF
READ_BYTES = 1 << 16  # a pipe's default capacity
BACKLOG_BYTES = 1 << 20  # unsent output above which the processes are no longer read
KILL_SECONDS = 3.0  # how long a killed process may take to vanish
FROZEN_SECONDS = 5.0  # how long a task may be stopped (state T)
FROZEN_LOOK_SECONDS = 1.0
LOOK_SECONDS = 0.02, 0.2  # first and longest time between two looks at what is left
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Process(NamedTuple):
    """One line of /proc/PID/stat: `start` (ticks since boot) tells a process from a later one with its pid."""

    pid: int
    parent: int
    state: str
    start: int


def process(pid: int) -> Process | None:
    """The process `pid` as /proc has it now; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command's name, in brackets, may hold anything
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]))


def living() -> dict[int, Process]:
    """All processes of this host that are not zombies."""
    found = (process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {each.pid: each for each in found if each is not None and each.state not in "ZX"}


def carries(pid: int, marks: tuple[bytes, ...]) -> bool:
    """Whether the process was started with one of `marks` (b"NAME=value") in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry in marks for entry in file.read().split(b"\0"))
    except OSError:  # gone, or another user's
        return False


def members(mark: str, root: int) -> dict[int, Process]:
    """The living processes of job `mark`: carriers of its mark, its other agents, and all below them and `root`."""
    everyone = living()
    marks = tuple(name + mark.encode() for name in (b"DMLTRAIN_JOB=", b"DMLTRAIN_AGENT="))
    children: dict[int, list[int]] = {}
    for each in everyone.values():
        children.setdefault(each.parent, []).append(each.pid)
    pending = [root] + [pid for pid in everyone if pid != root and carries(pid, marks)]
    found: set[int] = set()
    while pending:
        pid = pending.pop()
        if pid not in found:
            found.add(pid)
            pending.extend(children.get(pid, ()))
    return {pid: everyone[pid] for pid in found if pid != root and pid in everyone}


def send_signal(target: Process, number: int) -> None:
    """Signal `target`, and never a later process that got its pid (where the kernel has pidfds: 5.3)."""
    try:
        if not hasattr(os, "pidfd_open"):
            raise OSError(errno.ENOSYS, "no pidfds in this Python")
        descriptor = os.pidfd_open(target.pid)
        try:
            now = process(target.pid)
            if now is not None and now.start == target.start:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            os.kill(target.pid, number)
        # else it is gone, or another user's: then it stays and is reported as left


def become_subreaper() -> None:
    """Have orphaned descendants become this process's children; where that fails, the mark finds them."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def bound_socket(address: str, port: int) -> socket.socket:
    """A TCP socket bound to `address`:`port` that does not listen yet.

    SO_REUSEADDR lets a program that binds for itself with the same option (ps-lite's ZeroMQ, torch's TCPStore)
    have the port as long as nobody listens, while the kernel gives it to nobody who asks for any free port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((address, port))
    except OSError:
        held.close()
        raise
    return held


class Refusal(Exception):
    """What was asked cannot be done here; `code` is the exit code it asks of the launcher."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def spawn_refusal(error: OSError, argv: list[str], workdir: str, host: str) -> Refusal:
    """Say why `argv` could not be started, with the code a shell gives: 127 not found, 126 not executable."""
    name = argv[0]
    if os.path.isdir(os.path.join(workdir, name)):
        return Refusal(f"{name} is a folder on {host}, not a program", 126)
    if isinstance(error, FileNotFoundError) and error.filename == workdir and not os.path.isdir(workdir):
        return Refusal(f"the working directory {workdir} does not exist on {host}", 127)
    if isinstance(error, FileNotFoundError):
        if os.path.exists(os.path.join(workdir, name)) and "/" in name:
            return Refusal(f"the interpreter in the first line (#!) of {name} was not found on {host}", 127)
        where = "" if "/" in name else " in PATH"
        cure = "; a bare script.py is run by the launcher's own Python" if name.startswith("python") else ""
        message = f"program {name} not found{where} on {host} (working directory {workdir}){cure}"
        return Refusal(message, 127)
    if isinstance(error, PermissionError):
        return Refusal(f"program {name} is not executable on {host}: chmod +x {name}", 126)
    cure = "; does its first line lack #! and an interpreter?" if error.errno == errno.ENOEXEC else ""
    return Refusal(f"program {name} cannot be run on {host}: {error.strerror or error}{cure}", 126)


class Child:
    """A process the agent started: its number in the job, its pipe (None once ended) and how to hear of its end."""

    def __init__(self, task: int, popen: subprocess.Popen, pipe: int):
        self.task, self.popen = task, popen
        self.pipe: int | None = pipe
        self.frozen_since: float | None = None  # when it was first seen stopped
        os.set_blocking(pipe, False)
        try:
            self.pidfd = os.pidfd_open(popen.pid)
        except (AttributeError, OSError):
            self.pidfd = -1  # found by SIGCHLD alone


class RunFolder:
    """The private folder (0700) of one job on this host; it holds the job's key in a file of mode 0600."""

    def __init__(self, mark: str):
        self.prefix = f"dmltrain-{mark}."
        self.key_file = ""

    def create(self, key: str) -> None:
        try:
            folder = tempfile.mkdtemp(prefix=self.prefix)
            self.key_file = os.path.join(folder, "key")
            with open(os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(key)
        except OSError as error:
            self.remove()
            message = f"cannot write the job's private folder in {tempfile.gettempdir()}: {error.strerror}"
            raise Refusal(message, 125) from None

    def remove(self) -> None:
        """Remove the job's folders, those of a killed agent too."""
        folder = tempfile.gettempdir()
        for name in os.listdir(folder):
            if name.startswith(self.prefix):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


class Ending:
    """The end of a job on this host: TERM to every process, KILL after `grace` seconds, until none is left.

    Call `look` at `look_at`; it is over once `left` (pids) is not None.
    """

    def __init__(self, mark: str, now: float, grace: float):
        self.mark = mark
        self.asked: set[tuple[int, int]] = set()  # (pid, start)
        self.kill_at = now + grace
        self.look_at, self.pause = now, LOOK_SECONDS[0]
        self.empty_looks = 0
        self.left: list[int] | None = None

    @property
    def over(self) -> bool:
        return self.left is not None

    def sooner(self, now: float, grace: float) -> None:
        self.kill_at = min(self.kill_at, now + grace)
        self.look_at = now

    def members(self) -> dict[int, Process]:
        return members(self.mark, os.getpid()) if self.mark else {}

    def look(self, now: float) -> None:
        """See who is left, and do what the hour asks."""
        found = self.members()
        self.empty_looks = 0 if found else self.empty_looks + 1
        if self.empty_looks >= 2 or now >= self.kill_at + KILL_SECONDS:  # twice, as a fork can slip past one look
            self.left = sorted(found)
        elif now >= self.kill_at:
            for each in found.values():
                send_signal(each, signal.SIGKILL)
        else:
            self.ask(found)
        self.look_at = min(now + self.pause, max(now + LOOK_SECONDS[0], self.kill_at)) if found else now
        self.pause = min(2 * self.pause, LOOK_SECONDS[1])

    def ask(self, found: dict[int, Process]) -> None:
        for each in found.values():
            if (each.pid, each.start) not in self.asked:
                self.asked.add((each.pid, each.start))
                send_signal(each, signal.SIGTERM)
            if each.state == "T":
                send_signal(each, signal.SIGCONT)  # a stopped process hears TERM only when it runs again


class Agent:
    """One host's part of one job. `serve` runs it from the first message to its end."""

    def __init__(self, stdin: int = 0, stdout: int = 1):
        self.stdin, self.stdout = stdin, stdout
        self.incoming, self.backlog = bytearray(), bytearray(HELLO)
        self.selector = selectors.DefaultSelector()  # epoll: hands out events in the order they happened
        self.children: dict[int, Child] = {}  # by pid
        self.sockets: dict[str, socket.socket] = {}  # by purpose, held so that nobody else gets their ports
        self.host, self.mark, self.grace, self.silence = "this host", "", 5.0, 10.0
        self.log_folder: str | None = None
        self.folder: RunFolder | None = None
        self.heard = time.monotonic()
        self.look_for_frozen_at = self.heard
        self.paused = False
        self.lost = ""  # why the launcher is thought to be gone
        self.ending: Ending | None = None
        self.zombies = False
        self.signalled = 0

    # -- the loop ------------------------------------------------------------------------------------------------

    def serve(self) -> str:
        """Serve one job to its end; why the launcher was given up, or ""."""
        self._watch_signals()
        for descriptor in (self.stdin, self.stdout):
            os.set_blocking(descriptor, False)
        self.selector.register(self.stdin, selectors.EVENT_READ, lambda: self._read_messages())
        while not (self.ending and self.ending.over and (self.lost or not self.backlog)):
            self._watch_output()
            for key, _ in self.selector.select(self._patience(time.monotonic())):
                key.data()
            self._reap()
            self._tend(time.monotonic())
        if self.lost and self.log_folder:
            self._write_last_line(self.log_folder, self.ending.left or [])
        return self.lost

    def _watch_signals(self) -> None:
        wake, self.waker = os.pipe()
        for descriptor in (wake, self.waker):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: setattr(self, "zombies", True))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: setattr(self, "signalled", number))
        self.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, READ_BYTES))

    def _patience(self, now: float) -> float:
        """Seconds until something has to be done without an event."""
        if self.ending and self.lost:
            return max(0.0, self.ending.look_at - now)
        due = self.heard + self.silence
        if self.ending and not self.ending.over:
            due = min(due, self.ending.look_at)
        if self.children and not self.ending:
            due = min(due, self.look_for_frozen_at)
        return max(0.0, due - now)

    def _tend(self, now: float) -> None:
        if self.signalled:
            told = signal.Signals(self.signalled).name
            self.signalled = 0
            self.emit("refused", message=f"the agent on {self.host} was ended by {told}", code=125)
            self.stop(self.grace)
        if not self.lost and now - self.heard >= self.silence:
            self._lose(f"no word from the launcher for {self.silence:g} s")
        if self.ending and not self.ending.over and now >= self.ending.look_at:
            self.ending.look(now)
            if self.ending.left is not None:
                self._finish(self.ending.left)
        if not self.ending and now >= self.look_for_frozen_at:
            self.look_for_frozen_at = now + FROZEN_LOOK_SECONDS
            self._report_frozen(now)

    def _report_frozen(self, now: float) -> None:
        """A task that is stopped for FROZEN_SECONDS is a failure: nobody else may know that it exists yet, or still."""
        for child in self.children.values():
            found = process(child.popen.pid) if child.popen.returncode is None else None
            if found is None or found.state != "T":
                child.frozen_since = None
            elif child.frozen_since is None:
                child.frozen_since = now
            elif now - child.frozen_since >= FROZEN_SECONDS:
                self.emit("frozen", task=child.task, seconds=round(now - child.frozen_since))

    def _lose(self, why: str) -> None:
        """The launcher is gone: nobody reads any more, so end everything alone."""
        if self.lost:
            return
        self.lost = why
        self.backlog.clear()
        for descriptor in (self.stdin, self.stdout):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
        self._resume()
        self.stop(self.grace)

    # -- the channel ---------------------------------------------------------------------------------------------

    def _read_messages(self) -> None:
        try:
            data = os.read(self.stdin, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            return self._lose("the launcher's end of the channel closed")
        self.heard = time.monotonic()
        self.incoming += data
        *lines, rest = self.incoming.split(b"\n")
        self.incoming = bytearray(rest)
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, message: dict) -> None:
        try:
            if message["do"] == "job":
                self.prepare(message)
            elif message["do"] == "start":
                self.start(message)
            elif message["do"] == "stop":
                self.stop(message["grace"])
            elif message["do"] == "beat" and not self.backlog:  # what is under way says that we live
                self.emit("beat")
        except Refusal as refusal:
            self.emit("refused", message=str(refusal), code=refusal.code)

    def emit(self, event: str, **facts) -> None:
        self._send(EVENT, NO_TASK, json.dumps(dict(facts, event=event)).encode())

    def _send(self, kind: int, task: int, payload: bytes) -> None:
        if not self.lost:
            self.backlog += HEADER.pack(kind, task, len(payload))
            self.backlog += payload

    def _watch_output(self) -> None:
        """Write when there is something to write; stop reading the processes while too much is unwritten."""
        watched = self.stdout in self.selector.get_map()
        if self.backlog and not watched:
            self.selector.register(self.stdout, selectors.EVENT_WRITE, lambda: self._write())
        elif watched and not self.backlog:
            self.selector.unregister(self.stdout)
        if not self.paused and len(self.backlog) > BACKLOG_BYTES:
            self.paused = True
            for child in self.children.values():
                if child.pipe is not None:
                    self.selector.unregister(child.pipe)
        elif self.paused and len(self.backlog) < BACKLOG_BYTES // 2:
            self._resume()

    def _resume(self) -> None:
        if self.paused:
            self.paused = False
            for child in self.children.values():
                self._listen_to(child)

    def _write(self) -> None:
        try:
            with memoryview(self.backlog) as view:
                written = os.write(self.stdout, view[:BACKLOG_BYTES])
            del self.backlog[:written]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(f"the launcher reads no more ({error.strerror})")

    # -- the job -------------------------------------------------------------------------------------------------

    def prepare(self, job: dict) -> None:
        """Make the job's private folder and its ports; answers `ready`."""
        self.mark, self.host = job["mark"], job["host"]
        self.grace, self.silence, self.log_folder = job["grace"], job["silence"], job.get("log_folder")
        self.folder = RunFolder(self.mark)
        if job.get("key"):
            self.folder.create(job["key"])
        bind = job.get("bind") or {}
        for purpose in {"scheduler", "master"} & set(bind):
            self.sockets[purpose] = self._bind(bind["address"], bind[purpose])
        ports = {purpose: held.getsockname()[1] for purpose, held in self.sockets.items()}
        self.emit("ready", pid=os.getpid(), cores=len(os.sched_getaffinity(0)), ports=ports)

    def _bind(self, address: str, port: int) -> socket.socket:
        try:
            return bound_socket(address, port)
        except OSError as error:
            what = f"port {port} of {address}" if port else f"a port of {address}"
            cure = "choose another with --port, or leave --port out to get a free one"
            message = f"{what} on {self.host} cannot be had: {error.strerror}; {cure}"
            raise Refusal(message, 2) from None

    def start(self, message: dict) -> None:
        """Start the tasks, in order; answers one `started` each."""
        base = {name: value for name, value in os.environ.items() if name not in message["unset"]}
        base["DMLTRAIN_KEY_FILE"] = self.folder.key_file if self.folder else ""
        for task in message["tasks"]:
            if self.ending:
                return
            child = self._spawn(task, base)
            self.children[child.popen.pid] = child
            self.emit("started", task=child.task, pid=child.popen.pid)
            self._listen_to(child)
            if child.pidfd >= 0:
                self.selector.register(child.pidfd, selectors.EVENT_READ, lambda child=child: self._collect(child))

    def _spawn(self, task: dict, base: dict) -> Child:
        argv, workdir, script = task["argv"], task["workdir"], task.get("script")
        if script and not os.path.isfile(os.path.join(workdir, script)):
            raise Refusal(f"script {script} not found on {self.host} (working directory {workdir})", 127)
        environment = dict(base, **task["environment"])
        listener = self.sockets.pop("scheduler", None) if task.get("listens") else None
        if listener is not None:
            environment["DMLTRAIN_LISTEN_FD"] = str(listener.fileno())
        pipe, printed = os.pipe()
        try:
            popen = subprocess.Popen(
                argv,
                cwd=workdir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
                pass_fds=[listener.fileno()] if listener is not None else [],
            )
            return Child(task["task"], popen, pipe)
        except (OSError, ValueError) as error:
            os.close(pipe)
            known = error if isinstance(error, OSError) else OSError(0, str(error))
            raise spawn_refusal(known, argv, workdir, self.host) from None
        finally:
            os.close(printed)
            if listener is not None:  # a copy kept open would answer for a dead scheduler
                listener.close()

    def _listen_to(self, child: Child) -> None:
        if child.pipe is not None and not self.paused and child.pipe not in self.selector.get_map():
            self.selector.register(child.pipe, selectors.EVENT_READ, lambda: self._pass_on(child))

    def _pass_on(self, child: Child) -> int:
        """Pass on what the process printed, at most READ_BYTES; how much it was."""
        if child.pipe is None:
            return 0
        try:
            data = os.read(child.pipe, READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._send(OUTPUT, child.task, data)
        else:  # every writer has closed: stop watching, or epoll would report it for ever
            if child.pipe in self.selector.get_map():
                self.selector.unregister(child.pipe)
            os.close(child.pipe)
            child.pipe = None
        return len(data)

    def _drain(self, child: Child) -> None:
        """Pass on what is in the pipe now; bounded, as descendants may still be writing."""
        left = 2 * READ_BYTES
        while left > 0:
            count = self._pass_on(child)
            if not count:
                return
            left -= count

    def _collect(self, child: Child) -> None:
        """Report the end of a process, after the last it printed."""
        if child.popen.returncode is None and child.popen.poll() is not None:
            if child.pidfd >= 0:
                self.selector.unregister(child.pidfd)
                os.close(child.pidfd)
            self._drain(child)
            self.emit("exited", task=child.task, code=child.popen.returncode)
            self.zombies = True

    def _reap(self) -> None:
        """Collect adopted orphans; never a child of ours before its own turn, which keeps the order of ends."""
        if not self.zombies:
            return
        self.zombies = False
        if self.ending:
            self.ending.look_at = min(self.ending.look_at, time.monotonic() + LOOK_SECONDS[0])
        for child in self.children.values():
            if child.pidfd < 0:
                self._collect(child)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            ours = self.children.get(ended.si_pid)
            if ours and ours.popen.returncode is None:
                return
            os.waitpid(ended.si_pid, 0)

    # -- the end -------------------------------------------------------------------------------------------------

    def stop(self, grace: float) -> None:
        """End every process of the job; a second call can only make it sooner."""
        now = time.monotonic()
        if self.ending:
            return self.ending.sooner(now, grace)
        self.ending = Ending(self.mark, now, grace)
        found = self.ending.members()
        stopped = [each.pid for each in found.values() if each.state in "Tt"]
        if stopped:
            self.emit("stopped", processes=[{"pid": pid, "task": self._task_of(pid, found)} for pid in stopped])
        self.ending.ask(found)

    def _task_of(self, pid: int, found: dict[int, Process]) -> int | None:
        """The task that is `pid` or its ancestor."""
        while pid in found:
            if pid in self.children:
                return self.children[pid].task
            pid = found[pid].parent
        return None

    def _finish(self, left: list[int]) -> None:
        for child in self.children.values():
            self._collect(child)
            self._drain(child)
        for held in self.sockets.values():
            held.close()
        if self.folder:
            self.folder.remove()
        self.emit("ended", left=left)

    def _write_last_line(self, folder: str, left: list[int]) -> None:
        """What the launcher would have said, were it alive."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        pids = ": " + ", ".join(f"pid {pid} on {self.host}" for pid in left) if left else ""
        with contextlib.suppress(OSError), open(os.path.join(folder, f"agent-{self.host}.log"), "a") as file:
            file.write(f"{stamp} agent on {self.host} (pid {os.getpid()}): {self.lost}; ended the job\n")
            file.write(f"{len(left)} process{'' if len(left) == 1 else 'es'} left on 1 host{pids}\n")


def main() -> None:
    os.environ.pop("DMLTRAIN_AGENT", None)  # ours alone; what we start does not inherit it
    become_subreaper()
    sys.exit(Agent().serve() or 0)  # words go to standard error: a launcher that was only frozen may yet read them


if __name__ == "__main__":
    main()
