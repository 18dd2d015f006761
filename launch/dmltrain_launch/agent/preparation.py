"""What an agent does before the processes start: inspect the host, reach and measure the others, receive files."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dmltrain_launch.agent import Refusal, commands
from dmltrain_launch.agent.channel import Channel
from dmltrain_launch.agent.events import Bound, Measured, Probed, Reached
from dmltrain_launch.agent.ports import HeldPorts

if TYPE_CHECKING:  # imported only when needed: each takes time to load, and few jobs need all
    from dmltrain_launch.agent.copy.receive import Receiver
    from dmltrain_launch.agent.host.probe import Probe
    from dmltrain_launch.agent.network.reach import Reach
    from dmltrain_launch.agent.network.throughput import Throughput

Listener = TypeVar("Listener", "Reach", "Throughput")


class Preparation:
    """Answers over `channel`. Call `poll` after each event and at `deadline`, or at once while it is `busy`."""

    def __init__(self, selector: selectors.BaseSelector, channel: Channel):
        self.selector, self.channel = selector, channel
        self.key = ""  # the job's secret, shared by its agents
        self.ports = HeldPorts()
        self.probe: Probe | None = None
        self.reach: Reach | None = None
        self.reached = False
        self.throughput: Throughput | None = None
        self.receiver: Receiver | None = None
        self.busy = False  # the receiver has work that needs no new message
        self.finished = False

    @property
    def deadline(self) -> float:
        """When, in seconds of time.monotonic(), to call `poll` without an event."""
        return min((part.deadline for part in (self.probe, self.reach, self.throughput) if part), default=float("inf"))

    def poll(self) -> None:
        self._poll_probe()
        self._poll_reach()
        self._poll_throughput()
        if self.busy and self.receiver:
            self.busy = self.receiver.step()

    # -- the host itself -----------------------------------------------------------------------------------------

    def examine(self, command: commands.Probe) -> None:
        """Inspect this host; answers Probed."""
        from dmltrain_launch.agent.host.probe import Probe

        request = command.request
        self.probe = Probe(dict(request, workdir=os.path.expanduser(request.get("workdir") or "")))
        self.selector.register(self.probe, selectors.EVENT_READ, self._poll_probe)

    def _poll_probe(self) -> None:
        facts = self.probe.poll() if self.probe else None
        if facts is not None:
            self.channel.send(Probed(self.channel.host, facts))
            self._close_probe()

    def _close_probe(self) -> None:
        if self.probe:
            self.selector.unregister(self.probe)
            self.probe.close()
            self.probe = None

    # -- the other hosts -----------------------------------------------------------------------------------------

    def bind(self, wanted: commands.Bind) -> None:
        """Hold the ports that the job needs here; answers Bound."""
        for purpose, port in (("scheduler", wanted.scheduler), ("master", wanted.master)):
            if port is not None:
                self.ports.bind(purpose, wanted.address, port, self.channel.host)
        ports = self.ports.numbers
        if wanted.reach:
            from dmltrain_launch.agent.network.reach import Reach

            self.reach = self.reach or self._listen(Reach, wanted.address, self._poll_reach)
            ports["reach"] = self.reach.port
        if wanted.throughput:
            from dmltrain_launch.agent.network.throughput import Throughput

            self.throughput = self._listen(Throughput, wanted.address, self._poll_throughput)
            ports["throughput"] = self.throughput.port
        self.channel.send(Bound(self.channel.host, ports))

    def _listen(self, kind: type[Listener], address: str, poll: Callable[[], None]) -> Listener:
        """Accept connections of the other agents from now on."""
        try:
            listener = kind(address, self.key, self.channel.host)
        except OSError as error:
            raise Refusal(f"{address} on {self.channel.host} cannot be listened on: {error.strerror}", 2) from None
        self.selector.register(listener, selectors.EVENT_READ, poll)
        return listener

    def reach_peers(self, command: commands.Reach) -> None:
        """Connect to the other hosts; answers Reached."""
        if self.reach:
            self.reach.begin(command.peers)
            self._poll_reach()

    def _poll_reach(self) -> None:
        peers = self.reach.poll() if self.reach else None
        if peers is not None and not self.reached:
            self.reached = True
            self.channel.send(Reached(self.channel.host, peers))

    def measure(self, command: commands.Measure) -> None:
        """Measure the throughput to a peer; answers Measured."""
        if self.throughput:
            self.throughput.begin(*command.peer)
            self._poll_throughput()

    def _poll_throughput(self) -> None:
        result: dict[str, Any] | None = self.throughput.poll() if self.throughput else None
        if result is not None:
            self.channel.send(Measured(self.channel.host, **result))

    def _close_reach(self) -> None:
        for part in (self.reach, self.throughput):
            if part:
                self.selector.unregister(part)
                part.close()
        self.reach = self.throughput = None

    # -- files ---------------------------------------------------------------------------------------------------

    def receive(self, command: commands.Command) -> None:
        """Receive the launcher's working directory: see `dmltrain_launch.agent.copy.receive`."""
        if self.receiver is None:
            from dmltrain_launch.agent.copy.receive import Receiver

            self.receiver = Receiver(self.channel.host, self.channel.send)
        if isinstance(command, commands.File):
            self.receiver.expect(command)
        else:
            self.receiver.begin(command)
            self.busy = True

    def take(self, data: bytes) -> None:
        """Pass on bytes of a file that is being copied here."""
        if self.receiver:
            self.receiver.take(data)

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Stop answering other agents and end the copy."""
        self.finished = True
        self._close_reach()
        if self.receiver:
            self.receiver.finish()

    def close(self) -> None:
        self._close_probe()
        self.finish()
        self.ports.close()
