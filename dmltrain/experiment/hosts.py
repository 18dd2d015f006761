"""Cells side by side: each on hosts that no other cell uses at the time.

The launcher places a cell that runs beside others, with --exclude for the hosts that are in use. The cell may start if
its processes are then spread over hosts as they would be without --exclude: no host gets more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dmltrain.experiment.launch import Planned

HOST_OPTIONS = ("-H", "--hostfile", "--host-file", "--hosts", "-WH", "--worker-hostfile", "-SH", "--server-hostfile")

Words = tuple[str, ...]
Plan = Callable[[Words], Planned]  # options of the launcher -> where its processes would run


def names_hosts(words: Words) -> bool:
    return any(word.partition("=")[0] in HOST_OPTIONS or word[:2] == "-H" for word in words)


@dataclass
class Hosts:
    """Which hosts are in use. `plan` is called once for each list of words, because it starts a launcher."""

    plan: Plan
    used: dict[str, frozenset[str]] = field(default_factory=dict)  # ID of a running cell -> its hosts
    known: dict[Words, Planned] = field(default_factory=dict)

    def take(self, cell: str, words: Words) -> Words | None:
        """The launcher's options with which the cell may start now, beside the running cells; None: it must wait."""
        if not names_hosts(words):
            self.used[cell] = frozenset()
            return words
        busy = sorted(frozenset().union(*self.used.values()))
        here = (*words, "--exclude", ",".join(busy)) if busy else words
        planned = self._planned(here)
        if busy and (planned.error or planned.shape != self._planned(words).shape):
            return None
        self.used[cell] = planned.hosts
        return here

    def give_back(self, cell: str) -> None:
        self.used.pop(cell, None)

    def _planned(self, words: Words) -> Planned:
        if words not in self.known:
            self.known[words] = self.plan(words)
        return self.known[words]
