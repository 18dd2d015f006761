"""Workers that want to join an elastic job: replacements of lost workers, and additional ones. Pure.

A newcomer that is ready waits until the leader's next op is a round of training. Then the leader asks for a change of
view, and the newcomers that wait at that moment are in the next view (views.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dmltrain.kvstore.view import View


@dataclass
class Newcomers:
    """`joining`: the workers that have registered and are no members yet. `waiting`: those of them that are ready ->
    the ranks on the host of each. `admitted`: those of the waiting that the next view will have. `admitter`: the member
    that has asked for it."""

    joining: set[int] = field(default_factory=set)
    waiting: dict[int, tuple[int, ...]] = field(default_factory=dict)
    admitted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    admitter: int | None = None

    def registered(self, member: int) -> None:
        """A newcomer has registered."""
        self.joining.add(member)

    def ready(self, member: int, host: tuple[int, ...]) -> bool:
        """A newcomer is ready. Returns whether that is news."""
        if member not in self.joining or member in self.waiting:
            return False
        self.waiting[member] = host
        return True

    def lost(self, member: int) -> None:
        """A newcomer was lost."""
        self.joining.discard(member)
        self.waiting.pop(member, None)
        self.admitted.pop(member, None)

    def admit(self, by: int) -> None:
        """Admit the newcomers that wait: this member, `by`, waits for the next view before a round of training."""
        self.admitted, self.admitter = dict(self.waiting), by

    def admit_but(self, members: Collection[int]) -> None:
        """All members wait between two rounds: admit the newcomers that wait. But if a newcomer replaces one of
        `members`, the next view is without both, and the newcomer joins one view later."""
        self.admitted = {member: host for member, host in self.waiting.items() if member not in members}

    def member_lost(self, member: int) -> None:
        """A member was lost. If it was the admitter, the next op of the others may be no round: admit nobody."""
        if member == self.admitter:
            self.admitted, self.admitter = {}, None

    @property
    def between_rounds(self) -> bool:
        """Whether a member waits before a round of training: then all members are between two rounds."""
        return self.admitter is not None

    def begin(self, view: View) -> None:
        """This view begins."""
        self.joining.difference_update(view.joined)
        for member in view.joined:
            self.waiting.pop(member, None)
        self.admitted, self.admitter = {}, None


def differences(job: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """How the facts of a newcomer differ from those of the job; empty if they do not."""
    names = sorted(name for name in {*job, *facts} if job.get(name) != facts.get(name))
    return ", ".join(f"{name} {facts.get(name)!s:.80} (the job: {job.get(name)!s:.80})" for name in names)
