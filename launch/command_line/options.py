"""The launcher's command line: a table of options, and argv -> Options. Pure: the environment is an argument.

The first argument that is not an option is the program. All arguments after it belong to the program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from launch import LaunchError
from launch.clusters import LAUNCHERS, any_with, launchers_with, listing
from launch.clusters.in_ray import placement as ray_placement
from launch.command_line import old_options
from launch.job import placement
from launch.job.job import OWNED, WIRES, Setting
from launch.job.options import Options
from launch.job.role import SERVER, WORKER
from launch.job.rule import EXAMPLE, parse_rule

# Variables of the launcher's environment that all processes of the job get.
FORWARDED = re.compile(
    r"(PS|MXNET|NCCL|GLOO)_\w+|OMP_NUM_THREADS|KMP_AFFINITY|PYTHONPATH|PYTHONUNBUFFERED|DMLC_INTERFACE"
)
FILE = "a file"
STARTS = ("", "check", "dry-run", "plan")  # modes that plan a new job
USAGE = "usage: dmltrain-launch [options] -n WORKERS [-s SERVERS] program [arguments of the program]"


Apply = Callable[[Options, str, str, Mapping[str, str]], Options]


@dataclass(frozen=True)
class Option:
    """One row of the table. `apply(options, value, name, environ)` returns the options with this one added."""

    names: tuple[str, ...]
    value: str  # the placeholder in --help; "" if the option takes no value
    meaning: str
    apply: Apply


def _changed(options: Options, field: str, value: object) -> Options:
    """A copy of `options` with one field replaced."""
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


def _workers(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    least, colon, most = value.partition(":")
    options = _number("num_workers", int, 1)(options, least, name, environ)
    if not colon:
        return replace(options, most_workers=0)
    return _number("most_workers", int, options.num_workers or 1)(options, most, f"{name} {least}:M, M", environ)


def _set(field: str, constant: object) -> Apply:
    return lambda options, value, name, environ: _changed(options, field, constant)


def _launcher(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value not in LAUNCHERS:
        why = old_options.unsupported_cluster(value)
        raise LaunchError(f"{name} {value}: expected {listing()}" + (f"; {why}" if why else ""))
    return replace(options, launcher=value)


def _job(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not re.fullmatch(r"[^/\0\n]{1,100}", value) or value in (".", ".."):
        raise LaunchError(f"{name} is {value!r}: expected a folder name without / and of at most 100 characters")
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


def _destination(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not value.startswith(("/", "~")):
        raise LaunchError(f"{name} is {value!r}: expected a path on every host that starts with / or ~/")
    return replace(options, sync_dst_dir=value)


def _append(field: str) -> Apply:
    return lambda options, value, name, environ: _changed(options, field, (*getattr(options, field), value))


def _rule(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    try:
        return _changed(options, "rules", (*options.rules, parse_rule(value)))
    except LaunchError as error:
        raise LaunchError(f"{name} {error}") from None


def _extend(field: str, what: str) -> Apply:
    """For a comma-separated list. A repeated option adds to the list."""
    one = _text(field, what)

    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        before = getattr(options, field)
        return one(options, f"{before},{value}" if before and value else value, name, environ)

    return apply


def _checked(field: str, check: Callable[[str], object]) -> Apply:
    """For a text that `check` accepts, which raises LaunchError."""

    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        try:
            check(value)
        except LaunchError as error:
            raise LaunchError(f"{name} {error}") from None
        return _changed(options, field, value)

    return apply


def _url(field: str) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        if not re.fullmatch(r"https?://[^/\s?#]+/?", value):
            raise LaunchError(f"{name} is {value}: expected http://HOST:PORT or https://HOST:PORT")
        return _changed(options, field, value)

    return apply


def _choice(field: str, choices: Collection[str]) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        if value not in choices:
            raise LaunchError(f"{name} {value}: expected one of {', '.join(choices)}")
        return _changed(options, field, value)

    return apply


def _mode(mode: str) -> Apply:
    return lambda options, value, name, environ: replace(options, mode=mode, target=value)


def _setting(role: str) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:[=:](.*))?", value, re.DOTALL | re.ASCII)
        if not match:
            word = re.split("[=:]", value, maxsplit=1)[0]  # the rest may be secret
            raise LaunchError(f"{name} {word}: expected NAME=VALUE, NAME:VALUE, or NAME for the launcher's own value")
        variable, text = match.groups()
        if text is None and variable not in environ:
            raise LaunchError(f"{name} {variable}: not set in the launcher's environment; use {variable}=VALUE")
        return _with_setting(options, name, Setting(variable, environ[variable] if text is None else text, role))

    return apply


def _secret(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value not in environ:
        variable = value.partition("=")[0]
        raise LaunchError(f"{name} {variable}: expected the name of a variable in the launcher's environment")
    return _with_setting(options, name, Setting(value, environ[value], secret=True))


def _with_setting(options: Options, name: str, setting: Setting) -> Options:
    if setting.name in OWNED:
        raise LaunchError(f"{name} {setting.name}: the launcher sets this variable for every process")
    return replace(options, settings=(*options.settings, setting))


OPTIONS: tuple[Option, ...] = (
    Option(
        ("-n", "--num-workers"),
        "N[:M]",
        "number of workers; with --elastic N:M: at least N, and up to M as there are hosts for them",
        _workers,
    ),
    Option(
        ("-s", "--num-servers"),
        "N",
        "number of servers (default: one per worker; 0: only workers)",
        _number("num_servers", int, 0),
    ),
    Option(
        ("--launcher", "--cluster"),
        "NAME",
        f"where to run: {listing()} (default: ssh if hosts are given, otherwise local)",
        _launcher,
    ),
    Option(
        ("-H", "--hostfile", "--host-file"),
        "FILE",
        "hosts file; hosts.example describes the format",
        _text("hostfile", FILE),
    ),
    Option(("--hosts",), "A:2,B:4", "hosts and their slots, instead of a hosts file", _extend("hosts", "hosts")),
    Option(("-WH", "--worker-hostfile"), "FILE", "hosts file for the workers", _text("worker_hostfile", FILE)),
    Option(
        ("-SH", "--server-hostfile"),
        "FILE",
        "hosts file for the scheduler and the servers",
        _text("server_hostfile", FILE),
    ),
    Option(
        ("--include",),
        "NAMES",
        "use only these hosts: names, ranges such as node[01-08], patterns",
        _extend("include", "host names"),
    ),
    Option(("--exclude",), "NAMES", "do not use these hosts", _extend("exclude", "host names")),
    Option(
        ("--placement",),
        "POLICY",
        f"which process runs on which host: {placement.listing()} (default: dmlc)",
        _choice("placement", placement.POLICIES),
    ),
    Option(
        ("--interface",),
        "NIC",
        "network interface for training (default: the one on the network that all hosts share)",
        _text("interface", "an interface such as eth1"),
    ),
    Option(("--subnet",), "NET", "network for training, such as 10.0.0.0/24", _text("subnet", "a network")),
    Option(
        ("--ssh",),
        "paramiko|system",
        "SSH client (default: paramiko); system: the ssh command with its full configuration",
        _choice("ssh", ("paramiko", "system")),
    ),
    Option(
        ("--ssh-port",),
        "PORT",
        "port of sshd unless the hosts file gives one (default: from the SSH configuration)",
        _number("ssh_port", int, 1, 65535),
    ),
    Option(("-i", "--identity"), "FILE", "private key for SSH", _text("identity", FILE)),
    Option(
        ("--accept-new-host-keys",),
        "",
        "accept and store unknown host keys",
        _set("accept_new_host_keys", True),
    ),
    Option(
        ("--connect-timeout",),
        "SECONDS",
        "time limit for connecting to a host (default: 10)",
        _number("connect_timeout", float, 1),
    ),
    Option(
        ("--mpirun",),
        "PATH",
        "mpirun of Open MPI or MPICH, for --launcher mpi (default: mpirun)",
        _text("mpirun", "a program"),
    ),
    Option(("--mpirun-args",), "ARG", "extra argument for mpirun; may be repeated", _append("mpirun_args")),
    Option(
        ("--slurm-args",),
        "ARG",
        "extra argument for srun, or for sbatch with --submit; may be repeated",
        _append("slurm_args"),
    ),
    Option(
        ("--slurm-server-args",),
        "ARG",
        "the same for nodes of the servers only, a component of their own of the allocation; may be repeated",
        _append("slurm_server_args"),
    ),
    Option(("--submit",), "", "put the job into the cluster's queue, and return", _set("submit", True)),
    Option(
        ("--slurm-job",),
        "ID",
        "allocation of Slurm to use (default: the one that this command runs in)",
        _number("slurm_job", int, 1),
    ),
    Option(
        ("--yarn-url",),
        "URL",
        "web address of YARN's ResourceManager, such as http://rm:8088",
        _url("yarn_url"),
    ),
    Option(
        ("--yarn-hosts",),
        "N",
        "containers of YARN that the processes are spread over (default: one per worker)",
        _number("yarn_hosts", int, 1),
    ),
    Option(
        ("--address",),
        "HOST:PORT",
        "Ray cluster to use, for --launcher ray (default: auto, the one that this machine belongs to)",
        _text("address", "auto or HOST:PORT"),
    ),
    Option(
        ("--ray-nodes",),
        "N",
        "bundles of Ray's placement group, each on a node of its own (default: one per worker)",
        _number("ray_nodes", int, 1),
    ),
    Option(
        ("--ray-resources",),
        "CPU=8,GPU=2",
        "resources of each bundle, by Ray's names, also memory=16g and your own (default: CPU=1)",
        _checked("ray_resources", ray_placement.resources),
    ),
    Option(
        ("--ray-strategy",),
        "NAME",
        f"how Ray spreads the bundles: {ray_placement.listing()} (default: {ray_placement.STRICT_SPREAD})",
        _choice("ray_strategy", ray_placement.STRATEGIES),
    ),
    Option(
        ("--ray-runtime-env",),
        "FILE|JSON",
        "runtime environment of the job in Ray: a YAML or JSON file, or JSON",
        _text("ray_runtime_env", "a file or JSON"),
    ),
    Option(
        ("--ray-wait",),
        "SECONDS",
        "time limit for the placement, also if the cluster has too few nodes now (default: wait while it has enough)",
        _number("ray_wait", float, 0),
    ),
    Option(
        ("--launcher-inside",),
        "yes|no",
        "run the launcher in the cluster too, and follow its output here (default for kubernetes and yarn: yes)",
        _choice("launcher_inside", ("yes", "no")),
    ),
    Option(("--image",), "IMAGE", "container image for all pods of the job", _text("image", "an image")),
    Option(
        ("--kube-namespace",),
        "NAME",
        "namespace of Kubernetes (default: that of the kubeconfig's context)",
        _text("kube_namespace", "a namespace"),
    ),
    Option(
        ("--kube-context",),
        "NAME",
        "context of the kubeconfig file (default: the current one)",
        _text("kube_context", "a context"),
    ),
    Option(
        ("--kube-template",),
        "FILE",
        "YAML file with a pod's template: volumes, node selectors, tolerations and the like for all pods",
        _text("kube_template", FILE),
    ),
    Option(
        ("--kube-pods",),
        "N",
        "how many pods the processes are spread over (default: one for each worker)",
        _number("kube_pods", int, 1),
    ),
    Option(
        ("--kube-service-account",),
        "NAME",
        "service account for the launcher's pod (default: a new one, which goes with the job)",
        _text("kube_service_account", "a service account"),
    ),
    Option(
        ("--kube-jobset",),
        "auto|on|off",
        "make the job a JobSet, which was checked against schemas only, not with a controller (default: auto: if the "
        "cluster has JobSet and the job needs no replacement pods)",
        _choice("kube_jobset", ("auto", "on", "off")),
    ),
    Option(("--queue",), "NAME", "queue of YARN or Kueue, or of Slurm with --submit", _text("queue", "a queue")),
    Option(
        ("--worker-gpus",),
        "N",
        "GPUs of each worker, which Kubernetes or YARN is asked for",
        _number("worker_gpus", int, 1),
    ),
    Option(
        ("--sync-dst-dir",),
        "DIR",
        "copy the working directory to DIR (such as '~/job') on every host and run there",
        _destination,
    ),
    Option(
        ("--sync-exclude",),
        "PATTERN",
        "do not copy matching files (syntax of .gitignore); may be repeated",
        _append("sync_exclude"),
    ),
    Option(
        ("--env",),
        "K[=V]",
        "environment variable for all processes: K=V or K:V; K alone passes on the launcher's value",
        _setting(""),
    ),
    Option(("--env-server",), "K[=V]", "environment variable for the servers only", _setting(SERVER)),
    Option(("--env-worker",), "K[=V]", "environment variable for the workers only", _setting(WORKER)),
    Option(("--secret",), "NAME", "pass on the launcher's variable NAME and never show its value", _secret),
    Option(
        ("--torch-env",),
        "auto|on|off",
        "set the variables of torch.distributed (RANK, MASTER_ADDR, ...) for workers; auto (default): "
        "unless the script imports dmltrain",
        _choice("torch_env", ("auto", "on", "off")),
    ),
    Option(
        ("--wire",),
        "plain|auth|tls",
        "protect the traffic of dmltrain's processes: authenticate control frames (plain, the default), all frames "
        "(auth), or encrypt everything as well (tls)",
        _choice("wire", WIRES),
    ),
    Option(("--log-dir",), "DIR", "folder for the logs and job.json (default: logs/JOB)", _log_dir),
    Option(("--log-file",), "FILE", "also write the launcher's messages to FILE", _text("log_file", FILE)),
    Option(("--job", "--jobname"), "NAME", "name of the job (default: program and start time)", _job),
    Option(("--port",), "PORT", "TCP port of the scheduler (default: any free port)", _number("port", int, 0)),
    Option(
        ("--grace",),
        "SECONDS",
        "time between SIGTERM and SIGKILL when the job ends (default: 5)",
        _number("grace", float, 0),
    ),
    Option(
        ("--timeout",),
        "SECONDS",
        "end the job after this time, log all stacks and exit with 124 (default: no limit)",
        _number("timeout", float, 0),
    ),
    Option(
        ("--start-timeout",),
        "SECONDS",
        "time limit for starting all processes, not counting the copy (default: 60)",
        _number("start_timeout", float, 0),
    ),
    Option(
        ("--max-restarts",),
        "N",
        "restart a failed job at most N times (default: 0)",
        _number("max_restarts", int, 0),
    ),
    Option(
        ("--rule",),
        "RULE",
        f"change the kvstore while the job runs: '{EXAMPLE}'; may be repeated",
        _rule,
    ),
    Option(
        ("--detach",),
        "",
        "return when the job runs; it goes on if its launcher dies, and dmltrain job attach JOB takes it up",
        _set("detach", True),
    ),
    Option(
        ("--elastic",),
        "",
        "go on when workers, servers or the scheduler are lost; needs dist_sync with the optimizer on the workers",
        _set("elastic", True),
    ),
    Option(
        ("--min-workers",),
        "M",
        "with --elastic: end the job when fewer than M workers are left (default: 1; with -n N:M: N)",
        _number("min_workers", int, 1),
    ),
    Option(
        ("--restart-workers",),
        "N",
        "with --elastic: replace lost workers, at most N times (default: 0)",
        _number("restart_workers", int, 0),
    ),
    Option(
        ("--restart-servers",),
        "N",
        "with --elastic: replace lost servers, at most N times (default: 0)",
        _number("restart_servers", int, 0),
    ),
    Option(
        ("--restart-scheduler",),
        "N",
        "with --elastic: start the scheduler again when it is lost, at most N times (default: 3)",
        _number("restart_scheduler", int, 0),
    ),
    Option(
        ("--watch-hosts",),
        "",
        "with --elastic: read the hosts file again when it changes; new hosts get workers, those that are gone leave",
        _set("watch_hosts", True),
    ),
    Option(
        ("--wait-for-hosts",),
        "SECONDS",
        "with --elastic: when fewer workers than the minimum are left, wait so long for more (default: 0)",
        _number("wait_for_hosts", float, 0),
    ),
    Option(
        ("--usage",),
        "SECONDS",
        "sample the CPUs, memory and GPUs of each host every SECONDS, and less often in a long job, into usage.csv; "
        "0: never (default: 2)",
        _number("usage", float, 0),
    ),
    Option(("--quiet",), "", "do not show the output of the processes; the logs have it", _set("quiet", True)),
    Option(("--no-live",), "", "print plain lines instead of the live display", _set("live", False)),
    Option(
        ("--config",), "FILE", "YAML file with these options; the command line takes precedence", _text("config", FILE)
    ),
    Option(
        ("--check",),
        "",
        "check the hosts and the network between them; forecast the speed of a training program",
        _mode("check"),
    ),
    Option(("--dry-run",), "", "print the commands for each host and start nothing", _mode("dry-run")),
    Option(("--plan",), "", "print as JSON which process runs on which host and start nothing", _mode("plan")),
    Option(("--ps",), "JOB", "list the processes of a job (its name or its log folder)", _mode("ps")),
    Option(("--kill",), "JOB", "end a job and all processes that it left on its hosts", _mode("kill")),
    Option(("--attach",), "JOB", "take up a job that was started with --detach", _mode("attach")),
    Option(("--logs",), "JOB", "print the logs of a job", _mode("logs")),
    Option(("--follow",), "", "with --logs: continue until the job ends", _set("follow", True)),
    Option(("--show",), "WHO", "with --logs: only these processes, such as worker:0,scheduler", _text("show", "roles")),
    Option(("--version",), "", "print the version and exit", _mode("version")),
    Option(("-h", "--help"), "", "print this help and exit", _mode("help")),
)
OPTIONS = (*OPTIONS, *(Option(*row) for row in old_options.ROWS))
BY_NAME = {name: option for option in OPTIONS for name in option.names}
BY_NAME |= {theirs: BY_NAME[ours] for theirs, ours in old_options.ALIASES.items()}
BY_NAME |= {name: Option(*row) for row in old_options.REFUSED for name in row.names}


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options in `argv`, which begins after the program's own name. LaunchError if it is wrong."""
    settings = tuple(Setting(name, value) for name, value in environ.items() if FORWARDED.fullmatch(name))
    given, program = _expanded(argv, environ)
    options = Options(settings=settings)
    for option, name, value in given:
        options = option.apply(options, value, name, environ)
    options = replace(options, program=program)
    if not options.launcher and environ.get(old_options.CLUSTER_VARIABLE):
        options = _launcher(options, environ[old_options.CLUSTER_VARIABLE], old_options.CLUSTER_VARIABLE, environ)
    _refuse_unused(options, [(name, option.names) for option, name, _ in given])
    return options


