"""What a copy says about files that it did not simply copy. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dmltrain_launch.agent.copy.compare import Compared
from dmltrain_launch.agent.copy.way import shown

SHOWN = 5  # paths in a note


def of_compared(found: Compared) -> list[str]:
    said = []
    if found.kept:
        said.append(
            f"kept {_paths(found.kept)}: checkpoints that changed there since they were copied, or were written there; "
            "remove them there to get those of this folder"
        )
    if found.overwritten:
        said.append(f"replaced {_paths(found.overwritten)}: changed there since the last copy, or never copied there")
    return said


def of_removed(removed: Sequence[bytes], changed: Sequence[bytes]) -> list[str]:
    said = []
    if removed:
        said.append(f"removed {_paths(removed)}: copied there earlier, and gone from this folder")
    if changed:
        said.append(f"kept {_paths(changed)}: gone from this folder, but changed there since the last copy")
    return said


def _paths(paths: Sequence[bytes]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(map(shown, paths[:SHOWN])) + more
