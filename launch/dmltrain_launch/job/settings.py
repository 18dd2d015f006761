"""What `dmltrain job set` changes: kv_store=dist_ssp staleness=4. Pure.

The workers know which changes are possible. Here is only what any change looks like.
"""

from __future__ import annotations

import math
import re

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.value import Value, value

NAMES = ("kv_store", "staleness")
EXAMPLE = "kv_store=dist_ssp staleness=4"
KV_STORE = re.compile(r"[a-z_]{1,40}")
STAYS = -1.0  # in place of a staleness: see Settings


@value(frozen=True)
class Settings(Value):
    """`kv_store` "": it stays. `staleness` STAYS: the default of that kvstore, or what it is if the kvstore stays."""

    kv_store: str = ""
    staleness: float = STAYS


def parse(text: str) -> Settings:
    """The settings NAME=VALUE in `text`, separated by spaces. LaunchError if one is wrong."""
    found: dict[str, str] = {}
    for word in text.split():
        name, equals, given = word.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in NAMES:
            raise LaunchError(f"{word!r}: expected {' or '.join(f'{each}=VALUE' for each in NAMES)}, such as {EXAMPLE}")
        if name in found:
            raise LaunchError(f"{word!r}: {name} is there twice")
        found[name] = given
    if not found:
        raise LaunchError(f"nothing to set: expected settings such as {EXAMPLE}")
    kv_store = found.get("kv_store", "")
    if "kv_store" in found and not KV_STORE.fullmatch(kv_store):
        raise LaunchError(f"kv_store={kv_store}: expected a kvstore such as dist_ssp")
    return Settings(kv_store, _clocks(found["staleness"]) if "staleness" in found else STAYS)


def _clocks(text: str) -> float:
    try:
        clocks = float(text)
    except ValueError:
        clocks = math.nan
    if not 0 <= clocks < math.inf:
        raise LaunchError(f"staleness={text}: expected 0 or more steps")
    return clocks
