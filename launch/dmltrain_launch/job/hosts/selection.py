"""--include and --exclude: select hosts from a list. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.attribute import DEVICE
from dmltrain_launch.job.hosts.entry import errors_at
from dmltrain_launch.job.hosts.range import expand, split_list

INCLUDE, EXCLUDE = "--include", "--exclude"
EXPECTED = "expected names, ranges or globs with commas, such as h1,node[01-04],gpu*"
LISTED_HOSTS = 8  # hosts named in an error


@dataclass(frozen=True)
class Pattern:
    """One item of an option: host names with wildcards * and ?, and optionally some of their GPUs."""

    text: str
    names: tuple[str, ...]
    gpus: tuple[str, ...] = ()

    def matches(self, host: Host) -> bool:
        return any(fnmatchcase(host.name.casefold(), name.casefold()) for name in self.names)


def select(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """The hosts that match `include` ("" is all) and do not match `exclude`, in the order of `hosts`.

    Both accept comma-separated names, ranges and globs, `h1,node[01-04],gpu*`, and DeepSpeed's syntax: `h1@h2:0,2` is
    all of h1, and GPUs 0 and 2 of h2. If several items match a host, the first one counts.
    """
    included = _patterns(INCLUDE, include, hosts) if include else [Pattern("*", ("*",))]
    excluded = _patterns(EXCLUDE, exclude, hosts) if exclude else []
    selected = [chosen for host in hosts if (chosen := _without(_only(host, included), excluded))]
    if not selected:
        raise LaunchError(f"{EXCLUDE} {exclude} excludes every host: {_listed(hosts)}")
    return selected


def _patterns(option: str, text: str, hosts: Sequence[Host]) -> list[Pattern]:
    """The items of an option. Each must match a host."""
    deepspeed = "@" in text or any(":" in part and not part.startswith("[") for part in split_list(text))
    with errors_at(f"{option} {text}"):
        patterns = [_pattern(part.strip(), deepspeed) for part in (text.split("@") if deepspeed else split_list(text))]
    for pattern in patterns:
        if not any(pattern.matches(host) for host in hosts):
            near = get_close_matches(pattern.text, [host.name for host in hosts], 1)
            fix = f"did you mean {near[0]}?" if near else f"the hosts are {_listed(hosts)}"
            raise LaunchError(f"{option} {pattern.text}: no host with that name; {fix}")
    return patterns


def _pattern(text: str, deepspeed: bool) -> Pattern:
    if text.startswith("[") and text.endswith("]") and ":" in text:
        return Pattern(text, (text[1:-1],))  # IPv6
    name, colon, listed = text.partition(":")
    gpus = tuple(listed.split(",")) if colon else ()
    if deepspeed and not ("," not in name and all(DEVICE.fullmatch(gpu) for gpu in gpus)):
        raise ValueError("expected DeepSpeed's syntax h1@h2:0,2, with @ between hosts and : before GPUs")
    if not name:
        raise ValueError(f"a name is missing; {EXPECTED}")
    return Pattern(text, tuple(expand(name)), gpus)


def _match(host: Host, patterns: Sequence[Pattern]) -> Pattern | None:
    return next((pattern for pattern in patterns if pattern.matches(host)), None)


def _only(host: Host, patterns: Sequence[Pattern]) -> Host | None:
    pattern = _match(host, patterns)
    if pattern is None or not pattern.gpus:
        return host if pattern else None
    if _gpus(host):
        _check_gpus(INCLUDE, host, pattern)
    return _with_gpus(host, pattern.gpus)


def _without(host: Host | None, patterns: Sequence[Pattern]) -> Host | None:
    pattern = _match(host, patterns) if host else None
    if host is None or pattern is None:
        return host
    if not pattern.gpus:
        return None
    _check_gpus(EXCLUDE, host, pattern)
    left = tuple(gpu for gpu in _gpus(host) if gpu not in pattern.gpus)
    return _with_gpus(host, left) if left else None


def _gpus(host: Host) -> tuple[str, ...]:
    """The host's GPUs: gpus=, else one per slot, as in DeepSpeed; () if it has neither."""
    return host.gpus or tuple(map(str, range(host.slots or 0)))


def _check_gpus(option: str, host: Host, pattern: Pattern) -> None:
    missing = [gpu for gpu in pattern.gpus if gpu not in _gpus(host)]
    if missing:
        found = f"has gpus {','.join(_gpus(host))}" if _gpus(host) else "has neither gpus= nor slots="
        raise LaunchError(f"{option} {pattern.text}: no gpu {missing[0]} on {host.name}: it {found} ({host.where})")


def _with_gpus(host: Host, gpus: tuple[str, ...]) -> Host:
    """The host with these GPUs only. If its slots stand for its GPUs, their number changes too."""
    slots_are_gpus = host.slots is not None and not host.gpus
    return replace(host, gpus=gpus, slots=len(gpus) if slots_are_gpus else host.slots)


def _listed(hosts: Sequence[Host]) -> str:
    rest = len(hosts) - LISTED_HOSTS
    return ", ".join([host.name for host in hosts[:LISTED_HOSTS]] + [f"{rest} more"] * (rest > 0))
