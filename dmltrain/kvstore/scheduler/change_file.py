"""The file in which the agent of the scheduler's host writes what the user wants to change."""

from __future__ import annotations

import json
from pathlib import Path

from dmltrain.kvstore.log import log
from dmltrain.kvstore.transport.message import Change


class ChangeFile:
    """`path` "": there is none. The file is whole at any moment, and may not be there. `skips`: what it has now was
    for another scheduler."""

    def __init__(self, path: str, skips: bool = False) -> None:
        self._path = path
        self._last = 0  # the number of the last change
        if skips:
            self.newer()

    def newer(self) -> Change | None:
        """The change in the file, once."""
        if not self._path:
            return None
        try:
            content = json.loads(Path(self._path).read_text())
            found = Change(
                int(content["number"]), str(content["kv_store"]), float(content["staleness"]), str(content["by"])
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log(f"cannot read the change in {self._path}: {error!r}")
            self._path = ""
            return None
        if found.number <= self._last:
            return None
        self._last = found.number
        return found
