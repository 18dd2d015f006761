"""Scripts whose optimizer runs on the servers: what they change there counts, or is refused."""

import copy
import functools
import io

import torch
from torch import nn

from tests.backends.everyday.run import Run, case, draw, loss_of, mlp

STEPS = 4


def trained(run: Run, before_step=lambda *_: None, after_step=lambda *_: None, **options: object) -> None:
    """`before_step(model, optimizer, step)` comes after backward."""
    model = mlp(run)
    inner = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})
    optimizer = run.distribute(model, inner)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        before_step(model, optimizer, step)
        optimizer.step()
        run.note(model)
        after_step(model, optimizer, step)


@case("servers")
def a_rate_that_is_a_tensor(run: Run) -> None:
    def next_rate(_: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)

    trained(run, next_rate, lr=torch.tensor(0.25, dtype=torch.float64))


@case("servers", refused=r"gradient of parameter 0.weight was changed after backward\(\)")
def masked_gradients(run: Run) -> None:
    def masked(model: nn.Module, *_: object) -> None:
        model[0].weight.grad.data.mul_(draw(1, *model[0].weight.shape) > 0)

    trained(run, masked)


@case("servers", refused=r"gradient of parameter 3.bias was changed after backward\(\)")
def a_gradient_that_is_replaced(run: Run) -> None:
    def smaller(model: nn.Module, *_: object) -> None:
        model[3].bias.grad = model[3].bias.grad * 0.5

    trained(run, smaller)


@case("servers", refused="parameter 3.weight was changed by the script")
def one_weight_through_numpy(run: Run) -> None:
    def without_one(model: nn.Module, *_: object) -> None:
        model[3].weight.detach().numpy()[0, 1] = 0.0

    trained(run, after_step=without_one)


@case("servers")
def an_average_that_is_there_for_an_evaluation(run: Run) -> None:
    averages: dict[str, torch.Tensor] = {}

    def evaluated(model: nn.Module, _: object, step: int) -> None:
        own = copy.deepcopy(model.state_dict())
        averages.update({name: averages.get(name, each) * 0.9 + each * 0.1 for name, each in own.items()})
        model.load_state_dict(averages)
        run.note(model, model(draw(3, 2, 6)))
        model.load_state_dict(own)

    trained(run, after_step=evaluated)


@case("servers")
def checkpoints_after_steps(run: Run) -> None:
    """Of the state, of the whole model, and a copy that is trained elsewhere."""

    def saved(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        whole, state = io.BytesIO(), io.BytesIO()
        torch.save(model, whole)
        torch.save(model.state_dict(), state)
        whole.seek(0), state.seek(0)
        run.note(torch.load(whole, weights_only=False), *torch.load(state).values())
        twin = copy.deepcopy(model)
        torch.optim.SGD(twin.parameters(), lr=1.0).step()
        run.note(twin)

    trained(run, after_step=saved)


@case("servers")
def steps_that_are_left_out_and_gradients_of_two_batches(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        if step != 1:
            run.backward(loss_of(run, model, step + 50))
            optimizer.step()
        run.note(model)


@case("servers")
def a_closure(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, torch.optim.RMSprop(model.parameters(), lr=0.01))

    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(run, model, step)
        run.backward(loss)
        return loss

    for step in range(STEPS):
        optimizer.step(functools.partial(closure, step))
        run.note(model)


@case("servers", refused="parameter 0.weight has no gradient in this step")
def a_layer_that_is_frozen_later(run: Run) -> None:
    def frozen(model: nn.Module, _: object, step: int) -> None:
        model[0].weight.requires_grad_(step < 1)

    trained(run, after_step=frozen)


@case("servers", refused="parameter 0.weight was frozen at dmltrain.distribute")
def a_layer_that_is_unfrozen(run: Run) -> None:
    model = mlp(run)
    model[0].weight.requires_grad_(False)
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        model[0].weight.requires_grad_(step > 1)
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        run.note(model)


@case("servers")
def weights_that_are_loaded_before(run: Run) -> None:
    """And the same once more, which changes nothing."""
    model, state = mlp(run), mlp(Run(None, run.workers, {}, None), seed=3).state_dict()
    model.load_state_dict(state)
    optimizer = run.distribute(model, torch.optim.Adagrad(model.parameters(), lr=0.05))
    model.load_state_dict(state)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        run.note(model)


@case("servers", refused="memory of parameter .* was replaced")
def early_steps_of_other_memory(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), step_early=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        if step == 1:
            model[0].weight.data = model[0].weight.data * 0.5
        optimizer.step()
        if run.rank is not None:
            optimizer.settle()
        run.note(model)


@case("async")
def clipped_gradients_with_the_rate_of_their_step(run: Run) -> None:
    """The loss has the same gradient at all weights, so each push changes them by the same whenever it comes."""
    weight = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    model = nn.ParameterList([weight])
    optimizer = run.distribute(model, torch.optim.SGD([weight], lr=1.0))
    for step in range(STEPS):
        for rank in run.ranks:
            optimizer.zero_grad()
            run.backward((weight * draw(10 * step + rank, 6)).sum())
            nn.utils.clip_grad_norm_([weight], 0.5)
            weight.grad.data[0] = 1.0
            optimizer.param_groups[0]["lr"] = 0.5 / (step + 1)
            optimizer.step()
    if run.rank is not None:
        optimizer.store.barrier()
        optimizer.synchronize()
    run.note(model)
