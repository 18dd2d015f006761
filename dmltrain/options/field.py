"""How a field of Options describes one option of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from dmltrain.options.table import Options


class Group:
    """One group of options: a frozen dataclass whose fields are made by `option`. A new group is a file, and a base of
    `Options` (table.py)."""

    equal_on_members: ClassVar[bool] = False  # whether all members of an elastic job must have the same values

    @staticmethod
    def check(options: Options) -> None:
        """Raise UserError if an option of the group does not fit the others."""


def option(group: str, text: str, parse: Callable[[str], Any], default: Any = None, **more: Any) -> Any:
    """A field of Options; `more` are further arguments of argparse's add_argument."""
    arguments = {"type": parse, "help": text, **more}
    return dataclasses.field(default=default, metadata={"group": group, "arguments": arguments})


def flag(name: str) -> str:
    """'num_epochs' -> '--num-epochs'."""
    return "--" + name.replace("_", "-")
