"""Gradients as DistributedDataParallel gives them: when the outermost backward() returns, the `grad` of each parameter
of a model is the mean over the workers.

A round is one exchange of all workers' gradients. It sends the value that each `grad` has at the round's end, also if
the script has set it, as DistributedDataParallel does with find_unused_parameters. A gradient that is None counts as
zeros, and stays None if it is None on all workers. Each bucket is sent while backward computes, as soon as its
gradients are complete. The rest is sent at the end of backward, with one number of facts for each parameter (facts.py).
From these facts all workers learn what else they must do together: send gradients that came late, gradients of
parameters that were frozen until now, or the rows of sparse gradients.

A gradient keeps its tensor; the mean is written into it. So a script may use and change gradients freely. Buckets have
memory of their own. (Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704, section 3.2.)
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
from dmltrain.backends.torch.distributed.gradients.facts import FactsExchange, ProgramPlace, RoundFacts, SparseRows
from dmltrain.backends.torch.distributed.gradients.parameter_buckets import ParameterBuckets
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore
from dmltrain.kvstore.choices import ExchangeChoices

GradientVersion = tuple[torch.Tensor | None, int]  # a gradient, with its version


class Reducer:
    """Exchanges the gradients of all parameters of one model, which may have several optimizers. Every worker must
    create one for the same model at the same place of its program."""

    def __init__(self, model: nn.Module, store: KVStore, average: bool) -> None:
        backward.install()
        backward.calls_since_last(self)
        self.number = backward.next_number()
        self.rounds = 0
        self.weight = 1.0  # of this worker's gradients in the next round; see DistributedOptimizer.weigh
        self.holds = False  # backward only adds to the gradients, and nothing is sent
        self.shares_buffers = False  # all workers get worker 0's at the end of each round
        self.is_released = False
        self._hooks: list[RemovableHandle] = []  # of the parameters; the hooks keep this object alive
        self._store, prefix = store, store.new_name("gradients")
        self._prefix = prefix
        self._known = ParameterBuckets(store, prefix, average)
        self._rows = SparseRows(store, prefix)
        self._model = weakref.ref(model)
        self._steps = 0
        self._rounds_at_step = 0
        self._zero_grads = 0  # calls of zero_grad since the last round
        self._careful = False  # the workers may call backward() unequally often: see _watch_places
        self._after_round: list[GradientVersion] = []  # all gradients after the last round
        self._unused: list[int] = []  # parameters without a gradient on any worker in the last round
        self._local: set[int] = set()  # parameters to whose gradients only this worker has added since the last round
        self._frozen: set[Bucket] = set()  # whose parameters all workers have frozen
        self._failure: BaseException | None = None
        self.cover(model)

    # -- parameters -----------------------------------------------------------------------------------------------

    def covers(self, model: nn.Module) -> bool:
        """Whether it was made for this model."""
        return self._model() is model

    def cover(self, model: nn.Module) -> None:
        """Add the parameters that are new in the model, and give all workers worker 0's weights and buffers."""
        fresh = [(name, parameter) for name, parameter in model.named_parameters() if _reducer_of(parameter) is None]
        trained = same.check(self._store, fresh, list(model.named_buffers()))
        same.share(self._store, [*model.parameters(), *model.buffers()])
        owners.claim(self, [parameter for _, parameter in fresh])
        numbers = [self._known.add(name, parameter) for name, parameter in fresh]
        for number in numbers:
            self._watch(number)
        self._known.lay_out(number for number, wanted in zip(numbers, trained, strict=True) if wanted)
        self._known.changes += 1
        self._exchange = FactsExchange(self._store, f"{self._prefix} facts", len(self._known.parameters))
        self._after_round = self._states()
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

    def _states(self) -> list[GradientVersion]:
        return [_state(parameter.grad) for parameter in self._known.parameters]

    # -- a round --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A new round, in which nothing has been sent yet."""
        self._open = False
        self._seen: set[int] = set()
        self._sent: dict[Bucket, Handle] = {}
        self._sent_versions: dict[int, GradientVersion] = {}  # gradients that were sent
        self._unsent: dict[int, torch.Tensor] = {}  # gradient minus what was sent, where it has changed since
        self._missing = {
            bucket: sum(parameter.requires_grad for parameter in bucket.parameters)
            for bucket in self._known.buckets
            if bucket not in self._frozen
        }

    def _before(self, number: int, _: torch.Tensor) -> None:
        """Backward is about to add to this gradient. This hook is set only with lossy compression."""
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
        if bucket in self._missing:
            self._missing[bucket] -= 1
            is_last = len(self._sent) + 1 >= len(self._missing)  # the last bucket is sent together with the facts
            if self._missing[bucket] == 0 and not is_last and bucket not in self._sent:
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
        """Copy the parameters' gradients into the bucket, and return True. If the parameters have changed so that they
        do not fit the bucket, drop it and return False: they get other buckets after the facts (_send_late)."""
        if not self._known.fits(bucket):
            self._known.drop(bucket)
            del self._missing[bucket]
            return False
        with torch.no_grad():
            for number, view in zip(self._known.numbers(bucket), bucket.views, strict=True):
                gradient = self._known.parameters[number].grad
                self._sent_versions[number] = _state(gradient)
                if self._is_lossy and number not in self._seen and number not in self._local:
                    self._refuse_old(number)
                copy_gradient(view, gradient)
            bucket.weigh(self.weight)
        return True

    def finish(self, at_step: bool = False) -> None:
        """Complete the round with all other workers; every gradient is then the mean. `at_step`: this worker calls it
        from step() or reduce_gradients(), not at the end of backward()."""
        self._check_failure()
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._exchange_all(at_step)
        except BaseException as error:
            self._failure = error
            raise
        self._begin()

    def _exchange_all(self, at_step: bool) -> None:
        unsent = [
            bucket for bucket in self._known.buckets[::-1] if bucket in self._missing and bucket not in self._sent
        ]
        for bucket in unsent[:-1]:
            self._send(bucket)
        last = unsent[-1] if unsent and self._fill(unsent[-1]) else None
        before = self._states()
        self._send_facts(before, at_step, last)
        # What has arrived already is taken while the facts are under way.
        results = self._take([bucket for bucket, handle in self._sent.items() if handle.done])
        facts = self._exchange.receive()
        results |= self._take([bucket for bucket in self._sent if bucket not in results])
        self._watch_places(facts, at_step, before)
        self._complete(facts, results)
        self._unused = np.flatnonzero(facts.has == 0).tolist()
        self._frozen = set(self._known.buckets) - set(self._known.of(np.flatnonzero(facts.trained).tolist()))
        self._local.clear()
        self._after_round = self._states()
        model = self._model()
        if self.shares_buffers and model is not None:
            same.share(self._store, model.buffers())
        self.rounds += 1

    def _send_facts(self, states: list[GradientVersion], at_step: bool, last: Bucket | None) -> None:
        """Send the facts, together with the `last` bucket."""
        exchange, numbers = self._exchange, []
        for number, (parameter, state) in enumerate(zip(self._known.parameters, states, strict=True)):
            gradient, facts = state[0], exchange.trained if parameter.requires_grad else 0
            if gradient is not None and self.weight != 0.0:
                facts += exchange.has if gradient.layout is torch.strided else exchange.has + exchange.sparse
            if self._has_changed(number, state):
                facts += exchange.changed
            numbers.append(facts)
        # two counts in one number: workers only compare it, and never take it apart
        calls = backward.calls_since_last(self) + (self._zero_grads << 8)
        self._zero_grads = 0
        place = ProgramPlace(self._steps, self._known.changes, calls, at_step)
        handle = exchange.send(numbers, place, last)
        if last and handle:
            self._sent[last] = handle

    def _has_changed(self, number: int, state: GradientVersion) -> bool:
        """Whether the gradient differs from what was sent. The version alone does not tell: several gradients may be
        views of the same memory, which has one version."""
        sent, gradient = self._sent_versions.get(number, state), state[0]
        if sent[0] is gradient and sent[1] == state[1]:
            return False
        view = self._known.view(number)
        now = torch.zeros_like(view)
        if self.weight != 0.0:
            copy_gradient(now, gradient)
            now.mul_(self.weight)
        if gradient is not None and torch.equal(now, view):
            return False
        self._unsent[number] = now.sub_(view)
        return True

    def _take(self, buckets: list[Bucket]) -> dict[Bucket, list[torch.Tensor]]:
        """Wait for the results of these buckets. A result replaces its gradient at once where no fact can change that:
        the gradient is dense, and has not changed since it was sent."""
        results = {}
        for bucket, views in self._known.results(self._sent, buckets):
            results[bucket] = views
            for view, parameter in zip(views, bucket.parameters, strict=True):
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                if not self._unsent or self._known.number_of[parameter] not in self._unsent:
                    _write(parameter, view)
        return results

    # -- workers that call backward() unequally often ---------------------------------------------------------------

    def _watch_places(self, facts: RoundFacts, at_step: bool, before: list[GradientVersion]) -> None:
        """A worker whose batch has no loss may skip backward(); it then joins the others' rounds in its step(). If the
        facts point to that, each worker makes rounds until all workers are in their step()."""
        mixed = 0 < facts.at_step < self._store.num_workers
        if (mixed or (self._careful and not at_step)) and self.rounds > self._rounds_at_step:
            self._check_goes_on(before, 0 if at_step else 1)
        self._careful = mixed or (facts.at_step == 0 and (self._careful or not facts.even))

    def _check_goes_on(self, before: list[GradientVersion], most: int) -> None:
        """Raise UserError unless backward has only added to what the last round left, at most `most` times. Otherwise
        the workers may be exchanging gradients of different batches."""
        for number, (gradient, version) in enumerate(before):
            left, its_version = self._after_round[number]
            goes_on = gradient is left and its_version <= version <= its_version + most
            if number not in self._local and left is not None and not goes_on:
                raise UserError(
                    "the workers have called backward() unequally often, and the gradient of "
                    f"{self._known.names[number]} has changed since: let all workers call zero_grad(), backward() and "
                    "step() equally often, or call optimizer.reduce_gradients() on all where some have left out "
                    "backward()"
                )

    # -- what comes after the facts are known ---------------------------------------------------------------------

    def _complete(self, facts: RoundFacts, results: dict[Bucket, list[torch.Tensor]]) -> None:
        self._place_all(facts, results)
        changed = np.flatnonzero(facts.changed).tolist()
        if changed:
            self._send_changes(changed, facts, results)
        self._send_late(facts)
        if self.weight == 0.0:  # this worker's gradients do not count: remove those that no other worker has
            for number in np.flatnonzero(facts.has == 0):
                self._known.parameters[number].grad = None

    def _place_all(self, facts: RoundFacts, results: dict[Bucket, list[torch.Tensor]]) -> None:
        """Set the gradients that `_take` has not: those that only other workers have, and sparse ones. `_send_changes`
        sets those that have changed after they were sent."""
        for bucket, views in results.items():
            for number, values in zip(self._known.numbers(bucket), views, strict=True):
                gradient = self._known.parameters[number].grad
                dense = gradient is not None and gradient.layout is torch.strided
                if facts.has[number] and not facts.changed[number] and (facts.is_sparse(number) or not dense):
                    self._set(number, values, facts)

    def _set(self, number: int, values: torch.Tensor, facts: RoundFacts) -> None:
        parameter = self._known.parameters[number]
        if facts.is_sparse(number):
            parameter.grad = self._rows.gradient(parameter, values, self.weight != 0.0)
        else:
            _write(parameter, values)

    def _send_late(self, facts: RoundFacts) -> None:
        """Send gradients of parameters that were frozen on all workers until now, or whose types have changed."""
        late = [
            number for number in np.flatnonzero(facts.has).tolist() if self._known.bucket(number) not in self._missing
        ]
        self._known.lay_out(number for number in late if self._known.bucket(number) is None)
        buckets = self._known.of(late)
        for bucket in buckets:
            self._send(bucket)
        self._place_all(facts, self._take(buckets))

    def _send_changes(self, numbers: list[int], facts: RoundFacts, results: dict[Bucket, list[torch.Tensor]]) -> None:
        """Some gradients have changed after they were sent: one backward reached the parameter twice (reentrant
        checkpoints), or a hook of the script changed the gradient. Send the differences, and add their sum."""
        totals = {number: self._known.part(number, results).clone() for number in numbers}
        buckets = self._known.of(numbers)
        for bucket in buckets:
            bucket.gradients.zero_()
        for number, more in self._unsent.items():
            self._known.view(number).copy_(more)
        for bucket in buckets:
            self._sent[bucket] = bucket.send(self._store)
        results_of_changes = dict(self._known.results(self._sent, buckets))
        for number, total in totals.items():
            if facts.has[number]:
                self._set(number, total.add_(self._known.part(number, results_of_changes)), facts)

    # -- steps ----------------------------------------------------------------------------------------------------

    def ensure_round(self, before: int, always: bool = False) -> None:
        """Make a round with the others, unless one was made after round number `before` and no gradient was added
        since."""
        self._check_failure()
        if always or self.rounds == before or self._local or self._careful:
            self.finish(at_step=True)
        while self._careful:
            self.finish(at_step=True)

    def zeroed(self) -> None:
        """An optimizer's zero_grad was called."""
        self._zero_grads += 1

    def release(self) -> None:
        """See owners.Owner."""
        self.is_released = True
        for hook in self._hooks:
            hook.remove()
        owners.disown(self)

    def check_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """An optimizer is about to step with these parameters. Raises UserError for gradients that were in no round. A
        script may replace the mean by something computed from it, but not by a gradient that only this worker has."""
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
        """The numbers of the parameters whose `grad` is not the tensor that the last round left."""
        numbers = [
            (self._known.number_of.get(parameter, -1), parameter.grad)
            for parameter in parameters
            if parameter.grad is not None
        ]
        return [number for number, gradient in numbers if number >= 0 and gradient is not self._after_round[number][0]]


