"""Workers of an MXNet job that use the kvstore itself; the first argument says what they do. Results are JSON lines."""

import json
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from dmltrain import kvstore
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.base import errors
from tests.waiting import wait_for

errors.end_scripts_without_traceback()
SHAPES = {"small": (3, 4), "big": (1100, 1000)}  # MXNet cuts what has a million elements or more over all servers
KEYS = list(SHAPES)


def tell(**values):
    print(json.dumps(values), flush=True)


def extremes(arrays):
    return [(float(array.min().asscalar()), float(array.max().asscalar())) for array in arrays]


def opened(kind, first=1.0, compression=None):
    store = kvstore.create(kind, backend="mxnet")
    mx = mxnet_compat.load()
    if compression:
        store.set_gradient_compression({"type": compression, "threshold": 0.5})
    store.init(KEYS, [mx.nd.full(SHAPES[key], first) for key in KEYS])
    return store, mx


def step(store, mx, gradient, rate=None):
    """What this worker pulls after pushing `gradient` everywhere."""
    if rate is not None:
        store.set_learning_rate(rate)
    out = [mx.nd.zeros(SHAPES[key]) for key in KEYS]
    store.push(KEYS, [mx.nd.full(SHAPES[key], gradient) for key in KEYS])
    store.pull(KEYS, out)
    return extremes(out)


def steps(kind, where, compression=""):
    """Three steps; the last has another learning rate."""
    store, mx = opened(kind, compression=compression)
    if where == "servers":
        store.set_optimizer({"name": "sgd", "lr": 0.1, "momentum": 0.5})
    values = [step(store, mx, store.rank + 1.0, rate) for rate in (0.1, 0.1, 1.0)]
    summed = store.all_reduce("ranks", np.array([1.0, store.rank])).tolist()
    ranks = store.all_reduce("kv ranks", np.eye(store.num_workers)[store.rank] * store.kv_rank).tolist()
    tell(values=values, summed=summed, ranks=ranks, sent=store.bytes_sent, received=store.bytes_received)
    store.close()


def norms():
    """Steps of an optimizer that takes norms of whole weights."""
    store, mx = opened("dist_sync")
    store.set_optimizer({"name": "lamb", "lr": 0.1})
    step(store, mx, 1.0)
    store.close()


def numpy_values(kind):
    """Arrays of numpy go in and out as well; a list is one value a device, summed."""
    store = kvstore.create(kind, backend="mxnet")
    store.init("weight", np.arange(4, dtype="float32"))
    out = np.zeros(4, "float32")
    store.pull("weight", out)
    first = out.tolist()
    store.pushpull("weight", [np.full(4, 1.0, "float32"), np.full(4, float(store.rank), "float32")], out)
    tell(first=first, sum=out.tolist())
    store.close()


def states(kind, path, mode):
    """Four steps with momentum, and a save after two of them; or a load and the last two."""
    weights = Path(f"{path}.weights")
    first = float(weights.read_text()) if mode == "load" else 1.0
    store, mx = opened(kind, first)
    store.set_optimizer({"name": "adam", "lr": 0.1})
    if mode == "load":
        store.load_optimizer_states(path)
    else:
        values = [step(store, mx, store.rank + number) for number in (0, 1)]
        store.barrier()
        if store.rank == 0:
            store.save_optimizer_states(path)
            weights.write_text(str(values[-1][0][0]))
        store.barrier()
    tell(last=[step(store, mx, store.rank + number) for number in (2, 3)])
    store.close()


