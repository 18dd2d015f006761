"""Gradients as DistributedDataParallel gives them: when the outermost backward() returns, the `grad` of each parameter
of a model is the mean over the workers.

A round is one exchange of all workers' gradients. It sends what each `grad` is at its end, also one that the script has
set, as DistributedDataParallel does with find_unused_parameters. A gradient that is None counts as zeros, and stays
None if it is None on all workers. Buckets are sent while backward computes, as soon as it has completed their
gradients. The rest is sent at its end, with one number for each parameter: whether it has a gradient, and the like.
These numbers tell all workers what else there is to do together: send gradients that came late, or those of parameters
that were frozen until now, or the rows of sparse gradients.

A gradient keeps its tensor, in which the mean replaces what it was, so a script may do with it what it likes. Buckets
have memory of their own. (Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704, section 3.2.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dmltrain.backends.torch.distributed import backward, owners, same
from dmltrain.backends.torch.distributed.buckets import Bucket, copy_gradient
from dmltrain.backends.torch.distributed.gradients.facts import Exchange, Facts, Place, SparseRows
from dmltrain.backends.torch.distributed.gradients.parameter_buckets import ParameterBuckets
from dmltrain.backends.torch.distributed.overlap import Mode
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore

State = tuple[torch.Tensor | None, int]  # a gradient, with its version


class Reducer:
    """The gradients of all parameters of one model, for as many optimizers as it has. Every worker must make one for
    the same model at the same place of its program."""

    def __init__(self, model: nn.Module, store: KVStore, average: bool) -> None:
        backward.install()
        backward.calls_since_last(self)
        self.number = backward.next_number()
        self.rounds = 0
        self.weight = 1.0  # of this worker's gradients in the next round; see DistributedOptimizer.weigh
        self.holds = False  # backward only adds to the gradients
        self.shares_buffers = False  # all workers get worker 0's at the end of each round
        self.is_released = False
        self._hooks: list[RemovableHandle] = []  # of the parameters; they keep this object
        self._store, prefix = store, store.new_name("gradients")
        self._prefix = prefix
        self._known = ParameterBuckets(store, prefix, average)
        self._rows = SparseRows(store, prefix)
        self._model = weakref.ref(model)
        self._steps = 0
        self._rounds_at_step = 0
        self._zeros = 0  # calls of zero_grad since the last round
        self._careful = False  # the workers may call backward() unequally often: see _watch_places
        self._after: list[State] = []  # all gradients after the last round
        self._unused: list[int] = []  # parameters without a gradient on any worker in the last round
        self._local: set[int] = set()  # parameters to whose gradients only this worker has added since the last round
        self._idle: set[Bucket] = set()  # whose parameters all workers have frozen
        self._failure: BaseException | None = None
        self.cover(model)

    # -- parameters -----------------------------------------------------------------------------------------------

    def covers(self, model: nn.Module) -> bool:
        """Whether it was made for this model."""
        return self._model() is model

    def cover(self, model: nn.Module) -> None:
        """Take in the parameters that have come to the model, and give all workers worker 0's weights and buffers."""
        fresh = [(name, each) for name, each in model.named_parameters() if _reducer_of(each) is None]
        trained = same.check(self._store, fresh, list(model.named_buffers()))
        same.share(self._store, [*model.parameters(), *model.buffers()])
        owners.claim(self, [parameter for _, parameter in fresh])
        numbers = [self._known.add(name, parameter) for name, parameter in fresh]
        for number in numbers:
            self._watch(number)
        self._known.lay_out(number for number, wanted in zip(numbers, trained, strict=True) if wanted)
        self._known.changes += 1
        self._exchange = Exchange(self._store, f"{self._prefix} facts", len(self._known.parameters))
        self._after = self._states()
        self._begin()

    def _watch(self, number: int) -> None:
        """Notice each time backward completes this parameter's gradient, also if it is trained only later."""
        parameter = self._known.parameters[number]
        if not parameter.is_floating_point():
            return
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # else torch takes no hook
        self._hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, number)))
        if self._is_lossy:
            self._hooks.append(parameter.register_hook(functools.partial(self._before, number)))
        parameter.requires_grad_(trained)

    @functools.cached_property
    def _is_lossy(self) -> bool:
        return self._store.wire_ratio(1 << 18) != 1.0

    def _states(self) -> list[State]:
        return [_state(parameter.grad) for parameter in self._known.parameters]

    # -- a round --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A new round, in which nothing has been sent yet."""
        self._open = False
        self._seen: set[int] = set()
        self._sent: dict[Bucket, Handle] = {}
        self._copied: dict[int, State] = {}  # gradients that were sent
        self._more: dict[int, torch.Tensor] = {}  # what gradients have more than what was sent
        self._left = {
            bucket: sum(parameter.requires_grad for parameter in bucket.parameters)
            for bucket in self._known.buckets
            if bucket not in self._idle
        }

    def _before(self, number: int, _: torch.Tensor) -> None:
        """Backward is about to add to this gradient. Only where sending is not exact."""
        if number not in self._seen and number not in self._local:
            self._refuse_old(number)

    def _refuse_old(self, number: int) -> None:
        gradient = self._known.parameters[number].grad
        if gradient is not None and bool(gradient.any()):
            raise UserError(
                f"parameter {self._known.names[number]} still has a gradient, which compression would send a second "
                "time and change: call optimizer.zero_grad() before backward(), put all backward passes of a step but "
                "the last under `with optimizer.accumulate():`, or use compression='none'"
            )

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        """Backward has added to this parameter's gradient."""
        if self.holds:
            self._local.add(number)
            return
        self._check_failure()
        if not self._open:
            self._open = True
            backward.reached(self)
        if number in self._seen:
            return
        self._seen.add(number)
        bucket = self._known.bucket(number)
        if bucket in self._left:
            self._left[bucket] -= 1
            is_last = len(self._sent) + 1 >= len(self._left)  # which is sent with the facts
            if self._left[bucket] == 0 and not is_last and bucket not in self._sent:
                self._send(bucket)

    def failed(self, error: BaseException) -> None:
        """A backward has ended with an error in the middle of a round."""
        if self._sent:
            self._failure = error
        else:
            self._begin()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise UserError(
                "an error in backward() or step() has ended an exchange of gradients, so this worker cannot go on with "
                f"the others: {self._failure}"
            )

    def _send(self, bucket: Bucket) -> None:
        if self._fill(bucket):
            self._sent[bucket] = bucket.send(self._store)

    def _fill(self, bucket: Bucket) -> bool:
        """Copy its gradients. Or drop it: its parameters get other buckets when the facts are known (_send_late)."""
        if not self._known.fits(bucket):
            self._known.drop(bucket)
            del self._left[bucket]
            return False
        with torch.no_grad():
            for number, view in zip(self._known.numbers(bucket), bucket.views, strict=True):
                gradient = self._known.parameters[number].grad
                self._copied[number] = _state(gradient)
                if self._is_lossy and number not in self._seen and number not in self._local:
                    self._refuse_old(number)
                copy_gradient(view, gradient)
            bucket.weigh(self.weight)
        return True

    def finish(self, at_step: bool = False) -> None:
        """Complete the round with all other workers. Every gradient is the mean then. `at_step`: this worker is not in
        backward()."""
        self._check_failure()
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._exchange_all(at_step)
        except BaseException as error:
            self._failure = error
            raise
        self._begin()

    def _exchange_all(self, at_step: bool) -> None:
        unsent = [bucket for bucket in self._known.buckets[::-1] if bucket in self._left and bucket not in self._sent]
        for bucket in unsent[:-1]:
            self._send(bucket)
        last = unsent[-1] if unsent and self._fill(unsent[-1]) else None
        before = self._states()
        self._send_facts(before, at_step, last)
        results = self._take([each for each, handle in self._sent.items() if handle.done])
        facts = self._exchange.receive()
        results |= self._take([each for each in self._sent if each not in results])
        self._watch_places(facts, at_step, before)
        self._complete(facts, results)
        self._unused = np.flatnonzero(facts.has == 0).tolist()
        self._idle = set(self._known.buckets) - set(self._known.of(np.flatnonzero(facts.wants).tolist()))
        self._local.clear()
        self._after = self._states()
        model = self._model()
        if self.shares_buffers and model is not None:
            same.share(self._store, model.buffers())
        self.rounds += 1

    def _send_facts(self, states: list[State], at_step: bool, last: Bucket | None) -> None:
        """With the `last` bucket, in one message if that is small."""
        exchange, numbers = self._exchange, []
        for number, (parameter, state) in enumerate(zip(self._known.parameters, states, strict=True)):
            gradient, facts = state[0], exchange.wants if parameter.requires_grad else 0
            if gradient is not None and self.weight != 0.0:
                facts += exchange.has if gradient.layout is torch.strided else exchange.has + exchange.sparse
            if self._has_changed(number, state):
                facts += exchange.again
            numbers.append(facts)
        calls = backward.calls_since_last(self) + (self._zeros << 8)
        self._zeros = 0
        place = Place(self._steps, self._known.changes, calls, at_step)
        handle = exchange.send(numbers, place, last)
        if last and handle:
            self._sent[last] = handle

    def _has_changed(self, number: int, state: State) -> bool:
        """Whether the gradient is another one than what was sent. Several may share memory, and its version."""
        sent, gradient = self._copied.get(number, state), state[0]
        if sent[0] is gradient and sent[1] == state[1]:
            return False
        view = self._known.view(number)
        now = torch.zeros_like(view)
        if self.weight != 0.0:
            copy_gradient(now, gradient)
            now.mul_(self.weight)
        if gradient is not None and torch.equal(now, view):
            return False
        self._more[number] = now.sub_(view)
        return True

    def _take(self, buckets: list[Bucket]) -> dict[Bucket, list[torch.Tensor]]:
        """The results of these buckets, which at once replace the gradients that are certain."""
        results = {}
        for bucket, views in self._known.results(self._sent, buckets):
            results[bucket] = views
            for view, parameter in zip(views, bucket.parameters, strict=True):
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                if not self._more or self._known.number_of[parameter] not in self._more:
                    _write(parameter, view)
        return results

    # -- workers that call backward() unequally often ---------------------------------------------------------------

    def _watch_places(self, facts: Facts, at_step: bool, before: list[State]) -> None:
        """A worker whose batch has no loss may leave out backward(), and joins the others' rounds in its step(). If
        there is a sign of that, each makes rounds until all are in their steps."""
        mixed = 0 < facts.at_step < self._store.num_workers
        if (mixed or (self._careful and not at_step)) and self.rounds > self._rounds_at_step:
            self._check_goes_on(before, 0 if at_step else 1)
        self._careful = mixed or (facts.at_step == 0 and (self._careful or not facts.even))

    def _check_goes_on(self, before: list[State], most: int) -> None:
        """Raise UserError unless backward has only added to what the last round left, and at `most` so often: else the
        workers' rounds may be those of different batches."""
        for number, (gradient, version) in enumerate(before):
            left, its_version = self._after[number]
            goes_on = gradient is left and its_version <= version <= its_version + most
            if number not in self._local and left is not None and not goes_on:
                raise UserError(
                    "the workers have called backward() unequally often, and the gradient of "
                    f"{self._known.names[number]} has changed since: let all workers call zero_grad(), backward() and "
                    "step() equally often, or call optimizer.reduce_gradients() on all where some have left out "
                    "backward()"
                )

    # -- what comes after the facts are known ---------------------------------------------------------------------

    def _complete(self, facts: Facts, results: dict[Bucket, list[torch.Tensor]]) -> None:
        self._place_all(facts, results)
        changed = np.flatnonzero(facts.again).tolist()
        if changed:
            self._send_changes(changed, facts, results)
        self._send_late(facts)
        if self.weight == 0.0:  # there may be gradients of samples that do not count
            for number in np.flatnonzero(facts.has == 0):
                self._known.parameters[number].grad = None

    def _place_all(self, facts: Facts, results: dict[Bucket, list[torch.Tensor]]) -> None:
        """What `_take` left: gradients that only others have, and sparse ones. Not those that `_send_changes` sets."""
        for bucket, views in results.items():
            for number, values in zip(self._known.numbers(bucket), views, strict=True):
                gradient = self._known.parameters[number].grad
                dense = gradient is not None and gradient.layout is torch.strided
                if facts.has[number] and not facts.again[number] and (facts.is_sparse(number) or not dense):
                    self._set(number, values, facts)

    def _set(self, number: int, values: torch.Tensor, facts: Facts) -> None:
        parameter = self._known.parameters[number]
        if facts.is_sparse(number):
            parameter.grad = self._rows.gradient(parameter, values, self.weight != 0.0)
        else:
            _write(parameter, values)

    def _send_late(self, facts: Facts) -> None:
        """Send gradients of parameters that all workers had taken for frozen, or whose types have changed."""
        late = [each for each in np.flatnonzero(facts.has).tolist() if self._known.bucket(each) not in self._left]
        self._known.lay_out(each for each in late if self._known.bucket(each) is None)
        buckets = self._known.of(late)
        for bucket in buckets:
            self._send(bucket)
        self._place_all(facts, self._take(buckets))

    def _send_changes(self, numbers: list[int], facts: Facts, results: dict[Bucket, list[torch.Tensor]]) -> None:
        """Some gradients have changed after they were sent: a parameter was reached twice by one backward (reentrant
        checkpoints), or a hook of the script has changed its gradient. Send what they have more."""
        totals = {number: self._known.part(number, results).clone() for number in numbers}
        buckets = self._known.of(numbers)
        for bucket in buckets:
            bucket.gradients.zero_()
        for number, more in self._more.items():
            self._known.view(number).copy_(more)
        for bucket in buckets:
            self._sent[bucket] = bucket.send(self._store)
        found = dict(self._known.results(self._sent, buckets))
        for number, total in totals.items():
            if facts.has[number]:
                self._set(number, total.add_(self._known.part(number, found)), facts)

    # -- steps ----------------------------------------------------------------------------------------------------

    def ensure_round(self, before: int, always: bool = False) -> None:
        """Make a round with the others, unless there was one since the first `before` and nothing was added since."""
        self._check_failure()
        if always or self.rounds == before or self._local or self._careful:
            self.finish(at_step=True)
        while self._careful:
            self.finish(at_step=True)

    def zeroed(self) -> None:
        """An optimizer's zero_grad was called."""
        self._zeros += 1

    def release(self) -> None:
        """See owners.Owner."""
        self.is_released = True
        for hook in self._hooks:
            hook.remove()
        owners.disown(self)

    def check_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """An optimizer makes its step with these. Raises UserError for gradients that no round has had. A script may
        replace the mean by what it has made of it, but not by a gradient that only this worker has."""
        for number in self._unused:
            if self._known.parameters[number].grad is not None:
                raise UserError(
                    f"parameter {self._known.names[number]} has got a gradient after backward(), which the other "
                    "workers do not have: set gradients before the backward() of the step, or call "
                    "optimizer.reduce_gradients() after zero_grad() and all other gradients"
                )
        if replaced := self.replaced(parameters):
            norms = [0.0] * len(self._known.parameters)
            for number in replaced:
                norms[number] = _norm(self._known.parameters[number])
            same.check_norms(self._store, self._known.names, norms)
        self._steps += 1
        self._rounds_at_step = self.rounds

    def replaced(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Those whose `grad` is another object than the last round left."""
        numbers = [
            (self._known.number_of.get(parameter, -1), parameter.grad)
            for parameter in parameters
            if parameter.grad is not None
        ]
        return [number for number, gradient in numbers if number >= 0 and gradient is not self._after[number][0]]


def _write(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace what the parameter's gradient is, in its own tensor if that may be written."""
    gradient = parameter.grad
    if gradient is None or gradient.requires_grad or 0 in gradient.stride():
        parameter.grad = torch.empty_like(parameter).copy_(value)
    else:
        gradient.copy_(value)


def _state(gradient: torch.Tensor | None) -> State:
    return gradient, -1 if gradient is None else gradient._version


def _norm(parameter: nn.Parameter) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.detach().to_dense().double().norm())


