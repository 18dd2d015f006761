"""Scripts that drop gradients, or have several backward passes in a step."""

import torch
from torch import nn

from tests.backends.everyday.run import Run, case, loss_of, mlp, whole_numbers


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@case(races=True)
def a_bad_batch_on_one_worker(run: Run) -> None:
    """All workers see that the norm is not finite, and go on with the next batch."""
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model))

    def of_worker(rank: int, step: int) -> torch.Tensor:
        is_bad = rank == 0 and step in (1, 2, 4)
        return loss_of(run, model, step, rank) * (torch.nan if is_bad else 1.0)

    for step in range(6):
        run.backward(run.mean(of_worker, step))
        finite = nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
        run.note(finite)
        if finite:
            optimizer.step()
        optimizer.zero_grad()
        run.note(model)


@case(refused=r"zero_grad\(\) was called between backward\(\) and step\(\)", races=True)
def early_dropped(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model), step_early=True)
    run.backward(loss_of(run, model, 0))
    optimizer.zero_grad()


@case(refused="workers are at different places of the script: worker 0 has made 2 steps and worker 1 1")
def a_step_that_one_worker_leaves_out(run: Run) -> None:
    """For a reason that it alone has."""
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model))
    for step in range(3):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        if step != 1 or run.rank != 1:
            optimizer.step()
        if step == 0:
            run.note(model)


# -- compressed gradients: bf16, which does not change these whole numbers --------------------------------------------


def compressed(run: Run, backward) -> None:
    """`backward(optimizer, weight, step)` comes after zero_grad."""
    model = nn.ParameterList([torch.zeros(6)])
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(3):
        optimizer.zero_grad()
        backward(optimizer, model[0], step)
        optimizer.step()
        run.note(model)


@case("workers, compressed")
def compressed_gradients_of_a_batch_that_is_thrown_away(run: Run) -> None:
    def backward(optimizer: torch.optim.Optimizer, weight: torch.Tensor, step: int) -> None:
        run.backward(whole_numbers(run, weight, step=step))
        run.note(weight.grad)
        optimizer.zero_grad()
        run.backward(whole_numbers(run, weight, step=step + 10))

    compressed(run, backward)


@case("workers, compressed")
def compressed_gradients_that_are_accumulated(run: Run) -> None:
    def backward(optimizer: torch.optim.Optimizer, weight: torch.Tensor, step: int) -> None:
        with optimizer.accumulate():
            run.backward(whole_numbers(run, weight, step=step))
        run.backward(whole_numbers(run, weight, step=step + 10))

    compressed(run, backward)


@case("workers, compressed", refused="still has a gradient, which compression would send a second time")
def compressed_gradients_of_two_backward_passes(run: Run) -> None:
    def backward(optimizer: torch.optim.Optimizer, weight: torch.Tensor, step: int) -> None:
        run.backward(whole_numbers(run, weight, step=step))
        if step == 1:
            run.backward(whole_numbers(run, weight, step=step + 10))

    compressed(run, backward)
