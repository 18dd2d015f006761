"""Scripts in which a parameter has no gradient in some steps: the optimizer leaves it alone then."""

import random

import torch
from torch import nn

from tests.backends.everyday.run import INPUTS, Run, case, draw, loss_of, mlp, started

STEPS = 6


class Blocks(nn.Module):
    """Residual blocks, of which a forward runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(INPUTS, INPUTS) for _ in range(4))
        self.last, self.chosen = nn.Linear(INPUTS, 1), [0, 1, 2, 3]
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.chosen:
            x = x + torch.tanh(self.blocks[number](x))
        return self.last(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


@case()
def blocks_that_are_skipped_at_random(run: Run) -> None:
    """Stochastic depth, drawn alike by all workers."""
    model = started(run, Blocks())
    optimizer, chance = run.distribute(model, adamw(model)), random.Random(1)
    for step in range(STEPS):
        model.chosen = [number for number in range(4) if chance.random() < 0.6]
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        run.note(*[block.weight.grad is None for block in model.blocks])
        optimizer.step()
        run.note(model)


@case()
def experts_that_a_router_chooses_for_each_worker(run: Run) -> None:
    """A worker's samples use some experts, others' use others, and in some steps nobody uses the last."""
    model = started(run, Blocks())
    optimizer = run.distribute(model, torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1))

    def of_worker(rank: int, step: int) -> torch.Tensor:
        model.chosen = [rank, 2 + (step % 3 == 1) * rank]
        return loss_of(run, model, step, rank)

    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(run.mean(of_worker, step))
        run.note(*[block.weight.grad is None for block in model.blocks])
        optimizer.step()
        run.note(model)


@case()
def an_auxiliary_head_that_ends(run: Run) -> None:
    """As in Inception: its loss counts in the first steps. Zeros that zero_grad leaves are a gradient, None is none."""
    auxiliary_head(run, set_to_none=True)
    auxiliary_head(run, set_to_none=False)


def auxiliary_head(run: Run, set_to_none: bool) -> None:
    trunk, main, aside = model = nn.ModuleList(mlp(run, each) for each in range(3))
    optimizer = run.distribute(model, adamw(model))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        loss = loss_of(run, lambda x: trunk(x) + main(x), step)
        run.backward(loss + 0.3 * loss_of(run, lambda x: trunk(x) * aside(x), step) if step < 3 else loss)
        optimizer.step()
        run.note(model)


@case()
def a_layer_that_nothing_uses(run: Run) -> None:
    model = started(run, Blocks())
    model.chosen = [0, 3]
    optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.5))
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        run.note(model, len(optimizer.state), model.blocks[1].weight.grad is None)


@case()
def a_step_before_the_scheduler(run: Run) -> None:
    """At the start of each epoch, against the scheduler's warning: there are no gradients then."""
    model = mlp(run)
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    for epoch in range(3):
        optimizer.zero_grad()
        optimizer.step()
        schedule.step()
        run.note(model)
        for step in range(2):
            optimizer.zero_grad()
            run.backward(loss_of(run, model, 2 * epoch + step))
            optimizer.step()
        run.note(model)


@case()
def a_loss_without_parameters_on_one_worker(run: Run) -> None:
    """It has no sample of the kind that counts in this step."""
    model = mlp(run)
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def of_worker(rank: int, step: int) -> torch.Tensor:
        has_none = rank == step % 2
        return torch.zeros((), requires_grad=True).double() * 1 if has_none else loss_of(run, model, step, rank)

    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(run.mean(of_worker, step))
        optimizer.step()
        run.note(model)


@case(refused="parameter blocks.1.bias has got a gradient after backward.., which the other workers do not have")
def a_gradient_of_one_worker_after_backward(run: Run) -> None:
    """Of its own; nobody has sent it."""
    model = started(run, Blocks())
    model.chosen = [0, 2, 3]
    optimizer = run.distribute(model, adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        if step:
            model.blocks[1].bias.grad = draw(run.rank or 0, INPUTS)
        optimizer.step()
        run.note(model)