def _reducer_of(parameter: nn.Parameter) -> Reducer | None:
    owner = owners.owner_of(parameter)
    return owner if isinstance(owner, Reducer) else None


def reducers_of(model: nn.Module, store: KVStore, mode: Mode) -> list[Reducer]:
    """The reducers of the model's parameters, which are made, or told of what is new in the model."""
    own = [each for each in _known(model.parameters()) if each.covers(model)]
    if own:
        own[0].cover(model)
    elif any(_reducer_of(parameter) is None for parameter in model.parameters()):
        Reducer(model, store, mode.average)
    found = _known(model.parameters())
    for each in found:
        each.shares_buffers |= mode.broadcast_buffers
    return found


def _known(parameters: Iterable[nn.Parameter]) -> list[Reducer]:
    found = {reducer for parameter in parameters if (reducer := _reducer_of(parameter)) is not None}
    return sorted(found, key=lambda each: each.number)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the optimizer has parameters that are not the model's."""
    own = set(model.parameters())
    found = [each for group in optimizer.param_groups for each in group["params"] if each not in own]
    missing = sum(_reducer_of(each) is None for each in found)  # the others were the model's
    if missing:
        raise UserError(
            f"the optimizer has {missing} parameters that are not the model's: "
            "call dmltrain.distribute with the model that the optimizer was made for"
        )
