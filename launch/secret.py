"""What must not be shown: values of environment variables that are secret, by the user's word or by their names. Pure.

Redact words before they are quoted or encoded (a shell's or JSON's quoting changes them): `redact` for text,
`redact_all` for what becomes JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

HIDDEN = "***"
LOOKS_SECRET = re.compile(r"(KEY|TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL)S?(_ID)?$", re.IGNORECASE)
# What a variable that only looks secret may hold that is none, such as MAX_TOKENS=4096: hidden there, not everywhere.
COMMON = re.compile(r".{0,3}|[-+.\deE]*|true|false|none|null|auto|default", re.IGNORECASE)


def is_secret(name: str, named: Collection[str] = ()) -> bool:
    """Whether the value of the variable `name` is hidden; `named` are those of --secret."""
    return name in named or LOOKS_SECRET.search(name) is not None


def secrets(variables: Iterable[tuple[str, str]], named: Collection[str] = ()) -> tuple[str, ...]:
    """The values, of (name, value) pairs, that are to be hidden wherever they occur."""
    found = {
        value
        for name, value in variables
        if value and (name in named or (is_secret(name) and not COMMON.fullmatch(value)))
    }
    return tuple(sorted(found))


def redact(text: str, secrets: Collection[str]) -> str:
    """`text` with *** for each of `secrets` in it."""
    if not secrets:
        return text
    longest_first = sorted(secrets, key=len, reverse=True)  # one may begin with another
    return re.sub("|".join(map(re.escape, longest_first)), HIDDEN, text)


def redact_all(value: Any, secrets: Collection[str]) -> Any:
    """The same for every text in nested lists, tuples and dictionaries, keys included."""
    if isinstance(value, str):
        return redact(value, secrets)
    if isinstance(value, dict):
        return {redact_all(key, secrets): redact_all(each, secrets) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redact_all(each, secrets) for each in value)
    return value
