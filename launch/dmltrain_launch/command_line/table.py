"""All options of the launcher: those of its command line's own, of every launcher, and of older launchers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters import LAUNCHERS, AllOptions, listing
from dmltrain_launch.command_line import old_options
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import Option, options_of


def use_launcher(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value not in LAUNCHERS:
        why = old_options.unsupported_cluster(value)
        raise LaunchError(f"{name} {value}: expected {listing()}" + (f"; {why}" if why else ""))
    return replace(options, launcher=value)


LAUNCHER = Option(
    ("--launcher", "--cluster"),
    "NAME",
    f"where to run: {listing()} (default: ssh if hosts are given, otherwise local)",
    use_launcher,
    after="--num-servers",
    here=True,
)


def in_order(options: Iterable[Option]) -> tuple[Option, ...]:
    """As --help has them: each after the one that it names, else after the one before."""
    ordered: list[Option] = []
    at = 0
    for option in options:
        if option.after:
            at = 1 + next(index for index, each in enumerate(ordered) if option.after in each.names)
        ordered.insert(at, option)
        at += 1
    return tuple(ordered)


OPTIONS = (*in_order([*options_of(AllOptions), LAUNCHER]), *old_options.ROWS)
BY_NAME = {name: option for option in OPTIONS for name in option.names}
BY_NAME |= {theirs: BY_NAME[ours] for theirs, ours in old_options.ALIASES.items()}
BY_NAME |= {name: row for row in old_options.REFUSED for name in row.names}
RECORDED = {option.field: option for option in OPTIONS if option.record}  # in job.json, to reach the hosts again


def reached_by(options: Options) -> dict[str, Any]:
    """What job.json has of the options: those that are needed to connect to the job's hosts again."""
    return {
        field: option.record.write(options) if option.record and option.record.write else getattr(options, field)
        for field, option in RECORDED.items()
    }
