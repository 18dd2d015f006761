"""Options of dmlc-core's tracker and of MXNet's launch.py, for compatibility. Pure.

An option is an alias of one of ours (ALIASES), is supported (ROWS), or is refused with a reason and a fix (REFUSED).
No option is silently ignored. ROWS set the corresponding fields of `dmltrain_launch.job.options.Options`; memory is in
MiB (0: no limit). Sources: dmlc-core tracker/dmlc_tracker/opts.py (2015 to 2022, --kube-*, --slurm-* and
--local-num-attempt included), MXNet tools/launch.py (1.9.1 and master, which has --p3 and BytePS's options)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.job.job import Setting
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import Apply, Option, Record
from dmltrain_launch.job.role import SERVER, WORKER

CLUSTER_VARIABLE = "DMLC_SUBMIT_CLUSTER"  # dmlc's environment variable for the default of --cluster
P3 = {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"}  # as MXNet's launch.py sets them

# theirs: ours
ALIASES = {
    "--local-num-attempt": "--max-restarts",
    "--scheduler-port": "--port",  # BytePS's
    "--kube-worker-image": "--image",
    "--kube-worker-template": "--kube-template",
}


def _host_ip(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value in ("auto", "ip"):  # in dmlc's tracker: detect the address
        return replace(options, host_ip="")
    try:
        return replace(options, host_ip=str(ipaddress.ip_address(value)))
    except ValueError:
        raise LaunchError(
            f"{name} is {value}: expected an IP address of this machine that the hosts can reach"
        ) from None


def _log_level(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value not in ("INFO", "DEBUG"):
        raise LaunchError(f"{name} is {value}: expected INFO or DEBUG")
    return replace(options, log_level=value)


def _cores(role: str) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        if not re.fullmatch(r"[0-9]+", value) or int(value) < 1:
            raise LaunchError(f"{name} is {value}: expected a whole number, 1 or more")
        return replace(options, settings=(*options.settings, Setting("OMP_NUM_THREADS", str(int(value)), role)))

    return apply


def mebibytes(text: str) -> int:
    """The size in MiB of a text such as 4g or 512m. ValueError for other texts and for less than 1 MiB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)([gm])", text.lower())
    size = int(float(match[1]) * (1024 if match[2] == "g" else 1)) if match else 0
    if size < 1:
        raise ValueError(f"{text}: expected a number and g or m")
    return size


def _memory(field: str) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        try:
            changes: dict[str, Any] = {field: mebibytes(value)}
            return replace(options, **changes)
        except ValueError:
            raise LaunchError(f"{name} is {value}: expected a number and g (GiB) or m (MiB), such as 4g") from None

    return apply


