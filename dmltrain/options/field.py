"""How a field of Options describes one option of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def option(group: str, text: str, parse: Callable[[str], Any], default: Any = None, **more: Any) -> Any:
    """A field of Options; `more` are further arguments of argparse's add_argument."""
    arguments = {"type": parse, "help": text, **more}
    return dataclasses.field(default=default, metadata={"group": group, "arguments": arguments})


def flag(name: str) -> str:
    """'num_epochs' -> '--num-epochs'."""
    return "--" + name.replace("_", "-")
