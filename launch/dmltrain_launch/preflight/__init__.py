"""Preflight checks: all problems on all hosts, from the facts that the agents report, each with a fix. Pure.

`request(job, host)` is the request to an agent (`dmltrain_launch.agent.host.probe`). `problems` and `differences` check
the answers, `paths` checks which hosts reach each other. The code of a problem, if any, is the launcher's exit code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmltrain_launch.agent.network.outcome import NO_ROUTE, REFUSED, SILENT, UNAUTHENTICATED
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import OWNED, Job, workdir_of
from dmltrain_launch.preflight.pairs import Paths

Facts = Mapping[str, Any]  # the answer of `dmltrain_launch.agent.host.probe`
USER, NOT_EXECUTABLE, NOT_FOUND = 2, 126, 127  # exit codes; the last two are those of a shell
OLDEST_PYTHON = (3, 10)  # requires-python of dmltrain's pyproject.toml
SKEW_SECONDS = 1.0  # log lines of several hosts are compared by their times
OPEN_FILES = 256, 4  # of a process: for libraries and data, and for each other process of the job
DISK_MIB = {"/tmp": 100, "/dev/shm": 256}  # Docker's 64 MiB of /dev/shm are too few for a model's gradients
WORKDIR_MIB = 500  # logs, checkpoints
COMPARED = ("dmltrain", "torch", "mxnet")
EXTRAS = {"torch": "dmltrain[torch]", "mxnet": "dmltrain[mxnet]"}
DISTRIBUTIONS = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "google": "protobuf",
}  # by module, where the names differ


@dataclass(frozen=True)
class Problem:
    """A problem on `host` ("": of the whole job): what was found and expected, and the fix. `code` 0 is a warning."""

    host: str
    message: str
    fix: str = ""
    code: int = 0

    @property
    def fatal(self) -> bool:
        return self.code != 0

    @property
    def text(self) -> str:
        """One line."""
        host = f"{self.host}: " if self.host else ""
        return f"{host}{self.message}{'; ' if self.fix else ''}{self.fix}"


def request(job: Job, host: Host) -> dict[str, Any]:
    """The request to the agent of `host`."""
    settings = {setting.name: setting.value for setting in job.settings if not setting.role}
    return {
        "workdir": workdir_of(job, host),
        "argv": list(job.argv),
        "script": job.script,
        "python": host.python,
        "needs": list(job.needs),
        "environment": {**settings, **dict(host.environment)},
        "unset": list(OWNED),
        "gpus": list(host.gpus),
        "processes": job.num_workers + job.num_servers + 1,
    }


def clock_skew(facts: Facts, sent: float, received: float) -> float:
    """Seconds by which a host's clock is ahead of this one. `sent` and `received`: times of request and answer."""
    seconds: float = facts.get("seconds", 0.0)  # the host's time for the answer
    clock: float = facts["time"]
    travel = max(0.0, received - sent - seconds)  # of request and answer together
    return clock - (received - travel / 2)


def problems(host: Host, facts: Facts, request: Mapping[str, Any]) -> list[Problem]:
    """The problems of one host. facts["skew"], if present, is its clock skew in seconds. Unknown facts are ignored."""
    host_problems = _of_program(host, facts, request)
    if not any(problem.code in (NOT_FOUND, NOT_EXECUTABLE) for problem in host_problems):
        host_problems += _of_python(host, facts, request)
    return host_problems + _of_gpus(host, facts) + _of_machine(host, facts, request)


