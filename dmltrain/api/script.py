"""The arguments of `dmltrain.distribute`, which are checked before the job starts, and the one kvstore of a process."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from typing import Any

from dmltrain import kvstore
from dmltrain.base import env
from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec, rules, types
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.choices import ExchangeChoices
from dmltrain.options.training import BATCHES, CONSTANT


def in_effect(asked: ExchangeChoices, environment: Environment) -> dict[str, Any]:
    """What all models of a process have in common: choice -> the value that is used, the script's, else the default of
    `environment`. Raises UserError for a wrong value."""
    kind, chosen = types.find(asked.kvstore), asked.chosen(environment)
    return {
        "kvstore": kind.name,
        "compression": _codec(asked),
        "staleness": kind.bound(asked.staleness),
        "update_on_kvstore": asked.on_servers(environment),
        "balance": asked.balance,
        "batch": asked.batch,
        "server_snapshot": asked.server_snapshot,
        **{name: getattr(chosen, name) for name in env.CHOICES},
    }


def _codec(asked: ExchangeChoices) -> codec.Codec | None:
    try:
        return codec.make(asked.codec_parameters)
    except ValueError as error:
        raise UserError(f"compression={asked.compression!r}: {error}") from error


def check(asked: ExchangeChoices, environment: Environment) -> None:
    """Raise UserError for the first mistake, also where the script trains alone and its choices have no effect."""
    effective = in_effect(asked, environment)
    on_servers = effective["update_on_kvstore"]
    if asked.factors:
        rules.check_rows(asked.factors)
    rules.check(rules.IN_PYTHON, replace(asked, update_on_kvstore=on_servers))
    if asked.batch not in BATCHES:
        raise UserError(f"batch={asked.batch!r}: expected one of {', '.join(BATCHES)}")
    if asked.server_snapshot is not None:
        _check_snapshot(asked.server_snapshot, types.find(asked.kvstore).steps_on_servers(on_servers))
    why = rules.why_no_change(asked.kvstore, on_servers)
    if environment.reports_steps and why:
        raise UserError(why)
    if environment.launched and not environment.elastic:
        _check_plain(asked)
    if environment.elastic:
        rules.check_elastic(replace(asked, server_shares=effective["server_shares"]))


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
    now, before = in_effect(asked, environment), in_effect(first, environment)
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
