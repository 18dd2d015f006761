"""The processes of one contestant in the kvstore benchmark. They are started once, are idle between their blocks, and
are ended in any case.

A parameter-server job has a scheduler, servers and workers with the DMLC_* environment; a gloo job has workers only.
The driver exchanges messages with each worker over an inherited pipe (loop.py); each process's output goes to a file.
"""

import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from report import CHECKOUT, INTERPRETER, SEARCH_PATH

from contest.loop import PIPE_VARIABLE
from contest.place import Loopback, Place, Running

PROGRAMS = Path(__file__).resolve().parent / "programs"
IMPORTED = (str(CHECKOUT / "benchmarks"), SEARCH_PATH)  # by the programs
START_DEADLINE = 120.0  # s; four processes on a busy machine import a framework
BLOCK_DEADLINE = 300.0  # s
STOP_DEADLINE = 15.0  # s


class TeamFailed(Exception):
    """A contestant's process ended or did not answer in time; the message has the end of its output."""


@dataclass(frozen=True)
class Contest:
    """One row of the table: a system, its task, and its worker program with options."""

    system: str  # as in --systems
    mode: str  # the program's --mode
    label: str
    program: str  # file in programs/
    servers: bool = True  # has a scheduler and servers
    transport: str = ""  # DMLTRAIN_TRANSPORT
    launcher_threads: bool = True  # OMP_NUM_THREADS as dmltrain-launch sets it; False: the system's default
    codec: str = "none"  # dmltrain's --gc-type
    host_sum: str = ""  # DMLTRAIN_HOST_SUM
    wire: str = "plain"  # DMLTRAIN_WIRE

    @property
    def variant(self) -> str:
        """The codec, the host sum and the level of protection: what differs between contests of one system."""
        host_sum = f" host-sum {self.host_sum}" if self.host_sum else ""
        return self.codec + host_sum + (f" {self.wire}" if self.wire != "plain" else "")


@dataclass(frozen=True)
class Block:
    """One turn of a team."""

    seconds: float  # of a step: of the slowest worker, median over the steps after warm-up
    worker_cpu_seconds: float  # of a step, sum of all workers, mean
    server_cpu_seconds: float  # of a step, sum of all servers, mean
    other_cores: float  # used by the rest of the machine during the turn