def _of_program(host: Host, facts: Facts, request: Mapping[str, Any]) -> list[Problem]:
    """The first problem of working directory, program and script, and whether checkpoints can be written."""
    workdir, program, script = (facts.get(name) for name in ("workdir", "program", "script"))
    if workdir and not workdir["exists"]:
        fix = "copy it there with --sync-dst-dir DIR, or set another with workdir= in the hosts file"
        return [Problem(host.name, f"the working directory {workdir['path']} does not exist", fix, NOT_FOUND)]
    problems = []
    if program and not program["executable"]:
        problems.append(_program(host, program, request))
    elif script and not script["exists"]:
        message = f"script {script['path']} not found (working directory {request['workdir']})"
        fix = "copy it there with --sync-dst-dir DIR, or set the directory that has it with workdir="
        problems.append(Problem(host.name, message, fix, NOT_FOUND))
    elif script and not script["readable"]:
        message = f"script {script['path']} cannot be read by the user that runs it"
        problems.append(Problem(host.name, message, f"chmod +r {script['path']}", NOT_EXECUTABLE))
    if workdir and not workdir["writable"]:
        message = f"the working directory {workdir['path']} is not writable: checkpoints cannot be saved in it"
        problems.append(Problem(host.name, message, "set another with workdir= in the hosts file"))
    return problems


def _program(host: Host, program: Mapping[str, Any], request: Mapping[str, Any]) -> Problem:
    name = program["name"]
    if program["folder"]:
        return Problem(host.name, f"{name} is a folder, not a program", code=NOT_EXECUTABLE)
    if program["path"]:
        return Problem(host.name, f"program {program['path']} is not executable", f"chmod +x {name}", NOT_EXECUTABLE)
    if request.get("script"):
        fix = "set the host's Python with python= in the hosts file"
        return Problem(host.name, f"Python {name} not found", fix, NOT_FOUND)
    where = f"working directory {request['workdir']}" if "/" in name else "PATH of a non-interactive login there"
    fix = "give its full path" + (", or copy it there with --sync-dst-dir DIR" if "/" in name else "")
    return Problem(host.name, f"program {name} not found ({where})", fix, NOT_FOUND)


def _of_python(host: Host, facts: Facts, request: Mapping[str, Any]) -> list[Problem]:
    """Whether the interpreter of the script is new enough and finds the needed modules."""
    inspection, needs = facts.get("inspection") or {}, list(request.get("needs") or ())
    if inspection.get("error"):
        if not request.get("script"):
            return []
        return [Problem(host.name, f"cannot find out what its Python can import: {inspection['error']}")]
    if not inspection:
        return []
    python = f"{inspection['executable']} ({inspection['version']})"
    numbers = tuple(int(part) for part in re.findall(r"\d+", inspection["version"])[:2])
    if "dmltrain" in needs and numbers < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        message = f"{python} is too old for dmltrain, which needs Python {oldest} or later"
        return [Problem(host.name, message, "set another with python= in the hosts file", USER)]
    return _of_modules(host, inspection, python, needs)


def _of_modules(host: Host, inspection: Mapping[str, Any], python: str, needs: Sequence[str]) -> list[Problem]:
    missing, packages = inspection["missing"], inspection["packages"]
    first_local = min((needs.index(name) for name in inspection["local"]), default=len(needs))
    problems = []
    # a module beside the script may change sys.path for later imports, as MXNet's find_mxnet.py does
    for sure in (True, False):
        names = [name for name in missing if (needs.index(name) < first_local) == sure]
        if names:
            message = f"{python} lacks {', '.join(names)}, which the script imports"
            problems.append(Problem(host.name, message, _install(inspection["executable"], names), USER if sure else 0))
    if "dmltrain" in needs and "dmltrain" not in missing and not (packages.get("torch") or packages.get("mxnet")):
        message = f"{python} has dmltrain, but neither torch nor mxnet"
        problems.append(Problem(host.name, message, _install(inspection["executable"], ["torch"])))
    return problems


def _install(python: str, modules: Sequence[str]) -> str:
    """The command that installs `modules` for `python`."""
    wanted = list(dict.fromkeys(EXTRAS.get(name, DISTRIBUTIONS.get(name, name)) for name in modules))
    if any(name.startswith("dmltrain[") for name in wanted):
        wanted = [name for name in wanted if name != "dmltrain"]
    quoted = " ".join(f"'{name}'" if "[" in name else name for name in wanted)
    return f"{python} -m pip install {quoted}, or set another Python with python= in the hosts file"


