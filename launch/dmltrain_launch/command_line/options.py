"""The launcher's command line: argv -> Options, and --help. Pure: the environment is an argument.

The first argument that is not an option is the program. All arguments after it belong to the program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters import AllOptions, any_with, launchers_with
from dmltrain_launch.command_line import old_options
from dmltrain_launch.command_line.table import BY_NAME, OPTIONS, use_launcher
from dmltrain_launch.job.job import Setting
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import Option
from dmltrain_launch.secret import is_secret

# Variables of the launcher's environment that all processes of the job get.
FORWARDED = re.compile(
    r"(PS|MXNET|NCCL|GLOO)_\w+|OMP_NUM_THREADS|KMP_AFFINITY|PYTHONPATH|PYTHONUNBUFFERED|DMLC_INTERFACE"
)
STARTS = ("", "check", "dry-run", "plan")  # modes that plan a new job
USAGE = "usage: dmltrain-launch [options] -n WORKERS [-s SERVERS] program [arguments of the program]"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options in `argv`, which begins after the program's own name. LaunchError if it is wrong."""
    settings = tuple(Setting(name, value) for name, value in environ.items() if FORWARDED.fullmatch(name))
    given, program = _expanded(argv, environ)
    options = AllOptions(settings=settings)
    for option, name, value in given:
        options = option.apply(options, value, name, environ)
    options = replace(options, program=program)
    if not options.launcher and environ.get(old_options.CLUSTER_VARIABLE):
        options = use_launcher(options, environ[old_options.CLUSTER_VARIABLE], old_options.CLUSTER_VARIABLE, environ)
    _refuse_unused(options, [(name, option) for option, name, _ in given])
    return options


def _expanded(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[tuple[Option, str, str]], tuple[str, ...]]:
    """`split`, with the options of configuration files in the place of --config."""
    given, program = split(argv)
    for file in reversed([value for _, name, value in given if name == "--config"]):  # a later file overrides
        from dmltrain_launch.command_line import config  # which imports yaml

        more, its_program = split(config.arguments(file, OPTIONS, partial(_try, environ)))
        overridden = {name for _, name, _ in given} & HOST_LISTS
        more = [each for each in more if each[1] not in overridden]
        given, program = [*more, *given], program or its_program
    return given, program


def words_inside(argv: Sequence[str], environ: Mapping[str, str], launcher: str) -> tuple[str, ...]:
    """The command line for a launcher inside of a cluster, which does not see this machine's files."""
    given, program = _expanded(argv, environ)
    words = ["--launcher", launcher]
    for option, name, value in given:
        if not option.here:
            words += [name, _without_secret(option, value, environ)] if option.value else [name]
    return (*words, "--", *program)


def _without_secret(option: Option, value: str, environ: Mapping[str, str]) -> str:
    """NAME for --env NAME=VALUE, if it is secret and this machine's variable: then the launcher inside has it, too."""
    if option.names[0].startswith("--env"):
        variable = re.split("[=:]", value, maxsplit=1)[0]
        if is_secret(variable) and environ.get(variable) == value[len(variable) + 1 :]:
            return variable
    return value


def _refuse_unused(options: Options, given: Sequence[tuple[str, Option]]) -> None:
    """Refuse options that would have no effect. `given`: each as it was spelt, and what it is."""
    for name, option in given:
        if options.mode in STARTS and options.launcher_name not in launchers_with(option):
            raise LaunchError(
                f"{name} needs --launcher {any_with(option)}, but this job uses {options.launcher_name}: remove it"
            )
    if options.sync_exclude and not options.sync_dst_dir:
        raise LaunchError("--sync-exclude needs --sync-dst-dir: add it, or remove --sync-exclude")
    for field in OF_ELASTIC_JOBS:
        if getattr(options, field) is not None and not options.elastic:
            raise LaunchError(f"--{field.replace('_', '-')} needs --elastic")
    if options.most_workers and not options.elastic:
        raise LaunchError(f"-n {options.num_workers}:{options.most_workers} needs --elastic: else give one number")
    if options.watch_hosts and not (options.elastic and (options.hostfile or options.worker_hostfile)):
        raise LaunchError("--watch-hosts needs --elastic and a hosts file: -H FILE")
    if (options.follow or options.show) and options.mode != "logs":
        raise LaunchError("--follow and --show need --logs JOB")


OF_ELASTIC_JOBS = ("min_workers", "restart_workers", "restart_servers", "restart_scheduler", "wait_for_hosts")
HOST_LISTS = {"--hosts", "--include", "--exclude"}  # the command line replaces the lists of a --config file


def _try(environ: Mapping[str, str], option: Option, name: str, value: str) -> None:
    """Raise LaunchError if the option does not accept the value."""
    option.apply(AllOptions(), value, name, environ)


def split(argv: Sequence[str]) -> tuple[list[tuple[Option, str, str]], tuple[str, ...]]:
    """(option, its name as given, value) for each option, and the program with its arguments."""
    given, rest = [], list(argv)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        name, glued = _split(rest.pop(0))
        option = _lookup(name)
        if option.value and glued is None and not rest:
            raise LaunchError(f"{name} needs a value: {name} {option.value}")
        if not option.value and glued is not None:
            raise LaunchError(f"{name} takes no value: remove {glued!r}")
        value = "" if not option.value else rest.pop(0) if glued is None else glued
        given.append((option, name, value))
    return given, tuple(rest[1:] if rest[:1] == ["--"] else rest)


def _split(argument: str) -> tuple[str, str | None]:
    """Split --name=value or -n2 into name and value."""
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
    raise LaunchError(f"unknown option {name}: expected one of {valid}")


def table(options: Sequence[Option]) -> str:
    """The options for --help. `dmltrain_launch.commands.completion` needs the two spaces before each meaning."""
    rows = [(f"{', '.join(option.names)} {option.value}", option.meaning) for option in options]
    return "\n".join(f"  {names:<30}  {meaning}" for names, meaning in rows)


def usage() -> str:
    """The text of --help."""
    return f"""{USAGE}

Start a scheduler, servers and workers that all run the same program. The job ends when the workers do.
A script.py without an interpreter runs with this Python. All arguments after the program belong to the program.

{table(OPTIONS)}

Exit code: 0, or that of the first process to fail (128 + n for signal n); 2 usage error, 124 timeout,
125 launcher or agent failure, 126 program not executable, 127 program not found, 130 Ctrl-C, 143 SIGTERM.
"""


OTHER_MODES = {
    "--check",
    "--dry-run",
    "--plan",
    "--ps",
    "--kill",
    "--attach",
    "--logs",
    "--follow",
    "--show",
    "--detach",
}


def check_usage() -> str:
    """The text of dmltrain-check --help, which has no other modes."""
    options = [option for option in OPTIONS if option.names[0] not in OTHER_MODES]
    return f"""usage: dmltrain-check [options] [program [arguments of the program]]

Check the hosts and measure the network between them, without starting a job.
With -n and a training program, also measure a training step and forecast the job's speed.
Give the same options as to dmltrain-launch.

{table(options)}

Exit code: 0 if the job could start, otherwise the exit code of dmltrain-launch in that case.
"""
