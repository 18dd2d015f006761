"""What an elastic job cannot do, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore import rules, types
from dmltrain.options import Options
from dmltrain.options.data import OWN_FILES
from dmltrain.options.training import CONSTANT

NEEDED = "--elastic needs --kv-store dist_sync, dist_async, dist_ssp or dist_local"

LINKS = "links"  # a value of --server-shares

# What an elastic job refuses, and why: it cannot make sense, or something is missing.
_REFUSED: tuple[tuple[str, Callable[[Options, Environment], object], str], ...] = (
    (
        f"--data-parts {OWN_FILES}",
        lambda options, _: options.data_parts == OWN_FILES,
        "the samples of a lost worker would be on its host only",
    ),
    (
        "--test-io 1",
        lambda options, _: options.test_io,
        "it reads data without other workers, so there is nothing that could go on without one",
    ),
    (
        "--show-schedule",
        lambda options, _: options.show_schedule is not None,
        "it makes no steps, and shows the rates of the workers at the start, which are the same without --elastic",
    ),
    (
        "--snapshot-on-signal and --audit or --replay",
        lambda options, _: options.snapshot_on_signal and (options.audit or options.replay),
        "when members exchange signals depends on the time, so after a loss no replay could make the same steps",
    ),
    (
        "--server-shares links",
        lambda options, environment: LINKS in (options.server_shares, environment.server_shares),
        rules.NOT_ELASTIC["server_shares"],
    ),
    (
        "--factors auto",
        lambda options, _: options.factors != "off",
        rules.NOT_ELASTIC["factors"],
    ),
    (
        "--sync-bn 1",
        lambda options, _: options.sync_bn,
        "a round that is made again without a lost worker keeps the gradients of the others, which have the statistics "
        "of its samples",
    ),
)


def check(options: Options, environment: Environment) -> None:
    """Raise UserError if this job is elastic and the options ask for what such a job cannot do, or the reverse."""
    problems = list(_elastic(options, environment) if environment.elastic else _plain(options))
    if environment.reports_steps:
        problems += _of_rules(options)
    if problems:
        raise UserError("; ".join(problems))


def _plain(options: Options) -> Iterator[str]:
    for name in ("audit", "replay", "balance", "server_snapshot"):
        if getattr(options, name) is not None and getattr(options, name) is not False:  # 0 is given, too
            yield f"--{name.replace('_', '-')} needs a job that was started with dmltrain-launch --elastic"
    if options.batch != CONSTANT:
        yield f"--batch {options.batch} needs a job that was started with dmltrain-launch --elastic"


def _of_rules(options: Options) -> Iterator[str]:
    """Options that exclude the launcher's --rule."""
    if options.backend != "torch":
        yield f"--rule: ps-lite, of --backend {options.backend}, cannot change its kvstore; use --backend torch"
    elif options.ema_decay is not None:
        yield "--rule: --ema-decay needs steps of all workers together, which a rule may end; use --swa-from"
    elif options.sync_bn:
        yield "--rule: --sync-bn needs steps of all workers together, which a rule may end; leave one of them out"
    elif why := rules.why_no_change(options.kv_store, bool(options.update_on_kvstore)):
        yield why


def _of_own_steps(options: Options) -> Iterator[str]:
    """Options that need steps, or with --replay averages of weights, which all workers make together."""
    alone = f"with {options.kv_store} each worker makes steps of its own"
    if options.batch != CONSTANT:
        yield f"--batch {options.batch} needs --kv-store dist_sync: {alone}"
    if options.balance:
        yield f"--balance needs --kv-store dist_sync: {alone}"
    if options.replay is not None and not types.find(options.kv_store).synchronous:
        yield f"--replay needs --kv-store dist_sync or dist_local: {alone}"


def _elastic(options: Options, environment: Environment) -> Iterator[str]:
    if options.backend != "torch":
        yield (
            f"--elastic: --backend {options.backend} cannot do this, because ps-lite ends with the first process that "
            "it loses; use --backend torch"
        )
    kind = types.find(options.kv_store)
    if not kind.can_be_elastic:
        yield (
            f"{NEEDED} (this is {options.kv_store}): it has one worker; use one of these, or start the job without "
            "--elastic"
        )
    if options.server_snapshot is not None and not kind.steps_on_servers(bool(options.update_on_kvstore)):
        yield "--server-snapshot needs --update-on-kvstore 1: else servers keep nothing that a snapshot could have"
    if not kind.steps_together:
        yield from _of_own_steps(options)
    for name, given, reason in _REFUSED:
        if given(options, environment):
            yield f"--elastic does not work with {name}: {reason}; leave one of them out"
