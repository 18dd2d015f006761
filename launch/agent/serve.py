"""The agent's loop; its protocol is in `launch.agent`."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from launch.agent import EVENT, HEADER, HELLO, NO_TASK, OUTPUT, Refusal, cores
from launch.agent.ending import LOOK_SECONDS, Ending
from launch.agent.listing import rows
from launch.agent.probe import Probe
from launch.agent.process import Process, become_subreaper, process
from launch.agent.reach import Reach
from launch.agent.receive import Incoming, Receiver
from launch.agent.spawn import Child, RunFolder, bound_socket, environment_here, limit_memory, reached_at, spawn_refusal
from launch.agent.throughput import Throughput

READ_BYTES = 1 << 16  # a pipe's default capacity
BACKLOG_BYTES = 1 << 20  # unsent output above which the processes are no longer read
FROZEN_SECONDS = 5.0  # how long a task may be stopped (state T)
FROZEN_LOOK_SECONDS = 1.0


class Agent:
    """One host's part of one job. `serve` runs it from the first message to its end."""

    def __init__(self, stdin: int = 0, stdout: int = 1):
        self.stdin, self.stdout = stdin, stdout
        self.incoming, self.backlog = Incoming(), bytearray(HELLO)
        self.selector = selectors.DefaultSelector()  # epoll: hands out events in the order they happened
        self.children: dict[int, Child] = {}  # by pid
        self.sockets: dict[str, socket.socket] = {}  # by purpose, held so that nobody else gets their ports
        self.host, self.mark, self.grace, self.silence = "this host", "", 5.0, 10.0
        self.log_folder: str | None = None
        self.folder: RunFolder | None = None
        self.key = ""
        self.probe: Probe | None = None
        self.reach: Reach | None = None
        self.reached = False
        self.throughput: Throughput | None = None
        self.receiver: Receiver | None = None
        self.receiving = False  # whether it has work without a message
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
        if self.receiving:
            return 0.0
        due = self.heard + self.silence
        if self.ending and not self.ending.over:
            due = min(due, self.ending.look_at)
        if self.children and not self.ending:
            due = min(due, self.look_for_frozen_at)
        due = min([due, *(each.deadline for each in (self.probe, self.reach, self.throughput) if each)])
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
        self._poll_probe()
        self._poll_reach()
        self._poll_throughput()
        if self.receiving and self.receiver:
            self.receiving = self.receiver.step()
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
        for piece in self.incoming.feed(data):
            if isinstance(piece, dict):
                self._obey(piece)
            elif self.receiver:  # bytes of a file that is being copied here
                self.receiver.take(piece)

    def _obey(self, message: dict) -> None:
        try:
            if message["do"] == "job":
                self.prepare(message)
            elif message["do"] == "probe":
                self.examine(message["request"])
            elif message["do"] == "list":
                self.emit("listing", rows=rows(message["mark"]))
            elif message["do"] in ("sync", "file"):
                self.receive(message)
            elif message["do"] == "bind":
                self.bind(message)
            elif message["do"] == "reach" and self.reach:
                self.reach.begin(message["peers"])
                self._poll_reach()
            elif message["do"] == "measure" and self.throughput:
                self.throughput.begin(*message["peer"])
                self._poll_throughput()
            elif message["do"] == "start":
                self.start(message)
            elif message["do"] == "stop":
                self.stop(message["grace"], message.get("dump", False))
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
        """Make the job's private folder; answers `ready`."""
        self.mark, self.host = job["mark"], job["host"]
        self.grace, self.silence, self.log_folder = job["grace"], job["silence"], job.get("log_folder")
        self.folder, self.key = RunFolder(self.mark), job.get("key") or ""
        if self.key:
            self.folder.create(self.key)
        machine = cores.report()
        self.emit("ready", pid=os.getpid(), cores=cores.usable(machine), python=sys.executable, reached=reached_at(),
                  machine=machine)  # fmt: skip

    def bind(self, wanted: dict) -> None:
        """Hold the ports that the job needs here; answers `bound`."""
        for purpose in {"scheduler", "master"} & set(wanted):
            self.sockets[purpose] = self._bind(wanted["address"], wanted[purpose])
        ports = {purpose: held.getsockname()[1] for purpose, held in self.sockets.items()}
        if wanted.get("reach"):
            self.reach = self._answering(Reach, wanted["address"], self._poll_reach)
            ports["reach"] = self.reach.port
        if wanted.get("throughput"):
            self.throughput = self._answering(Throughput, wanted["address"], self._poll_throughput)
            ports["throughput"] = self.throughput.port
        self.emit("bound", ports=ports)

    def _answering(self, kind: type, address: str, poll: Callable[[], None]) -> Reach | Throughput:
        """What answers the other agents from now on."""
        try:
            made = kind(address, self.key, self.host)
        except OSError as error:
            raise Refusal(f"{address} on {self.host} cannot be listened at: {error.strerror}", 2) from None
        self.selector.register(made, selectors.EVENT_READ, poll)
        return made

    def _poll_reach(self) -> None:
        peers = self.reach.poll() if self.reach else None
        if peers is not None and not self.reached:
            self.reached = True
            self.emit("reached", peers=peers)

    def _poll_throughput(self) -> None:
        found = self.throughput.poll() if self.throughput else None
        if found is not None:
            self.emit("measured", **found)

    def receive(self, message: dict) -> None:
        """Take in the launcher's working directory: see `launch.agent.receive`."""
        if self.receiver is None:
            self.receiver = Receiver(self.host, self.emit)
        if message["do"] == "sync":
            self.receiver.begin(message)
            self.receiving = True
        else:
            self.receiver.expect(message)

    def examine(self, request: dict) -> None:
        """Look at this host; answers `probed`."""
        self.probe = Probe(dict(request, workdir=os.path.expanduser(request["workdir"])))
        self.selector.register(self.probe, selectors.EVENT_READ, self._poll_probe)

    def _poll_probe(self) -> None:
        facts = self.probe.poll() if self.probe else None
        if facts is not None:
            self.emit("probed", facts=facts)
            self._close_probe()

    def _close_probe(self) -> None:
        if self.probe:
            self.selector.unregister(self.probe)
            self.probe.close()
            self.probe = None

    def _close_reach(self) -> None:
        for each in (self.reach, self.throughput):
            if each:
                self.selector.unregister(each)
                each.close()
        self.reach = self.throughput = None

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
        self._close_reach()  # all have reached all, or nothing would start
        if self.receiver:
            self.receiver.finish()
        base = environment_here(message["unset"])
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
        argv, workdir, script = task["argv"], os.path.expanduser(task["workdir"]), task.get("script")
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
            limit_memory(popen.pid, task.get("memory", 0))
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

    def stop(self, grace: float, dump: bool = False) -> None:
        """End every process of the job; a second call can only make it sooner. `dump`: print Python's stacks first."""
        now = time.monotonic()
        if self.ending:
            return self.ending.sooner(now, grace)
        self.ending = Ending(self.mark, now, grace)
        found = self.ending.members()
        if dump:
            self.ending.dump(found)
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
        self._close_probe()
        self._close_reach()
        if self.receiver:
            self.receiver.finish()
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
