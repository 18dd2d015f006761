"""What a job would start. Pure.

`--dry-run` prints the commands of all processes on each host, for a shell, with secrets hidden. `--plan` prints which
process runs on which host, as JSON, for other programs.

Values that only agents can find are described between < and >. Each command changes to the process's working directory
and sets the variables that the launcher adds to the host's environment, except DMLTRAIN_KEY_FILE and
DMLTRAIN_LISTEN_FD, which refer to what an agent creates.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence

from dmltrain_launch.clusters import LAUNCHERS
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job, workdir_of
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.role import WORKER
from dmltrain_launch.job.task import Ports, Task, tasks
from dmltrain_launch.secret import HIDDEN, is_secret, redact

BY_AGENT = "<chosen by the agent>"
PORTS = ("DMLC_PS_ROOT_PORT", "MASTER_PORT")
WIDTH = 110


def lines(job: Job, hosts: Sequence[Host], options: Options, python: str = sys.executable) -> list[str]:
    """`--dry-run`: the commands by host.

    `python` runs scripts without an interpreter on hosts without python= (else python3).
    """
    every = tasks(job, hosts, Ports(scheduler=job.port))
    used = list(dict.fromkeys(task.host for task in every))
    hidden = job.secrets(hosts)
    cores_known = not LAUNCHERS[options.launcher_name].over_network
    counts = f"{_count(len(every), 'process', 'es')} on {_count(len(used), 'host', 's')}"
    printed = [f"dry run of job {redact(job.name, hidden)}: {counts} by {options.launcher_name}; nothing is started"]
    for host in used:
        here = [task for task in every if task.host == host]
        where = redact(workdir_of(job, host), hidden)
        printed += ["", f"{_title(host)}: {_count(len(here), 'process', 'es')} in {where}"]
        for task in here:
            argv = [python, *task.argv[1:]] if job.script and not host.python else task.argv
            argv = [redact(word, hidden) for word in argv]
            environment = _redacted(job, _environment(job, task, every, cores_known), hidden)
            limit = job.memory.get(task.role, 0)
            printed += [f"  {task.role} {task.rank}", *_command(where, limit, environment, argv)]
    return printed


def _redacted(job: Job, values: Mapping[str, str], hidden: Sequence[str]) -> dict[str, str]:
    """An environment with its secrets replaced."""
    named = {setting.name for setting in job.settings if setting.secret}
    return {
        name: HIDDEN if value and is_secret(name, named) else redact(value, hidden) for name, value in values.items()
    }


def _title(host: Host) -> str:
    user = f"{host.user}@" if host.user else ""
    port = f":{host.port}" if host.port else ""
    reached = f" ({user}{host.target}{port})" if user or port or host.target != host.name else ""
    return f"{host.name}{reached}"


def _environment(job: Job, task: Task, every: Sequence[Task], cores_known: bool) -> Mapping[str, str]:
    """The process's environment, with descriptions of values that are not known yet."""
    values = dict(task.environment)
    for name in PORTS:
        if values.get(name) == "0":
            values[name] = BY_AGENT
    master = next((other.host.name for other in every if other.role == WORKER), "")
    addresses = {"DMLC_NODE_HOST": task.host.name, "DMLC_PS_ROOT_URI": every[0].host.name, "MASTER_ADDR": master}
    for name, host in addresses.items():
        if values.get(name) == "":
            values[name] = f"<address of {host}>"
    values["DMLTRAIN_JOB"] = "<unique to each run>"
    given = {name for name, _ in task.host.environment}
    given |= {setting.name for setting in job.settings if setting.role in ("", task.role)}
    if not cores_known and task.role == WORKER and "OMP_NUM_THREADS" not in given:
        workers = sum(other.role == WORKER and other.host == task.host for other in every)
        values["OMP_NUM_THREADS"] = f"<cores of {task.host.name} / {workers}>"
    return values


def _command(workdir: str, limit: int, environment: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """`cd ... && env A=b ... program ...`, split into lines that end in a backslash. `limit` is in MiB, 0: none."""
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


def plan(job: Job, hosts: Sequence[Host]) -> str:
    """`--plan`: a list with an object for each process, in the order of their start.

    role, rank; host: its name in the hosts file; hostname, user ("": the SSH configuration's) and port (0: the same):
    how SSH reaches it.
    """
    every = tasks(job, hosts, Ports(scheduler=job.port))
    rows = [
        {
            "role": task.role,
            "rank": task.rank,
            "host": task.host.name,
            "hostname": task.host.target,
            "user": task.host.user,
            "port": task.host.port,
        }
        for task in every
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