def _write(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the parameter's gradient to `value`, in the same tensor if that may be written."""
    gradient = parameter.grad
    if gradient is None or gradient.requires_grad or 0 in gradient.stride():
        parameter.grad = torch.empty_like(parameter).copy_(value)
    else:
        gradient.copy_(value)


def _state(gradient: torch.Tensor | None) -> GradientVersion:
    return gradient, -1 if gradient is None else gradient._version


def _norm(parameter: nn.Parameter) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.detach().to_dense().double().norm())


def _reducer_of(parameter: nn.Parameter) -> Reducer | None:
    owner = owners.owner_of(parameter)
    return owner if isinstance(owner, Reducer) else None


def reducers_of(model: nn.Module, store: KVStore, choices: ExchangeChoices) -> list[Reducer]:
    """The reducers of the model's parameters. Creates one for a new model, and adds what is new in a known one."""
    own = [reducer for reducer in _reducers_of(model.parameters()) if reducer.covers(model)]
    if own:
        own[0].cover(model)
    elif any(_reducer_of(parameter) is None for parameter in model.parameters()):
        Reducer(model, store, choices.average)
    reducers = _reducers_of(model.parameters())
    for reducer in reducers:
        reducer.shares_buffers |= choices.broadcast_buffers
    return reducers


def _reducers_of(parameters: Iterable[nn.Parameter]) -> list[Reducer]:
    reducers = {reducer for parameter in parameters if (reducer := _reducer_of(parameter)) is not None}
    return sorted(reducers, key=lambda reducer: reducer.number)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the optimizer has parameters that are not the model's."""
    own = set(model.parameters())
    foreign = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter not in own]
    missing = sum(_reducer_of(parameter) is None for parameter in foreign)  # the others were the model's
    if missing:
        raise UserError(
            f"the optimizer has {missing} parameters that are not the model's: "
            "call dmltrain.distribute with the model that the optimizer was made for"
        )
