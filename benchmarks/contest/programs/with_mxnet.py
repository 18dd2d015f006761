"""The program of all processes of an MXNet `dist_sync` job in the kvstore benchmark, with default settings.

Scheduler and servers run and end inside `import mxnet`, as is usual with MXNet.
"""

import argparse
import ctypes
import math

import numpy as np

np.bool = bool  # type: ignore[attr-defined]  # MXNet 1.9.1 uses the name that NumPy 1.24 removed

import mxnet as mx  # noqa: E402  (must come after the line above; serves and exits in scheduler and server roles)
from contest.loop import serve  # noqa: E402
from contest.workload import KEYS, LEARNING_RATE, MOMENTUM, shapes_of  # noqa: E402


class MXNet:
    """One MXNet worker."""

    def __init__(self, shapes: list[tuple[int, ...]], momentum: bool, call: str) -> None:
        self.kv = mx.kv.create("dist_sync")
        self.keys = list(range(len(shapes)))
        self.values = [mx.nd.zeros(shape) for shape in shapes]
        self.outs = [mx.nd.zeros(shape) for shape in shapes]
        self.call = call
        if momentum:
            self.kv.set_optimizer(mx.optimizer.SGD(momentum=MOMENTUM, learning_rate=LEARNING_RATE))
        self.kv.init(self.keys, self.outs)
        mx.nd.waitall()
        self.gradients = [view(value) for value in self.values]
        self.results = [view(out) for out in self.outs]

    def step(self) -> None:
        """Push all, pull all, wait for all: key by key with decreasing priority, as Module does, or with lists of
        keys."""
        if self.call == "lists":
            self.kv.push(self.keys, self.values)
            self.kv.pull(self.keys, out=self.outs)
        elif self.call == "pushpull":
            for key in self.keys:
                self.kv.pushpull(key, self.values[key], out=self.outs[key], priority=-key)
        else:
            for key in self.keys:
                self.kv.push(key, self.values[key], priority=-key)
                self.kv.pull(key, out=self.outs[key], priority=-key)
        mx.nd.waitall()

    def close(self) -> None:
        """Drop the last reference to the store: MXNet then stops its servers."""
        del self.kv


def view(array: "mx.nd.NDArray") -> np.ndarray:
    """A numpy view of an MXNet array's CPU memory; use it only while MXNet has no queued operations."""
    address = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, shape=(math.prod(array.shape),)).reshape(array.shape)


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["sum", "momentum"], required=True)
    parser.add_argument("--megabytes", type=float)
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--call", choices=["keys", "lists", "pushpull"], default="lists")
    arguments = parser.parse_args()
    momentum = arguments.mode == "momentum"
    contestant = MXNet(shapes_of(arguments.megabytes, arguments.keys), momentum, arguments.call)
    serve(contestant, contestant.kv.rank, contestant.kv.num_workers, momentum)


if __name__ == "__main__":
    main()
