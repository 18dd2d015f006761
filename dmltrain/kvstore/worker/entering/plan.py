"""What a worker of an elastic job does when a view begins. Pure.

`entered` is the worker's state in the new view, `entry_plan` says what it does before it trains, in order, and `after`
is the state when one of these steps is complete. Another change of view may interrupt each step that waits for other
processes. Then the state is that after the last complete step, and the next view's plan follows from it.

In the steps from Tell to Commit, which are one op, all members say what they lack, and get it. Only then it is known
who sends what: `share_plan` has that part. If the op is interrupted, the next view begins with it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from dmltrain.kvstore.view import View


class Lack(IntEnum):
    """What a worker does not have: what a step changes, which are the weights and the optimizer's state; or all of the
    state of training."""

    NOTHING, STEP, ALL = range(3)


@dataclass(frozen=True)
class EntryState:
    """What a worker has, and what it still has to do.

    `servers`: the slices of keys are divided among these. `is_alone`: it is a replacement that has not yet met the
    members. `undeclared`: the servers may not know the keys. `sharing`: the first op is that all get what they lack.
    `restoring`: servers lack the optimizer's state of their slices."""

    servers: tuple[int, ...]
    is_alone: bool = False
    lacks: Lack = Lack.NOTHING
    undeclared: bool = False
    sharing: bool = False
    restoring: bool = False


@dataclass(frozen=True)
class NewView:
    """A view of which this worker is a member. `missed`: the others have completed the round that this worker was
    making. `on_servers`: the servers run the optimizer. `own`: each worker makes steps of its own."""

    view: View
    missed: bool
    on_servers: bool
    own: bool

    @property
    def tells_step(self) -> bool:
        """Whether the servers have to know which step this worker holds; before the first view no step was made."""
        return self.on_servers and self.view.number > 1


@dataclass(frozen=True)
class Told:
    """What the members have said about themselves, in the order of their places: what each lacks, and how many steps it
    holds. `restoring`: servers lack the optimizer's state."""

    lacks: tuple[int, ...]
    steps: tuple[int, ...]
    restoring: bool

    @property
    def source(self) -> int | None:
        """The place of the first member that lacks nothing."""
        return next((place for place, lacks in enumerate(self.lacks) if not lacks), None)


# -- steps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoseStates:
    """These servers, which were lost or are new, have no state of the optimizer."""

    servers: frozenset[int]


@dataclass(frozen=True)
class Divide:
    """Divide the slices of keys among these servers."""

    servers: tuple[int, ...]


@dataclass(frozen=True)
class Connect:
    """There is a link to each server; else wait for the next view."""


@dataclass(frozen=True)
class Declare:
    """Tell the servers all keys."""


@dataclass(frozen=True)
class Acknowledge:
    """Tell the servers which step this worker holds: the one with the number `clock` if it is given."""

    clock: int | None = None


@dataclass(frozen=True)
class Tell:
    """All members say what they lack: see Told."""


@dataclass(frozen=True)
class TellClocks:
    """All members say how many steps of their own they hold."""


@dataclass(frozen=True)
class Share:
    """Go on with `share_plan`."""


@dataclass(frozen=True)
class Restore:
    """The member with place `source` sends the servers the optimizer's states of their slices."""

    source: int


@dataclass(frozen=True)
class Commit:
    """The member with place `source` sends the state of training to those that lack it, if there are any; members that
    leave hand over their residuals. When all have that, the op is recognised."""

    source: int | None


@dataclass(frozen=True)
class Take:
    """Go on from the state of training that has come, if this worker lacked it."""

    lacked: Lack


@dataclass(frozen=True)
class Wait:
    """If the members have nothing to do in this view, wait for the next one."""


@dataclass(frozen=True)
class Settle:
    """Wait until all members know how many steps each of them holds, and go on from the same clock."""


Step = (
    LoseStates
    | Divide
    | Connect
    | Declare
    | Acknowledge
    | Tell
    | TellClocks
    | Share
    | Restore
    | Commit
    | Take
    | Wait
    | Settle
)


# -- plans --------------------------------------------------------------------------------------------------------


def at_start(servers: int, is_replacement: bool) -> EntryState:
    """That of a worker before its first view. `servers`: their number."""
    lacks = Lack.ALL if is_replacement else Lack.NOTHING
    return EntryState(tuple(range(servers)), is_alone=is_replacement, lacks=lacks, undeclared=is_replacement)


def entered(before: EntryState, new: NewView) -> EntryState:
    """The state when the view begins."""
    view, others = new.view, _has_others(before, new)
    restoring = before.restoring or (new.on_servers and others and not before.is_alone)
    return replace(
        before,
        servers=view.servers,
        lacks=max(before.lacks, Lack.STEP) if new.missed else before.lacks,
        undeclared=before.undeclared or others,
        sharing=before.sharing or view.shares_state or restoring or (new.own and new.tells_step),
        restoring=restoring,
    )


def entry_plan(before: EntryState, new: NewView) -> tuple[Step, ...]:
    """What follows when the view begins. `before`: the state before that."""
    now, view, steps = entered(before, new), new.view, list[Step]()
    if new.on_servers:
        steps.append(LoseStates(frozenset({*before.servers} - {*view.servers} | {*view.joined_servers})))
    if _has_others(before, new) or now.is_alone:
        steps.append(Divide(view.servers))
    steps.append(Connect())
    if now.undeclared and not now.is_alone:
        steps.append(Declare())
    if new.tells_step and not now.lacks:
        steps.append(Acknowledge())
    if now.sharing:
        steps.append(Tell())
        # The others have declared the keys before. So if this worker's differ, the servers refuse these, and not
        # theirs.
        steps += [Declare()] if now.is_alone else []
        steps += [TellClocks()] if new.own else []
        steps.append(Share())
    steps.append(Wait())
    if now.sharing and new.own:
        steps.append(Settle())
    return tuple(steps)


def share_plan(now: EntryState, new: NewView, told: Told, source: int) -> tuple[Step, ...]:
    """What all do when they have said what they lack. `source`: the place of the member that sends."""
    steps = list[Step]()
    if now.lacks and new.tells_step and not new.own:  # members with steps of their own do this in Settle
        steps.append(Acknowledge(told.steps[source]))
    if told.restoring:
        steps.append(Restore(source))
    return (*steps, Commit(source if any(told.lacks) else None), Take(now.lacks))


def after(state: EntryState, step: Step) -> EntryState:
    """The state when this step is complete."""
    match step:
        case Declare():
            return replace(state, is_alone=False, undeclared=False)
        case Commit():
            return replace(state, lacks=Lack.NOTHING, sharing=False, restoring=False)
    return state


def returning(state: EntryState) -> EntryState:
    """That of a worker that a later view of a replay has again."""
    return replace(state, lacks=Lack.ALL)


def _has_others(before: EntryState, new: NewView) -> bool:
    """Whether the view has other servers than the one before."""
    return before.servers != new.view.servers or bool(new.view.joined_servers)
