"""The result of a job: messages for the terminal. Starts and writes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dmltrain_launch.run.record import CHANGED
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.process import Process

WIDTH = 400  # characters shown of each line of a process's output


def failure(supervisor: Attempt, last_lines: Callable[[int], list[str]], folder: str) -> list[str]:
    """Why the job failed, as lines; [] if it did not fail."""
    cause = supervisor.cause
    if cause is None:
        return []
    lines = [cause.text]
    if cause.process:
        lines += _last_output(supervisor, cause.process, last_lines, folder)
    suspect = supervisor.verdict.suspect
    if suspect and suspect is not cause and supervisor.losses.explain(cause):
        lines.append(f"after that, {suspect.text}")
        lines += _last_output(supervisor, suspect.process, last_lines, folder) if suspect.process else []
    elif suspect and suspect is not cause:
        lines.append(f"before that, {suspect.text}")
    lines += losses(supervisor)
    lines += [f"{label} is stopped (SIGSTOP?)" for label in supervisor.ending.stopped]
    return lines


def losses(supervisor: Attempt) -> list[str]:
    """A line for each process without which the job went on."""
    return [f"lost {process.lost_after:.0f} s after the start: {process.fate}" for process in _lost(supervisor)]


def _last_output(
    supervisor: Attempt, process: Process, last_lines: Callable[[int], list[str]], folder: str
) -> list[str]:
    lines = last_lines(supervisor.processes.index(process))
    log = f"{folder}/{process.task.name}.log"
    heading = f"its last lines ({log}):" if lines else f"it printed nothing ({log})"
    return [heading, *(f"    {line[:WIDTH]}" for line in lines)]


def _lost(supervisor: Attempt) -> list[Process]:
    lost = [process for process in supervisor.processes if process.lost and process.left_after is None]
    return sorted(lost, key=lambda each: each.lost_after)


def _gone(process: Process, after: float) -> str:
    """A process that ended so many seconds after the start, and where another one took its place."""
    replaced = f" (replaced on {process.replaced_by.task.host.name})" if process.replaced_by else ""
    return f"{process.task.role} {process.task.rank} after {after:.0f} s{replaced}"


def announcements(supervisor: Attempt, last_lines: Callable[[int], list[str]], folder: str) -> list[str]:
    """What an elastic job has to tell since the last call, as lines."""
    lines = []
    for announcement in supervisor.take_announcements():
        lines.append(announcement.text)
        if announcement.process:
            lines += _last_output(supervisor, announcement.process, last_lines, folder)
    return lines


def explained(
    supervisor: Attempt, notes: Sequence[tuple[str, int | None]], last_lines: Callable[[int], list[str]], folder: str
) -> list[str]:
    """The notes of an answer as lines, each with the last lines of its process, if it names one."""
    lines = []
    for text, task in notes:
        lines += text.splitlines()
        lines += [] if task is None else _last_output(supervisor, supervisor.processes[task], last_lines, folder)
    return lines


def start_line(supervisor: Attempt, folder: str) -> str:
    job = supervisor.job
    parts = [_count(job.num_workers, "worker"), _count(job.num_servers, "server")] if job.num_servers else []
    parts = [*parts, "1 scheduler"] if parts else [_count(job.num_workers, "worker")]
    return f"job {job.name}: {', '.join(parts)} on {_count(len(supervisor.hosts), 'host')}; logs in {folder}"


def last_line(supervisor: Attempt) -> str:
    """The last message: how many processes are left on how many hosts, as the agents reported, and which were lost."""
    known = {host: pids for host, pids in supervisor.ending.left.items() if pids is not None}
    pids = [f"pid {pid} on {host}" for host, pids_left in known.items() for pid in pids_left]
    unknown = [host for host in supervisor.hosts if supervisor.ending.left.get(host, ()) is None]
    unreached = [host for host in supervisor.hosts if host in supervisor.ending.unreached]
    line = f"{_count(len(pids), 'process', 'es')} left on {_count(len(known), 'host')}"
    details = ([", ".join(pids)] if pids else []) + ([f"unknown for {', '.join(unknown)}"] if unknown else [])
    details += [f"never reached: {', '.join(unreached)}"] if unreached else []
    line = f"{line}: {'; '.join(details)}" if details else line
    lost = [_gone(process, process.lost_after) for process in _lost(supervisor)]
    joined = [
        f"worker {process.task.rank} on {process.task.host.name} after {at:.0f} s"
        for process, at in _changed(supervisor, 0)
    ]
    left = [_gone(process, at) for process, at in _changed(supervisor, 1)]
    kvstores = [f"{kvstore_change.now} {kvstore_change.where}" for kvstore_change in supervisor.kvstore_changes]
    changes = {"lost": lost, "joined": joined, "left": left, "changed": kvstores}
    return "; ".join([line, *(f"{name}: {', '.join(some)}" for name, some in changes.items() if some)])


def _changed(supervisor: Attempt, which: int) -> list[tuple[Process, float]]:
    """The processes with this attribute of CHANGED, and its value."""
    changes = [(process, getattr(process, CHANGED[which])) for process in supervisor.processes]
    return sorted(((process, at) for process, at in changes if at is not None), key=lambda pair: pair[1])


def new_job_name(program: tuple[str, ...], now: float) -> str:
    """Program and time, such as train_cifar10-20261120-120000."""
    script = next((word for word in program if word.endswith(".py")), program[0] if program else "job")
    name = script.rstrip("/").rpartition("/")[2].removesuffix(".py")[:60].replace("\n", "_") or "job"
    return time.strftime(f"{name.replace('%', '%%')}-%Y%m%d-%H%M%S", time.localtime(now))


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
