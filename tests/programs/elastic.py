"""Training of an elastic job whose workers have faults. Arguments: the faults, then the options.

Faults are separated by commas: MEMBER:before|after:POINT:AT:WHAT, for example 1:before:complete:5:kill. At this passage
of POINT (see POINTS; or at the first in op 1.2, the second after the rounds of epoch 1) member MEMBER does WHAT: kill
(kill -9), stop (SIGSTOP), leave (SIGTERM), scheduler (kill -9 of the process in scheduler.pid), server/1 or
"stop server/1" (the same for server 1), a mistake that is its own (RuntimeError) or one of the user (UserError); or it
waits until another of its threads has passed a point: until/after/announce/3. "own once 2/after/pushpull/8": not before
member 2 has passed this point; "go on once come": when the file passed-come is there. Also MEMBER:round:EPOCH: after
this epoch's steps the member's largest weight gets other last bits, as by a processor that rounds unlike others. And
any:sample:INDEX: the worker that prepares this sample of the training data has a mistake of its own;
any:unreadable:INDEX: it cannot be read.

With --trace FILE, the last option, a worker appends what it passes: FILE-MEMBER has lines "EPOCH.OP WHEN POINT".
"""

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from dmltrain import fit
from dmltrain.backends.torch.trainer import TorchTrainer
from dmltrain.base import whole_file
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import checkpoint
from dmltrain.data.dataset import Split
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.scheduler.client import Control
from dmltrain.kvstore.scheduler.connection import Connection
from dmltrain.kvstore.scheduler.job_end import JobEnd
from dmltrain.kvstore.worker.elastic_membership import ElasticMembership
from dmltrain.kvstore.worker.elastic_ops import ElasticOps
from dmltrain.kvstore.worker.entering.views import EnteredViews
from dmltrain.kvstore.worker.progress import Progress
from dmltrain.kvstore.worker.residual import ResidualHandover
from dmltrain.kvstore.worker.store import DistKVStore
from tests.waiting import wait_for


class Newcomer:
    """A worker or a server that joins."""

    @staticmethod
    def heard_of() -> None:
        """This worker has been told of one; see tell_of_newcomers."""


POINTS = {  # name -> owner and function
    "training": (Split, "training"),  # images are prepared, on another thread
    "train_step": (TorchTrainer, "train_step"),
    "evaluate": (TorchTrainer, "evaluate"),
    "pushpull": (DistKVStore, "pushpull"),  # of a bucket, or of a receipt
    "push": (DistKVStore, "push"),  # of a bucket, where the servers make the steps
    "complete": (ElasticOps, "complete"),  # before: all results are here; after: this worker holds the op
    "start": (ElasticMembership, "start"),  # after: the first view has been announced
    "op": (ElasticOps, "run"),  # one that is no round
    "wait": (Handle, "wait"),  # all is on its way to the servers
    "wait for release": (JobEnd, "wait"),  # a barrier is on its way to the scheduler
    "barrier": (ElasticMembership, "barrier"),
    "enter": (EnteredViews, "enter"),
    "close": (DistKVStore, "close"),
    "bye": (Control, "bye"),  # in close: the servers know that this worker leaves, the scheduler does not
    "freeze": (Progress, "freeze"),  # the scheduler asks which op this worker holds
    "introduce": (Connection, "_introduce"),  # to the next scheduler
    "invite": (Progress, "invite"),  # the scheduler tells the leader who waits to join
    "exchange": (ResidualHandover, "exchange"),  # of residuals that are handed over, or of none: one has joined
    "settle": (ResidualHandover, "settle"),  # before: that is recognised; after: residuals have changed
    "announce": (Progress, "announce"),  # of a view, the first one too
    "newcomer": (Newcomer, "heard_of"),  # the leader is invited because of it, or it joins with a change under way
    "write": (checkpoint, "write"),
    "put": (whole_file, "put"),  # before: the temporary file is there, whole; after: the checkpoint
}


ANY = "any"
ONCE = " once "


class Place:
    """Where the training thread is: how many ops were begun since the last round of an epoch."""

    def __init__(self) -> None:
        self.epoch, self.op = 0, 0

    def pass_by(self, when: str, point: str) -> None:
        if (when, point) == ("before", "op"):
            self.op += 1
        elif (when, point) == ("before", "train_step") and self.op:
            self.epoch, self.op = self.epoch + 1, 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.op}"


place = Place()
passed: Counter[tuple[str, str]] = Counter()
reached: set[tuple[str, str, str]] = set()  # when, point, at
members: list[ElasticMembership] = []
changed = threading.Condition()


