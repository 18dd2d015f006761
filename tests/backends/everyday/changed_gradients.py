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
def all_elements_of_large_gradients_through_data(run: Run) -> None:
    def clipped(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-1e-3, 1e-3)

    changed(run, clipped, hidden=100_000)


@case(races=True)
def fused_operations(run: Run) -> None:
    def limited(model: nn.Module, step: int) -> None:
        gradients = [parameter.grad.data for parameter in model.parameters()]
        torch._foreach_clamp_max_(gradients, 0.05)
        torch._foreach_mul_(gradients, 0.5)

    changed(run, limited)


@case(races=True)
def a_flat_gradient_of_length_one(run: Run) -> None:
    """Gradients get other memory under the same tensors."""

    def normalised(model: nn.Module, step: int) -> None:
        flat = nn.utils.parameters_to_vector([parameter.grad for parameter in model.parameters()])
        run.note(flat.norm())
        nn.utils.vector_to_parameters(flat / flat.norm(), [parameter.grad for parameter in model.parameters()])

    changed(run, normalised)


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


@case(races=True)
def tasks_whose_gradients_are_projected(run: Run) -> None:
    """PCGrad: of two losses' gradients the parts that are against each other are left out."""
    model = mlp(run)
    optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for step in range(STEPS):
        found = []
        for task in (2 * step, 2 * step + 1):
            optimizer.zero_grad()
            run.backward(loss_of(run, model, task))
            found.append([parameter.grad for parameter in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *found, strict=True):
            against = (one * other).sum().clamp(max=0.0) / other.square().sum()
            parameter.grad = one - against * other + other
        optimizer.step()
        run.note(model)


@case(races=True)
def adaptive_clipping_by_rows(run: Run) -> None:
    """A row's gradient is limited by its weights."""

    def clipped(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            rows, gradients = (each.detach().reshape(len(each), -1) for each in (parameter, parameter.grad))
            most = 0.1 * rows.norm(dim=1, keepdim=True).clamp_min(1e-3)
            gradients.mul_((most / gradients.norm(dim=1, keepdim=True).clamp_min(1e-6)).clamp(max=1.0))

    changed(run, clipped)


@case(races=True)
def a_buffer_of_gradients_in_place_of_parameters_own(run: Run) -> None:
    """Gradients are collected in a script's own tensors, which become `grad` before the step."""
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model))
    collected = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        for own, parameter in zip(collected, model.parameters(), strict=True):
            own.mul_(0.5).add_(parameter.grad)
            parameter.grad = own
        optimizer.step()
        run.note(model)
        for parameter in model.parameters():
            parameter.grad = None


@case(races=True)
def a_penalty_that_is_added_by_hand(run: Run) -> None:
    def shrunk(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad += 0.05 * parameter.sign()

    changed(run, shrunk)


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
def early_unchanged(run: Run) -> None:
    changed(run, lambda *_: None, **EARLY)


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


@case(refused=r"parameter 0.bias has no gradient at step\(\)")
def early_without_a_gradient(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model), **EARLY)
    run.backward(
        loss_of(run, model, 0), inputs=[parameter for parameter in model.parameters() if parameter is not model[0].bias]
    )
    optimizer.step()
