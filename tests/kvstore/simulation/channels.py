"""The channels of a simulated job."""

from collections import deque


class Channels(dict):
    """(from, to) -> messages, oldest first. `names` has the keys by number, so that one is drawn at once."""

    def __init__(self):
        super().__init__()
        self.names, self._places = [], {}

    def add(self, channel, message):
        if channel not in self:
            self[channel] = deque()
            self._places[channel] = len(self.names)
            self.names.append(channel)
        self[channel].append(message)

    def take(self, channel):
        """The oldest message."""
        messages = self[channel]
        message = messages.popleft()
        if not messages:
            self.pop(channel)
        return message

    def pop(self, channel, default=None):
        """Remove it with its messages."""
        if channel not in self:
            return default
        place, last = self._places.pop(channel), self.names.pop()
        if last != channel:
            self.names[place], self._places[last] = last, place
        return super().pop(channel)
