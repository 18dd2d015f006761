"""Hide the values of secret environment variables: those of --secret, and those with names such as TOKEN. Pure.

Redact text before it is quoted or encoded, because the quoting of a shell or of JSON changes it: `redact` for text,
`redact_all` for values that become JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

HIDDEN = "***"
LOOKS_SECRET = re.compile(r"(KEY|TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL)S?(_ID)?$", re.IGNORECASE)
# Values that are not secrets, such as MAX_TOKENS=4096: hidden as the value of that variable, but not everywhere.
COMMON = re.compile(r".{0,3}|[-+.\deE]*|true|false|none|null|auto|default", re.IGNORECASE)


def is_secret(name: str, named: Collection[str] = ()) -> bool:
    """Whether the value of the variable `name` is hidden; `named`: the variables of --secret."""
    return name in named or LOOKS_SECRET.search(name) is not None


def secrets(variables: Iterable[tuple[str, str]], named: Collection[str] = ()) -> tuple[str, ...]:
    """The values of these (name, value) pairs that must be hidden wherever they occur."""
    values = {
        value
        for name, value in variables
        if value and (name in named or (is_secret(name) and not COMMON.fullmatch(value)))
    }
    return tuple(sorted(values))


def redact(text: str, secrets: Collection[str]) -> str:
    """`text` with each of `secrets` replaced by ***."""
    if not secrets:
        return text
    longest_first = sorted(secrets, key=len, reverse=True)  # one may be a prefix of another
    return re.sub("|".join(map(re.escape, longest_first)), HIDDEN, text)


def redact_all(value: Any, secrets: Collection[str]) -> Any:
    """`redact` for every text in nested lists, tuples and dictionaries, including keys."""
    if isinstance(value, str):
        return redact(value, secrets)
    if isinstance(value, dict):
        return {redact_all(key, secrets): redact_all(each, secrets) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redact_all(each, secrets) for each in value)
    return value
