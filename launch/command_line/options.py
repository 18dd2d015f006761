"""The command line: one table of options, and argv -> Options. Pure: the environment is an argument.

Everything after the first argument that is no option of ours belongs to the program, whatever it looks like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from launch import LaunchError
from launch.clusters import LAUNCHERS, listing, those_with
from launch.command_line import old_options
from launch.job.job import OWNED, Setting
from launch.job.options import Options
from launch.job.placement import POLICIES
from launch.job.role import SERVER, WORKER

# Set where the launcher runs, these are meant for the processes of the job wherever they run.
FORWARDED = re.compile(
    r"(PS|MXNET|NCCL|GLOO)_\w+|OMP_NUM_THREADS|KMP_AFFINITY|PYTHONPATH|PYTHONUNBUFFERED|DMLC_INTERFACE"
)
FILE = "a file"
STARTS = ("", "check", "dry-run")  # modes that are about a job to be started
USAGE = "usage: dmltrain-launch [options] -n WORKERS [-s SERVERS] program [arguments of the program]"


Apply = Callable[[Options, str, str, Mapping[str, str]], Options]


@dataclass(frozen=True)
class Option:
    """One row of the table. `apply(options, value, name, environ)` gives the options with this one in it."""

    names: tuple[str, ...]
    value: str  # its name in --help; "" when the option takes none
    meaning: str
    apply: Apply


def _changed(options: Options, field: str, value: object) -> Options:
    """`options` with another value in one field."""
    changes: dict[str, Any] = {field: value}
    return replace(options, **changes)


def _number(field: str, convert: Callable[[str], float], least: float, most: float = math.inf) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        try:
            number = convert(value)
        except ValueError:
            number = math.nan
        if not (least <= number < math.inf) or number > most:
            kind = "a whole number" if convert is int else "a number of seconds"
            limit = f"to {most}" if most < math.inf else "or more"
            raise LaunchError(f"{name} is {value}: expected {kind}, {least} {limit}")
        return _changed(options, field, number)

    return apply


def _set(field: str, constant: object) -> Apply:
    return lambda options, value, name, environ: _changed(options, field, constant)


def _launcher(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value not in LAUNCHERS:
        why = old_options.cluster_elsewhere(value)
        raise LaunchError(f"{name} {value}: there is {listing()}" + (f"; {why}" if why else ""))
    return replace(options, launcher=value)


def _job(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not re.fullmatch(r"[^/\0\n]{1,100}", value) or value in (".", ".."):
        raise LaunchError(f"{name} is {value!r}: expected a name for a folder, without / and of at most 100 characters")
    return replace(options, job=value)


def _log_dir(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not value:
        raise LaunchError(f"{name} is empty: expected a folder")
    return replace(options, log_dir=value)


def _text(field: str, what: str) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        if not value:
            raise LaunchError(f"{name} is empty: expected {what}")
        return _changed(options, field, value)

    return apply


def _folder_there(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not value.startswith(("/", "~")):
        raise LaunchError(f"{name} is {value!r}: expected a folder on every host, by its path from / or ~/ on")
    return replace(options, sync_dst_dir=value)


def _add(field: str) -> Apply:
    return lambda options, value, name, environ: _changed(options, field, (*getattr(options, field), value))


def _more(field: str, what: str) -> Apply:
    """Repeated, the option names more of them."""
    one = _text(field, what)

    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        before = getattr(options, field)
        return one(options, f"{before},{value}" if before and value else value, name, environ)

    return apply


def _choice(field: str, choices: Collection[str]) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        if value not in choices:
            raise LaunchError(f"{name} {value}: there is {', '.join(choices)}")
        return _changed(options, field, value)

    return apply


def _mode(mode: str) -> Apply:
    return lambda options, value, name, environ: replace(options, mode=mode, target=value)


def _setting(role: str) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:[=:](.*))?", value, re.DOTALL | re.ASCII)
        if not match:
            word = re.split("[=:]", value, maxsplit=1)[0]  # the rest may be secret
            raise LaunchError(f"{name} {word}: expected NAME=VALUE, NAME:VALUE, or NAME to pass on the launcher's own")
        variable, text = match.groups()
        if text is None and variable not in environ:
            raise LaunchError(f"{name} {variable}: it is not set here; give {variable}=VALUE")
        return _with_setting(options, name, Setting(variable, environ[variable] if text is None else text, role))

    return apply


def _secret(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value not in environ:
        raise LaunchError(f"{name} {value.partition('=')[0]}: expected the NAME of a variable that is set here")
    return _with_setting(options, name, Setting(value, environ[value], secret=True))


def _with_setting(options: Options, name: str, setting: Setting) -> Options:
    if setting.name in OWNED:
        raise LaunchError(f"{name} {setting.name}: the launcher itself sets this for every process")
    return replace(options, settings=(*options.settings, setting))


OPTIONS: tuple[Option, ...] = (
    Option(("-n", "--num-workers"), "N", "number of workers", _number("num_workers", int, 1)),
    Option(
        ("-s", "--num-servers"),
        "N",
        "number of servers (default: one per worker; 0: workers only)",
        _number("num_servers", int, 0),
    ),
    Option(
        ("--launcher", "--cluster"),
        "NAME",
        f"where to run: {listing()} (default: ssh with hosts, else local)",
        _launcher,
    ),
    Option(("-H", "--hostfile", "--host-file"), "FILE", "the hosts; hosts.example explains", _text("hostfile", FILE)),
    Option(("--hosts",), "A:2,B:4", "the hosts and their slots, on the command line", _more("hosts", "hosts")),
    Option(("-WH", "--worker-hostfile"), "FILE", "the hosts of the workers", _text("worker_hostfile", FILE)),
    Option(("-SH", "--server-hostfile"), "FILE", "the hosts of scheduler and servers", _text("server_hostfile", FILE)),
    Option(
        ("--include",),
        "NAMES",
        "of the hosts only these: names, ranges node[01-08], patterns",
        _more("include", "host names"),
    ),
    Option(("--exclude",), "NAMES", "and without these", _more("exclude", "host names")),
    Option(
        ("--placement",),
        "POLICY",
        "dmlc (servers first, round robin), pack, spread, or dedicated (servers alone)",
        _choice("placement", POLICIES),
    ),
    Option(
        ("--interface",),
        "NIC",
        "network interface of the training (default: the network that all hosts share)",
        _text("interface", "an interface such as eth1"),
    ),
    Option(("--subnet",), "NET", "the same as a network: 10.0.0.0/24", _text("subnet", "a network")),
    Option(
        ("--ssh",),
        "paramiko|system",
        "how to log in (default: paramiko); system: the ssh command, with all that its configuration can do",
        _choice("ssh", ("paramiko", "system")),
    ),
    Option(
        ("--ssh-port",),
        "PORT",
        "port of sshd where the hosts file names none (default: the ssh configuration's)",
        _number("ssh_port", int, 1, 65535),
    ),
    Option(("-i", "--identity"), "FILE", "private key for SSH", _text("identity", FILE)),
    Option(
        ("--accept-new-host-keys",),
        "",
        "trust and remember host keys that are not known yet",
        _set("accept_new_host_keys", True),
    ),
    Option(
        ("--connect-timeout",), "SECONDS", "for reaching a host (default: 10)", _number("connect_timeout", float, 1)
    ),
    Option(("--mpirun",), "PATH", "the mpirun of --launcher mpi (Open MPI or MPICH)", _text("mpirun", "a program")),
    Option(("--mpirun-args",), "ARG", "one more argument for mpirun; repeat as needed", _add("mpirun_args")),
    Option(("--sync-dst-dir",), "DIR", "copy the working directory to DIR on every host, and run there", _folder_there),
    Option(
        ("--sync-exclude",),
        "PATTERN",
        "leave this out of the copy, as .gitignore would; repeat as needed",
        _add("sync_exclude"),
    ),
    Option(("--env",), "K[=V]", "environment variable for all processes: K=V, K:V, or K as it is here", _setting("")),
    Option(("--env-server",), "K[=V]", "the same for the servers only", _setting(SERVER)),
    Option(("--env-worker",), "K[=V]", "the same for the workers only", _setting(WORKER)),
    Option(("--secret",), "NAME", "pass on the variable NAME as it is here, and never show its value", _secret),
    Option(
        ("--torch-env",),
        "auto|on|off",
        "give workers torch.distributed's variables (RANK, MASTER_ADDR ...); auto "
        "(default): unless the script imports dmltrain",
        _choice("torch_env", ("auto", "on", "off")),
    ),
    Option(("--log-dir",), "DIR", "folder for the logs and job.json (default: logs/JOB)", _log_dir),
    Option(("--log-file",), "FILE", "the launcher's own lines go there too", _text("log_file", FILE)),
    Option(("--job", "--jobname"), "NAME", "name of the job (default: program and time)", _job),
    Option(("--port",), "PORT", "TCP port of the scheduler (default: any free one)", _number("port", int, 0)),
    Option(
        ("--grace",),
        "SECONDS",
        "between asking processes to end and killing them (default: 5)",
        _number("grace", float, 0),
    ),
    Option(
        ("--timeout",),
        "SECONDS",
        "end the job after this time, with all stacks and exit code 124 (default: never)",
        _number("timeout", float, 0),
    ),
    Option(
        ("--start-timeout",),
        "SECONDS",
        "for all processes to be started, without the copying (default: 60)",
        _number("start_timeout", float, 0),
    ),
    Option(
        ("--max-restarts",),
        "N",
        "start the job anew after a failure, at most N times (default: 0)",
        _number("max_restarts", int, 0),
    ),
    Option(("--quiet",), "", "no output of the processes on the terminal; the logs have it", _set("quiet", True)),
    Option(("--no-live",), "", "plain lines on a terminal too", _set("live", False)),
    Option(("--config",), "FILE", "YAML file with these options; the command line overrides it", _text("config", FILE)),
    Option(
        ("--check",),
        "",
        "look at the hosts and the network between them; with a training program, forecast",
        _mode("check"),
    ),
    Option(("--dry-run",), "", "print what would run where, start nothing", _mode("dry-run")),
    Option(("--ps",), "JOB", "list the processes of a job (its name, or its log folder)", _mode("ps")),
    Option(("--kill",), "JOB", "end a job and whatever is left of it on its hosts", _mode("kill")),
    Option(("--logs",), "JOB", "print the logs of a job", _mode("logs")),
    Option(("--follow",), "", "with --logs: go on until the job ends", _set("follow", True)),
    Option(("--show",), "WHO", "with --logs: only these, such as worker:0,scheduler", _text("show", "roles")),
    Option(("--version",), "", "print the version", _mode("version")),
    Option(("-h", "--help"), "", "print this", _mode("help")),
)
OPTIONS = (*OPTIONS, *(Option(*row) for row in old_options.ROWS))
BY_NAME = {name: option for option in OPTIONS for name in option.names}
BY_NAME |= {theirs: BY_NAME[ours] for theirs, ours in old_options.ALIASES.items()}
BY_NAME |= {name: Option(*row) for row in old_options.REFUSED for name in row.names}


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options of `argv` (without the program's own name); LaunchError says what is wrong with it."""
    settings = tuple(Setting(name, value) for name, value in environ.items() if FORWARDED.fullmatch(name))
    given, program = split(argv)
    options = Options(settings=settings)
    for file in reversed([value for _, name, value in given if name == "--config"]):  # a later file overrides
        from launch.command_line import config  # which imports yaml

        more, its_program = split(config.arguments(file, OPTIONS, partial(_try, environ)))
        overridden = {name for _, name, _ in given} & HOST_LISTS
        more = [each for each in more if each[1] not in overridden]
        given, program = [*more, *given], program or its_program
    for option, name, value in given:
        options = option.apply(options, value, name, environ)
    options = replace(options, program=program)
    if not options.launcher and environ.get(old_options.CLUSTER_VARIABLE):
        options = _launcher(options, environ[old_options.CLUSTER_VARIABLE], old_options.CLUSTER_VARIABLE, environ)
    _refuse_unused(options, [name for _, name, _ in given])
    return options


