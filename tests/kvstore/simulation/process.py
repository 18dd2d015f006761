"""What servers and workers of a simulated job have for their scheduler, and what they send each other."""

from dataclasses import dataclass

import numpy as np

from dmltrain.base.env import Environment
from dmltrain.kvstore.scheduler.following import Following
from dmltrain.kvstore.server.reply import Reply
from dmltrain.kvstore.transport.message.job import Register
from dmltrain.kvstore.transport.message.views import Superseded

REGISTER = Register("h", 1, "h", "", "h9")
SCHEDULER = ("scheduler", 0)  # the incarnation that a process follows


@dataclass
class Value:
    """Of a key, as a worker reads it: in the server's memory, or a copy."""

    view: int
    key: int
    clock: int
    array: np.ndarray
    content: np.ndarray  # as it was when it was sent
    reply: Reply | None  # to be released
    server: int


@dataclass
class Declared:
    """A server's answer to a declaration, or another request."""

    view: int
    content: dict | None = None


class Process:
    """What servers and workers have for their scheduler."""

    def __init__(self, world, role, index, joins=False):
        self.world = world
        self.node = (role, index)
        its = Environment(role=role, index=index, elastic=1, joins=joins, scheduler_file="/nowhere")
        self.following = Following(its)
        self.follows = 0  # the incarnation to which there is a link; 0: none
        self.start = None
        self.is_cut = False  # the scheduler has removed it
        self.ended = ""  # how

    def say(self, message):
        self.following.remember(message)
        self.world.send(self.node, SCHEDULER, message)

    @property
    def knows_the_servers(self):
        """Whether it has been told of them, or will be as a newcomer."""
        return self.start is not None or self.following._environment.joins

    def follow(self, incarnation):
        """Go on with this incarnation of the scheduler."""
        if self.follows:
            self.leave_scheduler(incarnation)
        self.follows = incarnation
        for message in self.following.introduction(self.registration, self.start, self.standing()):
            self.world.send(self.node, SCHEDULER, message)

    def leave_scheduler(self, incarnation):
        """It has this later one."""
        if "superseded" not in self.world.mutations:
            self.world.send(self.node, SCHEDULER, Superseded(incarnation))
        self.world.send(self.node, SCHEDULER, None)
        self.world.channels.pop((("scheduler", self.follows), self.node), None)
        self.follows = 0
