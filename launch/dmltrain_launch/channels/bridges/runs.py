"""Bridges on hosts: started by an engine, waited for, and given to agents' channels.

The hosts must reach the launcher at any port of one of this machine's addresses, or of --host-ip. If an agent is lost,
a separate run of the engine reconnects to its host. An engine may hang when a host is lost, so every wait for it has a
deadline.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

import psutil

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.channels.bridges.channel import BridgeChannel
from dmltrain_launch.channels.bridges.engine import END_SECONDS, Engine, Started, sweep
from dmltrain_launch.channels.bridges.reception import Caller, Reception
from dmltrain_launch.job.host import Host

LOOPBACK = "127.0.0.1"
OUTPUT_CHARACTERS = 400  # of the engine's output in a one-line message
NATURAL_END_SECONDS = 0.5  # for bridges and engine to exit by themselves after their connections are closed


def addresses(hosts: Sequence[Host], host_ip: str) -> list[str]:
    """The addresses at which bridges on `hosts` may reach this machine."""
    if host_ip:
        return [host_ip]
    own = [
        address.address
        for nic_addresses in psutil.net_if_addrs().values()
        for address in nic_addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    if all(_is_here(host.target, own) for host in hosts):
        return [LOOPBACK]
    # a link-local address needs an interface name, which differs between machines
    return [address for address in own if not address.startswith("127.") and address != "::1" and "%" not in address]


def _is_here(name: str, own: Sequence[str]) -> bool:
    try:
        resolved = {str(row[4][0]) for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(address in own or address.startswith("127.") for address in resolved)


class BridgedCluster:
    """What clusters with an engine inherit: see `dmltrain_launch.clusters`. Several threads call `connect`; the first
    call starts the engine for all hosts."""

    def __init__(self, engine: Engine, hosts: Sequence[Host], host_ip: str, connect_timeout: float):
        self.engine, self.hosts = engine, list(hosts)
        self._host_ip, self._connect_timeout = host_ip, connect_timeout
        self._lock = threading.Lock()
        self._reception: Reception | None = None
        self._runs: list[Run] = []
        # by host: its run and its index there, until connect() takes them
        self._unused: dict[str, tuple[Run, int]] = {}
        self._addresses: list[str] = []

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> BridgeChannel:
        """A channel to a new agent; LaunchError if that takes more than `timeout` seconds (None: --connect-timeout)."""
        seconds = self._connect_timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self._lock:
            run, index = self._run_for(host, seconds, alone=timeout is not None)
        return run.channel(index, mark, deadline, seconds)

    def _run_for(self, host: Host, seconds: float, alone: bool) -> tuple[Run, int]:
        """The run for `host`, and the index of the host in it. `alone`: reconnect to this host, without the others."""
        if not self._reception:
            self._addresses = addresses(self.hosts, self._host_ip)
            local = self._addresses == [LOOPBACK]
            self._reception = Reception(self._host_ip or (LOOPBACK if local else ""))
        late = all(host.name != known.name for known in self.hosts)  # the host has come to the running job
        if not (alone or late) and host.name not in self._unused:  # the first attempt of the job, or another one
            run = self._start(self.hosts, seconds)
            self._unused = {host.name: (run, index) for index, host in enumerate(self.hosts)}
        return self._unused.pop(host.name, None) or (self._start([host], seconds), 0)

    def _start(self, hosts: Sequence[Host], seconds: float) -> Run:
        assert self._reception
        argv = self.engine.command(hosts, again=bool(self._runs))
        self._runs.append(Run(self.engine, argv, self._reception, self._addresses, hosts, seconds))
        return self._runs[-1]

    def close(self) -> None:
        """End every run and its bridges. Agents that still run then end their processes and themselves."""
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
    """One run of the engine, and the bridges that it starts, one for each of `hosts`."""

    def __init__(
        self,
        engine: Engine,
        argv: Sequence[str],
        reception: Reception,
        addresses: Sequence[str],
        hosts: Sequence[Host],
        seconds: float,
    ):
        self.engine, self.hosts = engine, hosts
        self._reception = reception
        self._changed = threading.Condition()
        self._callers: dict[int, Caller] = {}
        self._channels: dict[int, BridgeChannel] = {}
        self._over = False
        self._token = reception.expect(self._take)
        self.started = Started(engine, argv, reception.settings_for(self._token, addresses, seconds), self._ended)

    def channel(self, index: int, mark: str, deadline: float, seconds: float) -> BridgeChannel:
        """A channel to a new agent on hosts[index], for the job `mark`; LaunchError if its bridge does not connect."""
        caller = self._caller(index, deadline, seconds)
        command, text = channels.remote_command(self.hosts[index], mark)
        self._channels[index] = BridgeChannel(caller.stream, str(caller), command, text, self.fate)
        return self._channels[index]

    def _caller(self, index: int, deadline: float, seconds: float) -> Caller:
        """The connection of the bridge on hosts[index]; LaunchError if it does not connect.

        Every call waits for all hosts and raises the same error, because an engine that cannot reach one host may also
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
            raise LaunchError(f"{were}: {self.started.complaint()}", self.started.why())
        output = self.started.output
        trial = self.engine.trial.format(host=missing[0].target if len(missing) == 1 else "HOST")
        more = f"{self.engine.name} printed\n{output}" if output else f"does `{trial}` work from here?"
        code = 2 if self.engine.mistake.search(output) else 125
        raise LaunchError(f"{were} by {self.engine.name} within {seconds:g} s (--connect-timeout); {more}", code)

    def _missing(self) -> list[Host]:
        """The hosts whose bridges have not connected."""
        return [host for index, host in enumerate(self.hosts) if index not in self._callers]

    def fate(self, seconds: float) -> str:
        """How the engine ended and what it printed, as text; "" if it still runs and printed nothing."""
        ended = self.started.fate(seconds)
        output = " ".join(self.started.output.split())[:OUTPUT_CHARACTERS]
        return "; ".join([ended] * bool(ended) + [f"{self.engine.name} printed: {output}"] * bool(output))

    def _take(self, caller: Caller) -> bool:
        with self._changed:
            if self._over or caller.index not in range(len(self.hosts)) or caller.index in self._callers:
                return False
            self._callers[caller.index] = caller
            self._changed.notify_all()
            return True

    def _ended(self, code: int) -> None:
        """The engine has exited: end its remaining bridges."""
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
        """Wait for the engine to end with its agents. If one is lost or still runs, kill it: it might wait forever."""
        self._reception.forget(self._token)
        agents_ended = len(self._channels) == len(self.hosts) and all(
            channel.ended for channel in self._channels.values()
        )
        self._abort()
        if agents_ended and not self.started.fate(NATURAL_END_SECONDS):
            self.started.end()
        sweep(self._token)
        self.started.fate(END_SECONDS)
