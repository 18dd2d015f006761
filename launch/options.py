"""The command line: one table of options, and argv -> Options. Pure: the environment is an argument.

Everything after the first argument that is no option of ours belongs to the program, whatever it looks like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch import LaunchError
from launch.clusters import CLUSTERS, listing
from launch.job import OWNED, SERVER, WORKER, Setting

# Set where the launcher runs, these are meant for the processes of the job wherever they run.
FORWARDED = re.compile(r"(PS|MXNET|NCCL|GLOO)_\w+|OMP_NUM_THREADS|PYTHONPATH|PYTHONUNBUFFERED|DMLC_INTERFACE")
USAGE = "usage: dmltrain-launch [options] -n WORKERS [-s SERVERS] program [arguments of the program]"


@dataclass(frozen=True)
class Options:
    """What the command line says. Times in seconds; `timeout` 0 is none; `num_servers` None is one per worker."""

    launcher: str = "local"
    num_workers: int | None = None
    num_servers: int | None = None
    settings: tuple[Setting, ...] = ()
    log_dir: str = ""
    job: str = ""
    port: int = 0
    grace: float = 5.0
    timeout: float = 0.0
    quiet: bool = False
    live: bool = True
    help: bool = False
    version: bool = False
    program: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """One row of the table. `apply(options, value, name, environ)` gives the options with this one in it."""

    names: tuple[str, ...]
    value: str  # its name in --help; "" when the option takes none
    meaning: str
    apply: Callable[[Options, str, str, Mapping[str, str]], Options]


def _number(field: str, convert: Callable[[str], Any], least: float) -> Callable:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        try:
            number = convert(value)
        except ValueError:
            number = math.nan
        if not (least <= number < math.inf):
            kind = "a whole number" if convert is int else "a number of seconds"
            raise LaunchError(f"{name} is {value}: expected {kind}, {least} or more")
        return replace(options, **{field: number})

    return apply


def _set(field: str, constant: Any) -> Callable:
    return lambda options, value, name, environ: replace(options, **{field: constant})


def _launcher(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value not in CLUSTERS:
        raise LaunchError(f"{name} {value}: there is {listing()}")
    return replace(options, launcher=value)


def _job(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not re.fullmatch(r"[^/\0\n]{1,100}", value) or value in (".", ".."):
        raise LaunchError(f"{name} is {value!r}: expected a name for a folder, without / and of at most 100 characters")
    return replace(options, job=value)


def _log_dir(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not value:
        raise LaunchError(f"{name} is empty: expected a folder")
    return replace(options, log_dir=value)


def _setting(role: str) -> Callable:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:[=:](.*))?", value, re.DOTALL | re.ASCII)
        if not match:
            raise LaunchError(f"{name} {value}: expected NAME=VALUE, NAME:VALUE, or NAME to pass on the launcher's own")
        variable, text = match.groups()
        if variable in OWNED:
            raise LaunchError(f"{name} {variable}: the launcher itself sets this for every process")
        if text is None and variable not in environ:
            raise LaunchError(f"{name} {variable}: it is not set here; give {variable}=VALUE")
        setting = Setting(variable, environ[variable] if text is None else text, role)
        return replace(options, settings=(*options.settings, setting))

    return apply


OPTIONS = (
    Option(("-n", "--num-workers"), "N", "number of workers", _number("num_workers", int, 1)),
    Option(("-s", "--num-servers"), "N", "number of servers (default: one per worker; 0: workers only)",
           _number("num_servers", int, 0)),
    Option(("--launcher", "--cluster"), "NAME", f"where to run: {listing()}", _launcher),
    Option(("--env",), "K[=V]", "environment variable for all processes: K=V, K:V, or K as it is here", _setting("")),
    Option(("--env-server",), "K[=V]", "the same for the servers only", _setting(SERVER)),
    Option(("--env-worker",), "K[=V]", "the same for the workers only", _setting(WORKER)),
    Option(("--log-dir",), "DIR", "folder for the logs and job.json (default: logs/JOB)", _log_dir),
    Option(("--job",), "NAME", "name of the job (default: program and time)", _job),
    Option(("--port",), "PORT", "TCP port of the scheduler (default: any free one)", _number("port", int, 0)),
    Option(("--grace",), "SECONDS", "between asking processes to end and killing them (default: 5)",
           _number("grace", float, 0)),
    Option(("--timeout",), "SECONDS", "end the job after this time, with exit code 124 (default: never)",
           _number("timeout", float, 0)),
    Option(("--quiet",), "", "no output of the processes on the terminal; the logs have it", _set("quiet", True)),
    Option(("--no-live",), "", "plain lines on a terminal too", _set("live", False)),
    Option(("--version",), "", "print the version", _set("version", True)),
    Option(("-h", "--help"), "", "print this", _set("help", True)),
)
BY_NAME = {name: option for option in OPTIONS for name in option.names}

# Options of dmlc's and MXNet's launchers that are about other hosts.
ELSEWHERE = ("-H", "--hostfile", "--host-file", "--hosts", "--host-ip", "--sync-dst-dir", "--hdfs-tempdir", "--p3")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options of `argv` (without the program's own name); LaunchError says what is wrong with it."""
    settings = tuple(Setting(name, value) for name, value in environ.items() if FORWARDED.fullmatch(name))
    options, rest = Options(settings=settings), list(argv)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        name, glued = _split(rest.pop(0))
        option = _lookup(name)
        if option.value and glued is None and not rest:
            raise LaunchError(f"{name} needs a value: {name} {option.value}")
        if not option.value and glued is not None:
            raise LaunchError(f"{name} takes no value, not {glued!r}")
        value = "" if not option.value else rest.pop(0) if glued is None else glued
        options = option.apply(options, value, name, environ)
    return replace(options, program=tuple(rest[1:] if rest[:1] == ["--"] else rest))


def _split(argument: str) -> tuple[str, str | None]:
    """--name=value and -n2 into name and value."""
    if argument.startswith("--"):
        name, equals, value = argument.partition("=")
        return name, value if equals else None
    return argument[:2], argument[2:] or None


def _lookup(name: str) -> Option:
    if name in BY_NAME:
        return BY_NAME[name]
    if name in ELSEWHERE:
        raise LaunchError(f"{name} is about jobs on other hosts; here there is {listing()}, which takes no such option")
    valid = ", ".join("/".join(option.names) for option in OPTIONS)
    raise LaunchError(f"unknown option {name}; the options are {valid}")


def usage() -> str:
    """The text of --help."""
    rows = [(f"{', '.join(option.names)} {option.value}", option.meaning) for option in OPTIONS]
    table = "\n".join(f"  {names:<30} {meaning}" for names, meaning in rows)
    return f"""{USAGE}

Start a scheduler, servers and workers that all run the same program, and end when the workers do.
A bare script.py is run by this Python. Everything after the program's name belongs to the program.

{table}

Exit code: 0, or that of the first process to fail (128 + n for a signal), 2 wrong usage, 124 timeout,
125 fault of the launcher or its agents, 126 program not executable, 127 not found, 130 Ctrl-C, 143 SIGTERM.
"""
