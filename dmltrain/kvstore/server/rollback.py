"""The optimizer's steps on a server of an elastic job: how the last one is taken back, and what a lost server's
successors get. Pure.

A round that no worker holds is made again in the next view (view.py), though some slices may have made its step. So a
slice keeps its value and its optimizer's state as they were before its last step, until it makes the next one: that
needs a push of each worker, which then holds the round before. In a new view each worker first says which step it
holds, the same on all, and slices that are one step ahead go back.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.optimizer_state import encoded
from dmltrain.kvstore.server.slice import ServerSlice

STEPS, STATE = "steps", "state "  # in names of arrays: of a slice, which may have no other; before the optimizer's own
CLOCKS = "clocks"  # int64 (n, 2): workers, and how many of their pushes the value contains, if each push is a step


class CannotGoBack(Exception):
    """A slice has made steps that cannot be taken back, or lacks some."""


def go_back_to(slice_: ServerSlice, step: int) -> None:
    """All workers hold this step of the slice's optimizer: take back the one after it. A slice that is new here only
    counts from there on. Raises CannotGoBack. No work may be in progress."""
    if slice_.completed == step:
        return
    if slice_.initial:
        slice_.count_from(step)
    elif slice_.completed == step + 1 and slice_.former is not None:
        former, slice_.former = slice_.former, None
        after, slice_.value = (slice_.value, slice_.coded), former.value
        assert slice_.step is not None  # it has made one
        slice_.step.load(former.state)
        slice_.coded = encoded(slice_)
        for buffer in after:
            if buffer is not None:
                slice_.give_back(buffer)
        slice_.release(former.value)
        slice_.count_from(step)
    else:
        raise CannotGoBack(f"has made {slice_.completed} steps where the workers hold {step}")


def states(slices: Mapping[tuple[int, int], ServerSlice], all_of_it: bool) -> dict[str, Array]:
    """Copies of the optimizers' states: "key/slice/steps/state momentum_buffer", ...; `steps` is how many have led to
    it. `all_of_it`: with values ("key/slice/steps/value") and `clocks`, and with what was before the last step. Slices
    that have no value yet are left out."""
    arrays = {}
    for (key, index), slice_ in slices.items():
        if slice_.step is None or slice_.initial:
            continue
        versions = [(slice_.steps if slice_.at_once else slice_.completed, slice_.value, slice_.step.state())]
        if slice_.former is not None and all_of_it:
            versions.append((slice_.completed - 1, slice_.former.value, slice_.former.state))
        for steps, value, state in versions:
            where = f"{key}/{index}/{steps}"
            arrays[f"{where}/{STEPS}"] = np.array(steps)
            arrays |= {f"{where}/{STATE}{name}": np.array(array) for name, array in state.items()}
            if all_of_it:
                arrays[f"{where}/value"] = value.array.copy()
            if all_of_it and slice_.at_once:
                arrays[f"{where}/{CLOCKS}"] = np.array(sorted(slice_.applied.items()), np.int64).reshape(-1, 2)
    return arrays


def pack(states: Mapping[str, Array]) -> bytes:
    """As npz."""
    stream = io.BytesIO()
    np.savez(stream, **states)
    return stream.getvalue()
