"""Scripts whose tensors lie otherwise than their neighbours', on all workers or on some."""

import copy

import torch
from torch import nn

from tests.backends.everyday.run import (
    HIDDEN,
    INPUTS,
    Run,
    case,
    draw,
    loss_of,
    mlp,
    only_distributed,
    started,
    whole_numbers,
)

STEPS = 4


class Volumes(nn.Module):
    """Convolutions in three dimensions, over inputs that are made of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 4, 2), nn.Linear(4 * 8, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x[:, :, None] * draw(1, INPUTS, 9)).reshape(len(x), 2, 3, 3, 3)
        return self.last(torch.tanh(self.first(x)).flatten(1))


def trained(run: Run, model: nn.Module, change=lambda step: None, **options: object) -> None:
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
    for step in range(STEPS):
        change(step)
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        run.note(model)


@case(refused="parameter .* was .* with strides .* at distribute, and is ")
def a_memory_format_that_changes_with_early_steps(run: Run) -> None:
    model = started(run, Volumes())

    def change(step: int) -> None:
        if step == 2:
            model.to(memory_format=torch.channels_last_3d)

    trained(run, model, change, step_early=True)


@case()
def a_state_of_another_memory_format(run: Run) -> None:
    """Fused steps read weights and their states by place."""
    saved = None
    for seed, layout in enumerate((torch.contiguous_format, torch.channels_last_3d)):
        model = started(run, Volumes(), seed).to(memory_format=layout)
        fused = {} if run.rank is None else {"fused": True}
        optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), lr=0.05, **fused))
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for step in range(STEPS):
            optimizer.zero_grad()
            run.backward(loss_of(run, model, step))
            optimizer.step()
            run.note(model)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@case()
def weights_that_are_views(run: Run) -> None:
    """Transposed, every second column of another tensor, and one number for all."""
    model = mlp(run)
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    model[3].weight = nn.Parameter(torch.zeros(1, 2 * HIDDEN, dtype=torch.float64)[:, ::2])
    trained(run, started(run, model, 4))


class Buffered(nn.Module):
    """Buffers of several types, which each worker draws anew, as without a seed."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        own = draw(50 + rank, INPUTS)
        self.register_buffer("mask", own > 0)
        self.register_buffer("shifts", own.mul(100).to(torch.int8))
        self.register_buffer("order", own.argsort())
        self.register_buffer("phases", torch.complex(own, own * 2))
        self.register_buffer("coarse", own.bfloat16())
        self.register_buffer("count", torch.tensor(rank + 3))
        self.register_buffer("unused", torch.zeros(0, 3))
        self.register_buffer("own", own, persistent=False)
        self.layer = nn.Linear(INPUTS, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, self.order] * self.mask + self.shifts / 100 + self.phases.abs() * self.coarse + self.own
        return self.layer(x / self.count)


@case()
def buffers_of_all_types(run: Run) -> None:
    model = started(run, Buffered(run.rank or 0))
    trained(run, model)
    run.note(model.own)


@case(refused=r"different models: the first difference is .* in their order")
def layers_in_the_order_of_a_set(run: Run) -> None:
    """Which is another one in each process."""
    names = sorted({"one", "two", "three"}, reverse=run.rank == 1)
    only_distributed(run, nn.ModuleDict({name: nn.Linear(INPUTS, 1) for name in names}))


@case(refused=r"different models: .*\(7, 6\)|different models: .*\(5, 6\)")
def a_layer_that_is_wider_on_one_worker(run: Run) -> None:
    only_distributed(run, mlp(run, hidden=7 if run.rank == 1 else HIDDEN))


@case(refused="5 parameters and 0 buffers")
def a_layer_that_one_worker_has_more(run: Run) -> None:
    model = mlp(run)
    if run.rank == 1:
        model[0].more = nn.Parameter(torch.zeros(2))
    only_distributed(run, model)


@case()
def a_bfloat16_layer_among_others(run: Run) -> None:
    model = nn.ParameterDict({"coarse": torch.zeros(6).bfloat16(), "fine": torch.zeros(6).double()})
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(whole_numbers(run, model["coarse"], model["fine"], step=step))
        optimizer.step()
        run.note(model["coarse"], model["fine"])


def normed(run: Run, **options: object) -> None:
    """Statistics of batches, which are worker 0's on all workers after each step."""
    layers = [nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 1)]
    model = started(run, nn.Sequential(*layers).double())
    optimizer, of_first = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options), {}

    def of_worker(rank: int, step: int) -> torch.Tensor:
        loss = loss_of(run, model, step, rank)
        if rank == 0:
            of_first.update({name: each.clone() for name, each in model.named_buffers()})
        return loss

    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(run.mean(of_worker, step))
        optimizer.step()
        if run.rank is None:
            model.load_state_dict(of_first, strict=False)
        run.note(model)


@case()
def statistics_of_the_first_worker(run: Run) -> None:
    normed(run, broadcast_buffers=True)


@case()
def statistics_of_the_first_worker_with_deferred_steps(run: Run) -> None:
    normed(run, broadcast_buffers=True, defer=True)


@case("servers")
def statistics_of_the_first_worker_with_the_optimizer_on_servers(run: Run) -> None:
    normed(run, broadcast_buffers=True)
