"""--ps and --kill: short connections to the hosts of a job that another launcher started, as job.json records it."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch import LaunchError, channels
from launch.agent import KILL_SECONDS
from launch.agent.commands import Command, Job, List, Stop
from launch.agent.events import Ended, Event, Listing
from launch.agent.protocol import EVENT, ProtocolError, decode_event, encode_command
from launch.clusters import LAUNCHERS, Cluster, listing, make_cluster
from launch.commands import show
from launch.commands.log_choice import find
from launch.job.host import Host
from launch.job.options import Options
from launch.run.limit import AGENT_SILENCE_SECONDS, FAULT_CODE, SILENCE_SECONDS
from launch.terminal.log_folder import KILLED, RECORD
from launch.terminal.record import read_record

LAUNCHER_SECONDS = 15.0  # for a launcher to end its job
Answers = dict[str, Event | LaunchError]
Commands = Callable[[Host], Sequence[Command]]


def processes(options: Options, write_line: Callable[[str], None]) -> int:
    """List the job's processes on all its hosts."""
    from launch.commands.processes import table
    from launch.secret import secrets

    record = read(options.target)
    answers = visit(options, record, lambda host: [List(record["mark"])], Listing)
    rows = {host: answer.rows for host, answer in answers.items() if isinstance(answer, Listing)}
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in table(rows, secrets(os.environ.items()), width):
        write_line(line)
    return _report_unreached(answers, write_line)


def kill(options: Options, write_line: Callable[[str], None]) -> int:
    """End the job: through its launcher if that runs on this machine, then all processes left on its hosts."""
    record, folder = read(options.target), find(options.target)
    (folder / KILLED).touch()  # so that a launcher on another machine does not restart the job
    if end_launcher(record, show.Record(folder)):
        write_line(f"the launcher of job {record['job']} has ended it")
    silence = AGENT_SILENCE_SECONDS + options.grace  # this program sends no heartbeats

    def commands(host: Host) -> list[Command]:
        return [Job(record["mark"], host.name, options.grace, silence), Stop(options.grace)]

    answers = visit(options, record, commands, Ended)
    left = {host: answer.left for host, answer in answers.items() if isinstance(answer, Ended)}
    unreached = _report_unreached(answers, write_line)
    pids = [f"pid {pid} on {host}" for host, found in left.items() for pid in found]
    write_line(
        f"{len(pids)} process{'' if len(pids) == 1 else 'es'} left on {len(left)} host{'' if len(left) == 1 else 's'}"
        + (f": {', '.join(pids)}" if pids else "")
    )
    return unreached or (FAULT_CODE if pids else 0)


def read(job: str) -> dict[str, Any]:
    """The job.json of the job with that name or folder; LaunchError if there is none."""
    path = find(job) / RECORD
    try:
        record = read_record(path)
        if not all(record[name] for name in ("hosts", "mark", "reached_by")):
            raise KeyError
        if record["launcher"] not in LAUNCHERS:
            raise LaunchError(f"{path}: unknown launcher {record['launcher']}: expected {listing()}")
        return record
    except (FileNotFoundError, KeyError):
        raise LaunchError(f"{path} is missing or not the record of a job: the job's hosts are unknown") from None


def end_launcher(record: Mapping[str, Any], folder: show.Record) -> bool:
    """Ask the job's launcher to end it, and wait. True if it ran on this machine and has exited."""
    here = record.get("launched_from") or {}
    pid = here.get("pid", 0)
    if record.get("ended") or here.get("host") != platform.node() or folder.abandoned or not _is_launcher(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)  # a stopped process handles TERM only after it continues
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + LAUNCHER_SECONDS
    while _is_launcher(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _is_launcher(pid)


def _is_launcher(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"launch" in command and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def visit(options: Options, record: Mapping[str, Any], commands: Commands, last: type[Event]) -> Answers:
    """Send `commands` to a new agent on each host of the job. Returns the event `last` of each, or the error."""
    hosts = [Host(**each) for each in record["hosts"]]
    origin = record["launched_from"]["host"]
    if not LAUNCHERS[record["launcher"]].over_network and origin != platform.node():
        how = f"--launcher {record['launcher']}"
        raise LaunchError(f"job {record['job']} was started on {origin} with {how}: run this command on {origin}")
    cluster = make_cluster(record["launcher"], _connection_options(options, record), hosts)
    answers: queue.SimpleQueue[tuple[str, Event | LaunchError]] = queue.SimpleQueue()

    def call(host: Host) -> None:
        try:
            answers.put((host.name, _converse(cluster, host, record["mark"], commands(host), last, options.grace)))
        except LaunchError as error:
            answers.put((host.name, error))
        except Exception as error:  # a bug of the launcher; without an answer the main thread would wait forever
            answers.put((host.name, LaunchError(f"launcher failure: {error!r}", FAULT_CODE)))

    try:
        for host in hosts:
            threading.Thread(target=call, args=(host,), daemon=True).start()
        found = dict(answers.get() for _ in hosts)
    finally:
        cluster.close()
    return {host.name: found[host.name] for host in hosts}


def _connection_options(options: Options, record: Mapping[str, Any]) -> Options:
    """`options`, completed by those with which the job's launcher connected to the hosts."""
    recorded: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record["reached_by"].items()
    }
    default = Options()
    missing = {name: value for name, value in recorded.items() if getattr(options, name) == getattr(default, name)}
    return replace(options, **missing)


def _converse(
    cluster: Cluster, host: Host, mark: str, commands: Sequence[Command], last: type[Event], grace: float
) -> Event:
    channel = cluster.connect(host, mark)
    try:
        for command in commands:
            channel.write(encode_command(command))
        deadline = SILENCE_SECONDS + grace + KILL_SECONDS
        for kind, _, payload in channels.frames(channel, deadline):
            if kind == EVENT and isinstance(event := decode_event(payload, host.name), last):
                return event
        raise LaunchError(f"the agent on {host.name} ended without an answer", FAULT_CODE)
    except (OSError, channels.ChannelError, ProtocolError) as error:
        raise LaunchError(f"the agent on {host.name} {channel.close()}: {error}", FAULT_CODE) from None
    finally:
        channel.close()


def _report_unreached(answers: Answers, write_line: Callable[[str], None]) -> int:
    errors = {host: answer for host, answer in answers.items() if isinstance(answer, LaunchError)}
    for host, error in errors.items():
        write_line(f"unknown for {host}: {error}")
    return FAULT_CODE if errors else 0
