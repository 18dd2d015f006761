"""A kvstore in one process whose server is a real one's core with torch's optimizers: two workers, the second of which
pushes twice what the first does."""

import numpy as np

from dmltrain.backends.torch.server_optimizer import SliceOptimizer
from dmltrain.kvstore import Handle
from dmltrain.kvstore.server import optimizer_state
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey
from tests.backends.agreeing import Agreeing
from tests.kvstore.carrying_out import run

STALENESS = {"dist_sync": 0.0, "dist_async": float("inf"), "dist_ssp": 1.0}


class ServedStore(Agreeing):
    """`rates`: the learning rates that came with pushes."""

    num_workers = 2
    num_servers = 1

    def __init__(self, kind="dist_sync"):
        self.type, self.core = kind, ServerCore(2, make_step=SliceOptimizer)
        self.rates, self._numbers, self._sizes, self._clocks = [], {}, {}, {}

    def init(self, key, value, whole=False, mean=False):
        for name, array in zip(key, value, strict=True):
            number = self._numbers[name] = len(self._numbers)
            self._sizes[name], self._clocks[name] = array.size, 0
            declared = DeclaredKey(number, name, array.dtype.name, True, {"type": "none"}, ((0, array.size),))
            for worker in range(2):
                self.core.keys.declare(worker, Declare(self.type, STALENESS[self.type], (declared,)))
            self.core.keys.initialise(0, number, 0, array)

    def buffers(self, keys):
        return [np.zeros(self._sizes[key], np.float32) for key in keys]

    def key_number(self, key):
        return self._numbers[key]

    def set_optimizer(self, spec):
        self.core.keys.optimize(spec)

    def push(self, key, value, priority=0, rate=-1.0):
        self.rates.append(rate)
        self._clocks[key] += 1
        for worker in range(2):
            buffer = self.core.buffer(worker, self._numbers[key], 0, value.nbytes, 0)
            buffer.array[:] = value * (worker + 1)
            run(self.core, self.core.push(worker, self._numbers[key], 0, self._clocks[key], rate, buffer))

    def pull(self, key, out, priority=0, wait=True):
        (reply,) = self.core.pull(0, self._numbers[key], 0, self._clocks[key])
        np.copyto(out, reply.buffer.array)
        reply.release()
        return Handle(0, "", 1.0)

    def optimizer_states(self):
        return [bytearray(optimizer_state.pack(self.core.slices()))]

    def load_optimizer_state_bytes(self, states):
        optimizer_state.unpack(states[0], self.core.slices())
