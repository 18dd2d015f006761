"""The placement group of a job: asked for, waited for, filled with keepers, removed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.queue import FAULT_CODE, TIMEOUT
from dmltrain_launch.clusters.ray.keeper import Place, actor, explanation
from dmltrain_launch.clusters.ray.placement import (
    Bundle,
    Node,
    Request,
    described,
    find,
    inventory,
    lacking,
    names,
    pinned,
)

LOOK_SECONDS = 1.0  # between looks whether Ray has placed the group
REMOVAL_SECONDS = 5.0
INFEASIBLE = "INFEASIBLE"  # in Ray's own record of a placement group
USAGE_CODE = 2
FIX = (
    "Ask for less with --ray-nodes or --ray-resources; where the cluster grows by itself, --queue-wait SECONDS waits "
    "for that"
)


def living() -> dict[str, Node]:
    """The nodes of the cluster by name."""
    return names([Node.of(row) for row in ray.nodes() if row["Alive"]])


class Group:
    """`waits` is called with a text while Ray has no room. LaunchError if it cannot be placed, or not in time."""

    def __init__(self, request: Request, waits: Callable[[str], None]):
        self._request, self._waits = request, waits
        bundles = request.bundles
        if request.hosts:
            nodes = living()
            chosen = [find(host, nodes) for host in request.hosts]
            bundles = [pinned(bundle, node) for bundle, node in zip(bundles, chosen, strict=True)]
        self._bundles = bundles
        self._group: Any = placement_group(bundles, strategy=request.strategy, name=request.name)

    def places(self) -> dict[str, Place]:
        """By name of their nodes; in the order of these names, or in that of the hosts that the user has named."""
        self._wait()
        chosen: dict[str, list[int]] = {}  # by node
        for index, node in sorted(placement_group_table(self._group)["bundles_to_node_id"].items()):
            chosen.setdefault(node, []).append(index)
        found = [Place(name, node, chosen[node.id]) for name, node in living().items() if node.id in chosen]
        if self._request.hosts:
            found.sort(key=lambda place: place.bundles)
        return {place.name: place for place in found}

    def _wait(self) -> None:
        began, shown, limit = time.monotonic(), "", self._request.wait
        while not self._group.wait(LOOK_SECONDS):
            state = placement_group_table(self._group)["stats"]["scheduling_state"]
            nodes = living()
            asked = f"{described(self._bundles, self._request.strategy)}: Ray says {state}"
            has = f"the cluster has {inventory(nodes, self._bundles)}"
            why = lacking(self._bundles, self._request.strategy, list(nodes.values()))
            if limit is None and (why or state == INFEASIBLE):
                raise LaunchError(f"{asked}: {why or 'this can never be placed'}; {has}. {FIX}", USAGE_CODE)
            if limit is not None and time.monotonic() - began >= limit:
                raise LaunchError(f"{asked} after {limit:g} s; {why or 'others have it'}; {has}", TIMEOUT)
            if state != shown:
                self._waits(f"{asked}; {has}")
                shown = state

    def keep(self, places: Sequence[Place]) -> None:
        """Start a keeper in each bundle, and wait for what they find on their nodes."""
        bundles = self._request.bundles
        for place in places:
            place.keepers = [self._keeper(index, bundles[index]) for index in place.bundles]
            place.cpus = sum(bundles[index].get("CPU", 0.0) for index in place.bundles)
        calls = [[keeper.facts.remote() for keeper in place.keepers] for place in places]
        for place, asked in zip(places, calls, strict=True):
            try:
                found = ray.get(asked)
            except ray.exceptions.RayError as error:
                raise LaunchError(f"{place.name}: {explanation(error)}", FAULT_CODE) from None
            place.facts = found[0]
            place.gpus = ",".join(each["gpus"] for each in found if each["gpus"])

    def _keeper(self, index: int, bundle: Bundle) -> Any:
        """It takes only the GPUs of the bundle, to know which they are. The group has all."""
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return actor(where, 0, bundle.get("GPU", 0.0), 0, {})

    def remove(self) -> None:
        """Return when Ray says that it is removed."""
        with contextlib.suppress(Exception):  # also if the cluster is lost
            remove_placement_group(self._group)
            end = time.monotonic() + REMOVAL_SECONDS
            while placement_group_table(self._group)["state"] != "REMOVED" and time.monotonic() < end:
                time.sleep(0.02)
