"""Hosts reached through mpirun: one mpirun starts a bridge on each host, which connects back to the launcher.

The hosts must reach the launcher at any port of one of this machine's addresses, or of --host-ip. If an agent is lost,
a separate mpirun reconnects to its host. mpirun may hang when a host is lost, so every wait for it has a deadline.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from launch import LaunchError, channels
from launch.channels.mpi import bridge
from launch.channels.mpi.channel import MpiChannel
from launch.channels.mpi.mpirun import END_SECONDS, Mpirun, bridge_command, check, command, complaint, kind, sweep
from launch.channels.mpi.reception import Caller, Reception
from launch.job.host import Host
from launch.job.hosts.allocation import allocation
from launch.job.hosts.selection import select
from launch.job.options import Options

LOOPBACK = "127.0.0.1"
# Messages of ssh and the shell for a host that is down, and for a user error.
UNREACHABLE = re.compile("Connection (refused|timed out|reset)|No route to host|Network is unreachable")
MISTAKE = re.compile("Could not resolve hostname|Permission denied|Host key verification failed|: not found")
OUTPUT_CHARACTERS = 400  # of mpirun's output in a one-line message
NATURAL_END_SECONDS = 0.5  # for bridges and mpirun to exit by themselves after their connections are closed


def hosts_of(options: Options) -> list[Host]:
    """The hosts of the options, else of the batch system's allocation, else this machine. LaunchError if wrong."""
    if options.names_hosts:
        from launch.clusters import ssh

        return ssh.hosts_of(options)
    found = allocation(os.environ)
    if not found and (options.include or options.exclude):
        raise LaunchError("--include and --exclude need hosts to choose from: use -H FILE or --hosts")
    return select(found, options.include, options.exclude) if found else [Host("localhost", LOOPBACK)]


