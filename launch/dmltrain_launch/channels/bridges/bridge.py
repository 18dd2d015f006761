"""The bridge: the small program that an engine (mpirun, srun) starts on each host, to reach the launcher.

mpirun's own standard input reaches only one of its processes, and that of srun is copied to all of them.

Contract: standard library only, Python 3.8 or later, because it is sent as text. It knows nothing about jobs: it starts
one command (an agent) in its own session and forwards its standard input and output.

Theory of operation. The environment variable VARIABLE has the bridge's settings as JSON: {"program": this text,
"addresses", "port", "certificate", "token", "seconds"}. The bridge connects to the launcher at the first address that
answers over TLS with exactly that certificate. It compares the SHA-256 of the certificate only: names, authorities and
dates, and so the hosts' clocks, do not matter. Then it sends one line of JSON:
    {"token", "index", "host", "pid"}       index: the number of its host
The launcher answers with the byte WELCOME, or ends TLS if it does not know the token. If the connection ends in any
other way before that, unauthenticated peers may have crowded the bridge out, and it connects again.
After that each side sends frames: length (4 bytes) and payload of at most FRAME_BYTES.
    launcher -> bridge    first the shell command; then the agent's input; a frame of length 0 ends the input
    bridge -> launcher    the agent's output; a frame of length 0 ends the output, after it {"code", "said"} as JSON:
                          the agent's exit code (minus n for signal n) and the end of its standard error
Loss of the launcher: when the connection or the bridge ends, the agent's standard input ends. The agent then ends the
job on its host, and the bridge waits for that. The bridge always exits with 0, because an engine would end the other
hosts after any other exit code. If the launcher has become silent, mpirun has too, and its daemon on this host would
wait for minutes; the bridge then ends the daemon as well.

With "stays" in the settings it is the first process of a container. It serves one agent after another, until the
launcher is gone, or SIGTERM says that the container is to end: without an agent it exits, and with one it sends SIGUSR1
to all processes of that, which is a notice for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import selectors
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

VARIABLE = "DMLTRAIN_BRIDGE"
LENGTH = struct.Struct("!I")  # of a frame's payload, in bytes
READ_BYTES = 1 << 16
FRAME_BYTES = 1 << 20  # of a frame's payload, at most
BACKLOG_BYTES = 1 << 18  # of unsent data; above it no more is read
STDERR_BYTES = 2000  # of the agent's standard error
HANDSHAKE_SECONDS = 5.0
RETRY_SECONDS = 0.05
DROPPED = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)  # before WELCOME
WELCOME = b"+"
FLUSH_SECONDS = 2.0  # for sending the last frames after the agent has ended
LOOK_SECONDS = 1.0  # between checks whether the agent has ended
# Without a heartbeat of the launcher, which sends one a second. Longer than a short network outage.
SILENT_SECONDS = 6.0
DAEMONS = ("orted", "prted", "hydra_pmi_proxy")  # of Open MPI up to 4, from 5, and MPICH
POLL_SECONDS = 0.05  # the same after it has closed its output, because then it ends soon, and after it has ended
# These only free a lost connection: the heartbeats of launcher and agent detect the loss earlier. A connection must
# survive an outage of 5 s.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES, USER_TIMEOUT = 5, 3, 3, 12_000  # s, s, probes, ms
# Variables that an engine sets for its own processes, such as this one. With them a program of the job would take
# itself for one of these. Those of the whole allocation, such as SLURM_JOB_ID, stay.
ENGINES_OWN = re.compile(
    r"(OMPI|ORTE|OPAL|PRTE|PMIX|PMI|HYDI?)_|MPI_LOCAL|MPIR_CVAR_CH3_INTERFACE_HOSTNAME"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|NTASKS|NPROCS|STEP|SRUN|LAUNCH_NODE|CPU_BIND|PRIO_PROCESS)|SRUN_"
)


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel close a connection whose peer is gone, with or without pending data."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# -- connect to the launcher--------------------------------------------------------------------------------------------


def reach(addresses: list[str], port: int, certificate: str, hello: bytes, seconds: float) -> ssl.SSLSocket:
    """A connection to the launcher, at the first address that answers with its `certificate`. `hello` has been sent and
    WELCOME received. OSError names the error of each address.
    """
    deadline = time.monotonic() + seconds
    failed: dict[str, str] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as others:

        def begin(address: str) -> None:
            try:
                connection = _connect(address, port, others)
                selector.register(connection, selectors.EVENT_WRITE, (address, connection))
            except OSError as error:
                failed[address] = str(error.strerror or error)

        for address in addresses:
            begin(address)
        while len(failed) < len(addresses) and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                address, connection = key.data
                selector.unregister(connection)
                try:
                    return _introduced(_secure(connection, certificate), hello)
                except DROPPED:  # the launcher may be busy with unauthenticated peers
                    time.sleep(RETRY_SECONDS)
                    begin(address)
                except OSError as error:
                    failed[address] = str(error.strerror or error)
    raise OSError(
        "; ".join(f"{address}: {failed.get(address, f'no answer in {seconds:g} s')}" for address in addresses)
    )


def _connect(address: str, port: int, others: contextlib.ExitStack) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    # no effect on the connection that is used: wrap_socket detaches the descriptor from this socket object
    others.callback(connection.close)
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.connect((address, port))
    return connection


def _secure(connection: socket.socket, certificate: str) -> ssl.SSLSocket:
    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is compared below
    connection.settimeout(HANDSHAKE_SECONDS)
    secured = context.wrap_socket(connection, suppress_ragged_eofs=False)
    presented = secured.getpeercert(binary_form=True) or b""
    if hashlib.sha256(presented).hexdigest() != certificate:
        secured.close()
        raise OSError("another program with another certificate answers there")
    keep_alive(secured)
    return secured


def _introduced(link: ssl.SSLSocket, hello: bytes) -> ssl.SSLSocket:
    """The connection, once the launcher has welcomed this bridge, or has ended TLS. ConnectionResetError if the
    connection was lost before."""
    try:
        link.sendall(hello)
        link.recv(len(WELCOME))
    except OSError as error:
        link.close()
        raise ConnectionResetError(str(error)) from error
    return link


# -- between launcher and agent ----------------------------------------------------------------------------------------


def visible_gpus(environ: Mapping[str, str]) -> str:
    """The GPUs that the engine has given to this step, such as 0,1, as CUDA_VISIBLE_DEVICES names them. AMD's are
    numbered anew among those of ROCR_VISIBLE_DEVICES."""
    given = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("HIP_VISIBLE_DEVICES")
    of_amd = environ.get("ROCR_VISIBLE_DEVICES")
    return given or (",".join(map(str, range(of_amd.count(",") + 1))) if of_amd else "")


class Agent:
    """The agent's process and its non-blocking pipes."""

    def __init__(self, command: bytes):
        home = os.path.expanduser("~")
        environment = {name: value for name, value in os.environ.items() if not ENGINES_OWN.match(name)}
        if "SLURM_JOB_ID" in os.environ:
            environment["DMLTRAIN_STEP_GPUS"] = visible_gpus(os.environ)
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=home if os.path.isdir(home) else "/",
            env=environment,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)