class Team:
    """The running processes of one contest."""

    def __init__(
        self, contest: Contest, workers: int, servers: int, options: list[str], folder: Path, place: Place | None = None
    ) -> None:
        self.contest = contest
        self.place = place or Loopback()
        self.folder = folder
        program = PROGRAMS / contest.program
        self.command = [*(INTERPRETER or [sys.executable]), str(program), "--mode", contest.mode, *options]
        self.processes: list[Running] = []
        self.pipes: list[Connection] = []
        self.base = environment(contest, workers, servers, folder, self.place)
        self.cpu_idle, self.clock_idle = 0.0, 0.0  # CPU seconds and seconds while others had their turns
        self.blocks: list[Block] = []
        self.answers: list[dict[str, Any]] = []  # of the workers in the last turn
        try:
            for role, count in (("scheduler", 1), ("server", servers), ("worker", workers)):
                for rank in range(count if role == "worker" or contest.servers else 0):
                    self.start(role, rank)
            for rank in range(workers):
                self.answer(rank, START_DEADLINE)
        except BaseException:
            self.stop()
            raise
        self.cpu_seen, self.clock_seen = self.cpu_seconds(), time.monotonic()

    def start(self, role: str, rank: int) -> None:
        """Start one process."""
        variables = self.base | role_variables(role, rank, self.base, self.place)
        near, far = Pipe()
        with far, (self.folder / f"{role}-{rank}.log").open("wb") as log:
            variables[PIPE_VARIABLE] = str(far.fileno())
            self.processes.append(
                self.place.start(
                    role,
                    rank,
                    self.command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[far.fileno()],
                )
            )
        if role == "worker":
            self.pipes.append(near)

    def take_turn(self, warm_up: int, steps: int, together: bool = False, **settings: Any) -> None:
        """Run `warm_up` untimed and `steps` timed steps; adds to `blocks`.

        `together`: all workers begin each step at the same time (within 1 ms), as after equally long computation; else
        each worker begins when it is ready. `settings` are passed to the contestants' `prepare`.
        """
        self.cpu_idle += self.cpu_seconds() - self.cpu_seen
        self.clock_idle += time.monotonic() - self.clock_seen
        served, busy, start = self.cpu_seconds("server"), busy_seconds(), time.monotonic()
        own = self.cpu_seconds()
        for pipe in self.pipes:
            pipe.send_bytes(json.dumps({"steps": warm_up + steps, "together": together, **settings}).encode())
        for _ in range(warm_up + steps if together else 0):
            self.start_step()
        answers = self.answers = [json.loads(self.answer(rank, BLOCK_DEADLINE)) for rank in range(len(self.pipes))]
        self.cpu_seen, self.clock_seen = self.cpu_seconds(), time.monotonic()
        others = (busy_seconds() - busy - (self.cpu_seen - own)) / (self.clock_seen - start)
        slower = [max(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True)]
        worked = sum(statistics.mean(answer["cpu_seconds"]) for answer in answers)
        made = statistics.mean(answer.get("made", warm_up + steps) for answer in answers)
        served = (self.cpu_seconds("server") - served) / made
        self.blocks.append(Block(statistics.median(slower[warm_up:]), worked, served, max(0.0, others)))

    def start_step(self) -> None:
        """Wait until every worker is ready for its next step, then start all."""
        for rank in range(len(self.pipes)):
            self.answer(rank, BLOCK_DEADLINE)
        for pipe in self.pipes:
            pipe.send_bytes(b"go")

    def answer(self, rank: int, seconds: float) -> bytes:
        """The worker's next message; raises TeamFailed when any process of the team ends, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.pipes[rank].poll(0.2):
            for process in self.processes:
                if process.child.poll() is not None:
                    raise TeamFailed(self.failure(process.name, f"ended with {process.child.returncode}"))
            if time.monotonic() > deadline:
                raise TeamFailed(self.failure(f"worker-{rank}", f"did not answer within {seconds:.0f} s"))
        try:
            return self.pipes[rank].recv_bytes()
        except EOFError:
            raise TeamFailed(self.failure(f"worker-{rank}", "ended")) from None

    def failure(self, name: str, what: str) -> str:
        """The error message: the failed process, the failure, and the last lines of its output."""
        tail = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        return "\n  ".join([f"{self.contest.label}: {name} {what}; its last lines:", *tail])

    def cpu_seconds(self, role: str = "") -> float:
        """User and system seconds so far of the processes with one role, or of all."""
        return sum(process.cpu_seconds() for process in self.processes if process.name.startswith(role))

    def idle_cores(self) -> float:
        """Cores that the team used outside its turns; the comparison is fair only if it is near 0."""
        return self.cpu_idle / self.clock_idle if self.clock_idle else 0.0

    def stop(self) -> None:
        """Let the workers leave, then kill all remaining processes."""
        for pipe in self.pipes:
            pipe.close()
        _, left = psutil.wait_procs([process.child for process in self.processes], STOP_DEADLINE if self.pipes else 0)
        for child in left:
            child.kill()
        psutil.wait_procs(left)


def environment(contest: Contest, workers: int, servers: int, folder: Path, place: Place) -> dict[str, str]:
    """The environment that all processes of a team share."""
    key_file = folder / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(secrets.token_hex(32))
    variables = dict(os.environ) | {
        "DMLC_PS_ROOT_URI": place.address("scheduler", 0),
        "DMLC_PS_ROOT_PORT": str(place.port()),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        "MASTER_ADDR": place.address("worker", 0),
        "MASTER_PORT": str(place.port()),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(place.local_workers or workers),
        "DMLTRAIN_JOB": f"benchmark-{contest.system}-{contest.mode}-{os.getpid()}",
        "DMLTRAIN_KEY_FILE": str(key_file),
        "PYTHONPATH": os.pathsep.join(filter(None, [*IMPORTED, os.environ.get("PYTHONPATH")])),
    }
    if contest.transport:
        variables["DMLTRAIN_TRANSPORT"] = contest.transport
    if contest.host_sum:
        variables["DMLTRAIN_HOST_SUM"] = contest.host_sum
    if contest.wire != "plain":
        variables |= {"DMLTRAIN_WIRE": contest.wire, "DMLTRAIN_CERTIFICATE_FILE": str(certificate_file(folder))}
    variables.pop("OMP_NUM_THREADS", None)
    if contest.launcher_threads:
        variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    return variables


def certificate_file(folder: Path) -> Path:
    """A new certificate with its private key, as the launcher makes it for a job."""
    from dmltrain_launch import certificate  # only for tls: it imports cryptography

    path = folder / "certificate"
    path.touch(mode=0o600)
    path.write_bytes(certificate.new()[0])
    return path


def role_variables(role: str, rank: int, base: dict[str, str], place: Place) -> dict[str, str]:
    """The environment variables that differ between a team's processes."""
    variables = {"DMLC_ROLE": role, "DMLC_TASK_ID": str(rank), "DMLC_NODE_HOST": place.address(role, rank)}
    if role == "worker":
        local_rank = rank % (place.local_workers or int(base["WORLD_SIZE"]))
        return variables | {"DMLC_WORKER_ID": str(rank), "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    if "OMP_NUM_THREADS" in base:
        variables["OMP_NUM_THREADS"] = "1"
    return variables | ({"DMLC_SERVER_ID": str(rank)} if role == "server" else {})


def busy_seconds() -> float:
    """CPU seconds of all processes on the machine so far; in a virtual machine including those stolen by others."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + getattr(times, "steal", 0.0)
