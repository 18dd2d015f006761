"""Scripts that change gradients between backward() and step(), in ways that a tensor's version may not show."""

import torch
from torch import nn

from tests.backends.everyday.run import HIDDEN, Run, batch, case, loss_of, mlp

STEPS = 4


def sgd(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def changed(run: Run, change, hidden: int = HIDDEN, **options: object) -> None:
    """A training whose gradients `change(model, step)` changes before each step."""
    model = mlp(run, hidden=hidden)
    optimizer = run.distribute(model, sgd(model), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        change(model, step)
        run.pause()
        optimizer.step()
        run.note(model)


@case(races=True)
def one_element_through_numpy(run: Run) -> None:
    def without_first(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad.numpy().flat[0] = 0.0

    changed(run, without_first)


@case(races=True)
def gradients_that_the_script_keeps(run: Run) -> None:
    """They stay the same tensors, and the script changes them through its own list."""
    model = mlp(run)
    optimizer, kept = run.distribute(model, sgd(model)), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        run.backward(loss_of(run, model, step))
        kept = kept or [parameter.grad for parameter in model.parameters()]
        for gradient in kept:
            gradient[gradient.abs() < 0.02] = 0.0
        optimizer.step()
        run.note(model, *kept)


# -- where steps are early, what can be noticed is refused -------------------------------------------------------------

EARLY = {"step_early": True}


@case(refused="changed between backward.. and step", races=True)
def early_in_place(run: Run) -> None:
    changed(run, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), **EARLY)


@case(refused="replaced or set to None between backward.. and step", races=True)
def early_replaced(run: Run) -> None:
    def masked(model: nn.Module, step: int) -> None:
        model[0].weight.grad = model[0].weight.grad * (batch(0)[:HIDDEN] > 0)

    changed(run, masked, **EARLY)


@case(refused="replaced or set to None between backward.. and step", races=True)
def early_set_to_none(run: Run) -> None:
    def dropped(model: nn.Module, step: int) -> None:
        model[0].bias.grad = None

    changed(run, dropped, **EARLY)


@case(races=True)
def early_clipped_after_reduce_gradients(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model), **EARLY)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        if run.rank is not None:
            optimizer.reduce_gradients()
        run.note(nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
        optimizer.step()
        run.note(model)
