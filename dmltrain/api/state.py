"""`dmltrain.State`: where a script's training is."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dmltrain.api import joining, script
from dmltrain.api.content import Content, read
from dmltrain.base import env, whole_file
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import seal
from dmltrain.kvstore.base import KVStore, MembershipEnded
from dmltrain.kvstore.view import EQUAL, Balancing
from dmltrain.kvstore.worker.elastic_ops import ElasticOps
from dmltrain.logs import record
from dmltrain.rounds import notice
from dmltrain.rounds.member import Member
from dmltrain.rounds.member_rounds import MemberRounds
from dmltrain.rounds.plain import PlainRounds, Rounds
from dmltrain.rounds.rates import Rates

if TYPE_CHECKING:
    from dmltrain.api.loader import Loader

T = TypeVar("T")
# the phases of a State: between two epochs; in an epoch before, in and after the loop over the loader
BETWEEN, BEFORE, READING, AFTER = "between", "before", "reading", "after"


class State:
    """The state of a script's training: what a checkpoint holds, and what a new member of an elastic job gets from the
    others. It has the `model`, the `optimizer` that `dmltrain.distribute` returned, and further values by name. An
    object with `state_dict` and `load_state_dict`, such as a scheduler of the learning rate, keeps its state itself.
    Any other value is read and set as an attribute (`state.best`): numbers, texts, tensors, and lists and dictionaries
    of these.

    Raises UserError for a value of another kind.
    """

    def __init__(self, *, model: Any, optimizer: Any, **values: Any) -> None:
        from dmltrain.backends.torch import loop

        for name in values:
            if name.startswith("_") or hasattr(State, name):
                raise UserError(f"dmltrain.State: {name} is a name of its own: choose another one for this value")
        self._content = Content(model, optimizer, values)
        self._statistics = loop.Statistics(model)
        self._store: KVStore = getattr(optimizer, "store", None) or KVStore()
        self._member: Member | None = None
        self._rates: Rates | None = None
        self._loader: Loader | None = None
        self._epoch, self._phase, self._seen = 0, BETWEEN, 0
        self._rounds: Rounds | None = None  # of the present epoch of an elastic job
        joining.check(self.is_elastic)
        if _states and self.is_elastic:
            raise UserError("a worker of an elastic job has one dmltrain.State: give it all names at once")
        _states[:] = [self]
        if self.is_elastic:
            atexit.register(self._at_exit)  # atexit runs it before the store's, which was registered earlier

    def __getattr__(self, name: str) -> Any:
        """A value or an object by its name."""
        content = self.__dict__.get("_content")
        if content is None or name not in content.names:
            raise AttributeError(f"the state has no {name!r}: name it in dmltrain.State({name}=...)")
        return content[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._content.names:
            self._content[name] = value
        else:
            raise AttributeError(f"the state has no {name!r}: name it in dmltrain.State({name}=...)")

    # -- for scripts ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._epoch

    @property
    def rank(self) -> int:
        """This worker's place among the present workers, from 0."""
        return self._store.rank

    @property
    def num_workers(self) -> int:
        """The present number of workers."""
        return self._store.num_workers

    def epochs(self, number: int) -> Iterator[int]:
        """The epochs from the present one to `number` - 1. In an elastic job a worker that joins begins with the
        others' epoch. Raises UserError, JobLost. If the job ends before this worker could join it, the process ends
        with exit code 0."""
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UserError(f"state.epochs({number!r}): expected a whole number of at least 1")
        if self._store.elastic and not self._member and self._epoch < number:
            self._join_job(number)
        while self._epoch < number:
            self._phase = BEFORE
            if self._member and self._loader:  # assign it now: state.save may enter a view before the loader's loop
                self._rounds = MemberRounds(self._member, self._loader.at(self._epoch))
            yield self._epoch
            if self.is_elastic and self._phase != AFTER:
                raise UserError(
                    f"epoch {self._epoch} has ended before its loop over dmltrain.loader: in an elastic job that loop "
                    "must come to its end, without `break`"
                )
            self._epoch, self._phase = self._epoch + 1, BETWEEN

    def repeat(self, block: Callable[[], T]) -> T:
        """Run `block` and return its result. If the workers of an elastic job change meanwhile, the block runs again
        from its beginning. So it must divide its work by `rank` and `num_workers` (or `part`), must not change anything
        that it reads, and must end with `all_reduce`. Every worker must call this, after the loop over the loader."""
        self._check_together("repeat")
        return self._store.repeat(block)

    def all_reduce(self, value: Any) -> Any:
        """The sum of all workers' values: for a number a float; for an array, a tensor or a list a float64 array of the
        same shape. Every worker must call this, after the loop over the loader."""
        self._check_together("all_reduce")
        from dmltrain.backends.torch import loop

        own = loop.array(value)
        total = self._store.repeat(lambda: self._store.all_reduce("a script's values", own.reshape(-1)))
        return float(total[0]) if isinstance(value, Number) else total.reshape(own.shape)

    def part(self, count: int) -> range:
        """This worker's part of the numbers 0 to count - 1, for example of validation samples. Use it inside of
        `repeat`."""
        return range(self.rank, count, self.num_workers)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: the first worker writes the file, whole or not at all. Every worker must call this.
        Raises UserError if the file cannot be written."""
        self._content.synchronize()
        if self._phase == READING and self._member and self._member.journal.between_epochs:
            # The epoch's last step is made. Not in `repeat`, which may enter a new view: this worker, alone there,
            # would assign the next epoch to other members.
            return self._write(Path(path))
        self._store.repeat(lambda: self._write(Path(path)))

    def load(self, path: str | Path) -> bool:
        """Load a checkpoint, which only the first worker needs to have. Returns False if there is none. Every worker
        must call this, before `epochs`. A worker that joins an elastic job does not read the file. Raises UserError for
        a file that is no checkpoint, or one of another State."""
        if self._phase != BETWEEN or self._member or self._epoch:
            raise UserError("state.load comes before state.epochs")
        if self._store.is_alone:
            return True
        content = self._of_worker_0(read(Path(path)) if self.rank == 0 else b"")
        if not content:
            return False
        self._epoch = int(self._content.take(content, str(path))["epoch"])
        return True

    def digest(self) -> str:
        """sha256 of the model's weights and buffers: equal digests mean bit-identical models."""
        return self._content.digest()

    # -- for the loader -------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        return self._content["optimizer"]

    @property
    def is_elastic(self) -> bool:
        return self._store.elastic

    @property
    def member(self) -> int:
        return self._store.member

    @property
    def view_number(self) -> int:
        return self._member.view.number if self._member else 1

    @property
    def workers_at_start(self) -> int:
        environment = env.read()
        return environment.num_workers if self._store.is_distributed else 1

    @property
    def steps_together(self) -> bool:
        return not self._store.is_distributed or self._store.kvstore_type.steps_together

    @property
    def steps_alone(self) -> bool:
        return self._store.kvstore_type.steps_alone

    def take_loader(self, loader: Loader) -> None:
        if self._loader:
            raise UserError(
                "this State has a dmltrain.loader already: read other samples, such as those for validation, with "
                "torch's DataLoader"
            )
        self._loader = loader

    @contextlib.contextmanager
    def reading(self) -> Iterator[Rounds]:
        """The rounds of the present epoch, once."""
        if self._phase != BEFORE:
            raise UserError("read dmltrain.loader once in each turn of `for epoch in state.epochs(...)`")
        self._phase = READING
        try:
            yield self._rounds or self._plain_rounds()
        finally:
            self.optimizer.weigh(1.0)
        self._phase = AFTER

    def _plain_rounds(self) -> Rounds:
        assert self._loader
        shared, seed = self._loader.shared, self._loader.seed
        part = shared.part(self._store.rank, seed, self._epoch)
        return PlainRounds(part, lambda step: sum(shared.step_sizes(step)), 0, shared.steps)

    def rate_factor(self, rounds: Rounds) -> float:
        """What learning rates are multiplied by in the present round."""
        return self._rates.factor(rounds.assignment) if self._rates else 1.0

    def add_seen(self, samples: int) -> None:
        """Count samples with which this worker has updated its batch-norm statistics."""
        self._seen += samples

    def settle(self) -> None:
        """At the end of an epoch: give all workers the mean of their batch-norm statistics, weighted by samples."""
        if self._statistics.present and self._store.is_distributed:
            self._store.repeat(lambda: self._statistics.merge(self._seen, self._store.all_reduce))
        self._seen = 0

    def unchanged_statistics(self) -> contextlib.AbstractContextManager[None]:
        """A context after which batch-norm statistics are as before it."""
        return self._statistics.kept()

    # -- the job --------------------------------------------------------------------------------------------------

    def _join_job(self, epochs: int) -> None:
        if not self._loader:
            raise UserError("an elastic job needs a dmltrain.loader, made before state.epochs")
        store, loader, asked = self._store, self._loader, script.in_use()
        assert isinstance(store.ops, ElasticOps)
        job = joining.job(store, self.workers_at_start, loader, epochs, self.model, asked)
        log = record.logger(store.member)
        self._rates = Rates(log, asked.batch)
        if asked.server_snapshot is not None:
            store.ops.steps.snapshots.every = asked.server_snapshot
        self._member = Member(store, log, job, env.audit() or None, self._give, self._take)
        self._member.has_statistics = self._statistics.present
        try:
            facts = {"state": ", ".join(sorted(self._content.names)), "kind of batch": asked.batch}
            facts["averages"] = str(asked.averaging(store.kvstore_type))
            balance = Balancing(job.batch, job.each) if asked.balance else EQUAL
            self._member.start(facts, joining.replayed, balance)
        except MembershipEnded as end:
            log.info("This worker's part has ended: %s", end)
            raise SystemExit(0) from None
        if not env.replay():
            notice.LeaveNotice(store.ops.views.leave, env.read().leave_seconds, log)
        if self._member.journal.joins:
            self._epoch = self._member.journal.epoch

    def _at_exit(self) -> None:
        """At the end of the script: report an error that nobody caught, and close the membership."""
        error = getattr(sys, "last_value", None)
        if error is not None and not isinstance(error, MembershipEnded):
            self._store.failed(error)
        if self._member:
            self._member.close()

    def _give(self, place: dict[str, Any]) -> bytes:
        with self.optimizer.shared():
            return self._content.give(place)

    def _take(self, content: bytes, step_only: bool) -> dict[str, Any]:
        self.optimizer.forget_round()
        if step_only:
            return self._content.take_step(content, "the state of the others")
        self._seen = 0
        return self._content.take(content, "the state of the others")

    def _check_together(self, method: str) -> None:
        if self._phase not in (AFTER, BETWEEN) or (self.is_elastic and not self._member):
            raise UserError(
                f"state.{method}: workers can do this together only after the loop over dmltrain.loader, where all of "
                "them come at the same time"
            )

    def _write(self, path: Path) -> None:
        """The first worker writes the file. After the loop over the loader the others wait for it."""
        if self.rank == 0:
            try:
                content = self._content.give({"epoch": self._epoch + (self._phase == AFTER)})
                whole_file.write(path, seal.sealed(content), confirm=self._store.confirm)
            except OSError as error:
                raise UserError(f"state.save: {path} cannot be written: {error.strerror}") from error
        if self._phase == AFTER:
            self._store.barrier()

    def _of_worker_0(self, content: bytes) -> bytes:
        """Worker 0's content, on all workers."""
        size = int(self._store.all_reduce("size of a checkpoint", np.array([float(len(content))]))[0])
        values: Array = np.frombuffer(content, np.uint8).copy() if content else np.zeros(size, np.uint8)
        if self._store.num_workers > 1 and size:
            self._store.broadcast(values, needed=self.rank != 0)
        return values.tobytes()


_states: list[State] = []  # at most one: the newest of this process


def newest() -> State:
    """Raises UserError if there is none."""
    if not _states:
        raise UserError("dmltrain.loader needs a state: make `state = dmltrain.State(model=..., optimizer=...)` first")
    return _states[-1]