def _p3(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    """Put these settings first, so that an --env of the user overrides them in any order."""
    return replace(options, settings=(*(Setting(*item) for item in P3.items()), *options.settings))


def _ship_libcxx(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not value:
        raise LaunchError(f"{name} is empty: expected the folder of libstdc++.so")
    variable = "LD_LIBRARY_PATH"
    earlier = [setting.value for setting in options.settings if setting.name == variable and not setting.role]
    rest = earlier[-1] if earlier else environ.get(variable, "")
    path = f"{value}:{rest}" if rest else value
    return replace(options, settings=(*options.settings, Setting(variable, path)))


def _auto_file_cache(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value.lower() in ("false", "0", "no", ""):
        return options
    raise LaunchError(f"{name} {value}: the launcher does not copy files named in the program's arguments; {_COPY}")


ROWS = (
    Option(("--p3",), "", "MXNet's P3: send parameters by priority (dmltrain's kvstores always do)", _p3),
    Option(
        ("--worker-cores",),
        "N",
        "threads per worker (OMP_NUM_THREADS; default: its share of the host's cores)",
        _cores(WORKER),
    ),
    Option(("--server-cores",), "N", "threads per server (default: 1)", _cores(SERVER)),
    Option(
        ("--worker-memory",),
        "4g",
        "memory limit per worker (RLIMIT_DATA), with unit g or m (default: no limit)",
        _memory("worker_memory"),
    ),
    Option(("--server-memory",), "4g", "memory limit per server", _memory("server_memory")),
    Option(
        ("--host-ip",),
        "IP",
        "address of this machine that the hosts can reach (default: detected)",
        _host_ip,
        "host_ip",
        reaches=True,
        record=Record(),
    ),
    Option(("--log-level",), "LEVEL", "level of the launcher's messages: INFO (default) or DEBUG", _log_level),
    Option(("--ship-libcxx",), "DIR", "folder on the hosts to put first in LD_LIBRARY_PATH", _ship_libcxx),
    Option(
        ("--auto-file-cache",), "BOOL", "only false is accepted; use --sync-dst-dir to copy files", _auto_file_cache
    ),
)

_COPY = "use --sync-dst-dir DIR, which copies the working directory to the hosts"
_HOSTS = "use -H FILE, or -WH FILE and -SH FILE, to choose the hosts of workers and servers"
_NODES = (
    "use --launcher slurm --submit --slurm-args=--nodes=N, or start it with salloc --nodes=N; workers and servers "
    "share the nodes, or with --placement dedicated the last ones have servers only"
)
_ONE_POD = "workers and servers share the pods of a job: "


def _refusals(what: str, fixes: Mapping[tuple[str, str], str]) -> tuple[Option, ...]:
    """Rows that refuse options. A key is the option's name and the placeholder of its value."""

    def refuse(fix: str) -> Apply:
        def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
            raise LaunchError(f"{name} is for {what}; {fix}")

        return apply

    return tuple(Option((name,), value, f"for {what}; {fix}", refuse(fix)) for (name, value), fix in fixes.items())


REFUSED = (
    *_refusals("files that YARN distributes", {("--files", "FILE"): _COPY, ("--archives", "FILE"): _COPY}),
    *_refusals(
        "dmlc's own program for YARN, and --launcher yarn uses YARN's services",
        {
            ("--hdfs-tempdir", "DIR"): "nothing is copied to HDFS: remove it",
            ("--yarn-app-classpath", "PATH"): "no class of ours runs there: remove it",
            ("--yarn-app-dir", "DIR"): "no program of ours is to be copied there: remove it",
        },
    ),
    *_refusals("SGE, which this launcher does not use", {("--sge-log-dir", "DIR"): "use --log-dir DIR"}),
    *_refusals("Mesos, which this launcher does not use", {("--mesos-master", "HOST"): _HOSTS}),
    *_refusals(
        "one srun for workers and another one for servers, and this launcher has one for all",
        {("--slurm-worker-nodes", "N"): _NODES, ("--slurm-server-nodes", "N"): _NODES},
    ),
    *_refusals(
        "servers in pods of their own",
        {
            ("--kube-server-image", "IMAGE"): f"{_ONE_POD}--image IMAGE",
            ("--kube-server-template", "FILE"): f"{_ONE_POD}--kube-template FILE",
        },
    ),
    *_refusals(
        "BytePS, which has its own servers and launcher",
        {
            ("--byteps-launch", ""): "remove it",
            ("--scheduler-ip", "IP"): "the scheduler runs on the first host; choose its address with addr= or --subnet",
        },
    ),
)


def rows() -> Iterator[tuple[str, str]]:
    """(option, what it does here) of all, for the documentation."""
    for theirs, ours in ALIASES.items():
        yield theirs, f"is {ours}"
    for row in (*ROWS, *REFUSED):
        yield f"{row.names[0]} {row.value}".strip(), f"{'refused: ' if row in REFUSED else ''}{row.meaning}"
    for name in UNSUPPORTED_CLUSTERS:
        yield f"--cluster {name}", f"refused: {unsupported_cluster(name)}"


# Other values of dmlc's --cluster and MXNet's --launcher.
UNSUPPORTED_CLUSTERS = {
    "sge": "the Sun Grid Engine",
    "mesos": "Mesos",
}


def unsupported_cluster(name: str) -> str:
    """The end of an error: why a cluster of dmlc or MXNet is not supported, and the fix. "" for other names."""
    if name not in UNSUPPORTED_CLUSTERS:
        return ""
    return f"the launcher does not request hosts from {UNSUPPORTED_CLUSTERS[name]}; give your hosts with -H or --hosts"
