"""How the operations of a store begin and end, as a value that the store has: where the workers stay the same, nothing
interrupts an operation. worker/elastic_ops.py has the other value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dmltrain.kvstore.view import View

T = TypeVar("T")


class Ops:
    """Of a job whose workers stay the same. `is_alone`: see KVStore. In an elastic job `view` is the one that this
    worker has entered, and `op` the number of the op whose pushes come next."""

    is_alone = False
    view: View | None = None
    op = 0

    def begin(self) -> None:
        """Before each request of an operation. Raises ViewChanged if a new view has to be entered first."""

    def begin_step(self) -> None:
        """`begin`, before pushes with which the servers make a step."""

    def begin_round(self) -> None:
        """`begin`, before pushes whose sums come back."""

    def run(self, what: str, run: Callable[[], None], has_barrier: bool = True) -> None:
        """Do `what`, an operation of all workers other than a round of training."""
        run()

    def repeat(self, block: Callable[[], T]) -> T:
        """See KVStore.repeat, as for the next two."""
        return block()

    def complete(self) -> None: ...

    def enter(self) -> bool:
        return False

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        """The servers run this optimizer from now on."""

    def drops_out(self, error: BaseException) -> bool:
        """Leave the job, which goes on, because of this error, if that is possible. Returns whether it is."""
        return False
