"""Which states servers get when the slices of weights are divided anew in an elastic job. Pure.

The states are those that servers still have, and snapshots of lost servers (snapshots.py), which may be older. The
weights are always those of the present step, because each worker has all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Key
from dmltrain.kvstore.worker.entry import KeyEntry, cut

STATE, VALUE, CLOCKS, STEPS = "state ", "value", "clocks", "steps"  # in the names of arrays: see server/rollback.py
States = Mapping[str, Array]  # by such names
MAX_NAMED = 5  # keys in a message


@dataclass
class Restored:
    """`parts`: the states of each server's slices. `behind`: which of them are too old: by how many steps a state is
    older than the weights -> key -> number of its slices with such a state; -1 stands for slices without any state."""

    parts: dict[int, dict[str, Array]] = field(default_factory=lambda: defaultdict(dict))
    behind: dict[int, dict[Key, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))

    def texts(self) -> list[str]:
        """About states that were lost, for the log."""
        return [_said(behind_by, keys) for behind_by, keys in sorted(self.behind.items())]


def divided(
    arrays: States, entries: Iterable[tuple[Key, KeyEntry]], weights: Mapping[Key, Array], made: int, own: bool
) -> Restored:
    """`weights`: those of a worker that holds `made` steps. `own`: each worker makes steps of its own; then the age of
    a state is in relation to the newest one of all slices."""
    by_slice, restored = _by_slice(arrays), Restored()
    present = _most_steps(by_slice) if own else made
    for name, entry in entries:
        if not entry.is_weight:
            continue
        for slice_ in entry.slices:
            states = by_slice.get((slice_.range.key, slice_.range.index), {})
            newest = max((steps for steps in states if own or steps <= present), default=-1)
            fields = states.get(newest, {})
            exact = (own or newest == present) and VALUE in fields
            part = {VALUE: fields[VALUE] if exact else np.ascontiguousarray(cut(weights[name], slice_))}
            part |= {field: array for field, array in fields.items() if field not in (VALUE, CLOCKS)}
            if own:
                part |= {STEPS: np.array(max(newest, 0)), CLOCKS: fields.get(CLOCKS, np.zeros((0, 2), np.int64))}
            where = f"{slice_.range.key}/{slice_.range.index}"
            restored.parts[slice_.range.server] |= {f"{where}/{field}": array for field, array in part.items()}
            if not exact and (present > max(newest, 0) or (newest < 0 and made)):
                restored.behind[present - newest if newest >= 0 else -1][name] += 1
    return restored


def _by_slice(states: States) -> dict[tuple[int, int], dict[int, dict[str, Array]]]:
    """(key, slice) -> steps -> "value" and the optimizer's arrays by name."""
    by_slice: dict[tuple[int, int], dict[int, dict[str, Array]]] = defaultdict(lambda: defaultdict(dict))
    for name, array in states.items():
        key, index, steps, field = name.split("/", 3)
        fields = by_slice[int(key), int(index)][int(steps)]
        if field in (VALUE, CLOCKS) or field.startswith(STATE):
            fields[field.removeprefix(STATE)] = array
    return by_slice


def _most_steps(by_slice: Mapping[tuple[int, int], Mapping[int, States]]) -> int:
    """The highest number of steps after which there is a value of a slice; 0 without any value."""
    return max((steps for states in by_slice.values() for steps, state in states.items() if VALUE in state), default=0)


def _said(behind_by: int, slices: Mapping[Key, int]) -> str:
    names = [f"{name} ({count})" for name, count in slices.items()]
    more = f" and {len(names) - MAX_NAMED} others" if len(names) > MAX_NAMED else ""
    what = f"{sum(slices.values())} slices, of the keys {', '.join(names[:MAX_NAMED])}{more}"
    if behind_by < 0:
        return f"the optimizer's state of {what} is lost with their server, and begins anew"
    steps = "1 step" if behind_by == 1 else f"{behind_by} steps"
    return f"the optimizer's state of {what} is {steps} older than the weights: it is a lost server's last snapshot"
