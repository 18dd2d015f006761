"""--ps and --kill: short visits to the hosts of a job that another launcher has started, by what job.json says."""

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
from launch.clusters import LAUNCHERS, Cluster, cluster, listing
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


def processes(options: Options, tell: Callable[[str], None]) -> int:
    """Print the job's processes on all its hosts."""
    from launch.commands.processes import table
    from launch.secret import secrets

    record = read(options.target)
    answers = visit(options, record, lambda host: [List(record["mark"])], Listing)
    rows = {host: answer.rows for host, answer in answers.items() if isinstance(answer, Listing)}
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in table(rows, secrets(os.environ.items()), width):
        tell(line)
    return _tell_unreached(answers, tell)


def kill(options: Options, tell: Callable[[str], None]) -> int:
    """End the job: by its launcher where that lives on this machine, then whatever is left on its hosts."""
    record, folder = read(options.target), find(options.target)
    (folder / KILLED).touch()  # so that a launcher elsewhere does not start the job anew
    if end_launcher(record, show.Record(folder)):
        tell(f"the launcher of job {record['job']} has ended it")
    silence = AGENT_SILENCE_SECONDS + options.grace  # no beats come from a visitor

    def commands(host: Host) -> list[Command]:
        return [Job(record["mark"], host.name, options.grace, silence), Stop(options.grace)]

    answers = visit(options, record, commands, Ended)
    left = {host: answer.left for host, answer in answers.items() if isinstance(answer, Ended)}
    unreached = _tell_unreached(answers, tell)
    pids = [f"pid {pid} on {host}" for host, found in left.items() for pid in found]
    tell(
        f"{len(pids)} process{'' if len(pids) == 1 else 'es'} left on {len(left)} host{'' if len(left) == 1 else 's'}"
        + (f": {', '.join(pids)}" if pids else "")
    )
    return unreached or (FAULT_CODE if pids else 0)


def read(job: str) -> dict[str, Any]:
    """job.json of the job of that name or folder; LaunchError when there is none."""
    path = find(job) / RECORD
    try:
        record = read_record(path)
        if not all(record[name] for name in ("hosts", "mark", "reached_by")):
            raise KeyError
        if record["launcher"] not in LAUNCHERS:
            raise LaunchError(f"{path}: the job was started by --launcher {record['launcher']}; there is {listing()}")
        return record
    except (FileNotFoundError, KeyError):
        raise LaunchError(f"{path} is not the record of a job: it cannot be found on its hosts") from None


def end_launcher(record: Mapping[str, Any], folder: show.Record) -> bool:
    """Ask the launcher of the job to end it, and wait; whether there was one here and it has."""
    here = record.get("launched_from") or {}
    pid = here.get("pid", 0)
    if record.get("ended") or here.get("host") != platform.node() or folder.abandoned or not _is_launcher(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)  # one that is stopped hears TERM only when it runs again
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
    """Give `commands` to a new agent on each host of the job; the event `last` of each, or why there is none."""
    hosts = [Host(**each) for each in record["hosts"]]
    there = record["launched_from"]["host"]
    if not LAUNCHERS[record["launcher"]].over_network and there != platform.node():
        how = f"--launcher {record['launcher']}"
        raise LaunchError(f"job {record['job']} runs on {there}, which started it with {how}: ask there")
    place = cluster(record["launcher"], _as_then(options, record), hosts)
    answers: queue.SimpleQueue[tuple[str, Event | LaunchError]] = queue.SimpleQueue()

    def call(host: Host) -> None:
        try:
            answers.put((host.name, _converse(place, host, record["mark"], commands(host), last, options.grace)))
        except LaunchError as error:
            answers.put((host.name, error))
        except Exception as error:  # a fault of ours; nobody may wait for this thread for ever
            answers.put((host.name, LaunchError(f"fault of the launcher: {error!r}", FAULT_CODE)))

    try:
        for host in hosts:
            threading.Thread(target=call, args=(host,), daemon=True).start()
        found = dict(answers.get() for _ in hosts)
    finally:
        place.close()
    return {host.name: found[host.name] for host in hosts}


def _as_then(options: Options, record: Mapping[str, Any]) -> Options:
    """The options by which the job's launcher reached the hosts, unless the command line says otherwise now."""
    then: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record["reached_by"].items()
    }
    plain = Options()
    changed = {name: value for name, value in then.items() if getattr(options, name) == getattr(plain, name)}
    return replace(options, **changed)


def _converse(
    place: Cluster, host: Host, mark: str, commands: Sequence[Command], last: type[Event], grace: float
) -> Event:
    channel = place.connect(host, mark)
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


def _tell_unreached(answers: Answers, tell: Callable[[str], None]) -> int:
    errors = {host: answer for host, answer in answers.items() if isinstance(answer, LaunchError)}
    for host, error in errors.items():
        tell(f"not known for {host}: {error}")
    return FAULT_CODE if errors else 0
