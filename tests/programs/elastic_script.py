"""examples/elastic_script.py as a worker that has faults. Arguments: the faults, then those of the example.

Faults are separated by commas: MEMBER:before|after:OP kills (kill -9) member MEMBER before or after it recognises this
op; MEMBER:in:OP when it has pushed only a part of this round; MEMBER:notice:OP is SIGTERM there. MEMBER:invited:OP: as
the leader it waits before this round until a worker wants to join or to leave, or has left. MEMBER:server-N:OP: it
kills server N when it holds this op; MEMBER:copied-N:OP: when it also has what it copies of the servers' state after
it. MEMBER:behind:OP: it does not recognise this op before the scheduler asks for it. MEMBER:own|user:OP: an error in
this round, of the script or of the user. MEMBER:slow:MS: its computing takes so many milliseconds longer for each
sample. MEMBER:copies:SECONDS: the optimizer is on the servers, and its state is copied so often. MEMBER:kvstore:NAME:
it trains with this kvstore. MEMBER:alone:STEP: it kills itself in this step of its own, when it has pushed a part.
MEMBER:reads:OP: after this round, and with MEMBER:reads-in:OP before its step, it waits for a new view, and then asks
for the optimizer's state, alone. MEMBER:saves:OP: when it knows all members' samples of this round, and that a member
is lost, it saves a checkpoint; MEMBER:saves-after:OP: after this round. MEMBER:agreed:OP: it kills itself when it knows
all members' samples of this round.
"""

import functools
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch

import dmltrain
from dmltrain.backends.torch.distributed.elastic_on_servers import ElasticOptimizerOnServers
from dmltrain.errors import UserError
from dmltrain.kvstore.worker.elastic_store import ElasticKVStore
from dmltrain.loop.state import newest

EXAMPLE = Path(__file__).parents[2] / "examples/elastic_script.py"


def kill_at(when: str, op: int) -> None:
    """`op` is that which is made or was made last."""
    name = "pushpull" if when in ("in", "notice") else "complete"
    function = getattr(ElasticKVStore, name)

    def watched(store, *words, **named):
        reached = when == "before" or (when in ("in", "notice") and words[0].startswith("receipt"))
        if reached and store.view and store.done + 1 == op:
            os.kill(os.getpid(), signal.SIGTERM if when == "notice" else signal.SIGKILL)
        result = function(store, *words, **named)
        if when == "after" and store.done == op:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(ElasticKVStore, name, watched)


def kill_server(number: str, op: int, moment: str) -> None:
    function = getattr(ElasticKVStore, moment)

    def watched(store):
        function(store)
        if store.done == op:
            os.kill(int(Path(f"server-{number}.pid").read_text()), signal.SIGKILL)

    setattr(ElasticKVStore, moment, watched)


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def fall_behind(op: int) -> None:
    complete = ElasticKVStore.complete

    def watched(store):
        if store.view and store.done + 1 == op:
            progress = store._progress
            wait_until(lambda: progress._flush is not None or progress.pending, "the scheduler does not ask")
        complete(store)

    ElasticKVStore.complete = watched


def wait_at(op: int) -> None:
    admit = ElasticKVStore.admit

    def waits(store):
        if store.done + 1 == op:
            print("This worker waits for one that comes or leaves", flush=True)
            wait_until(lambda: store._progress.invited or store.view.left, "nobody wants to join or to leave")
        admit(store)

    ElasticKVStore.admit = waits


def fail_at(when: str, op: int) -> None:
    pushpull = ElasticKVStore.pushpull

    def fails(store, *words, **named):
        if store.view and store.done + 1 == op:
            raise (RuntimeError if when == "own" else UserError)("a mistake of this worker")
        return pushpull(store, *words, **named)

    ElasticKVStore.pushpull = fails


def slow_down(seconds: float) -> None:
    loss = torch.nn.functional.cross_entropy

    def slow(outputs, labels):
        time.sleep(seconds * len(labels))
        return loss(outputs, labels)

    torch.nn.functional.cross_entropy = slow


def copy_every(seconds: float) -> None:
    dmltrain.distribute = functools.partial(dmltrain.distribute, update_on_kvstore=True, server_snapshot=seconds)


def train_with(kvstore: str) -> None:
    dmltrain.distribute = functools.partial(dmltrain.distribute, kvstore=kvstore)


def kill_in_own(step: int) -> None:
    push = ElasticKVStore.push

    def pushes(store, *words, **named):
        push(store, *words, **named)
        if store.clock + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)

    ElasticKVStore.push = pushes


def save(when: str, op: int) -> None:
    begin, step = ElasticOptimizerOnServers.round, ElasticOptimizerOnServers.step

    def round_(optimizer, *words):
        begin(optimizer, *words)
        if optimizer.store.done == op - 1:
            wait_until(lambda: optimizer._sum.done, "not all have said how many samples they have")
            wait_until(lambda: optimizer.store._progress.pending, "nobody is lost")
            newest().save("saved.pt")

    def steps(optimizer, *words):
        step(optimizer, *words)
        if optimizer.store.done == op:
            wait_until(lambda: optimizer.store._progress.pending, "nobody is lost")
            newest().save("saved.pt")

    if when == "saves":
        ElasticOptimizerOnServers.round = round_
    else:
        ElasticOptimizerOnServers.step = steps


def kill_when_agreed(op: int) -> None:
    sum_in_round = ElasticKVStore.sum_in_round

    def sums(store, *words):
        handle = sum_in_round(store, *words)
        if store.done + 1 == op:
            wait_until(lambda: handle.done, "not all have said how many samples they have")
            os.kill(os.getpid(), signal.SIGKILL)
        return handle

    ElasticKVStore.sum_in_round = sums


def read_state(when: str, op: int) -> None:
    step = ElasticOptimizerOnServers.step

    def read(optimizer):
        wait_until(lambda: optimizer.store._progress.pending, "nobody is lost")
        print("The servers' states:", len(optimizer.state_dict()["servers"]), flush=True)

    def steps(optimizer, *words):
        if when == "reads-in" and optimizer.store.done == op - 1:
            read(optimizer)
        step(optimizer, *words)
        if when == "reads" and optimizer.store.done == op:
            read(optimizer)

    ElasticOptimizerOnServers.step = steps


faults, *sys.argv[1:] = sys.argv[1:]
if os.environ["DMLC_ROLE"] == "server":
    Path(f"server-{os.environ['DMLC_TASK_ID']}.pid").write_text(str(os.getpid()))
for member, when, op in (each.split(":") for each in faults.split(",") if each):
    if os.environ["DMLC_ROLE"] != "worker" or os.environ["DMLC_TASK_ID"] != member or "DMLTRAIN_JOIN" in os.environ:
        continue
    if when == "invited":
        wait_at(int(op))
    elif when == "behind":
        fall_behind(int(op))
    elif when.startswith("server"):
        kill_server(when[-1], int(op), "complete")
    elif when.startswith("copied"):
        kill_server(when[-1], int(op), "stepped")
    elif when in ("own", "user"):
        fail_at(when, int(op))
    elif when == "slow":
        slow_down(int(op) / 1000)
    elif when == "kvstore":
        train_with(op)
    elif when == "alone":
        kill_in_own(int(op))
    elif when in ("saves", "saves-after"):
        save(when, int(op))
    elif when == "agreed":
        kill_when_agreed(int(op))
    elif when in ("reads", "reads-in"):
        read_state(when, int(op))
    elif when == "copies":
        copy_every(float(op))
    else:
        kill_at(when, int(op))
sys.argv[0] = str(EXAMPLE)
runpy.run_path(str(EXAMPLE), run_name="__main__")
