"""What a changed hosts file means for a running elastic job. Pure.

Hosts that are new in the file get workers: by slots=, else one for each of gpus=, else one. Hosts that are gone from
the file leave, unless the job needs them. Hosts that the user added with `dmltrain job add` do not belong to the file,
so they stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.placement import default_workers
from dmltrain_launch.run.planned.arrivals import Arrivals
from dmltrain_launch.run.planned.leavers import Leavers
from dmltrain_launch.run.planned.waiters import Waiter
from dmltrain_launch.run.supervisor.action import Action
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.limit import FAULT_CODE


class Listing:
    """`known`: the hosts of the file by name. `wanted`: those of a changed file that `follow` has not handled yet."""

    def __init__(self, attempt: Attempt, arrivals: Arrivals, leavers: Leavers, listed: Sequence[Host]):
        self._attempt, self._arrivals, self._leavers = attempt, arrivals, leavers
        self.known = {host.name: host for host in listed}
        self.wanted: tuple[Host, ...] = ()
        self._kept: set[str] = set()  # hosts that are gone from the file, but could not leave

    def follow(self, now: float) -> list[Action]:
        """Make the job use the hosts of the file as it is now."""
        wanted, self.wanted = {host.name: host for host in self.wanted}, ()
        before, self.known = self.known, wanted
        used = {host.name for host in self._attempt.usable}
        new = [host for name, host in wanted.items() if name not in before and name not in used]
        gone = [name for name in before if name not in wanted]
        actions = [action for host in new for action in self._add(host, now)]
        self._kept &= used - wanted.keys()
        return [*actions, *(action for name in gone for action in self._remove(name, now))]

    def retry(self, now: float) -> list[Action]:
        """Try again to remove hosts that could not leave before. The members have changed, so it may be possible
        now."""
        return [action for name in sorted(self._kept) for action in self._remove(name, now)]

    def _add(self, host: Host, now: float) -> list[Action]:
        workers = int(min(default_workers(host), self._arrivals.room))
        if not workers:
            why = "-n N:M allows no more" if default_workers(host) else "its line allows none"
            self._attempt.announce(f"{host.name} is new in the hosts file and gets no worker: {why}")
            return []
        waiter = Waiter(-1)  # nobody waits for an answer
        try:
            self._arrivals.check(workers)
            actions = self._arrivals.add(host, workers, waiter, now)
        except LaunchError as error:
            waiter.note(str(error))
            actions = []
        self._attempt.announce(f"{host.name} is new in the hosts file")
        self._say_all(waiter)
        return actions

    def _remove(self, name: str, now: float) -> list[Action]:
        if self._arrivals.is_coming(name):
            return self._arrivals.give_up(name, "the hosts file does not list it any more", FAULT_CODE)
        if all(host.name != name for host in self._attempt.usable):
            self._kept.discard(name)
            return []
        try:
            return self._leavers.remove(name, Waiter(-1), "the hosts file does not list its host any more", now)
        except LaunchError as error:
            if name not in self._kept:
                self._attempt.announce(f"{name} is not in the hosts file any more, but stays: {error}")
            self._kept.add(name)
            return []

    def _say_all(self, waiter: Waiter) -> None:
        for text, _ in waiter.notes:
            self._attempt.announce(text)
