"""`--dry-run`: what would run where, as commands for a shell, secrets hidden. Pure.

What only the agents can tell is put in words between < and >. Each command starts in the process's own working
directory and names what the launcher adds to the host's own environment, less DMLTRAIN_KEY_FILE and
DMLTRAIN_LISTEN_FD, which name what an agent makes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence

from launch.clusters import LAUNCHERS
from launch.job.host import Host
from launch.job.job import Job, Ports, Task, tasks, workdir_of
from launch.job.options import Options
from launch.job.role import WORKER
from launch.secret import HIDDEN, is_secret, redact

BY_AGENT = "<chosen by the agent>"
PORTS = ("DMLC_PS_ROOT_PORT", "MASTER_PORT")
WIDTH = 110


def lines(job: Job, hosts: Sequence[Host], options: Options, python: str = sys.executable) -> list[str]:
    """What would run, by host. `python` runs bare scripts on hosts that name none (where it exists, else python3)."""
    every = tasks(job, hosts, Ports(scheduler=job.port))
    used = list(dict.fromkeys(task.host for task in every))
    hidden = job.secrets(hosts)
    counts = f"{_count(len(every), 'process', 'es')} on {_count(len(used), 'host', 's')}"
    printed = [f"dry run of job {redact(job.name, hidden)}: {counts} by {options.place}; nothing is started"]
    for host in used:
        here = [task for task in every if task.host == host]
        where = redact(workdir_of(job, host), hidden)
        printed += ["", f"{_title(host)}: {_count(len(here), 'process', 'es')} in {where}"]
        for task in here:
            argv = [python, *task.argv[1:]] if job.script and not host.python else task.argv
            argv = [redact(word, hidden) for word in argv]
            environment = _shown(job, _values(job, task, every, not LAUNCHERS[options.place].over_network), hidden)
            limit = job.memory.get(task.role, 0)
            printed += [f"  {task.role} {task.rank}", *_command(where, limit, environment, argv)]
    return printed


def _shown(job: Job, values: Mapping[str, str], hidden: Sequence[str]) -> dict[str, str]:
    """An environment without its secrets."""
    named = {each.name for each in job.settings if each.secret}
    return {
        name: HIDDEN if value and is_secret(name, named) else redact(value, hidden) for name, value in values.items()
    }


def _title(host: Host) -> str:
    user = f"{host.user}@" if host.user else ""
    port = f":{host.port}" if host.port else ""
    reached = f" ({user}{host.target}{port})" if user or port or host.target != host.name else ""
    return f"{host.name}{reached}"


def _values(job: Job, task: Task, every: Sequence[Task], cores_known: bool) -> Mapping[str, str]:
    """The process's environment, with words for what is not known yet."""
    values = dict(task.environment)
    for name in PORTS:
        if values.get(name) == "0":
            values[name] = BY_AGENT
    master = next((each.host.name for each in every if each.role == WORKER), "")
    addresses = {"DMLC_NODE_HOST": task.host.name, "DMLC_PS_ROOT_URI": every[0].host.name, "MASTER_ADDR": master}
    for name, host in addresses.items():
        if values.get(name) == "":
            values[name] = f"<address of {host}>"
    values["DMLTRAIN_JOB"] = "<new for each run>"
    given = {name for name, _ in task.host.environment}
    given |= {each.name for each in job.settings if each.role in ("", task.role)}
    if not cores_known and task.role == WORKER and "OMP_NUM_THREADS" not in given:
        workers = sum(each.role == WORKER and each.host == task.host for each in every)
        values["OMP_NUM_THREADS"] = f"<cores of {task.host.name} / {workers}>"
    return values


def _command(workdir: str, limit: int, environment: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """`cd ... && env A=b ... program ...`, in lines that a shell takes as one; `limit` is in MiB, 0 is none."""
    rows = ["env"]
    for name, value in sorted(environment.items()):
        word = shlex.quote(f"{name}={value}")
        if len(rows[-1]) + 1 + len(word) <= WIDTH:
            rows[-1] += f" {word}"
        else:
            rows.append(word)
    first = f"cd {shlex.quote(workdir)} && " + (f"ulimit -d {limit * 1024} && " if limit else "")  # in KiB
    return [f"    {first}\\", *(f"      {row} \\" for row in rows), f"      {shlex.join(argv)}"]


def _count(number: int, what: str, plural: str) -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