def addresses(hosts: Sequence[Host], host_ip: str) -> list[str]:
    """The addresses at which bridges on `hosts` may reach this machine."""
    if host_ip:
        return [host_ip]
    own = [
        each.address
        for found in psutil.net_if_addrs().values()
        for each in found
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    if all(_is_here(host.target, own) for host in hosts):
        return [LOOPBACK]
    # a link-local address needs an interface name, which differs between machines
    return [each for each in own if not each.startswith("127.") and each != "::1" and "%" not in each]


def _is_here(name: str, own: Sequence[str]) -> bool:
    try:
        found = {str(row[4][0]) for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(each in own or each.startswith("127.") for each in found)


class Cluster:
    """See `launch.clusters`. `connect` is called from several threads; the first call starts mpirun for all hosts."""

    def __init__(self, options: Options, hosts: Sequence[Host] | None = None):
        self.options = options
        self.hosts = hosts_of(options) if hosts is None else list(hosts)
        check(self.hosts)
        self._kind = kind(options.mpirun)
        self._lock = threading.Lock()
        self._reception: Reception | None = None
        self._runs: list[Run] = []
        self._unused: dict[str, tuple[Run, int]] = {}  # by host: its run and index there, until connect() takes them
        self._addresses: list[str] = []

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> MpiChannel:
        """A channel to a new agent; LaunchError if that takes more than `timeout` seconds (None: --connect-timeout)."""
        seconds = self.options.connect_timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self._lock:
            run, index = self._run_for(host, seconds, alone=timeout is not None)
        return run.channel(index, mark, deadline, seconds)

    def _run_for(self, host: Host, seconds: float, alone: bool) -> tuple[Run, int]:
        """The mpirun for `host` and the host's index in it. `alone`: reconnect to this host, without the others."""
        if not self._reception:
            self._addresses = addresses(self.hosts, self.options.host_ip)
            local = self._addresses == [LOOPBACK]
            self._reception = Reception(self.options.host_ip or (LOOPBACK if local else ""))
        if not alone and host.name not in self._unused:  # a new attempt of the job
            run = self._start(self.hosts, seconds)
            self._unused = {each.name: (run, index) for index, each in enumerate(self.hosts)}
        return self._unused.pop(host.name, None) or (self._start([host], seconds), 0)

    def _start(self, hosts: Sequence[Host], seconds: float) -> Run:
        assert self._reception
        commands = [bridge_command(host, index, bridge.VARIABLE) for index, host in enumerate(hosts)]
        argv = command(self.options.mpirun, self._kind, self.options.mpirun_args, hosts, commands, bridge.VARIABLE)
        self._runs.append(Run(self._reception, self._addresses, hosts, argv, seconds))
        return self._runs[-1]

    def close(self) -> None:
        """End every mpirun and its bridges. Agents that still run then end their processes and themselves."""
        with self._lock:
            runs, self._runs = self._runs, []
            enders = [threading.Thread(target=run.close, daemon=True) for run in runs]
            for ender in enders:
                ender.start()
            for ender in enders:
                ender.join()
            if self._reception:
                self._reception.close()


class Run:
    """One mpirun and the bridges that it starts, one for each of `hosts`."""

    def __init__(
        self, reception: Reception, addresses: Sequence[str], hosts: Sequence[Host], argv: Sequence[str], seconds: float
    ):
        self.hosts = hosts
        self._reception = reception
        self._changed = threading.Condition()
        self._callers: dict[int, Caller] = {}
        self._channels: dict[int, MpiChannel] = {}
        self._over = False
        self._token = reception.expect(self._take)
        program = Path(bridge.__file__).read_text()
        settings = {
            "program": program,
            "addresses": addresses,
            "port": reception.port,
            "certificate": reception.certificate,
            "token": self._token,
            "seconds": seconds,
        }
        self.mpirun = Mpirun(argv, {bridge.VARIABLE: json.dumps(settings)}, self._ended)

    def channel(self, index: int, mark: str, deadline: float, seconds: float) -> MpiChannel:
        """A channel to a new agent on hosts[index], for the job `mark`; LaunchError if its bridge does not connect."""
        caller = self._caller(index, deadline, seconds)
        command, text = channels.remote_command(self.hosts[index], mark)
        self._channels[index] = MpiChannel(caller.stream, str(caller), command, text, self.fate)
        return self._channels[index]

    def _caller(self, index: int, deadline: float, seconds: float) -> Caller:
        """The connection of the bridge on hosts[index]; LaunchError if it does not connect.

        Every call waits for all hosts and raises the same error, because an mpirun that cannot reach one host may also
        end the bridges on the others, and its output is about all hosts.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or not self._missing(), deadline - time.monotonic())
            missing = self._missing()
            if index in self._callers and not (missing and self._over):
                return self._callers[index]
        names = ", ".join(host.name for host in missing)
        were = f"{names} {'were' if len(missing) > 1 else 'was'} not reached"
        if self._over:
            code = 125 if UNREACHABLE.search(self.mpirun.output) else 2
            raise LaunchError(f"{were}: {complaint(self.mpirun)}", code)
        output = self.mpirun.output
        each = missing[0].target if len(missing) == 1 else "HOST"
        more = f"mpirun printed\n{output}" if output else f"does `ssh {each} true` work from here?"
        code = 2 if MISTAKE.search(output) else 125
        raise LaunchError(f"{were} by mpirun within {seconds:g} s (--connect-timeout); {more}", code)

    def _missing(self) -> list[Host]:
        """The hosts whose bridges have not connected."""
        return [host for index, host in enumerate(self.hosts) if index not in self._callers]

    def fate(self, seconds: float) -> str:
        """How mpirun ended and what it printed, as text; "" if it still runs and printed nothing."""
        output = " ".join(self.mpirun.output.split())[:OUTPUT_CHARACTERS]
        ended = self.mpirun.fate(seconds)
        return "; ".join([ended] * bool(ended) + [f"mpirun printed: {output}"] * bool(output))

    def _take(self, caller: Caller) -> bool:
        with self._changed:
            if self._over or caller.index not in range(len(self.hosts)) or caller.index in self._callers:
                return False
            self._callers[caller.index] = caller
            self._changed.notify_all()
            return True

    def _ended(self, code: int) -> None:
        """mpirun has exited: end its remaining bridges."""
        self._reception.forget(self._token)
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if code:
            time.sleep(NATURAL_END_SECONDS)
            self._abort()

    def _abort(self) -> None:
        for caller in list(self._callers.values()):
            caller.stream.abort()

    def close(self) -> None:
        """Wait for mpirun to end with its agents. If one is lost or still runs, kill mpirun: it might wait forever."""
        self._reception.forget(self._token)
        agents_ended = len(self._channels) == len(self.hosts) and all(each.ended for each in self._channels.values())
        self._abort()
        if agents_ended and not self.mpirun.fate(NATURAL_END_SECONDS):
            self.mpirun.end()
        sweep(self._token)
        self.mpirun.fate(END_SECONDS)
