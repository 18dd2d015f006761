"""The arguments of `dmltrain.distribute`, which are checked before the job starts, and the one kvstore of a process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from dmltrain import kvstore
from dmltrain.base import env
from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec, rules, types
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.local_steps import LocalSteps
from dmltrain.options.training import BATCHES, CONSTANT


@dataclass(frozen=True)
class ExchangeChoices:
    """How the models of a process exchange gradients; the fields are parameters of `dmltrain.distribute`."""

    kvstore: str
    compression: str | Mapping[str, Any]
    staleness: float | None
    update_on_kvstore: bool | None
    transport: str | None
    host_sum: str | None
    server_shares: str | None
    balance: bool = False
    batch: str = CONSTANT
    server_snapshot: float | None = None

    @property
    def codec_parameters(self) -> dict[str, Any]:
        """As `KVStore.set_gradient_compression` takes them."""
        return dict(self.compression) if isinstance(self.compression, Mapping) else {"type": self.compression}

    def chosen(self, environment: Environment) -> Environment:
        """`environment`, in which the script's choices replace the values of variables. Raises UserError for a wrong
        value."""
        return env.with_choices(
            environment, transport=self.transport, host_sum=self.host_sum, server_shares=self.server_shares
        )

    def in_effect(self, environment: Environment) -> dict[str, Any]:
        """Field -> the value that is used: the script's, else the default of `environment`. Raises UserError for a
        wrong value."""
        kind, chosen = types.find(self.kvstore), self.chosen(environment)
        return {
            "kvstore": kind.name,
            "compression": self._codec(),
            "staleness": kind.bound(self.staleness),
            "update_on_kvstore": self.on_servers(environment),
            "balance": self.balance,
            "batch": self.batch,
            "server_snapshot": self.server_snapshot,
            **{name: getattr(chosen, name) for name in env.CHOICES},
        }

    def on_servers(self, environment: Environment) -> bool:
        """Whether the optimizer runs on the servers: as the script asks, else as the environment says if the type of
        kvstore allows it."""
        if self.update_on_kvstore is not None:
            return bool(self.update_on_kvstore)
        return bool(environment.update_on_kvstore) and "servers" in types.find(self.kvstore).optimizer_on

    def _codec(self) -> codec.Codec | None:
        try:
            return codec.make(self.codec_parameters)
        except ValueError as error:
            raise UserError(f"compression={self.compression!r}: {error}") from error


@dataclass(frozen=True)
class ModelChoices:
    """What each model of a process can choose for itself; the fields are parameters of `dmltrain.distribute`."""

    local_steps: int | None
    outer_lr: float | None
    outer_momentum: float | None
    factors: int

    def averaging(self, kvstore: str) -> LocalSteps | None:
        """See KVStoreType.averaging."""
        return types.find(kvstore).averaging(self.local_steps, self.outer_lr, self.outer_momentum)


def check(asked: ExchangeChoices, model: ModelChoices, environment: Environment) -> None:
    """Raise UserError for the first mistake, also where the script trains alone and its choices have no effect."""
    effective = asked.in_effect(environment)
    if model.factors:
        rules.check_rows(model.factors)
    rules.check(
        rules.IN_PYTHON,
        kvstore=asked.kvstore,
        staleness=asked.staleness,
        local_steps=model.local_steps,
        outer_lr=model.outer_lr,
        outer_momentum=model.outer_momentum,
        update_on_kvstore=effective["update_on_kvstore"],
        compression=effective["compression"].name if effective["compression"] else "none",
        threshold=asked.codec_parameters.get("threshold"),
        factors=model.factors or None,
        server_shares=asked.server_shares,
    )
    if asked.batch not in BATCHES:
        raise UserError(f"batch={asked.batch!r}: expected one of {', '.join(BATCHES)}")
    if asked.server_snapshot is not None:
        on_servers = types.find(asked.kvstore).steps_on_servers(effective["update_on_kvstore"])
        _check_snapshot(asked.server_snapshot, on_servers)
    why = rules.why_no_change(asked.kvstore, effective["update_on_kvstore"])
    if environment.reports_steps and why:
        raise UserError(why)
    if environment.launched and not environment.elastic:
        _check_plain(asked)
    if environment.elastic:
        more = {"threshold": asked.codec_parameters.get("threshold"), "factors": model.factors}
        _check_elastic({**effective, **more, "balance": asked.balance, "batch": asked.batch})


def _check_snapshot(seconds: Any, on_servers: bool) -> None:
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds < math.inf:
        raise UserError(f"server_snapshot={seconds!r}: expected seconds, 0 or more (0: after each step)")
    if not on_servers:
        raise UserError(
            f"server_snapshot={seconds!r} needs update_on_kvstore=True: else servers keep nothing that a snapshot "
            "could have"
        )


def _check_plain(asked: ExchangeChoices) -> None:
    """Raise UserError for what only an elastic job has."""
    for name, value in (("balance", False), ("batch", CONSTANT), ("server_snapshot", None)):
        if (chosen := getattr(asked, name)) != value:
            raise UserError(f"{name}={chosen!r} needs a job that was started with dmltrain-launch --elastic")


def _check_elastic(chosen: Mapping[str, Any]) -> None:
    """Raise UserError for what an elastic job cannot have."""
    wanted = {"threshold": None, "factors": 0, "server_shares": env.SERVER_SHARES[0]}
    wrong = [f"{name}={chosen[name]!r}" for name, value in wanted.items() if chosen[name] != value]
    kind = types.find(chosen["kvstore"])
    if not kind.can_be_elastic:
        wrong.insert(0, f"kvstore={chosen['kvstore']!r}")
    together = {"balance": False, "batch": CONSTANT}
    if not kind.synchronous:
        wrong += [f"{name}={chosen[name]!r}" for name, value in together.items() if chosen[name] != value]
    if wrong:
        raise UserError(
            "this job was started with --elastic, which needs kvstore='dist_sync', 'dist_async' or 'dist_ssp', no "
            "threshold of compression, no factors, equal server_shares, and dist_sync for balance and batch; this is "
            f"{', '.join(wrong)}: use these, or start it without --elastic"
        )


def store(asked: ExchangeChoices, environment: Environment) -> KVStore:
    """The kvstore of this process. The first model creates it; raises UserError if a later one asks for another."""
    if not environment.launched:
        return kvstore.create("local")
    if not _stores:
        chosen = asked.chosen(environment)
        created = kvstore.create(asked.kvstore, staleness=asked.staleness, environment=chosen, elastic=True)
        created.set_gradient_compression(asked.codec_parameters)
        _stores.append((asked, created))
    first, shared = _stores[0]
    _check_same(asked, first, environment)
    return shared


def in_use() -> ExchangeChoices:
    """What the first model of this process asked for; its kvstore is that of the process."""
    return _stores[0][0]


def _check_same(asked: ExchangeChoices, first: ExchangeChoices, environment: Environment) -> None:
    now, before = asked.in_effect(environment), first.in_effect(environment)
    for name in now:
        if now[name] != before[name]:
            raise UserError(
                f"{_shown(asked, name, now)}: this process already uses {_shown(first, name, before)}; use that for "
                "every model"
            )


def _shown(asked: ExchangeChoices, name: str, effective: dict[str, Any]) -> str:
    """'name=value' with the value that was asked for, else the one in effect."""
    value = getattr(asked, name)
    return f"{name}={(effective[name] if value is None else value)!r}"


_stores: list[
    tuple[ExchangeChoices, KVStore]
] = []  # at most one: a process joins its job once, however many models it trains
