"""What a user chooses about the exchange of gradients, as one value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dmltrain.base import env
from dmltrain.base.env import Environment
from dmltrain.kvstore import types
from dmltrain.kvstore.local_steps import LocalSteps
from dmltrain.kvstore.types import KVStoreType


@dataclass(frozen=True)
class ExchangeChoices:
    """See `dmltrain.distribute`, whose parameters these are, and below them those of the trainer alone. None stands for
    the default of the environment or of the kvstore's type. The command line's options become such a value, too
    (options/checks.py).

    With `step_early` `parameter.grad` is the worker's own gradient after backward() (undefined where factors are sent),
    the sum or mean after `reduce_gradients()`, and undefined after `step()`. `defer` has no effect with torch.compile,
    nor for optimizers that cannot step in parts. With `factors` weights equal those without them up to rounding."""

    kvstore: str
    compression: str | Mapping[str, Any] = "none"
    staleness: float | None = None
    local_steps: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    update_on_kvstore: bool | None = None
    factors: Any = 0  # the rows of a step; of the command line: what asks for factors; 0 or None: none
    transport: str | None = None
    host_sum: str | None = None
    server_shares: str | None = None
    balance: bool = False
    batch: str = "constant"
    server_snapshot: float | None = None
    defer: bool = False
    step_early: bool = False
    broadcast_buffers: bool = False

    average: bool = True  # use the mean of the workers' gradients, else their sum (dist_sync)
    overlap: bool = True  # with step_early; without it gradients are sent at step(), in place of backward
    factored: Collection[str] | None = None  # the weights whose gradients are sent as factors, instead of a choice

    @property
    def codec_parameters(self) -> dict[str, Any]:
        """As `KVStore.set_gradient_compression` takes them."""
        return dict(self.compression) if isinstance(self.compression, Mapping) else {"type": self.compression}

    def chosen(self, environment: Environment) -> Environment:
        """`environment`, in which the choices replace the values of variables. Raises UserError for a wrong value."""
        return env.with_choices(
            environment, transport=self.transport, host_sum=self.host_sum, server_shares=self.server_shares
        )

    def on_servers(self, environment: Environment) -> bool:
        """Whether the optimizer runs on the servers: as the script asks, else as the environment says if the type of
        kvstore allows it."""
        if self.update_on_kvstore is not None:
            return bool(self.update_on_kvstore)
        return bool(environment.update_on_kvstore) and "servers" in types.find(self.kvstore).optimizer_on

    def of_job(self, environment: Environment) -> ExchangeChoices:
        """These, with the place of the optimizer as it is in this job."""
        return replace(self, update_on_kvstore=self.on_servers(environment))

    def averaging(self, kind: KVStoreType) -> LocalSteps | None:
        """See KVStoreType.averaging."""
        return kind.averaging(self.local_steps, self.outer_lr, self.outer_momentum)
