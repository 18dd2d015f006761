"""A server of an elastic job goes from one view to the next. Pure.

Workers keep their ranks. If each round is a step of the optimizer here, the last step may be taken back: `hold`,
rollback.py. If each push is a step, workers keep their clocks. Then a worker's clock may also jump, and a push that a
worker repeats after the change counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dmltrain.base.arrays import Array
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.server import rollback
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.keys import Keys
from dmltrain.kvstore.server.pulls import Pulls
from dmltrain.kvstore.server.reply import Action
from dmltrain.kvstore.server.stragglers import Stragglers


@dataclass(eq=False)
class Views:
    """`gone`: if each push is a step, the lowest and the highest clock over all slices of each worker that pushes no
    longer."""

    keys: Keys
    pulls: Pulls
    stragglers: Stragglers
    gone: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept: dict[str, Array] = field(default_factory=dict)  # states of slices before they were divided anew

    def enter(self, hosts: Sequence[tuple[int, ...]], lost: Collection[int] = (), other_servers: bool = False) -> None:
        """Begin a view in which these workers push, from clock 0 on. `hosts`: their ranks by host, in the order in
        which hosts are added. `lost`: workers that were lost; those of them in `hosts` are replacements. Weights stay
        declared and keep their values. Other keys are forgotten; the memory of a value stays until the workers that
        still read it release it. With `other_servers`, slices are divided among other servers than before, so weights
        are forgotten as well. No work may be in progress. Not for flat slices."""
        keys, ranks = self.keys, {worker for host in hosts for worker in host}
        self._forget_workers(set(keys.workers.ranks).difference(ranks) | set(lost))
        keys.workers.on_hosts(hosts, lost)
        self.stragglers.forget()
        is_first, keys.elastic = not keys.elastic, True
        if other_servers:
            self.kept |= rollback.states(keys.slices, all_of_it=True)
        keys.declared.forget(weights=other_servers)
        for (key, index), slice_ in list(keys.slices.items()):
            if slice_.is_weight and not other_servers:
                slice_.restart(keys.workers.ranks, keeps_residual=is_first)
                slice_.can_roll_back = not slice_.pushes.at_once
                slice_.factor = keys.factor(keys.declared.is_mean(key))
                slice_.result_codec = keys.of_sum(slice_.codec)
            else:
                del keys.slices[key, index]
                slice_.retire(keys.memory.give_back)

    def _forget_workers(self, workers: Collection[int]) -> None:
        at_once = [slice_ for slice_ in self.keys.weights.values() if slice_.pushes.at_once]
        for worker in workers:
            clocks = [slice_.forget_worker(worker) for slice_ in at_once if worker in slice_.pushes.applied]
            if not clocks:
                self.gone.pop(worker, None)
            elif max(clocks) or worker not in self.gone:  # else it is a new process that has made no step
                self.gone[worker] = min(clocks), max(clocks)

    def hold(self, worker: int, step: int, now: float = 0.0) -> list[Action]:
        """A worker has entered a view and holds step `step` of the optimizer. All workers hold the same; if a slice has
        made the step after it, that one is taken back. A worker sends this before its first push. If each push is a
        step, `step` counts the worker's own steps: they all count as made, so nobody waits for one of them. Raises
        Rejected. No work may be in progress, unless each push is a step."""
        weights = self.keys.weights
        if not self.keys.declared.synchronous:
            for slice_ in weights.values():
                slice_.pushes.hold(worker, step)
            return [reply for id, slice_ in weights.items() for reply in self.pulls.answer(*id, slice_, now)]
        for id, slice_ in weights.items():
            try:
                rollback.go_back_to(slice_, step)
            except rollback.CannotGoBack as error:
                raise Rejected(f"{self.keys.declared.describe(*id)} {error}") from error
        return []

    def states(self) -> dict[str, Array]:
        """This server's optimizer states: see rollback.states. After a change of servers, until the first push, also
        the states that it had before."""
        return self.kept | rollback.states(self.keys.slices, all_of_it=False)

    def become(self, kind: KVStoreKind) -> None:
        """In a new view the kvstore is of this kind; see Keys.become. Call this after `enter`."""
        self.keys.become(kind)
        if kind.type.synchronous:
            self.gone.clear()