def _expanded(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[tuple[Option, str, str]], tuple[str, ...]]:
    """`split`, with the options of configuration files in the place of --config."""
    given, program = split(argv)
    for file in reversed([value for _, name, value in given if name == "--config"]):  # a later file overrides
        from launch.command_line import config  # which imports yaml

        more, its_program = split(config.arguments(file, OPTIONS, partial(_try, environ)))
        overridden = {name for _, name, _ in given} & HOST_LISTS
        more = [each for each in more if each[1] not in overridden]
        given, program = [*more, *given], program or its_program
    return given, program


# Options that say what the command does that submits a job, or name files of its machine.
FOR_SUBMITTING = (
    *("--config", "--submit", "--dry-run", "--job", "--log-dir", "--log-file", "--quiet", "--no-live"),
    *("--kube-template", "--kube-context", "--kube-jobset", "--launcher", "--launcher-inside", "--yarn-url"),
)


def words_inside(argv: Sequence[str], environ: Mapping[str, str], launcher: str) -> tuple[str, ...]:
    """The command line for a launcher inside of a cluster, which does not see this machine's files."""
    given, program = _expanded(argv, environ)
    words = ["--launcher", launcher]
    for option, name, value in given:
        if not set(option.names) & set(FOR_SUBMITTING):
            words += [name, value] if option.value else [name]
    return (*words, "--", *program)


