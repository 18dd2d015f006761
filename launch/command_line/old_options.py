"""The options of dmlc-core's tracker and of MXNet's launch.py that `options` does not have. Pure.

Each of them is an alias of one of ours (ALIASES), does what its name says (ROWS), or is refused with the reason and
the fix (REFUSED): none is accepted and then ignored. ROWS set fields of `launch.job.options.Options` of the same
meaning: `host_ip`, `log_level`, and `worker_memory` and `server_memory` in MiB (0: no limit).
Sources: dmlc-core tracker/dmlc_tracker/opts.py (2015 to 2022, --kube-*, --slurm-* and --local-num-attempt included),
MXNet tools/launch.py (1.9.1 and master, which has --p3 and BytePS's options).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from launch import LaunchError
from launch.job.job import Setting
from launch.job.options import Options
from launch.job.role import SERVER, WORKER

CLUSTER_VARIABLE = "DMLC_SUBMIT_CLUSTER"  # dmlc's default for --cluster
P3 = {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"}  # as MXNet's launch.py sets them

# theirs: ours
ALIASES = {
    "--local-num-attempt": "--max-restarts",
    "--scheduler-port": "--port",  # BytePS's
}

Apply = Callable[[Options, str, str, Mapping[str, str]], Options]


class Row(NamedTuple):
    """As `launch.command_line.options.Option`."""

    names: tuple[str, ...]
    value: str
    meaning: str
    apply: Apply


def _host_ip(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value in ("auto", "ip"):  # dmlc's words for finding it
        return replace(options, host_ip="")
    try:
        return replace(options, host_ip=str(ipaddress.ip_address(value)))
    except ValueError:
        raise LaunchError(f"{name} is {value}: expected an IP address of this machine that the hosts reach") from None


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
    """4g or 512m as dmlc reads them, in MiB; ValueError when it is neither, or less than 1 MiB."""
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
    """First among the settings, so that a user's --env of one of these variables wins wherever it stands."""
    return replace(options, settings=(*(Setting(*each) for each in P3.items()), *options.settings))


def _ship_libcxx(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not value:
        raise LaunchError(f"{name} is empty: expected the folder of libstdc++.so")
    variable = "LD_LIBRARY_PATH"
    earlier = [each.value for each in options.settings if each.name == variable and not each.role]
    rest = earlier[-1] if earlier else environ.get(variable, "")
    path = f"{value}:{rest}" if rest else value
    return replace(options, settings=(*options.settings, Setting(variable, path)))


def _auto_file_cache(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value.lower() in ("false", "0", "no", ""):
        return options  # so it is
    raise LaunchError(f"{name} {value}: files named in the program's arguments are not copied; {_COPY}")


ROWS = (
    Row(("--p3",), "", "MXNet's P3: parameters travel by priority (dmltrain's own always do)", _p3),
    Row(
        ("--worker-cores",),
        "N",
        "threads of each worker (OMP_NUM_THREADS; default: its share of the host)",
        _cores(WORKER),
    ),
    Row(("--server-cores",), "N", "threads of each server (default: 1)", _cores(SERVER)),
    Row(
        ("--worker-memory",),
        "4g",
        "memory of each worker (RLIMIT_DATA; g or m; default: no limit)",
        _memory("worker_memory"),
    ),
    Row(("--server-memory",), "4g", "memory of each server", _memory("server_memory")),
    Row(("--host-ip",), "IP", "address of this machine that the hosts reach (default: found)", _host_ip),
    Row(("--log-level",), "LEVEL", "of the launcher's own lines: INFO or DEBUG", _log_level),
    Row(("--ship-libcxx",), "DIR", "folder on the hosts that comes first in LD_LIBRARY_PATH", _ship_libcxx),
    Row(("--auto-file-cache",), "BOOL", "false, or it is refused: --sync-dst-dir copies files", _auto_file_cache),
)

_COPY = "with --sync-dst-dir DIR everything below the working directory is copied to the hosts"
_PLACE = "-H HOSTS, or -WH and -SH, say which hosts run what, as names, names:slots, or with roles="
_IMAGES = "there are no containers here: each host runs its own Python, or that of python= in the hosts file"
_QUEUE = "inside an allocation give the nodes it has with --hosts"


def _refusals(what: str, fixes: Mapping[tuple[str, str], str]) -> tuple[Row, ...]:
    """Rows that refuse; the keys are a name and its value."""

    def refuse(fix: str) -> Apply:
        def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
            raise LaunchError(f"{name} is about {what}; {fix}")

        return apply

    return tuple(Row((name,), value, f"about {what}; {fix}", refuse(fix)) for (name, value), fix in fixes.items())


REFUSED = (
    *_refusals("files that YARN distributes", {("--files", "FILE"): _COPY, ("--archives", "FILE"): _COPY}),
    *_refusals(
        "Hadoop's YARN, which this launcher does not use",
        {
            ("--hdfs-tempdir", "DIR"): "leave it out",
            ("--yarn-app-classpath", "PATH"): "leave it out",
            ("--yarn-app-dir", "DIR"): "leave it out",
        },
    ),
    *_refusals("queues of SGE and YARN, which this launcher does not use", {("--queue", "NAME"): _QUEUE}),
    *_refusals("SGE, which this launcher does not use", {("--sge-log-dir", "DIR"): "--log-dir DIR is for the logs"}),
    *_refusals("Mesos, which this launcher does not use", {("--mesos-master", "HOST"): _PLACE}),
    *_refusals(
        "Slurm, which this launcher does not ask for nodes",
        {
            ("--slurm-worker-nodes", "N"): _PLACE,
            ("--slurm-server-nodes", "N"): _PLACE,
        },
    ),
    *_refusals(
        "Kubernetes, which this launcher does not use",
        {
            ("--kube-namespace", "NAME"): "leave it out",
            ("--kube-worker-image", "IMAGE"): _IMAGES,
            ("--kube-server-image", "IMAGE"): _IMAGES,
            ("--kube-worker-template", "FILE"): _IMAGES,
            ("--kube-server-template", "FILE"): _IMAGES,
        },
    ),
    *_refusals(
        "BytePS, another system with servers of its own",
        {
            ("--byteps-launch", ""): "leave it out: its programs are started by its own launcher",
            (
                "--scheduler-ip",
                "IP",
            ): "the scheduler runs on the first host, at the address that addr= or --subnet chooses",
        },
    ),
)

# What dmlc's --cluster and MXNet's --launcher also name.
CLUSTERS_ELSEWHERE = {
    "sge": "the Sun Grid Engine",
    "yarn": "Hadoop's YARN",
    "mesos": "Mesos",
    "kubernetes": "Kubernetes",
    "slurm": "Slurm",
}


def cluster_elsewhere(name: str) -> str:
    """Why a cluster of theirs cannot be had, and the fix, as the end of an error; "" for names that are not theirs."""
    if name not in CLUSTERS_ELSEWHERE:
        return ""
    return f"it does not ask {CLUSTERS_ELSEWHERE[name]} for hosts; give the hosts you have with -H or --hosts"
