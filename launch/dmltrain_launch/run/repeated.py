"""The supervisor of a job that another launcher has started, rebuilt from the journal of that launcher. Pure."""

from __future__ import annotations

from dmltrain_launch.agent.commands import Command
from dmltrain_launch.agent.events import Ready
from dmltrain_launch.run.journal import JournalContent
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.action import Action, Continue, Open, Send
from dmltrain_launch.run.supervisor.event import Connected


class Repeated:
    """The supervisor after all events of a journal, and what else a launcher needs to go on.

    `sent`: the commands that each agent was sent. `seen`: the newest event of each agent. `opened`: all Continue and
    Open actions.
    """

    def __init__(self, supervisor: Supervisor, content: JournalContent):
        self.supervisor = supervisor
        self.sent: dict[str, list[Command]] = {}  # by host
        self.seen: dict[str, int] = {}
        self.places: dict[str, tuple[str, str]] = {}  # by host: door and spool of its agent
        self.opened: list[Continue | Open] = []
        began = content.beginning
        self.now = began.now
        self._note(supervisor.begin(began.key, began.log_folder, began.now, began.certificate))
        for entry in content.entries:
            self.now = entry.now
            if entry.host:
                self.seen[entry.host] = max(entry.number, self.seen.get(entry.host, 0))
            if isinstance(entry.event, Connected):
                self.sent[entry.event.host] = []
                self.seen.pop(entry.event.host, None)
            if isinstance(entry.event, Ready):
                self.places[entry.event.host] = entry.event.door, entry.event.spool
            self._note(supervisor.handle(entry.event, entry.now))
        supervisor.take_warnings()  # the earlier launcher has told the user these, and the announcements
        supervisor.take_announcements()

    def _note(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.setdefault(action.host, []).append(action.command)
            elif isinstance(action, (Continue, Open)):
                self.opened.append(action)
