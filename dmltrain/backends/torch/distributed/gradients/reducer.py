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
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.gradients.facts import FactsExchange, ProgramPlace, RoundFacts, SparseRows
from dmltrain.backends.torch.distributed.gradients.parameter_buckets import ParameterBuckets
from dmltrain.backends.torch.distributed.gradients.round import (
    BetweenRounds,
    GradientVersion,
    Results,
    SentGradients,
    write,
)
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.choices import ExchangeChoices


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
        self._zero_grads = 0  # calls of zero_grad since the last round
        self._between = BetweenRounds(self._known, store.num_workers)
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
        self._between.note()
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

    # -- a round --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A new round, in which nothing has been sent yet."""
        self._open = False
        self._sent = SentGradients(self._store, self._known, self._frozen, self._local, self._is_lossy)

    def _before(self, number: int, _: torch.Tensor) -> None:
        """Backward is about to add to this gradient. This hook is set only with lossy compression."""
        self._sent.check_new(number)

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        """Backward has added to this parameter's gradient."""
        if self.holds:
            self._local.add(number)
            return
        self._check_failure()
        if not self._open:
            self._open = True
            backward.reached(self)
        self._sent.arrived(number, self.weight)

    def failed(self, error: BaseException) -> None:
        """A backward has ended with an error in the middle of a round."""
        if self._sent.begun:
            self._failure = error
        else:
            self._begin()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise UserError(
                "an error in backward() or step() has ended an exchange of gradients, so this worker cannot go on with "
                f"the others: {self._failure}"
            )

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
        last = self._sent.send_all(self.weight)
        before = self._between.states()
        self._send_facts(before, at_step, last)
        self._sent.send_rest()
        # What has arrived already is taken while the facts are under way.
        results = self._sent.take([bucket for bucket, handle in self._sent.handles.items() if handle.done])
        facts = self._exchange.receive()
        results |= self._sent.take([bucket for bucket in self._sent.handles if bucket not in results])
        self._between.watch(facts, at_step, before, self.rounds, self._local)
        self._complete(facts, results)
        self._unused = np.flatnonzero(facts.has == 0).tolist()
        self._frozen = set(self._known.buckets) - set(self._known.of(np.flatnonzero(facts.trained).tolist()))
        self._local.clear()
        self._between.note()
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
            if self._sent.has_changed(number, state, self.weight):
                facts += exchange.changed
            numbers.append(facts)
        # two counts in one number: workers only compare it, and never take it apart
        calls = backward.calls_since_last(self) + (self._zero_grads << 8)
        self._zero_grads = 0
        place = ProgramPlace(self._steps, self._known.changes, calls, at_step)
        handle = exchange.send(numbers, place, last)
        if last and handle:
            self._sent.handles[last] = handle

    # -- what comes after the facts are known ---------------------------------------------------------------------

    def _complete(self, facts: RoundFacts, results: Results) -> None:
        self._place_all(facts, results)
        changed = np.flatnonzero(facts.changed).tolist()
        if changed:
            self._send_changes(changed, facts, results)
        self._send_late(facts)
        if self.weight == 0.0:  # this worker's gradients do not count: remove those that no other worker has
            for number in np.flatnonzero(facts.has == 0):
                self._known.parameters[number].grad = None

    def _place_all(self, facts: RoundFacts, results: Results) -> None:
        """Set the gradients that are not set yet: those that only other workers have, and sparse ones. `_send_changes`
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
            write([(parameter, values)])

    def _send_late(self, facts: RoundFacts) -> None:
        """Send gradients of parameters that were frozen on all workers until now, or whose types have changed."""
        of_any = np.flatnonzero(facts.has).tolist()
        late = [number for number in of_any if not self._sent.has(self._known.bucket(number))]
        self._known.lay_out(number for number in late if self._known.bucket(number) is None)
        buckets = self._known.of(late)
        for bucket in buckets:
            self._sent.send(bucket, self.weight)
        self._sent.send_rest()
        self._place_all(facts, self._sent.take(buckets))

    def _send_changes(self, numbers: list[int], facts: RoundFacts, results: Results) -> None:
        """Some gradients have changed after they were sent: one backward reached the parameter twice (reentrant
        checkpoints), or a hook of the script changed the gradient. Send the differences, and add their sum."""
        totals = {number: self._known.part(number, results).clone() for number in numbers}
        results_of_changes = self._sent.send_changes(self._known.of(numbers))
        for number, total in totals.items():
            if facts.has[number]:
                self._set(number, total.add_(self._known.part(number, results_of_changes)), facts)

    # -- steps ----------------------------------------------------------------------------------------------------

    def ensure_round(self, before: int, always: bool = False) -> None:
        """Make a round with the others, unless one was made after round number `before` and no gradient was added
        since."""
        self._check_failure()
        if always or self.rounds == before or self._local or self._between.is_careful:
            self.finish(at_step=True)
        while self._between.is_careful:
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
        self._between.stepped(self.rounds)

    def replaced(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """The numbers of the parameters whose `grad` is not the tensor that the last round left."""
        return self._between.replaced(parameters)


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
