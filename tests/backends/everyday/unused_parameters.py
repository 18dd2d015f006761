"""Scripts in which a parameter has no gradient in some steps: the optimizer leaves it alone then."""

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