def _refuse_unused(options: Options, given: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Refuse options that would have no effect. `given`: each as it was spelt, and all its names."""
    for name, names in given:
        if options.mode in STARTS and options.launcher_name not in launchers_with(names[0]):
            raise LaunchError(
                f"{name} needs --launcher {any_with(names[0])}, but this job uses {options.launcher_name}: remove it"
            )
    if options.sync_exclude and not options.sync_dst_dir:
        raise LaunchError("--sync-exclude needs --sync-dst-dir: add it, or remove --sync-exclude")
    if options.min_workers is not None and not options.elastic:
        raise LaunchError("--min-workers needs --elastic")
    if options.restart_workers is not None and not options.elastic:
        raise LaunchError("--restart-workers needs --elastic")
    if options.restart_servers is not None and not options.elastic:
        raise LaunchError("--restart-servers needs --elastic")
    if options.restart_scheduler is not None and not options.elastic:
        raise LaunchError("--restart-scheduler needs --elastic")
    if options.wait_for_hosts is not None and not options.elastic:
        raise LaunchError("--wait-for-hosts needs --elastic")
    if options.most_workers and not options.elastic:
        raise LaunchError(f"-n {options.num_workers}:{options.most_workers} needs --elastic: else give one number")
    if options.watch_hosts and not (options.elastic and (options.hostfile or options.worker_hostfile)):
        raise LaunchError("--watch-hosts needs --elastic and a hosts file: -H FILE")
    if (options.follow or options.show) and options.mode != "logs":
        raise LaunchError("--follow and --show need --logs JOB")


HOST_LISTS = {"--hosts", "--include", "--exclude"}  # the command line replaces the lists of a --config file


def _try(environ: Mapping[str, str], option: Option, name: str, value: str) -> None:
    """Raise LaunchError if the option does not accept the value."""
    option.apply(Options(), value, name, environ)


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
    """The options for --help. `launch.commands.completion` needs the two spaces before each meaning."""
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


# Not in dmltrain-check.
OTHER_MODES = (
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
)


def check_usage() -> str:
    """The text of dmltrain-check --help."""
    options = [option for option in OPTIONS if option.names[0] not in OTHER_MODES]
    return f"""usage: dmltrain-check [options] [program [arguments of the program]]

Check the hosts and measure the network between them, without starting a job.
With -n and a training program, also measure a training step and forecast the job's speed.
Give the same options as to dmltrain-launch.

{table(options)}

Exit code: 0 if the job could start, otherwise the exit code of dmltrain-launch in that case.
"""
