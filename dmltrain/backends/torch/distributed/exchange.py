"""What the workers of a job do together in a step: the base of all exchanges.

An exchange has three parts, each of which knows nothing of the others' choices:

- `gradients`, this worker's: not sent (gradients/own.py), exchanged when backward() ends (gradients/means.py), or sent
  bucket by bucket (gradients/pushes.py);
- `members`: who takes part in a step, if that can change (members.py);
- itself: what a step is. Here it is the whole step of the inner optimizer, with the gradients as they are when
  backward() has returned: a worker's own, or the mean. The others: sums, of which workers make the step (sums.py);
  steps on the servers (on_servers.py); averages of weights after local steps (local_steps.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.distributed.choice import NOTHING_CHOSEN, Chosen
from dmltrain.backends.torch.distributed.gradients.own import OwnGradients
from dmltrain.backends.torch.distributed.members import Members
from dmltrain.backends.torch.optimizer import lay_out_state, row_of
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore


class Exchange:
    """See the module, and DistributedOptimizer for the methods of the same names. `inner`: the optimizer of the script.
    `store`: None for a single worker."""

    chosen: Chosen = NOTHING_CHOSEN  # which dense layers send factors

    def __init__(self, gradients: OwnGradients, store: KVStore | None = None, members: Members | None = None) -> None:
        self.inner, self.gradients, self.store = gradients.inner, gradients, store
        self.members = members or Members()

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def common_state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        state: Mapping[torch.Tensor, Mapping[str, Any]] = self.state
        return state

    def reduce_gradients(self) -> None:
        self.gradients.reduce()

    def scale(self) -> float:
        """See gradients.pushes.Destination."""
        return 1.0

    def took(self) -> None:
        """See gradients.pushes.Destination."""

    def round(self, dealt: int, checksum: Array, then: Callable[[Array], None] | None = None) -> None:
        """Only an elastic job has rounds that workers must know."""

    def skip_round(self) -> bool:
        return False

    def forget_round(self) -> None:
        """Without rounds there is nothing to forget."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.step_inner(self.gradients.begin_step(closure))
        self.gradients.end_step()
        return loss

    def step_inner(self, closure: Callable[[], Any] | None) -> Any:
        """The inner optimizer's own step."""
        if closure is None and row_of(self.inner) and plain_step.is_possible(self.inner):
            return plain_step.step(self.inner)
        return self.inner.step(closure)

    def synchronize(self) -> None:
        self.gradients.settle()

    def shared(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "servers" in state_dict:
            raise UserError(
                "this state was saved with the optimizer on the servers, but it now runs on the worker: "
                "resume with the kvstore (and update_on_kvstore) that it was saved with"
            )
        self.load_inner(state_dict)

    def load_inner(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        lay_out_state(self.inner)


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss of a step's closure, which runs once; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
