"""The views of a replay, which a job goes through in the order of the recorded job (--replay). Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from dmltrain.kvstore.view import NEVER, View

FIXED = "a replay goes through the views of the replayed job: start the job without --replay"
ALL_NEEDED = "a replay needs all workers of the replayed job: start it again"


class Replay:
    """`active`: whether the job is a replay."""

    def __init__(self, views: Sequence[View] = (), servers: tuple[int, ...] = ()) -> None:
        self.active = bool(views)
        self._coming = _planned(views, servers)

    @property
    def ended(self) -> bool:
        """Whether no further view follows."""
        return not self._coming

    def next(self) -> View:
        """The next view, which begins."""
        return self._coming.pop(0)

    def missing(self, here: Collection[int]) -> list[int]:
        """The workers that join with the next view and are not `here`."""
        return sorted(set(self._coming[0].joined).difference(here))

    def needs(self, member: int) -> bool:
        """Whether a later view has this member."""
        return any(member in view.members for view in self._coming)


def _planned(views: Sequence[View], servers: tuple[int, ...]) -> list[View]:
    """The views of a replay, with this job's servers: each ends where the next one begins. `behind` stays as recorded:
    these workers lack nothing here, but so the view begins with the same op as in the recorded job."""
    ends = [*(after.base for after in views[1:]), NEVER]
    return [
        replace(view, servers=servers, until=end, lost=(), left=(), lost_servers=(), joined_servers=())
        for view, end in zip(views, ends, strict=False)
    ]
