"""`--dry-run`: what would run where, as commands for a shell, secrets hidden. Pure.

What only the agents can tell is put in words between < and >. Each command starts in the process's own working
directory and names what the launcher adds to the host's own environment, less DMLTRAIN_KEY_FILE and
DMLTRAIN_LISTEN_FD, which name what an agent makes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence

from launch.host import Host
from launch.job import Job, Task
from launch.role import WORKER
from launch.secret import HIDDEN, is_secret, redact, secrets

BY_AGENT = "<chosen by the agent>"
PORTS = ("DMLC_PS_ROOT_PORT", "MASTER_PORT")
WIDTH = 110


def lines(
    job: Job,
    tasks: Sequence[Task],
    launcher: str,
    workdir: Callable[[Host], str],
    python: str,
    named: Collection[str] = (),
    cores_known: bool = False,
) -> list[str]:
    """What would run, by host in launch order.

    `tasks` are those of `Ports(job.port)`; `workdir` tells a host's working directory, `python` what runs bare scripts
    on hosts that name none; `named` are the variables of --secret. With `cores_known` the hosts' cores are the real
    ones; else each worker's share of them is left to the agent.
    """
    hidden = secrets((pair for task in tasks for pair in task.environment.items()), named)
    hosts = list(dict.fromkeys(task.host for task in tasks))
    counts = f"{_count(len(tasks), 'process', 'es')} on {_count(len(hosts), 'host', 's')}"
    printed = [f"dry run of job {redact(job.name, hidden)}: {counts} by {launcher}; nothing is started"]
    for host in hosts:
        here = [task for task in tasks if task.host == host]
        printed += ["", f"{_title(host)}: {_count(len(here), 'process', 'es')} in {workdir(host)}"]
        for task in here:
            values = _values(job, task, tasks, cores_known)
            shown = {
                name: HIDDEN if value and is_secret(name, named) else redact(value, hidden)
                for name, value in values.items()
            }
            argv = [redact(word, hidden) for word in task.argv]
            if job.script and not host.python:
                argv[0] = python
            printed += [f"  {task.role} {task.rank}", *_command(workdir(host), shown, argv)]
    return printed


def _title(host: Host) -> str:
    user = f"{host.user}@" if host.user else ""
    port = f":{host.port}" if host.port else ""
    reached = f" ({user}{host.target}{port})" if user or port or host.target != host.name else ""
    return f"{host.name}{reached}"


def _values(job: Job, task: Task, tasks: Sequence[Task], cores_known: bool) -> Mapping[str, str]:
    """The process's environment, with words for what is not known yet."""
    values = dict(task.environment)
    for name in PORTS:
        if values.get(name) == "0":
            values[name] = BY_AGENT
    master = next((each.host.name for each in tasks if each.role == WORKER), "")
    addresses = {"DMLC_NODE_HOST": task.host.name, "DMLC_PS_ROOT_URI": tasks[0].host.name, "MASTER_ADDR": master}
    for name, host in addresses.items():
        if values.get(name) == "":
            values[name] = f"<address of {host}>"
    values["DMLTRAIN_JOB"] = "<new for each run>"
    given = {each.name for each in job.settings if each.role in ("", task.role)} | {k for k, _ in task.host.environment}
    if not cores_known and task.role == WORKER and "OMP_NUM_THREADS" not in given:
        workers = values.get("LOCAL_WORLD_SIZE", "1")
        values["OMP_NUM_THREADS"] = f"<cores of {task.host.name} / {workers}>"
    return values


def _command(workdir: str, environment: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """`cd ... && env A=b ... program ...`, in lines that a shell takes as one."""
    rows = ["env"]
    for name, value in sorted(environment.items()):
        word = shlex.quote(f"{name}={value}")
        if len(rows[-1]) + 1 + len(word) <= WIDTH:
            rows[-1] += f" {word}"
        else:
            rows.append(word)
    return [f"    cd {shlex.quote(workdir)} && \\", *(f"      {row} \\" for row in rows), f"      {shlex.join(argv)}"]


def _count(number: int, what: str, plural: str) -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
