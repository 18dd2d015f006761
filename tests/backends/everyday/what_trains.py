"""Scripts that change what trains: frozen and unfrozen layers, later groups, another optimizer, other layers."""

import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.backends.everyday.run import HIDDEN, INPUTS, Pausing, Run, case, draw, loss_of, mlp, started


def steps(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        run.note(model)


def deep(run: Run) -> nn.Sequential:
    layers = [nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), Pausing(run)]
    return started(run, nn.Sequential(*layers, nn.Linear(HIDDEN, 1)).double())


@case()
def layers_that_join_one_after_another(run: Run) -> None:
    """ULMFiT: from the last layer to the first, each in a group with a smaller rate."""
    model = deep(run)
    model.requires_grad_(False)
    model[5].requires_grad_(True)
    optimizer = run.distribute(model, torch.optim.SGD(model[5].parameters(), lr=0.1, momentum=0.9))
    steps(run, model, optimizer, range(2))
    for number, rate in ((2, 0.05), (0, 0.02)):
        model[number].requires_grad_(True)
        optimizer.add_param_group({"params": model[number].parameters(), "lr": rate})
        steps(run, model, optimizer, range(2 * number, 2 * number + 2))


@case()
def layers_that_are_frozen_in_turn(run: Run) -> None:
    """All are in the optimizer, and each step trains one of them, then again all. Adam with weight decay."""
    model = deep(run)
    optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.1))
    for step in range(6):
        for number in (0, 2, 5):
            model[number].requires_grad_(number in ((0,), (2,), (5,), (0, 2, 5))[step % 4])
        steps(run, model, optimizer, range(step, step + 1))


@case()
def toggled_optimizers(run: Run) -> None:
    """Before each half of a step only its own parameters need gradients."""
    model = deep(run)
    halves = [model[0], nn.ModuleList([model[2], model[5]])]
    optimizers = [run.distribute(model, torch.optim.Adam(half.parameters(), lr=0.02)) for half in halves]
    for step in range(4):
        for half, other, optimizer in zip(halves, halves[::-1], optimizers, strict=True):
            half.requires_grad_(True)
            other.requires_grad_(False)
            steps(run, model, optimizer, range(step, step + 1))


@case()
def from_adam_to_sgd(run: Run) -> None:
    """SWATS: the second optimizer begins where the first ends."""
    model = deep(run)
    steps(run, model, run.distribute(model, torch.optim.Adam(model.parameters(), lr=0.02)), range(3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    steps(run, model, run.distribute(model, sgd), range(3, 6))


@case()
def a_new_head(run: Run) -> None:
    """Its first weights differ between the workers, as all do."""
    model = deep(run)
    steps(run, model, run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)), range(2))
    model[5] = started(run, nn.Linear(HIDDEN, 1).double(), 7)
    parameters = [{"params": model[5].parameters(), "lr": 0.1}, {"params": model[:5].parameters(), "lr": 0.01}]
    steps(run, model, run.distribute(model, torch.optim.SGD(parameters, momentum=0.9)), range(2, 5))


class LowRank(nn.Module):
    """A weight plus the product of two small factors."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a, self.b = nn.Parameter(weight.new_zeros(rows, 2)), nn.Parameter(weight.new_zeros(2, columns))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


@case()
def low_rank_adapters(run: Run) -> None:
    """LoRA: after a training of all weights these are frozen, and factors beside them train; then they are merged."""
    model = deep(run)
    steps(run, model, run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)), range(2))
    model.requires_grad_(False)
    for number in (0, 2):
        adapter = started(run, LowRank(model[number].weight), 11 + number)
        parametrize.register_parametrization(model[number], "weight", adapter)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(wanted) == 4
    steps(run, model, run.distribute(model, torch.optim.AdamW(wanted, lr=0.05, weight_decay=0.1)), range(2, 5))
    for number in (0, 2):
        parametrize.remove_parametrizations(model[number], "weight")
    run.note(model, model[2](draw(0, 1, HIDDEN)))


@case()
def parts_with_an_optimizer_each(run: Run) -> None:
    """And a third one for all of the model at the end."""
    model = deep(run)
    first = run.distribute(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    others = run.distribute(model, torch.optim.Adagrad(model[2:].parameters(), lr=0.05))
    for step in range(3):
        first.zero_grad()
        others.zero_grad()
        run.backward(loss_of(run, model, step))
        first.step()
        others.step()
        run.note(model)
    steps(run, model, run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05)), range(3, 5))


@case()
def a_model_within_another(run: Run) -> None:
    """A trained trunk goes on in a larger model."""
    trunk = mlp(run)
    steps(run, trunk, run.distribute(trunk, torch.optim.SGD(trunk.parameters(), lr=0.1)), range(2))
    model = nn.Sequential(trunk, started(run, nn.Linear(1, 1).double(), 5))
    steps(run, model, run.distribute(model, torch.optim.Adam(model.parameters(), lr=0.02)), range(2, 5))


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