def _of_gpus(host: Host, facts: Facts) -> list[Problem]:
    """gpus= has indices, UUIDs or beginnings of UUIDs, as CUDA_VISIBLE_DEVICES does."""
    if not host.gpus or facts.get("gpus") is None:
        return []
    have = facts["gpus"]
    known = {str(gpu["index"]) for gpu in have}
    absent = [
        gpu_name
        for gpu_name in host.gpus
        if gpu_name not in known
        and not (gpu_name.startswith("GPU-") and any(gpu["uuid"].startswith(gpu_name) for gpu in have))
        and not (gpu_name.startswith("MIG-") and have)  # not listed by the probe
    ]
    if not absent:
        return []
    listing = ", ".join(f"{gpu['index']} ({gpu['name']})" for gpu in have) or "none (by nvidia-smi -L)"
    message = f"gpus={','.join(host.gpus)}: there is no GPU {', '.join(absent)}; the host has {listing}"
    return [Problem(host.name, message, "correct gpus= in the hosts file", USER)]


def _of_machine(host: Host, facts: Facts, request: Mapping[str, Any]) -> list[Problem]:
    """Warnings about clock, open files and disks."""
    problems = []
    skew = facts.get("skew", 0.0)
    if abs(skew) > SKEW_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        message = (
            f"its clock is {abs(skew):.1f} s {way} this machine's: times in its logs cannot be compared with others"
        )
        problems.append(Problem(host.name, message, "run an NTP client there (chrony, systemd-timesyncd)"))
    soft, hard = facts.get("open_files") or (-1, -1)
    needed = OPEN_FILES[0] + OPEN_FILES[1] * request.get("processes", 0)
    if 0 <= soft < needed:
        how = "with ulimit -n in the shell's start-up file" if hard < 0 or hard >= needed else "as root"
        message = f"a process may open {soft} files, but one of this job may need {needed}"
        problems.append(Problem(host.name, message, f"raise it: {how}, or nofile in /etc/security/limits.conf"))
    for path, free in (facts.get("disk") or {}).items():
        wanted = DISK_MIB.get(path, WORKDIR_MIB)
        if free is not None and free < wanted:
            message = f"{free} MiB are free at {path}, expected at least {wanted}"
            problems.append(Problem(host.name, message, "docker run --shm-size=8g" if path == "/dev/shm" else ""))
    return problems


def differences(facts: Mapping[str, Facts]) -> list[Problem]:
    """Warnings about packages whose versions differ between hosts: results may depend on which host computes what."""
    problems = []
    for package in COMPARED:
        hosts: dict[str, list[str]] = {}
        for name, fact in facts.items():
            version = ((fact.get("inspection") or {}).get("packages") or {}).get(package)
            if version:
                hosts.setdefault(version, []).append(name)
        if len(hosts) > 1:
            listing = "; ".join(f"{version} on {', '.join(names)}" for version, names in hosts.items())
            message = f"hosts have different versions of {package}: {listing}"
            problems.append(Problem("", message, "install the same version on all hosts"))
    return problems


CHOICE = "choose another with --interface, --subnet or addr="
FIXES = {
    REFUSED: f"a firewall there rejects connections, or this is not their common network: {CHOICE}",
    NO_ROUTE: f"they have no common network with this address: {CHOICE}",
    SILENT: "its agent does not respond: is that host overloaded?",
    UNAUTHENTICATED: f"another machine in this host's network has this address: {CHOICE}",
}
DROPPED = f"a firewall drops packets to high ports, or this is not their common network: {CHOICE}"


def paths(addresses: Mapping[str, str], reached: Paths) -> list[Problem]:
    """Which hosts do not reach each other. `reached` has the results of `dmltrain_launch.agent.network.reach` by
    host."""
    return [
        Problem(
            name,
            f"cannot reach {peer} at {addresses.get(peer)}: {path['error']}",
            FIXES.get(path["error"], DROPPED),
            USER,
        )
        for name, peers in reached.items()
        for peer, path in peers.items()
        if path.get("error")
    ]
