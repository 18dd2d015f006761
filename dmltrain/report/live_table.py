"""The table of a live job in a terminal, drawn again in place. Only this module imports rich."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dmltrain.base.safe_text import raw
from dmltrain.report import text
from dmltrain.report.table import table

if TYPE_CHECKING:
    from dmltrain.report.follow import FollowedJob

_BESIDE = 4  # lines of the terminal that are not rows: heading, rule, what comes before and after


class LiveTable:
    """While the job runs, the last epochs that fit, with the one that is under way; at the end all of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._console = Console(file=raw(sys.stdout))
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="visible")
        self._live.start()
        self._state: FollowedJob | None = None

    def show(self, state: FollowedJob) -> None:
        self._state = state
        self._live.update(self._table(state, max(1, self._console.height - _BESIDE)), refresh=True)

    def close(self) -> None:
        if self._state:
            self._live.update(self._table(self._state, len(self._state.run.epochs)), refresh=True)
        self._live.stop()

    def _table(self, state: FollowedJob, most: int) -> Table:
        lines = text.grid([table(state.run, self._given.aggregate)], self._given.metric_names)
        shown = Table(box=None, pad_edge=False, title=f"restart {state.attempt}" if state.attempt else None)
        for heading in lines[0] if lines else ["no epoch yet"]:
            shown.add_column(Text(heading), justify="right", no_wrap=True)
        epochs = list(state.run.epochs)
        for epoch, line in list(zip(epochs, lines[1:], strict=True))[-most:]:
            shown.add_row(*map(Text, line), style="" if epoch in state.complete else "dim")
        return shown
