"""examples/elastic_script.py as a worker that has faults. Arguments: the faults, then those of the example.

Faults are separated by commas: MEMBER:before|after:OP kills (kill -9) member MEMBER before or after it recognises this
op; MEMBER:in:OP when it has pushed only a part of this round; MEMBER:notice:OP is SIGTERM there. MEMBER:invited:OP: as
the leader it waits before this round until a worker wants to join or to leave, or has left. MEMBER:copied-N:OP: it
kills server N when it holds this op and has what it copies of the servers' state after it. MEMBER:own|user:OP: an error
in this round, of the script or of the user. MEMBER:slow:MS: its computing takes so many milliseconds longer for each
sample. MEMBER:copies:SECONDS: the optimizer is on the servers, and its state is copied so often. MEMBER:kvstore:NAME:
it trains with this kvstore. MEMBER:averages:N: with dist_local, and N local steps. MEMBER:alone:STEP: it kills itself
in this step of its own, when it has pushed a part. MEMBER:reads:OP: after this round, and with MEMBER:reads-in:OP
before its step, it waits for a new view, and then asks for the optimizer's state, alone. MEMBER:saves:OP: when it knows
all members' samples of this round, and that a member is lost, it saves a checkpoint; MEMBER:saves-after:OP: after this
round. MEMBER:agreed:OP: it kills itself when it knows all members' samples of this round.
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
from dmltrain.api.state import newest
from dmltrain.backends.torch.distributed import DistributedOptimizer as Optimizer
from dmltrain.base.errors import UserError
from dmltrain.kvstore.worker.elastic_ops import ElasticOps
from dmltrain.kvstore.worker.store import DistKVStore
from tests.waiting import wait_for

EXAMPLE = Path(__file__).parents[2] / "examples/elastic_script.py"


def around(owner, name, before=None, after=None):
    """Call `before` with what the function of that name gets, and `after` with its first argument and its result."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(subject, *words, **named):
        if before:
            before(subject, *words)
        result = function(subject, *words, **named)
        if after:
            after(subject, result)
        return result

    setattr(owner, name, watched)


def making(op, act, name="complete", key=""):
    """Do this when the round is made, before this function; of a key that begins so."""

    def before(subject, *words):
        ops = getattr(subject, "ops", subject)
        if ops.view and ops.done + 1 == op and (not key or words[0].startswith(key)):
            act(ops)

    around(DistKVStore if name == "pushpull" else ElasticOps, name, before=before)


def made(op, act, name="complete"):
    """Do this after this function, when the round is made."""
    around(ElasticOps, name, after=lambda ops, _: act(ops) if ops.done == op else None)


def kill(_=None):
    os.kill(os.getpid(), signal.SIGKILL)


def leave(_):
    os.kill(os.getpid(), signal.SIGTERM)


def kill_server(number):
    return lambda _: os.kill(int(Path(f"server-{number}.pid").read_text()), signal.SIGKILL)


def wait_for_change(op):
    def before(ops):
        if ops.done + 1 == op:
            print("This worker waits for one that comes or leaves", flush=True)
            wait_for(lambda: ops._progress.invited or ops.view.left, "a worker that wants to join or to leave")

    around(ElasticOps, "admit", before=before)


def fail(kind):
    def act(_):
        raise kind("a mistake of this worker")

    return act


def slow_down(seconds):
    loss = torch.nn.functional.cross_entropy

    def slow(outputs, labels):
        time.sleep(seconds * len(labels))
        return loss(outputs, labels)

    torch.nn.functional.cross_entropy = slow


def distribute_with(**options):
    dmltrain.distribute = functools.partial(dmltrain.distribute, **options)


def kill_in_own(step):
    around(DistKVStore, "push", after=lambda store, _: kill() if store.ops.clock + 1 == step else None)


def wait_for_loss(optimizer):
    wait_for(lambda: optimizer.store.ops._progress.pending, "the loss of a member")


def save(optimizer):
    wait_for_loss(optimizer)
    newest().save("saved.pt")


def save_when_agreed(optimizer):
    wait_for(lambda: optimizer._exchange.members._total.done, "how many samples all have")
    save(optimizer)


def kill_when_agreed(op):
    def after(ops, handle):
        if ops.done + 1 == op:
            wait_for(lambda: handle.done, "how many samples all have")
            kill()

    around(ElasticOps, "sum_in_round", after=after)


def read_state(optimizer):
    wait_for_loss(optimizer)
    print("The servers' states:", len(optimizer.state_dict()["servers"]), flush=True)


def beside(name, moment, op, act):
    """Do this before or after this function of the optimizer, where the worker holds so many ops."""
    around(Optimizer, name, **{moment: lambda own, *_: act(own) if own.store.ops.done == op else None})


FAULTS = {  # of an op, a step or another number
    "before": lambda op: making(op, kill),
    "after": lambda op: made(op, kill),
    "in": lambda op: making(op, kill, "pushpull", "receipt"),
    "notice": lambda op: making(op, leave, "pushpull", "receipt"),
    "invited": wait_for_change,
    "own": lambda op: making(op, fail(RuntimeError), "pushpull"),
    "user": lambda op: making(op, fail(UserError), "pushpull"),
    "slow": lambda milliseconds: slow_down(milliseconds / 1000),
    "copies": lambda seconds: distribute_with(update_on_kvstore=True, server_snapshot=seconds),
    "alone": kill_in_own,
    "saves": lambda op: beside("round", "after", op - 1, save_when_agreed),
    "saves-after": lambda op: beside("step", "after", op, save),
    "agreed": kill_when_agreed,
    "reads": lambda op: beside("step", "after", op, read_state),
    "reads-in": lambda op: beside("step", "before", op - 1, read_state),
}

faults, *sys.argv[1:] = sys.argv[1:]
if os.environ["DMLC_ROLE"] == "server":
    Path(f"server-{os.environ['DMLC_TASK_ID']}.pid").write_text(str(os.getpid()))
for member, when, at in (word.split(":") for word in faults.split(",") if word):
    if os.environ["DMLC_ROLE"] != "worker" or os.environ["DMLC_TASK_ID"] != member:
        continue
    if when == "averages":
        distribute_with(kvstore="dist_local", local_steps=int(at), outer_momentum=0.5)
    elif "DMLTRAIN_JOIN" in os.environ:
        continue
    elif when == "kvstore":
        distribute_with(kvstore=at)
    elif when.startswith("copied"):
        made(int(at), kill_server(when[-1]), "stepped")
    else:
        FAULTS[when](float(at))
sys.argv[0] = str(EXAMPLE)
runpy.run_path(str(EXAMPLE), run_name="__main__")
