"""Scripts that change what trains: frozen and unfrozen layers, later groups, another optimizer, other layers."""

import torch
from torch import nn

from tests.backends.everyday.run import Run, case, loss_of, mlp


def steps(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        run.note(model)


@case(refused="replaced by a later dmltrain.distribute")
def an_optimizer_that_was_replaced(run: Run) -> None:
    """With steps that are early, the first one's hooks are gone."""
    model = mlp(run)
    before = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), step_early=True)
    steps(run, model, before, range(2))
    after = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), step_early=True)
    steps(run, model, after, range(2, 4))
    before.step()


@case(refused="frozen at dmltrain.distribute has a gradient now")
def a_layer_that_is_unfrozen_with_early_steps(run: Run) -> None:
    model = mlp(run)
    model[0].requires_grad_(False)
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), step_early=True)
    steps(run, model, optimizer, range(2))
    model.requires_grad_(True)
    steps(run, model, optimizer, range(2, 4))
