"""The commands of workers to MXNet's servers: {"optimizer": spec} or {"learning_rate": number} as JSON. Pure.

MXNet's servers unpickle every command (mxnet/python/mxnet/kvstore/kvstore_server.py), so anyone who can connect to
their port can run arbitrary code. dmltrain's accept these two commands only.
"""

from __future__ import annotations

import json
from typing import Any

from dmltrain.base import json_text, schema

HEAD = 0  # of commands for the controller (kController of src/kvstore/kvstore_dist_server.h)
MAX_BYTES = 1 << 24
COMMAND = schema.either({"optimizer": schema.OBJECT, "learning_rate": schema.number()})


class Refused(Exception):
    """An invalid command; the message says why."""


def encode(kind: str, value: Any) -> str:
    return json.dumps({kind: value}, allow_nan=False)


def decode(head: int, body: bytes) -> tuple[str, Any]:
    """(kind, value) of a command that a server received. Raises Refused."""
    if head != HEAD or len(body) > MAX_BYTES:
        raise Refused(f"a command with head {head} and {len(body)} bytes: expected head {HEAD}, {MAX_BYTES} at most")
    try:
        message = json_text.parse(body)
    except schema.Invalid:
        raise Refused(
            f"a command that is not JSON ({body[:20]!r}); MXNet's kv.set_optimizer sends pickled "
            "objects, which could run any code here: use dmltrain's kvstore.set_optimizer"
        ) from None
    try:
        [(kind, value)] = COMMAND.read(message).items()
    except schema.Invalid as error:
        raise Refused(f"a wrong command: {error}") from None
    return kind, value