def overtaken():
    """A pull that goes on only when this thread waits for it, or after the next push and pull."""
    store, mx = opened("dist_sync", first=0.0)
    go_on, wait_to_read = threading.Event(), mx.nd.NDArray.wait_to_read

    class Hold(mx.operator.CustomOp):
        def forward(self, *_, **__):
            go_on.wait()

    @mx.operator.register("hold")
    class _HoldProp(mx.operator.CustomOpProp):
        def create_operator(self, *_):
            return Hold()

    def wait(array):
        if threading.current_thread() is threading.main_thread():  # others watch the time
            go_on.set()
        wait_to_read(array)

    store.set_optimizer({"name": "sgd", "lr": 1.0})
    first, before, after = (mx.nd.ones(SHAPES["small"]) for _ in range(3))
    store.push("small", first)
    mx.nd.waitall()
    mx.nd.Custom(first, op_type="hold")  # MXNet pulls into what was pushed before it copies that
    mx.nd.NDArray.wait_to_read = wait
    store.pull("small", before)
    store.push("small", mx.nd.ones(SHAPES["small"]))
    store.pull("small", after)
    found = extremes([after])
    go_on.set()
    tell(before=extremes([before]), after=found)
    store.close()


def endless(kind):
    """Steps until somebody ends it."""
    store, mx = opened(kind)
    store.set_optimizer({"name": "sgd", "lr": 1e-6})
    for number in range(1_000_000):
        step(store, mx, 1.0)
        if number == 2:
            print("ready", flush=True)
        time.sleep(0.02)


def done(how):
    """Worker 0 is done, the other rests."""
    store, mx = opened("dist_sync")
    step(store, mx, 1.0)
    print("ready", flush=True)
    if store.rank:
        signal.pause()
    if how == "close":
        store.close()


def idle(kind):
    """All workers pull the weights again and again. A process waits to join the job while the file `hold` exists."""
    mxnet_compat.load()
    print("loaded", flush=True)
    wait_for(lambda: not Path("hold").exists(), "hold removed")
    store, mx = opened(kind)
    out = [mx.nd.zeros(SHAPES[key]) for key in KEYS]
    print("ready", flush=True)
    while True:
        store.pull(KEYS, out, wait=True)
        tell(values=extremes(out))
        time.sleep(0.2)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def mistakes():
    """What must be an error of this worker at once, one after the other; then a step."""
    store, mx = opened("dist_sync")
    wrong = {
        "compression-after-init": lambda: store.set_gradient_compression({"type": "2bit"}),
        "shape": lambda: store.push("small", mx.nd.ones((4, 3))),
        "dtype": lambda: store.push("small", np.ones(SHAPES["small"])),
        "rate": lambda: store.set_learning_rate(float("nan")),
        "rate-of-a-push": lambda: store.push("small", mx.nd.ones(SHAPES["small"]), rate=float("nan")),
    }
    store.set_optimizer({"name": "sgd", "lr": 0.1})
    for name, call in wrong.items():
        try:
            call()
        except errors.UserError as error:
            tell(mistake=name, error=str(error))
    tell(values=step(store, mx, 1.0))
    store.close()


def wrong(what):
    """What must be an error."""
    kind = "dist_async" if what == "no-optimizer" else "dist_sync"
    if what == "different-types":
        kind = ["dist_sync", "dist_async"][int(os.environ.get("DMLC_WORKER_ID", 0))]
    if what == "different-shapes":
        SHAPES["small"] = (3, 4 + int(os.environ.get("DMLC_WORKER_ID", 0)))
    store, mx = opened(kind)
    print("opened", flush=True)
    if what == "custom-optimizer":

        class Mine(mx.optimizer.SGD):
            pass

        store.set_optimizer(Mine())
    elif what == "pickle" and store.rank == 0:
        store._kv._send_command_to_servers(0, pickle.dumps(Evil(), 0).decode())
    elif what == "uneven" and store.rank == 1:
        signal.pause()
    elif what == "exception" and store.rank == 0:
        raise RuntimeError("a defect of the program")
    elif what == "exit" and store.rank == 0:
        sys.exit(7)
    step(store, mx, 1.0)
    if what in ("pickle", "uneven"):
        signal.pause()


if __name__ == "__main__":
    modes = (steps, norms, numpy_values, states, overtaken, endless, done, idle, mistakes, wrong)
    {mode.__name__: mode for mode in modes}[sys.argv[1]](*sys.argv[2:])
