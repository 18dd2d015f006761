"""List the processes of a job on this host for --ps (`dmltrain_launch.commands.processes`). Only reads /proc. Linux."""

from __future__ import annotations

import os
from typing import TypedDict

from dmltrain_launch.agent.process import ENVIRONMENT_BYTES, Process, members

NO_ROOT = -1  # no process has this pid: the job's processes are found by their mark alone
MOST_DIGITS, ROLE_BYTES = 9, 32  # of a rank and of a role, which can be any text
ARGUMENT_BYTES = 4096  # of a command; a longer one is cut between arguments, so that no secret is cut in two
ALL_BYTES = 1 << 19  # of all commands together, so that they fit into a message


class ProcessRow(TypedDict):
    """One process. Times in seconds, memory (resident) in MiB."""

    pid: int
    parent: int
    role: str
    rank: int | None
    state: str
    cpu_seconds: float
    rss_mib: float
    age_seconds: float
    command: list[str]


class Identity(TypedDict, total=False):
    """The role and rank of a process. An agent has no rank; a process that belongs to no task has neither."""

    role: str
    rank: int | None


def rows(mark: str) -> list[ProcessRow]:
    """A row for each process of job `mark` except this one.

    Role and rank come from the environment of the process or of its nearest ancestor. An agent's role is "agent".
    """
    processes = members(mark, NO_ROOT)
    processes.pop(os.getpid(), None)
    identities = {pid: _identity(_environment(pid), mark) for pid in processes}
    most = min(ARGUMENT_BYTES, ALL_BYTES // max(1, len(processes)))
    listed = (_row(process, _inherited(process, processes, identities), most) for process in processes.values())
    return sorted((row for row in listed if row is not None), key=lambda row: row["pid"])


def _row(each: Process, identity: Identity, most: int) -> ProcessRow | None:
    """None when the process has just exited. `most`: bytes of its command."""
    try:
        with open(f"/proc/{each.pid}/stat", "rb") as file:
            text = file.read()
        with open("/proc/uptime", "rb") as file:
            uptime = float(file.read().split()[0])
    except OSError:
        return None
    # see man 5 proc; fields[0] is the third field, the state
    fields = text[text.rindex(b")") + 2 :].split()
    ticks = os.sysconf("SC_CLK_TCK")
    name = text[text.index(b"(") + 1 : text.rindex(b")")].decode("utf-8", "replace")
    return {
        "pid": each.pid,
        "parent": each.parent,
        "role": identity.get("role", ""),
        "rank": identity.get("rank"),
        "state": fields[0].decode(),
        "cpu_seconds": round((int(fields[11]) + int(fields[12])) / ticks, 2),
        "rss_mib": round(int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        "age_seconds": round(max(0.0, uptime - int(fields[19]) / ticks), 1),
        "command": _command(each.pid, most) or [f"[{name}]"],
    }


def _command(pid: int, most: int) -> list[str]:
    """The arguments of a process, at most so many bytes; [] if it has none or has just exited."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read(ENVIRONMENT_BYTES).split(b"\0")[:-1]
    except OSError:
        return []
    words: list[str] = []
    size = 0
    for argument in arguments:
        size += len(argument)
        if size > most:
            return [*words, "..."]
        words.append(argument.decode("utf-8", "surrogateescape"))
    return words


def _environment(pid: int) -> dict[bytes, bytes]:
    """The environment at the start of the process; {} if it is not readable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read(ENVIRONMENT_BYTES).split(b"\0"))
            return {name: value for name, _, value in pairs}
    except OSError:
        return {}


def _identity(environment: dict[bytes, bytes], mark: str) -> Identity | None:
    """Role and rank according to the environment; None if it has neither."""
    if environment.get(b"DMLTRAIN_JOB") == os.fsencode(mark) and b"DMLC_ROLE" in environment:
        rank = environment.get(b"DMLC_TASK_ID", b"")
        role = environment[b"DMLC_ROLE"][:ROLE_BYTES].decode("utf-8", "replace")
        return {"role": role, "rank": int(rank) if rank.isdigit() and len(rank) <= MOST_DIGITS else None}
    return {"role": "agent"} if environment.get(b"DMLTRAIN_AGENT") == os.fsencode(mark) else None


def _inherited(each: Process, processes: dict[int, Process], identities: dict[int, Identity | None]) -> Identity:
    """Its own identity or that of its nearest ancestor in the job; {} if only an agent is above it."""
    pid = each.pid
    while pid in processes:
        identity = identities[pid]
        if identity is not None:
            return {} if identity["role"] == "agent" and pid != each.pid else identity
        pid = processes[pid].parent
    return {}