def _refuse_unused(options: Options, names: Sequence[str]) -> None:
    """No option is taken and then forgotten."""
    for name in names:
        if options.mode in STARTS and options.place not in those_with(name):
            those = " or ".join(those_with(name))
            raise LaunchError(f"{name} is for --launcher {those}, and this job's is {options.place}: leave it out")
    if options.sync_exclude and not options.sync_dst_dir:
        raise LaunchError("--sync-exclude leaves files out of a copy: give --sync-dst-dir too, or leave it out")
    if (options.follow or options.show) and options.mode != "logs":
        raise LaunchError("--follow and --show are for --logs JOB")


HOST_LISTS = {"--hosts", "--include", "--exclude"}  # repeated, they name more; on the command line, others


def _try(environ: Mapping[str, str], option: Option, name: str, value: str) -> None:
    """Refuse what the option would refuse."""
    option.apply(Options(), value, name, environ)


def split(argv: Sequence[str]) -> tuple[list[tuple[Option, str, str]], tuple[str, ...]]:
    """(option, the name it was given by, value) of each option, and the program with its arguments."""
    given, rest = [], list(argv)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        name, glued = _split(rest.pop(0))
        option = _lookup(name)
        if option.value and glued is None and not rest:
            raise LaunchError(f"{name} needs a value: {name} {option.value}")
        if not option.value and glued is not None:
            raise LaunchError(f"{name} takes no value, not {glued!r}")
        value = "" if not option.value else rest.pop(0) if glued is None else glued
        given.append((option, name, value))
    return given, tuple(rest[1:] if rest[:1] == ["--"] else rest)


