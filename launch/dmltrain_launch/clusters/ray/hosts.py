"""In the launcher: the program that talks to Ray, and the nodes and bridges that it gives to a job."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dmltrain_launch import NAME, LaunchError
from dmltrain_launch.channels.bridges.engine import Engine
from dmltrain_launch.channels.bridges.runs import BridgedCluster
from dmltrain_launch.clusters.named_hosts import named_hosts
from dmltrain_launch.clusters.ray import RayOptions, relay
from dmltrain_launch.clusters.ray.environment import AUTO, need_ray, runtime_env
from dmltrain_launch.clusters.ray.placement import Request, described, resources
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options
from dmltrain_launch.own_program import own_program

CLIENT = "ray://"
DRY_SECONDS = 5.0  # a dry run does not wait for room
PROBE_SECONDS = 5.0  # for its port
RELEASE_SECONDS = 10.0  # until Ray has removed all; then the driver is killed, and Ray does it later
LOST = re.compile("died|dead|unavailable|crashed")  # in what Ray says of a node


def request(options: RayOptions, hosts: Sequence[Host]) -> Request:
    """What to ask the driver for. `hosts`: those that the user has named. LaunchError if the options are wrong."""
    bundle = resources(options.ray_resources) if options.ray_resources else {"CPU": 1.0}
    if hosts and options.ray_nodes:
        raise LaunchError("--ray-nodes and a list of hosts exclude each other: each host is one node")
    dry = options.mode in ("dry-run", "plan")
    return Request(
        address=options.address or AUTO,
        name=f"dmltrain-{options.job or 'job'}-{secrets.token_hex(4)}",
        bundle=bundle,
        bundles=[bundle] * (len(hosts) or options.ray_nodes or options.num_workers or 1),
        strategy=options.ray_strategy,
        hosts=[host.target for host in hosts],
        runtime_env=runtime_env(options.ray_runtime_env),
        wait=DRY_SECONDS if dry else options.queue_wait,
        starts=not dry,
    )


def check(options: RayOptions, installed: Callable[[str], object] = importlib.util.find_spec) -> None:
    """LaunchError if Ray is missing here, or nobody answers at the address."""
    need_ray(installed)
    address = options.address or AUTO
    if address.startswith(CLIENT):
        raise LaunchError(
            f"--address {address}: Ray's client is not supported: start the job on a node of the cluster, or with "
            "--submit"
        )
    if address == AUTO:
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise LaunchError(f"--address {address}: expected auto, or HOST:PORT of the cluster's head (6379 by default)")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"no Ray cluster at --address {address}: {why}; `ray start --head` prints the address of a cluster"
        ) from None


def hosts_of(options: Options) -> list[Host]:
    """The nodes that the options name; []: any."""
    if options.names_hosts:
        return named_hosts(options)
    if options.include or options.exclude:
        raise LaunchError("--include and --exclude need hosts to choose from: use -H FILE or --hosts with nodes of Ray")
    return []


def merged(place: Mapping[str, Any], given: Mapping[str, Host], slots: bool) -> Host:
    """The host of a place that `ray.driver` reports. `given`: those that the user has named."""
    host = given.get(place["name"]) or given.get(place["ip"]) or Host(place["name"])
    return replace(
        host,
        name=place["name"],
        hostname=place["ip"],
        python=host.python or place["python"],
        workdir=host.workdir or place["folder"],
        slots=len(place["bundles"]) if slots and host.slots is None else host.slots,
    )


class Driver:
    """The running `ray.driver`. LaunchError if Ray refuses. `close` releases all."""

    def __init__(self, request: Request, say: Callable[[str], None]):
        specs = [importlib.util.find_spec(name) for name in ("dmltrain_launch", "dmltrain")]
        roots = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin)
        path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the driver
        self._popen = subprocess.Popen(
            own_program(sys.executable, "dmltrain_launch.clusters.ray.driver"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is the launcher's
        )
        try:
            self._write(request)
            self.places, self.socket = self._placed(say)
        except BaseException:
            self.close()
            raise

    def _write(self, request: Request) -> None:
        assert self._popen.stdin
        with contextlib.suppress(OSError):  # it has ended, and says why
            self._popen.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            self._popen.stdin.flush()

    def _placed(self, say: Callable[[str], None]) -> tuple[list[dict[str, Any]], str]:
        assert self._popen.stdout
        while True:
            line = self._popen.stdout.readline()
            if not line:
                raise LaunchError(f"the program that talks to Ray has ended; its last words: {self._last_words()}", 125)
            message = json.loads(line)
            if "problem" in message:
                raise LaunchError(message["problem"], message["code"])
            if "placed" in message:
                return message["placed"], message["socket"]
            say(f"{NAME}: waiting: {message['waiting']}")

    def _last_words(self) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        text = os.pread(self._stderr.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
        return " ".join(text.split()[-60:]) or "none"

    def close(self) -> None:
        assert self._popen.stdin and self._popen.stdout
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        try:
            self._popen.wait(RELEASE_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()
        self._stderr.close()


class Cluster(BridgedCluster):
    """See `dmltrain_launch.clusters`. Without `hosts` they are known after `allocate`."""

    def __init__(self, options: RayOptions, hosts: Sequence[Host] | None = None):
        check(options)
        self._options, self._given = options, hosts_of(options) if hosts is None else []
        self._request = request(options, self._given)
        if hosts is not None:  # a job that runs has its place
            self._request = replace(self._request, bundles=[], hosts=[], bundle={})
        self._driver: Driver | None = None
        self._starting = threading.Lock()
        engine = Engine("Ray", self._command, "ray status", unreachable=LOST)
        super().__init__(engine, hosts or [], options.host_ip, options.connect_timeout)

    def allocate(self, say: Callable[[str], None]) -> None:
        """Wait until Ray has placed the job."""
        places = self._connected(say).places
        given = {host.target: host for host in self._given}
        several = len(places) < len(self._request.bundles)
        self.hosts = [merged(place, given, several) for place in places]

    def described(self) -> list[str]:
        """For --dry-run: what Ray is asked for, and what it would give now."""
        if not self._driver:
            return []
        asked = described(self._request.bundles, self._request.strategy)
        rows = [
            f"  bundle {', '.join(map(str, place['bundles']))} on {place['name']} ({place['ip']}), node {place['node']}"
            for place in self._driver.places
        ]
        return [f"Ray at {self._request.address}: {asked}, and an actor in each bundle", *rows]

    def _connected(self, say: Callable[[str], None] = lambda line: None) -> Driver:
        with self._starting:
            self._driver = self._driver or Driver(self._request, say)
            return self._driver

    def _command(self, hosts: Sequence[Host], again: bool) -> list[str]:
        order = {"hosts": [{"name": host.name, "python": host.python} for host in hosts]}
        return [sys.executable, "-I", "-S", relay.__file__, self._connected().socket, json.dumps(order)]

    def close(self) -> None:
        super().close()
        if self._driver:
            self._driver.close()
