"""Scripts with what few have: sparse gradients, closures, gradients of gradients, copies, files of whole models."""

import copy
import io
import pickle
import types

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from tests.backends.everyday.run import (
    HIDDEN,
    INPUTS,
    SAMPLES,
    Run,
    batch,
    case,
    draw,
    loss_of,
    mlp,
    only_distributed,
    started,
)

STEPS = 4


@case()
def bags_of_words_with_a_sparse_optimizer(run: Run) -> None:
    """SparseAdam moves the rows that some worker has used, which are others on each, and Adam the rest."""
    bag, last = started(run, nn.EmbeddingBag(20, 4, sparse=True).double()), started(run, nn.Linear(4, 1).double(), 1)
    model = nn.ModuleList([bag, last])
    rows = run.distribute(model, torch.optim.SparseAdam(bag.parameters(), lr=0.05))
    rest = run.distribute(model, torch.optim.Adam(last.parameters(), lr=0.05))
    for step in range(STEPS):
        rows.zero_grad()
        rest.zero_grad()
        words = run.part(draw(step, SAMPLES, 3).mul(3).long().remainder(20))
        run.backward(mse_loss(last(bag(words)), run.part(draw(step + 50, SAMPLES, 1))))
        gradient = bag.weight.grad.coalesce()
        run.note(gradient, gradient.indices())
        rows.step()
        rest.step()
        run.note(model)


@case()
def words_of_one_worker_alone(run: Run) -> None:
    """The other has samples without any of them in some steps."""
    table, last = started(run, nn.Embedding(9, 3, sparse=True).double()), started(run, nn.Linear(3, 1).double(), 1)
    model = nn.ModuleList([table, last])
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def of_worker(rank: int, step: int) -> torch.Tensor:
        if rank == step % 2:
            return last(run.part(draw(step, SAMPLES, 3), rank)).square().mean()
        return last(table(torch.tensor([step, step + 2 * rank]))).square().mean()

    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(run.mean(of_worker, step))
        optimizer.step()
        run.note(model)


@case(refused="sparse gradients cannot be sent during backward")
def a_sparse_table_with_early_steps(run: Run) -> None:
    table = started(run, nn.Embedding(9, 3, sparse=True).double())
    optimizer = run.distribute(table, torch.optim.SGD(table.parameters(), lr=0.1), step_early=True)
    run.backward(table(torch.arange(4)).square().sum())
    optimizer.step()


@case("servers")
def a_sparse_table_on_servers(run: Run) -> None:
    table = started(run, nn.Embedding(9, 3, sparse=True).double())
    optimizer = run.distribute(table, torch.optim.SGD(table.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(table(run.part(draw(step, SAMPLES).mul(3).long().remainder(9))).square().mean())
        optimizer.step()
        run.note(table)


@case()
def lbfgs_with_a_line_search(run: Run) -> None:
    model = mlp(run)
    inner = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    optimizer = run.distribute(model, inner)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(run, model, 0)
        run.backward(loss)
        return loss

    for _ in range(3):
        run.note(optimizer.step(closure))
        run.note(model)


@case()
def copies_that_each_worker_trains_for_itself(run: Run) -> None:
    """Reptile: a copy makes steps on the worker's own samples, and where it comes to is the model's direction."""
    model = mlp(run)
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(STEPS):
        directions = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in run.ranks:
            own = copy.deepcopy(model)
            inner = torch.optim.SGD(own.parameters(), lr=0.1)
            for turn in range(2 + rank):  # the copy's backward sends nothing, so their numbers may differ
                inner.zero_grad()
                loss_of(run, own, 10 * step + turn, rank).backward()
                inner.step()
            for direction, before, after in zip(directions, model.parameters(), own.parameters(), strict=True):
                direction += (before - after).detach() / len(run.ranks)
        optimizer.zero_grad()
        for parameter, direction in zip(model.parameters(), directions, strict=True):
            parameter.grad = direction
        optimizer.step()
        run.note(model)


@case()
def a_recomputed_layer_that_is_used_twice(run: Run) -> None:
    """A backward runs within another one, and a hook of the script sees gradients there."""
    inner, last = started(run, nn.Linear(INPUTS, INPUTS).double()), mlp(run, 1)
    model = nn.ModuleList([inner, last])
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(inner(y)), x, use_reentrant=True)
        return last(x)

    for step in range(STEPS):
        optimizer.zero_grad()
        x = run.part(batch(step)).requires_grad_()
        run.backward(mse_loss(forward(x), run.part(draw(step, SAMPLES, 1))))
        run.note(inner.weight.grad)
        optimizer.step()
        run.note(model)


class Averaging(torch.optim.SGD):
    """An optimizer with methods, attributes and a state of its own."""

    swaps = 0

    def swap(self) -> None:
        self.swaps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("kept", parameter.detach().clone())
                now = parameter.detach().clone()
                parameter.data.copy_(kept)
                kept.copy_(now)


@case()
def an_optimizer_with_methods_of_its_own(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, Averaging(model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    later = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        optimizer.swap()
        schedule.step(float(step)) if step < 2 else later.step()
        run.note(model, optimizer.swaps, len(calls), optimizer.param_groups[0]["lr"])
        assert isinstance(optimizer, torch.optim.Optimizer)
    run.note(*[optimizer.state[parameter]["kept"] for parameter in model.parameters()])


class _Elsewhere(pickle.Unpickler):
    """Where dmltrain is not installed."""

    def find_class(self, module: str, name: str) -> object:
        if module.partition(".")[0] == "dmltrain":
            raise ModuleNotFoundError(f"No module named {module}")
        return super().find_class(module, name)


def loaded_elsewhere(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    reading = types.ModuleType("reading")
    reading.Unpickler, reading.load = _Elsewhere, lambda file, **more: _Elsewhere(file, **more).load()
    return torch.load(file, pickle_module=reading, weights_only=False)


def saved_whole(run: Run, **options: object) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        found = loaded_elsewhere(model)
        found(batch(0)).sum().backward()  # a plain model
        run.note(found, copy.deepcopy(model), found[0].weight.grad)


@case()
def files_of_the_whole_model_with_deferred_steps(run: Run) -> None:
    saved_whole(run, defer=True)


@case("servers")
def files_of_the_whole_model_with_the_optimizer_on_servers(run: Run) -> None:
    saved_whole(run)


# -- what is refused at distribute -------------------------------------------------------------------------------------


@case(refused="weight is .*on device meta.*give the model a device before dmltrain.distribute")
def layers_without_memory(run: Run) -> None:
    only_distributed(run, nn.Linear(INPUTS, HIDDEN, device="meta"))


@case(refused="optimizer LBFGS computes gradients several times in a step")
def lbfgs_with_early_steps(run: Run) -> None:
    model = mlp(run)
    only_distributed(run, model, torch.optim.LBFGS(model.parameters()), step_early=True)
