"""What an elastic job cannot do, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore import rules, types
from dmltrain.options import Options
from dmltrain.options.data import OWN_FILES
from dmltrain.options.training import CONSTANT

NEEDED = "--elastic needs --kv-store dist_sync, dist_async or dist_ssp"

_REFUSED: tuple[tuple[str, Callable[[Options], object]], ...] = (
    ("--gc-threshold", lambda options: options.gc_threshold is not None),
    ("--factors auto", lambda options: options.factors != "off"),
    ("--macrobatch-size", lambda options: options.macrobatch_size),
    (f"--data-parts {OWN_FILES}", lambda options: options.data_parts == OWN_FILES),
    ("--dtype float16", lambda options: options.dtype == "float16"),
    ("--snapshot", lambda options: options.snapshot),
    ("--load-iteration", lambda options: options.load_iteration is not None),
    ("--test-interval", lambda options: options.test_interval),
    ("--max-iter", lambda options: options.max_iter is not None),
    ("--skip-broken", lambda options: options.skip_broken),
    ("--monitor", lambda options: options.monitor),
    ("--test-io 1", lambda options: options.test_io),
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
    elif why := rules.why_no_change(options.kv_store, bool(options.update_on_kvstore)):
        yield why


def _of_own_steps(options: Options) -> Iterator[str]:
    """Options that need steps which all workers make together."""
    given = {"--replay": options.replay is not None, "--balance": options.balance}
    given[f"--batch {options.batch}"] = options.batch != CONSTANT
    for name in (option for option, is_given in given.items() if is_given):
        yield f"{name} needs --kv-store dist_sync: with {options.kv_store} each worker makes steps of its own"


def _elastic(options: Options, environment: Environment) -> Iterator[str]:
    if options.backend != "torch":
        yield (
            f"--elastic: --backend {options.backend} cannot do this, because ps-lite ends with the first process that "
            "it loses; use --backend torch"
        )
    kind = types.find(options.kv_store)
    if not kind.can_be_elastic:
        yield f"{NEEDED} (this is {options.kv_store}): use one of these, or start the job without --elastic"
    if options.server_snapshot is not None and not kind.steps_on_servers(bool(options.update_on_kvstore)):
        yield "--server-snapshot needs --update-on-kvstore 1: else servers keep nothing that a snapshot could have"
    if not kind.synchronous:
        yield from _of_own_steps(options)
    if options.snapshot_on_signal:
        yield (
            "--snapshot-on-signal is for jobs that are not elastic: remove it; in an elastic job SIGUSR1 to the agent "
            "of a host lets its workers leave, and a job that all leave ends with a checkpoint"
        )
    for name, given in _REFUSED:
        if given(options):
            yield f"--elastic does not work with {name} yet: leave one of them out"
    if "links" in (options.server_shares, environment.server_shares):
        yield "--elastic does not work with --server-shares links yet: leave one of them out"
