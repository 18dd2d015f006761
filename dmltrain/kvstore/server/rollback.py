"""Optimizer steps on a server of an elastic job: how the last one is taken back, and which states the servers get that
take over from a lost one. Pure.

A round that no worker holds is repeated in the next view (view.py), although some slices may have made its step
already. So a slice keeps its value and its optimizer's state from before its last step, until it makes the next step.
One earlier step is enough: the next step needs a push of each worker, and a worker pushes only when it holds the last
round. At the beginning of a view each worker sends the step that it holds, which is the same for all. Slices that are
one step ahead go back.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.optimizer_state import encoded
from dmltrain.kvstore.server.slice import ServerSlice

STEPS, STATE = "steps", "state "  # names of arrays: the number of steps; prefix of the optimizer's arrays, if any
CLOCKS = "clocks"  # int64 (n, 2): workers, and how many of their pushes the value contains, if each push is a step


class CannotGoBack(Exception):
    """A slice has made more steps than can be taken back, or fewer than the workers hold."""


def go_back_to(slice_: ServerSlice, step: int) -> None:
    """All workers hold this step of the slice's optimizer: take back the step after it, if it was made. A slice that is
    new on this server only counts from this step on. Raises CannotGoBack. No work may be in progress."""
    pushes = slice_.pushes
    if pushes.completed == step:
        return
    if slice_.initial:
        pushes.count_from(step)
    elif pushes.completed == step + 1 and slice_.former is not None:
        former, slice_.former = slice_.former, None
        after, slice_.value = (slice_.value, slice_.coded), former.value
        assert slice_.step is not None  # it has made one
        slice_.step.load(former.state)
        slice_.coded = encoded(slice_)
        for buffer in after:
            if buffer is not None:
                slice_.give_back(buffer)
        slice_.release(former.value)
        pushes.count_from(step)
    else:
        raise CannotGoBack(f"has made {pushes.completed} steps where the workers hold {step}")


def states(slices: Mapping[tuple[int, int], ServerSlice], all_of_it: bool) -> dict[str, Array]:
    """Copies of the optimizers' states: "key/slice/steps/state momentum_buffer", ...; `steps`: how many steps have led
    to this state. `all_of_it`: also values ("key/slice/steps/value") and clocks, and the states before the last step.
    Slices without a value are left out."""
    arrays = {}
    for (key, index), slice_ in slices.items():
        if slice_.step is None or slice_.initial:
            continue
        pushes = slice_.pushes
        versions = [(slice_.steps if pushes.at_once else pushes.completed, slice_.value, slice_.step.state())]
        if slice_.former is not None and all_of_it:
            versions.append((pushes.completed - 1, slice_.former.value, slice_.former.state))
        for steps, value, state in versions:
            where = f"{key}/{index}/{steps}"
            arrays[f"{where}/{STEPS}"] = np.array(steps)
            arrays |= {f"{where}/{STATE}{name}": np.array(array) for name, array in state.items()}
            if all_of_it:
                arrays[f"{where}/value"] = value.array.copy()
            if all_of_it and pushes.at_once:
                arrays[f"{where}/{CLOCKS}"] = np.array(sorted(pushes.applied.items()), np.int64).reshape(-1, 2)
    return arrays


def pack(states: Mapping[str, Array]) -> bytes:
    """The states as the bytes of an npz file."""
    stream = io.BytesIO()
    np.savez(stream, **states)
    return stream.getvalue()
