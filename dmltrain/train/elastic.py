"""How a run becomes elastic, and how an elastic one ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dmltrain.audit import views_file
from dmltrain.audit.views_file import JobFacts
from dmltrain.base import env
from dmltrain.data.assignment.parts import Epoch, Shared
from dmltrain.kvstore.base import MembershipEnded, Stopped
from dmltrain.kvstore.view import EQUAL, Balancing, View
from dmltrain.kvstore.worker.elastic_ops import ElasticOps
from dmltrain.options import Options
from dmltrain.options.distribution import SNAPSHOT_SECONDS
from dmltrain.options.field import flag
from dmltrain.options.table import ON_MEMBERS
from dmltrain.options.training import CONSTANT
from dmltrain.options.values import as_words
from dmltrain.rounds import notice
from dmltrain.rounds.member import Member
from dmltrain.rounds.member_rounds import MemberRounds
from dmltrain.train import resume
from dmltrain.train.plan import Position
from dmltrain.train.run import Run

# These may differ between hosts. `network` may be the path of a file; JobFacts has the name in it.
OF_HOSTS = ("network", "data_nthreads", "mean_img", "compile")
# options of other groups that must be equal
OPS = ("shuffle", "save_period", "skip_broken", "snapshot_on_signal", "loss", "outer_lr", "outer_momentum")
# What a replay need not have in common: how options are given, what it compares as facts of the job, and what does not
# change weights.
NOT_OF_REPLAYS = (
    *("recipe", "network", "seed", "batch", "batch_size", "num_epochs", "max_iter"),
    *("save_period", "skip_broken", "snapshot_on_signal", "show_schedule", "val_flip", "val_image_shape"),
)
# And what else it compares; members that differ in these fail in other ways, or have different weights from the start.
ONLY_OF_REPLAYS = ("gc_type", "gc_threshold", "gc_ratio", "rgb_mean", "rgb_std", "enlarge", "last_lr_mult")
BATCH = "--batch"  # not as its field is called: JobFacts has another `batch`


def train(run: Run, epochs: Callable[[Run], None]) -> None:
    """Train the epochs. A worker that joins an elastic job starts where the others are. If an elastic job must end
    because it has too few workers, they save a checkpoint. Raises JobLost, UserError."""
    if not run.store.elastic:
        return epochs(run)
    try:
        run = join_job(run)
        while True:
            try:
                epochs(run)
                break
            except MembershipEnded:
                run = wait_to_return(run)
    except MembershipEnded as end:
        run.log.info("This worker's part has ended: %s", end)
    except Stopped as end:
        save_at_stop(run)
        leave_job(run)
        run.store.close()
        raise end
    leave_job(run)


def join_job(run: Run) -> Run:
    """Become a member: from now on the job goes on without workers that are lost. Waits for all workers; a replacement
    waits until it has joined. Returns the run, which starts where the others are. Raises UserError for a replay of
    another job, JobLost, MembershipEnded."""
    store = run.store
    assert isinstance(store.ops, ElasticOps)
    member = Member(store, run.log, _job(run), run.options.audit, partial(_state, run), partial(_take, run))
    member.has_statistics = bool(run.network.auxiliary())
    run = replace(run, member=member)
    every = run.options.server_snapshot
    store.ops.steps.snapshots.every = SNAPSHOT_SECONDS if every is None else every
    member.start(_facts(run), partial(_replayed, run), _balancing(run))
    if run.options.replay is None:
        notice.LeaveNotice(store.ops.views.leave, env.read().leave_seconds, run.log)
    return replace(run, start=Position(member.journal.epoch)) if member.journal.joins else run


def wait_to_return(run: Run) -> Run:
    """After MembershipEnded in a replay: wait for the next view that has this worker again, and go on there. Raises
    JobLost; MembershipEnded if there is no such view."""
    assert run.member
    run.member.wait_to_return()
    return replace(run, start=Position(run.member.journal.epoch))


def save_at_stop(run: Run) -> None:
    """The job ends between two rounds: save a checkpoint of this position, with all members. Raises JobLost."""
    assert run.member
    assignment, epoch, store = run.member.journal.assignment, run.member.journal.epoch, run.store
    assert assignment is not None
    run.trainer.take_state(run.trainer.shared_state(), only_step=True)  # without local steps since the last average
    store.repeat(lambda: run.trainer.merge_statistics(store.all_reduce, store.num_workers))
    position = run.plan.after(epoch, assignment.step)
    store.repeat(partial(resume.save, run, position))
    if not run.store.kvstore_type.synchronous:
        run.log.warning("Some samples of this epoch may come again, or be left out: workers were at different steps")
    else:
        first, rest = min(assignment.step * assignment.batch, assignment.samples), assignment.rest
        out, again = int((rest < first).sum()), assignment.samples - first - int((rest >= first).sum())
        if again or out:
            text = "A job that goes on from this checkpoint uses %d samples of this epoch again, and leaves out %d"
            run.log.info(text, again, out)


def leave_job(run: Run) -> None:
    """The last thing before this worker leaves the job."""
    if run.member:
        run.member.close()


def _facts(run: Run) -> dict[str, Any]:
    """The options that must be equal on all members, so that a replacement trains as the others do."""
    values = {
        name: str(getattr(run.options, name)) for name in ["image_shape", *ON_MEMBERS, *OPS] if name not in OF_HOSTS
    }
    return {BATCH: values.pop("batch"), **values}


def _of_replays(options: Options) -> dict[str, str]:
    """The options on which the weights of a replay depend, as on the command line; those that are not the defaults."""
    names = ("image_shape", *ON_MEMBERS, *OPS, *ONLY_OF_REPLAYS)
    kept = [name for name in names if name not in (*OF_HOSTS, *NOT_OF_REPLAYS)]
    values = {name: getattr(options, name) for name in kept}
    return {flag(name): as_words(value) for name, value in values.items() if value != getattr(Options, name)}


def _state(run: Run, place: dict[str, Any]) -> bytes:
    """What a new member needs: the trainer's state, and the `place` where the job is."""
    return run.backend.encode({"trainer": run.trainer.shared_state(), **place})


