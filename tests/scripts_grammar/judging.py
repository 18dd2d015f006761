"""Runs a program as one process and as several workers, and says whether they do the same."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dmltrain.backends.torch.optimizer import lay_out_state
from dmltrain.base.errors import UserError
from dmltrain.kvstore import KVStore
from tests.scripts_grammar.drawing import Program, program
from tests.scripts_grammar.memory_store import Finished, Group, Hangs, MemoryStore
from tests.scripts_grammar.world import World

TOLERANCE = 1e-9  # of float64 numbers, relative to those above 1
LARGEST = 1e4  # programs whose numbers grow beyond are not tried
ATTEMPTS = 100  # to find a program that plain torch can run
CHANGING = r"[0-9.e+-]*[0-9]|parameter [a-z0-9_.]+"  # in the text of a verdict
DistributeOn = Callable[[Any, Any, KVStore], Any]


@dataclass(frozen=True)
class Verdict:
    """How a program ended. kind: right, refused, wrong (another result), hangs, error, or unclear (rounding alone
    changes the result). `text`: the first words of an error, or where the first difference is."""

    kind: str
    text: str = ""

    @property
    def cause(self) -> str:
        """The verdict without what only this program has."""
        return f"{self.kind}: {re.sub(CHANGING, '#', self.text)[:90]}".rstrip(": ")

    @property
    def fails(self) -> bool:
        return self.kind in ("wrong", "hangs", "error")


def alone(_: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`distribute` in the reference: torch's own optimizer. Loaded states get their parameter's layout, without which
    torch's fused kernels read them wrongly."""
    optimizer.accumulate = contextlib.nullcontext
    optimizer.register_load_state_dict_post_hook(lay_out_state)
    return optimizer


def execute(tried: Program, world: World) -> None:
    """Raises what the program raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(_compiled(tried.text), world.names())


@functools.lru_cache(64)
def _compiled(text: str) -> Any:
    return compile(text, "<program>", "exec")


def reference(tried: Program, nudge: float = 0.0) -> World:
    """Plain torch, in one process."""
    world = World(alone, tried.workers, None, nudge)
    execute(tried, world)
    return world


def valid(seed: int, elastic: bool = False) -> tuple[Program, World]:
    """The first program of this seed that plain torch runs, and whose numbers stay small; and what it notes."""
    for attempt in range(ATTEMPTS):
        tried = program(seed, attempt, elastic)
        with contextlib.suppress(Exception):
            world = reference(tried)
            numbers = torch.cat([each.flatten() for note in world.notes for each in note]).nan_to_num()
            if len(world.notes) and numbers.abs().max() < LARGEST:
                return tried, world
    raise AssertionError(f"seed {seed}: no program that plain torch runs")


class Worker(threading.Thread):
    """One worker of a program, as a thread."""

    def __init__(self, tried: Program, distribute: DistributeOn, store: MemoryStore) -> None:
        super().__init__(daemon=True)
        self._tried, self._store = tried, store
        found = functools.partial(_with_store, distribute, store)
        self.world = World(found, tried.workers, store.rank, elastic=store.elastic)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            execute(self._tried, self.world)
        except BaseException as error:
            self.error = error
        finally:
            self._store.group.end(self._store.rank)


def _with_store(distribute: DistributeOn, store: KVStore, model: Any, optimizer: Any) -> Any:
    return distribute(model, optimizer, store)


def judge(tried: Program, distribute: DistributeOn, expected: World | None = None, elastic: bool = False) -> Verdict:
    """Compare the workers, as threads of this process, with the reference."""
    expected = expected or reference(tried)
    group = Group(tried.workers)
    workers = [Worker(tried, distribute, MemoryStore(group, rank, elastic)) for rank in range(tried.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = [difference(worker.world, expected, worker.error is None) for worker in workers]
    wrong = next((f"worker {rank}: {text}" for rank, text in enumerate(found) if text), "")
    if wrong and _rounds(tried, expected):
        return Verdict("unclear", wrong)
    if wrong:
        return Verdict("wrong", wrong)
    return _ended([worker.error for worker in workers if worker.error is not None])


def _rounds(tried: Program, expected: World) -> bool:
    """Whether so small a change of the samples as rounding makes changes what the program does."""
    return bool(difference(reference(tried, nudge=1e-15), expected, True, TOLERANCE / 100))


def _ended(errors: list[BaseException]) -> Verdict:
    own = [error for error in errors if not isinstance(error, (Hangs, Finished))]
    refusals = [each for each in own if isinstance(each, UserError)]
    others = [each for each in own if not isinstance(each, UserError)]
    if others:
        return Verdict("error", f"{type(others[0]).__name__}: {others[0]} ({_place(others[0])})")
    if refusals:
        return Verdict("refused", str(refusals[0]))
    if hangs := [error for error in errors if isinstance(error, Hangs)]:
        return Verdict("hangs", str(hangs[0]))
    return Verdict("refused", str(errors[0])) if errors else Verdict("right")


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}"


def difference(found: World, expected: World, whole: bool, tolerance: float = TOLERANCE) -> str:
    """The first note in which they differ, or nothing. A program that is not `whole` has ended with an error, which is
    right if all before it was."""
    tolerance = max(tolerance, expected.tolerance)
    if whole and len(found.notes) != len(expected.notes):
        return f"{len(found.notes)} notes, expected {len(expected.notes)}"
    for number, (mine, its) in enumerate(zip(found.notes, expected.notes, strict=False)):
        for one, other in zip(mine, its, strict=True):
            if one.shape != other.shape:
                return f"note {number} has another shape"
            if not torch.allclose(one, other, tolerance, tolerance, equal_nan=True):
                return f"note {number} differs by {(one - other).abs().max():.1e}"
    return ""


def shrunk(tried: Program, fails: Callable[[Program], bool]) -> Program:
    """A program with as few pieces as possible that still fails: halves, quarters and so on are left out."""
    size = len(tried.pieces)
    while size:
        start = len(tried.pieces) - size
        while start >= 0:
            smaller = tried.without(set(range(start, start + size)))
            if len(smaller.pieces) < len(tried.pieces) and _still(smaller, fails):
                tried = smaller
            start -= size
        size //= 2
    return tried


def _still(tried: Program, fails: Callable[[Program], bool]) -> bool:
    """False also for a program that plain torch cannot run."""
    try:
        reference(tried)
    except Exception:
        return False
    return fails(tried)


def smallest(tried: Program, distribute: DistributeOn, cause: str, elastic: bool = False) -> Program:
    """The smallest program that ends in the same way."""
    return shrunk(tried, lambda each: judge(each, distribute, elastic=elastic).cause == cause)
