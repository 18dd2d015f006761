"""Hosts whose bridges call the launcher by themselves, before an agent is wanted there."""

from __future__ import annotations

import threading

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.channels.bridges.channel import BridgeChannel
from dmltrain_launch.channels.bridges.reception import Caller, Reception
from dmltrain_launch.channels.bridges.runs import addresses
from dmltrain_launch.clusters.queue import FAULT_CODE
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options


class CalledCluster:
    """What clusters inherit whose hosts call the launcher: see `dmltrain_launch.clusters.launcher`. A bridge serves one
    agent after another, so a host whose agent is lost calls again. `what`: a host, in words."""

    hosts: list[Host]

    def __init__(self, options: Options, what: str):
        self._what, self._host_ip = what, options.host_ip
        self._seconds, self._queue_wait = options.connect_timeout, options.queue_wait
        self._reception = Reception(options.host_ip)
        self._changed = threading.Condition()
        self._callers: dict[str, Caller] = {}  # those that wait for an agent, by what `_admit` says
        self._token = self._reception.expect(self._take)

    def _settings(self) -> str:
        """Of the bridges that are to call: see `dmltrain_launch.channels.bridges.bridge`."""
        reached = addresses([Host(f"a {self._what}")], self._host_ip)
        return self._reception.settings_for(self._token, reached, self._seconds, stays=True)

    def _take(self, caller: Caller) -> bool:
        with self._changed:
            admitted = self._admit(caller)
            self._changed.notify_all()
            return admitted

    def _admit(self, caller: Caller) -> bool:
        """Keep the caller; False if it is not needed."""
        raise NotImplementedError

    def _caller_for(self, host: Host) -> Caller | None:
        """Take one out; None if there is none now."""
        raise NotImplementedError

    def _why_silent(self, host: Host) -> str:
        raise NotImplementedError

    def _fate(self, host: str, seconds: float) -> str:
        """How a host has ended, as text, if that is known within so many seconds; else ""."""
        return ""

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> BridgeChannel:
        """A channel to a new agent; LaunchError if that takes more than `timeout` seconds (None: --connect-timeout)."""
        seconds = self._seconds if timeout is None else timeout
        with self._changed:
            caller = self._changed.wait_for(lambda: self._caller_for(host), seconds)
        if caller is None:
            what = f"{host.name} was not reached within {seconds:g} s (--connect-timeout)"
            raise LaunchError(f"{what}: {self._why_silent(host)}", FAULT_CODE)
        command, text = channels.remote_command(host, mark)
        return BridgeChannel(caller.stream, str(caller), command, text, lambda limit: self._fate(caller.host, limit))

    def close(self) -> None:
        """End the bridges. Agents that still run then end their processes and themselves."""
        self._reception.close()
        for caller in list(self._callers.values()):
            caller.stream.abort()
