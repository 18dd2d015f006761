"""What a simulated job computes, with whole numbers, and what an invariant is."""

from dataclasses import dataclass

import numpy as np

from dmltrain.kvstore.view import EQUAL, Balancing, View

SIZE = 2  # elements of a gradient's slice
BITS = 50  # of a float, which a sum keeps: so there are at most SIZE * BITS workers
FLOAT64 = 1  # wire.DTYPES
PRIME = 65_521
RECEIPT, SUM, STATE, RECEIPTS = 9, 1 << 31, (1 << 31) + 1, (1 << 31) + 2  # keys
SPEC = {"name": "with momentum", "keys": {"0": {}, "1": {}}}


@dataclass(frozen=True)
class Job:
    """What is trained, and what may happen."""

    workers: int = 3
    servers: int = 2
    samples: int = 10
    batch: int = 4
    epochs: int = 2
    faults: int = 2
    replacements: int = 0
    server_faults: int = 0
    server_replacements: int = 0
    newcomers: int = 0  # with ranks above those of the start
    cuts: int = 0  # how many workers that have the state of training are cut off from a server
    notices: int = 0  # how many members leave on purpose
    residuals: bool = False  # and hand theirs over
    minimum: int = 1
    patience: float = 0.0  # s, to wait with fewer
    schedulers: int = 0  # how many incarnations of the scheduler are lost
    shared: bool = False  # values are read in the server's memory
    balance: Balancing = EQUAL
    each: int = 0  # samples of each member in a round, instead of `batch`
    replay: tuple[View, ...] = ()
    on_servers: bool = False  # the optimizer, which has a state
    span: int = 900  # events in which most faults come


class Step:
    """A server's optimizer, with whole numbers."""

    def __init__(self, spec, key, value):
        self.momentum = np.zeros_like(value)

    def __call__(self, value, gradient, rate):
        self.momentum[:] = (self.momentum * 5 + gradient) % PRIME
        value[:] = (value * 3 + self.momentum + rate) % PRIME

    def state(self):
        return {"momentum": self.momentum}

    def load(self, state):
        self.momentum = np.array(state["momentum"])


def gradient(weights, positions):
    """Of these samples at these weights: whole numbers (2 * SIZE,)."""
    total = np.zeros(2 * SIZE)
    for position in positions:
        total += [(int(w) * 31 + int(position) * (index + 7)) % 997 for index, w in enumerate(weights)]
    return total


def growth(op, member):
    """What a member's residual grows by in this round."""
    return op * (member + 1.0)


def stepped(weights, total, committed):
    return (weights * 3 + total + committed) % PRIME


class Violated(AssertionError):
    pass


class Unlucky(Exception):
    """All who could have given a step to those who were behind were lost before that, which no rule can prevent."""


def require(condition, text):
    if not condition:
        raise Violated(text)
