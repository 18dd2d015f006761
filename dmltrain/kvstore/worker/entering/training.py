"""What the kvstore of an elastic job asks of the program that trains, and tells it."""

from __future__ import annotations

from typing import Protocol

from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.clocks import Clocks


class Training(Protocol):
    """The training of a member. All methods are called on the thread that trains."""

    def entered(self, view: View, missed: bool) -> None:
        """This worker is in a new view. `missed`: the others have completed the round that it was making."""

    def give_state(self) -> bytes:
        """The state of training, for members that lack it."""
        ...

    def take_state(self, content: bytes) -> None:
        """Go on from what `give_state` returned on another member."""

    def take_step(self, content: bytes) -> None:
        """Like `take_state`, but take only what a step changes: the weights and the optimizer's state."""

    def state_is_shared(self) -> None:
        """All members have the state of training."""

    def take_clocks(self, clocks: Clocks) -> None:
        """How many steps of their own all members hold. Comes before `give_state`, and not to members that lack the
        state."""

    def begun(self) -> bool:
        """Whether this worker is in the middle of a step of its own."""
        ...

    def between_epochs(self) -> bool:
        """Whether this worker begins an epoch next."""
        ...

    def blamed(self, error: str) -> str:
        """Why this worker's error ends the job; empty if the job goes on without this worker."""
        ...


class NoTraining:
    """That of a program that has no state to share."""

    def entered(self, view: View, missed: bool) -> None: ...

    def give_state(self) -> bytes:
        return b""

    def take_state(self, content: bytes) -> None: ...

    def take_step(self, content: bytes) -> None: ...

    def state_is_shared(self) -> None: ...

    def take_clocks(self, clocks: Clocks) -> None: ...

    def begun(self) -> bool:
        return False

    def between_epochs(self) -> bool:
        return False

    def blamed(self, error: str) -> str:
        return ""