class Bridge:
    """Forwards bytes in both directions and never waits for one side only. `serve` returns when the agent has ended."""

    def __init__(self, link: ssl.SSLSocket):
        self.link: ssl.SSLSocket | None = link
        self.received, self.to_launcher, self.to_agent = bytearray(), bytearray(), bytearray()
        self.agent: Agent | None = None
        self.stdin_ended = self.stdout_ended = False
        self.stderr = b""  # the end of it
        self.received_at = time.monotonic()  # the last data from the launcher
        link.setblocking(False)

    def serve(self) -> None:
        while self.agent is None and self.link:
            self._wait([])
            self._receive()
        if self.agent is not None:
            self._report(self._serve(self.agent))

    def _serve(self, agent: Agent) -> int:
        """Serve until the agent has ended and all its output is read. Returns its exit code."""
        while True:
            # before reading the pipes: when the agent has ended by now, they have everything that it wrote
            code = agent.process.poll()
            ready = self._wait(self._pipes(agent), LOOK_SECONDS if code is None else POLL_SECONDS)
            for stream in ready:
                self._move(agent, stream)
            self._receive()
            self._send()
            if code is not None and self._is_drained(ready):
                self._read_stderr(agent.stderr)
                return code

    def _is_drained(self, ready: list[IO[bytes]]) -> bool:
        """Whether all output of an agent that has ended is read.

        The end of the pipe does not show that, because children of the agent may keep it open.
        """
        return self.stdout_ended or not self.link or not (ready or len(self.to_launcher) >= BACKLOG_BYTES)

    def _pipes(self, agent: Agent) -> list[tuple[IO[bytes], int]]:
        """The agent's pipes to wait for now."""
        pipes = [(agent.stderr, selectors.EVENT_READ)] if not agent.stderr.closed else []
        if not self.stdout_ended and len(self.to_launcher) < BACKLOG_BYTES:
            pipes.append((agent.stdout, selectors.EVENT_READ))
        if self.to_agent:
            pipes.append((agent.stdin, selectors.EVENT_WRITE))
        return pipes

    def _wait(self, pipes: list[tuple[IO[bytes], int]], seconds: float = LOOK_SECONDS) -> list[IO[bytes]]:
        """Wait until a pipe or the connection is ready, for at most so long. Returns the ready pipes."""
        with selectors.DefaultSelector() as selector:
            for stream, events in pipes:
                selector.register(stream, events, stream)
            if self.link:
                reads = selectors.EVENT_READ if len(self.to_agent) < BACKLOG_BYTES else 0
                writes = selectors.EVENT_WRITE if self.to_launcher else 0
                if reads | writes:
                    selector.register(self.link, reads | writes)
            ready = selector.select(POLL_SECONDS if self.stdout_ended else seconds)
        return [key.data for key, _ in ready if key.data is not None]  # the link has no data

    def _move(self, agent: Agent, stream: IO[bytes]) -> None:
        if stream is agent.stdin:
            try:
                del self.to_agent[: os.write(stream.fileno(), self.to_agent[:READ_BYTES])]
            except BlockingIOError:
                return
            except OSError:  # the agent closed its input; its exit code will say why
                self.stdin_ended = True
                self.to_agent.clear()
            self._close_stdin_when_due(agent)
        elif stream is agent.stderr:
            self._read_stderr(stream)
        else:
            data = os.read(stream.fileno(), READ_BYTES)
            self.stdout_ended = not data
            self._frame(data)

    def _read_stderr(self, stream: IO[bytes]) -> None:
        """Read what the agent has written to standard error, without blocking."""
        with contextlib.suppress(BlockingIOError, ValueError):
            data = os.read(stream.fileno(), READ_BYTES)
            self.stderr = (self.stderr + data)[-STDERR_BYTES:]
            if not data:
                stream.close()

    def _frame(self, data: bytes) -> None:
        if self.link:
            self.to_launcher += LENGTH.pack(len(data)) + data

    # -- the connection ----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Read all data that has arrived: TLS buffers data that a selector does not see."""
        while self.link and len(self.to_agent) < BACKLOG_BYTES:
            try:
                data = self.link.recv(READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                data = b""
            if not data:
                return self._hang_up()
            self.received_at = time.monotonic()
            self.received += data
            self._take_frames()

    def _take_frames(self) -> None:
        while len(self.received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self.received)[0]
            if end > LENGTH.size + FRAME_BYTES:  # not from our launcher
                return self._hang_up()
            if len(self.received) < end:
                return
            payload = bytes(self.received[LENGTH.size : end])
            del self.received[:end]
            if self.agent is None:
                self.agent = Agent(payload)
            elif not payload:
                self.stdin_ended = True
                self._close_stdin_when_due(self.agent)
            elif not self.stdin_ended:
                self.to_agent += payload

    def _hang_up(self) -> None:
        """The launcher is lost: drop unsent data and close the agent's input, so that it ends."""
        if self.link:
            self.link.close()
        self.link = None
        self.to_launcher.clear()
        self.stdin_ended = True
        if self.agent:
            self.to_agent.clear()
            self._close_stdin_when_due(self.agent)

    def _close_stdin_when_due(self, agent: Agent) -> None:
        if self.stdin_ended and not self.to_agent and not agent.stdin.closed:
            agent.stdin.close()

    def _send(self) -> None:
        while self.link and self.to_launcher:
            try:
                del self.to_launcher[: self.link.send(self.to_launcher[:READ_BYTES])]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                return self._hang_up()

    def _report(self, code: int) -> None:
        """Send the exit code and the end of standard error, within FLUSH_SECONDS."""
        if not self.stdout_ended:
            self._frame(b"")
        last = {"code": code, "said": self.stderr.decode(errors="replace").strip()}
        self._frame(json.dumps(last).encode())
        deadline = time.monotonic() + FLUSH_SECONDS
        while self.link and self.to_launcher and time.monotonic() < deadline:
            self._send()
            with selectors.DefaultSelector() as selector:
                if self.link:
                    selector.register(self.link, selectors.EVENT_WRITE)
                    selector.select(POLL_SECONDS)
        if self.link:
            self.link.close()


class TerminationNotice:
    """Handles SIGTERM for a bridge that stays: see the last paragraph of the module's description."""

    def __init__(self) -> None:
        self.bridge: Bridge | None = None
        self.given = False
        signal.signal(signal.SIGTERM, lambda number, frame: self.give())

    def give(self) -> None:
        self.given = True
        if not self.bridge or not self.bridge.agent:
            sys.exit(0)
        for pid in descendants(self.bridge.agent.process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)


def descendants(pid: int) -> list[int]:
    """A process, and all that descend from it."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    pids = [pid]
    for ancestor in pids:
        pids += [child for child, parent in parents.items() if parent == ancestor]
    return pids


def main() -> None:
    settings = json.loads(os.environ.pop(VARIABLE))
    if not settings.get("stays"):
        return serve_one(settings)
    notice, served = TerminationNotice(), False
    while not notice.given:
        try:
            link = reach_launcher(settings)
        except SystemExit:
            if served:  # the job is over
                return
            raise
        notice.bridge, served = Bridge(link), True
        notice.bridge.serve()
        notice.bridge = None
        time.sleep(RETRY_SECONDS)


def serve_one(settings: dict[str, Any]) -> None:
    bridge = Bridge(reach_launcher(settings))
    bridge.serve()
    if time.monotonic() - bridge.received_at > SILENT_SECONDS:
        end_daemon()


def reach_launcher(settings: dict[str, Any]) -> ssl.SSLSocket:
    """The connection of this bridge to the launcher; SystemExit if no address can be reached."""
    host = socket.gethostname()
    hello = {"token": settings["token"], "index": int(sys.argv[2]), "host": host, "pid": os.getpid()}
    line = json.dumps(hello).encode() + b"\n"
    try:
        return reach(settings["addresses"], settings["port"], settings["certificate"], line, settings["seconds"])
    except OSError as error:
        sys.exit(f"{host} cannot reach the launcher at port {settings['port']}: {error}")


def end_daemon() -> None:
    """End mpirun's daemon, if it started this process's shell."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{os.getppid()}/stat") as file:
            daemon = file.read().rpartition(")")[2].split()[1]
        with open(f"/proc/{daemon}/comm") as file:
            if file.read().strip() in DAEMONS:
                os.kill(int(daemon), signal.SIGTERM)


if __name__ == "__main__":
    main()
