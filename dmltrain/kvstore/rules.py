"""Which choices of users about the exchange of gradients exclude each other. The options of the training programs and
the parameters of `dmltrain.distribute` have the same rules. A message names each choice as its user wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from dmltrain.base import env
from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec, types
from dmltrain.kvstore.choices import ExchangeChoices


@dataclass(frozen=True)
class Spelling:
    """How a user writes a choice: `names` by those of CHOICES, then `between` and the value as `show` writes
    it."""

    names: Mapping[str, str]
    between: str
    show: Callable[[Any], str]

    def __call__(self, choice: str, *values: Any) -> str:
        """The choice alone, or with alternative values."""
        return self.names[choice] + (self.between + " or ".join(map(self.show, values)) if values else "")


CHOICES = (
    *("kvstore", "staleness", "local_steps", "outer_lr", "outer_momentum"),
    *("update_on_kvstore", "compression", "threshold", "factors", "server_shares"),
)
IN_PYTHON = Spelling({name: name for name in CHOICES} | {"threshold": "compression's threshold"}, "=", repr)


# What an elastic job cannot have, and why. `rounds/checks.py` has further options of the training programs.
NOT_ELASTIC = {
    "server_shares": "the links that divide the weights are measured once, before members or servers change",
    "factors": (
        "each worker needs the factors of all others, and a round cannot be made again without those of a lost one yet"
    ),
    "broadcast_buffers": (
        "workers that are lost or join between a step and this broadcast would leave the others with other buffers"
    ),
}


def check_elastic(chosen: ExchangeChoices) -> None:
    """Raise UserError for what a script's elastic job cannot have."""
    kind, name = types.find(chosen.kvstore), chosen.kvstore
    problems = [] if kind.can_be_elastic else [f"kvstore={name!r}: it has one worker"]
    for choice, usual in {"balance": False, "batch": "constant"}.items() if not kind.steps_together else ():
        if (value := getattr(chosen, choice)) != usual:
            problems.append(
                f"{choice}={value!r}, which needs dist_sync: with {name} each worker makes steps of its own"
            )
    for choice, reason in NOT_ELASTIC.items():
        if (value := getattr(chosen, choice)) not in (None, 0, env.SERVER_SHARES[0]):
            problems.append(f"{choice}={value!r}: {reason}")
    if problems:
        raise UserError(
            f"this job was started with --elastic, which does not work with {'; '.join(problems)}; leave these out "
            "(the kvstore can be dist_sync, dist_async, dist_ssp or dist_local), or start the job without --elastic"
        )


def check(say: Spelling, chosen: ExchangeChoices) -> None:
    """Raise UserError for the first choice that another one excludes."""
    kvstore, on_servers = chosen.kvstore, bool(chosen.update_on_kvstore)
    compression, threshold = chosen.codec_parameters["type"], chosen.codec_parameters.get("threshold")
    kind = types.find(kvstore)
    kind.bound(chosen.staleness, say("staleness"))
    kind.averaging(chosen.local_steps, chosen.outer_lr, chosen.outer_momentum, say)
    if kind.steps_alone:
        _check_steps_alone(say, kvstore, on_servers, threshold)
    _check_compression(say, compression, kvstore)
    if chosen.factors:
        able = types.names(lambda type_: type_.takes_factors)
        _check_on_workers(say, "factors", chosen.factors, kvstore, on_servers, able)
    if chosen.server_shares == "links":
        able = types.names(lambda type_: type_.distributed and "workers" in type_.optimizer_on)
        _check_on_workers(say, "server_shares", chosen.server_shares, kvstore, on_servers, able)
        _check_exact(say, "server_shares", chosen.server_shares, compression)


def why_no_change(kvstore: str, on_servers: bool) -> str:
    """Why the launcher's --rule could never change the kvstore of such a job, with a fix; empty if it can."""
    if types.find(kvstore).steps_on_servers(on_servers):
        return ""
    able = "the optimizer on the servers: dist_async, dist_ssp, or dist_sync with update_on_kvstore"
    return f"--rule needs {able} (this is {kvstore}): use that, or start the job without --rule"


def _check_steps_alone(say: Spelling, kvstore: str, update_on_kvstore: bool, threshold: float | None) -> None:
    if update_on_kvstore:
        raise UserError(
            f"{say('update_on_kvstore', True)}: with {say('kvstore', kvstore)} each worker's own optimizer makes the "
            f"steps: leave {say('update_on_kvstore')} out"
        )
    if threshold is not None:
        raise UserError(
            f"{say('threshold', threshold)} is compared with gradients, and {say('kvstore', kvstore)} sends "
            f"differences of weights: leave {say('threshold')} out, the levels then adapt"
        )


def _check_compression(say: Spelling, compression: str, kvstore: str) -> None:
    if compression != "none" and not types.find(kvstore).distributed:
        raise UserError(
            f"{say('compression', compression)} needs a distributed kvstore; {say('kvstore', kvstore)} sends nothing: "
            f"leave {say('compression')} out"
        )


def _check_exact(say: Spelling, name: str, value: Any, compression: str) -> None:
    """Raise UserError if the codec keeps residuals, which exclude the choice `name` of `value`."""
    exact = ["none", *(row.name for row in codec.TABLE if not row.needs_residual)]
    if compression not in exact:
        raise UserError(
            f"{say(name, value)} does not work with {say('compression', compression)}, which keeps residuals: "
            f"use {say('compression', *exact)}, or leave {say(name)} out"
        )


def _check_on_workers(
    say: Spelling, name: str, value: Any, kvstore: str, update_on_kvstore: bool, able: Sequence[str]
) -> None:
    """Raise UserError unless the optimizer runs on the workers of one of the kvstores `able`, as the choice `name` of
    `value` needs."""
    kind = types.find(kvstore)
    if kind.name not in able:
        what, fix = say("kvstore", kvstore), say("kvstore", *able)
    elif kind.steps_on_servers(update_on_kvstore):
        what, fix = "the optimizer on the servers", say("update_on_kvstore", False)
    else:
        return
    raise UserError(f"{say(name, value)} does not work with {what}: use {fix}, or leave {say(name)} out")


def check_rows(rows: Any) -> None:
    """Raise UserError unless this can be the `factors` of `dmltrain.distribute`."""
    if isinstance(rows, bool) or not isinstance(rows, Integral) or int(rows) < 1:
        raise UserError(f"factors={rows!r}: expected the largest number of samples of a worker's step")