def fail(what: str) -> None:
    what, _, others = what.partition(ONCE)
    for point in others.split():
        wait_for(mark(point).exists, point)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what in ("leave", "notice"):
        os.kill(os.getpid(), signal.SIGTERM if what == "leave" else signal.SIGUSR1)
    elif what == "scheduler":
        kill_scheduler()
    elif what == "own":
        raise RuntimeError("this worker's own mistake")
    elif what == "go on":
        pass
    elif "server/" in what:
        name = what.split()[-1].replace("/", "-")
        os.kill(int(Path(f"{name}.pid").read_text()), signal.SIGSTOP if what.startswith("stop") else signal.SIGKILL)
    elif what.startswith("until"):
        with changed:
            assert changed.wait_for(lambda: tuple(what.split("/")[1:]) in reached, 60.0), what
    else:
        raise UserError("a mistake of the user")


def mark(point: str) -> Path:
    """The file that says that a member has passed this point, such as 2/after/pushpull/8."""
    return Path(f"passed-{point.replace('/', '-')}")


def kill_scheduler() -> None:
    """The one that lives, as soon as the test says which one that is."""
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(Path("scheduler.pid").read_text()), signal.SIGKILL)
            return
        time.sleep(0.005)


def watch(point: str, faults: dict[tuple[str, str, str], str], marks: set[Path], trace: Path | None) -> None:
    owner, name = POINTS[point]
    function = getattr(owner, name)

    def passes(when: str) -> None:
        if not (members and members[0].progress.view or point in ("start", "announce", "invite", "newcomer")):
            return
        with changed:
            place.pass_by(when, point)
            passed[when, point] += 1
            at = str(passed[when, point]), str(place)
            reached.update((when, point, each) for each in at)
            changed.notify_all()
        if trace:
            with trace.open("a") as file:
                file.write(f"{place} {when} {point}\n")
        for each in at:
            if marks and (passed_by := mark(f"{os.environ['DMLC_TASK_ID']}/{when}/{point}/{each}")) in marks:
                passed_by.touch()
            if what := faults.pop((when, point, each), ""):
                fail(what)

    @functools.wraps(function)
    def watched(*words, **named):
        passes("before")
        result = function(*words, **named)
        passes("after")
        return result

    setattr(owner, name, watched)


def remember_membership() -> None:
    join = ElasticMembership.__init__

    def joined(member, *words):
        join(member, *words)
        members.append(member)

    ElasticMembership.__init__ = joined


def tell_of_newcomers() -> None:
    invite, announce = Progress.invite, Progress.announce

    def invited(progress):
        invite(progress)
        Newcomer.heard_of()

    def announced(progress, view, *words):
        announce(progress, view, *words)
        if view.joined or view.joined_servers:
            Newcomer.heard_of()

    Progress.invite, Progress.announce = invited, announced


def round_unlike_others(epochs: list[int]) -> None:
    merge, number = TorchTrainer.merge_statistics, iter(range(1000))

    @functools.wraps(merge)
    def merged(trainer, *words):
        merge(trainer, *words)
        if next(number) in epochs:
            weight = next(
                common_array for common_array in trainer.common_arrays() if common_array.name.endswith("weight")
            )
            values = np.array(weight.read())
            values.reshape(-1)[np.abs(values).argmax()] *= 1 + 1e-6
            weight.write(values)

    TorchTrainer.merge_statistics = merged


def fail_at(index: int, error: Exception) -> None:
    training = Split.training

    @functools.wraps(training)
    def failing(split, samples, *words):
        if index in samples:
            raise error
        return training(split, samples, *words)

    Split.training = failing


def watched_points(own: list[list[str]], marks: set[Path]) -> list[str]:
    """Those that something is about, and those that say where the training thread is."""
    text = " ".join([*itertools.chain(*own), *(each.name for each in marks)])
    return [point for point in POINTS if text and (point in ("op", "train_step") or point in text)]


def install(member: int, words: list[str], trace: Path | None) -> None:
    for _, what, index in (word for word in words if word[0] == ANY):
        fail_at(int(index), UserError("it is damaged") if what == "unreadable" else RuntimeError("a bad sample"))
    own = [word[1:] for word in words if word[0] == str(member)]
    marks = {mark(point) for word in words for point in word[-1].partition(ONCE)[2].split()}
    remember_membership()
    tell_of_newcomers()
    for point in POINTS if trace else watched_points(own, marks):
        watch(point, {(when, name, at): what for when, name, at, what in (e for e in own if len(e) == 4)}, marks, trace)
    round_unlike_others([int(each[1]) for each in own if len(each) == 2])


faults, *options = sys.argv[1:]
traced = None
if "--trace" in options:
    *options, _, file = options
    traced = Path(f"{file}-{os.environ['DMLC_TASK_ID']}")
if os.environ["DMLC_ROLE"] == "server":
    Path(f"server-{os.environ['DMLC_TASK_ID']}.pid").write_text(str(os.getpid()))
if os.environ["DMLC_ROLE"] == "worker":
    install(int(os.environ["DMLC_TASK_ID"]), [word.split(":") for word in faults.split(",") if word], traced)
defaults = {"dataset": "digits", "network": "mlp", "batch_size": 4, "num_examples": 100, "num_epochs": 2}
defaults |= {"num_val_examples": 100, "kv_store": "dist_sync", "disp_batches": 1000}
sys.exit(fit.main(options, prog="elastic", defaults=defaults))