def _split(argument: str) -> tuple[str, str | None]:
    """--name=value and -n2 into name and value."""
    if argument in BY_NAME:
        return argument, None
    if argument.startswith("--"):
        name, equals, value = argument.partition("=")
        return name, value if equals else None
    return argument[:2], argument[2:] or None


def _lookup(name: str) -> Option:
    if name in BY_NAME:
        return BY_NAME[name]
    valid = ", ".join("/".join(option.names) for option in OPTIONS)
    raise LaunchError(f"unknown option {name}; the options are {valid}")


def table(options: Sequence[Option]) -> str:
    """The options for --help. Two spaces before what each means: completion reads them so."""
    rows = [(f"{', '.join(option.names)} {option.value}", option.meaning) for option in options]
    return "\n".join(f"  {names:<30}  {meaning}" for names, meaning in rows)


def usage() -> str:
    """The text of --help."""
    return f"""{USAGE}

Start a scheduler, servers and workers that all run the same program, and end when the workers do.
A bare script.py is run by this Python. Everything after the program's name belongs to the program.

{table(OPTIONS)}

Exit code: 0, or that of the first process to fail (128 + n for a signal), 2 wrong usage, 124 timeout,
125 fault of the launcher or its agents, 126 program not executable, 127 not found, 130 Ctrl-C, 143 SIGTERM.
"""


OTHER_PROGRAMS = ("--check", "--dry-run", "--ps", "--kill", "--logs", "--follow", "--show")  # not of dmltrain-check


def check_usage() -> str:
    """The text of dmltrain-check --help."""
    options = [option for option in OPTIONS if option.names[0] not in OTHER_PROGRAMS]
    return f"""usage: dmltrain-check [options] [program [arguments of the program]]

Check the hosts that the options name, and measure the network between them. No job is started.
With -n and a training program, its steps are measured and its speed on these hosts is forecast.
The options are those of the job to be started.

{table(options)}

Exit code: 0 when a job could start, else that which dmltrain-launch would end with.
"""