def _take(run: Run, content: bytes, only_step: bool) -> dict[str, Any]:
    """The inverse of _state."""
    decoded = run.backend.decode(content)
    run.trainer.take_state(decoded.pop("trainer"), only_step)
    return decoded


def _job(run: Run) -> JobFacts:
    options, parts, plan = run.options, _shared(run), run.plan
    own, data = options.batch_size * plan.group, run.dataset.digests.get("training data", run.dataset.name)
    averaging = run.store.kvstore_type.averaging(options.local_steps)
    return JobFacts(
        workers=parts.num_workers,
        seed=options.seed,
        samples=parts.samples,
        batch=own * parts.num_workers,
        epochs=plan.epochs,
        network=run.network.name,
        data=data,
        each=0 if options.batch == CONSTANT else own,
        kvstore=run.store.kvstore_type.name,
        iterations=plan.iterations if plan.iterations % plan.steps else 0,
        test_interval=options.test_interval,
        snapshot=options.snapshot,
        local_steps=averaging.steps if averaging else 0,
        options=_of_replays(options),
    )


def _balancing(run: Run) -> Balancing:
    job = _job(run)
    return Balancing(job.batch, job.each) if run.options.balance else EQUAL


def _replayed(run: Run, job: JobFacts) -> tuple[View, ...]:
    file = run.options.replay
    if file is None:
        return ()
    recorded = views_file.read(Path(file), "--replay")
    views_file.check_same(recorded, job, f"--replay {file}")
    views_file.check_together(recorded, f"--replay {file}")
    views_file.check_ranks(recorded, env.read().ranks, f"--replay {file}")
    return recorded.views


def _shared(run: Run) -> Shared:
    assert isinstance(run.parts, Shared)  # see checks.py
    return run.parts


def rounds(run: Run, epoch: int, first: int, stop: int) -> MemberRounds:
    """The rounds of this epoch that use the samples of a plain job's steps `first` to `stop` - 1."""
    assert run.member
    return MemberRounds(run.member, Epoch(_shared(run), run.options.seed, epoch), first, stop)
