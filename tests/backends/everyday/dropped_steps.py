"""Scripts that drop gradients, or have several backward passes in a step."""

import torch
from torch import nn
from torch.nn.functional import softplus

from tests.backends.everyday.run import INPUTS, Run, batch, case, draw, loss_of, mlp, started, whole_numbers


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


@case(races=True)
def losses_that_are_only_measured(run: Run) -> None:
    """A search for a rate: gradients are looked at and thrown away, and weights go back to what they were."""
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model))
    for step in range(3):
        kept = {name: each.clone() for name, each in model.state_dict().items()}
        for rate in (0.01, 0.1, 1.0):
            optimizer.zero_grad()
            run.backward(loss_of(run, model, step))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= rate * parameter.grad
            run.note(model)
            model.load_state_dict(kept)
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        optimizer.step()
        run.note(model)


@case(races=True)
def unequal_numbers_of_backward_passes(run: Run) -> None:
    """Gradients are added up without accumulate()."""
    model = mlp(run)
    optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), lr=0.02))
    for step in range(4):
        optimizer.zero_grad()
        for part in range(1 + step % 3):
            run.backward(loss_of(run, model, 10 * step + part) / (1 + step % 3))
        optimizer.step()
        run.note(model)


@case(races=True)
def an_overflow_on_one_worker_with_clipping(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def of_worker(rank: int, step: int) -> torch.Tensor:
        return loss_of(run, model, step, rank) * (1e308 if rank == 1 and step in (0, 3) else 1.0)

    for step in range(6):
        optimizer.zero_grad()
        run.backward(scaler.scale(run.mean(of_worker, step)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        run.note(model, scaler.get_scale())


@case(races=True)
def micro_batches_that_are_left_over(run: Run) -> None:
    """At the end of an epoch the last of them make no step."""
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model))
    for epoch in range(2):
        for part in range(5):
            if part % 3 == 2:
                run.backward(loss_of(run, model, 10 * epoch + part) / 3)
                optimizer.step()
                optimizer.zero_grad()
            else:
                with optimizer.accumulate():
                    run.backward(loss_of(run, model, 10 * epoch + part) / 3)
        optimizer.zero_grad()
        run.note(model)


@case(races=True)
def a_critic_with_more_steps_that_is_frozen_meanwhile(run: Run) -> None:
    """WGAN: the critic has three steps for each of the generator."""
    generator, critic = (started(run, nn.Linear(INPUTS, size).double(), size) for size in (INPUTS, 1))
    makes = run.distribute(generator, torch.optim.RMSprop(generator.parameters(), lr=0.01))
    judges = run.distribute(critic, torch.optim.RMSprop(critic.parameters(), lr=0.01))
    for step in range(3):
        critic.requires_grad_(True)
        for turn in range(3):
            judges.zero_grad()
            makes.zero_grad()
            real, noise = run.part(batch(step)), run.part(draw(10 * step + turn, *batch(0).shape))
            run.backward(critic(generator(noise)).mean() - critic(real).mean())  # reaches the generator, too
            judges.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.3, 0.3)
        critic.requires_grad_(False)
        makes.zero_grad()
        run.backward(softplus(-critic(generator(run.part(draw(step, *batch(0).shape))))).mean())
        makes.step()
        run.note(generator, critic)


@case(races=True)
def gradients_at_weights_further_on(run: Run) -> None:
    """SAM: weights go along the gradient, and back after a second backward pass."""
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model))
    for step in range(4):
        run.backward(loss_of(run, model, step))
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        moves = [0.05 * parameter.grad / norm for parameter in model.parameters()]
        torch._foreach_add_([parameter.data for parameter in model.parameters()], moves)
        optimizer.zero_grad()
        run.backward(loss_of(run, model, step))
        torch._foreach_sub_([parameter.data for parameter in model.parameters()], moves)
        optimizer.step()
        optimizer.zero_grad()
        run.note(model)


@case(refused=r"zero_grad\(\) was called between backward\(\) and step\(\)", races=True)
def early_dropped(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model), step_early=True)
    run.backward(loss_of(run, model, 0))
    optimizer.zero_grad()


@case(refused=r"backward\(\) ran twice before step\(\)", races=True)
def early_twice(run: Run) -> None:
    model = mlp(run)
    optimizer = run.distribute(model, sgd(model), step_early=True)
    run.backward(loss_of(run, model, 0))
    run.backward(loss_of(run, model, 1))
    optimizer.step()


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
