"""The optimizer on the servers makes the same steps as in a plain loop."""

import pytest
import torch
from torch import nn

from dmltrain.backends.torch.distributed import distribute
from dmltrain.backends.torch.optimizer import set_rate
from dmltrain.errors import UserError
from tests.backends.served_store import ServedStore

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def backward(model, optimizer, step):
    images = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(images).pow(2).mean().backward()


def weights(model):
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def train(model, optimizer, steps=3, rate=0.05):
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate / (step + 1)
        backward(model, optimizer, step)
        optimizer.step()
    return weights(model)


def on_servers(kind="sgd", store=None, **options):
    """A model, and its optimizer on the servers of this store."""
    model, store = model_of(), store or ServedStore()
    on = {"update_on_kvstore": True} if store.type == "dist_sync" else {}
    return model, distribute(model, OPTIMIZERS[kind](model.parameters()), store, **on, **options)


def plainly(kind, factors):
    """Each step with the plain gradient times these, one after the other."""
    model = model_of()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (step + 1)
        backward(model, optimizer, step)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        for factor in factors:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient * factor
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("average, factor", [(True, 1.5), (False, 3.0)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_synchronous_steps_are_of_the_mean_or_the_sum(kind, average, factor, defer):
    """The workers' gradients are 1 and 2 times the same."""
    model, optimizer = on_servers(kind, average=average, defer=defer)
    train(model, optimizer)
    optimizer.synchronize()
    torch.testing.assert_close(weights(model), plainly(kind, [factor]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("store", ["dist_async", "dist_ssp"])
def test_asynchronous_steps_use_the_whole_gradient(store, average):
    model, optimizer = on_servers(store=ServedStore(store), average=average)
    train(model, optimizer)
    optimizer.synchronize()
    torch.testing.assert_close(weights(model), plainly("sgd", [1.0, 2.0]), rtol=1e-5, atol=1e-6)


def test_a_learning_rate_of_zero_changes_nothing():
    store = ServedStore()
    model, optimizer = on_servers(store=store)
    before = weights(model)
    train(model, optimizer, 1, rate=0.0)
    optimizer.synchronize()
    assert set(store.rates) == {0.0} and torch.equal(weights(model), before)


def test_groups_keep_their_own_options_and_rates():
    plain, model, store = model_of(), model_of(), ServedStore()

    def two_groups(of):
        first = {"params": of[0].parameters(), "lr": 0.1, "momentum": 0.9}
        return torch.optim.SGD([first, {"params": of[2].parameters(), "lr": 0.01, "weight_decay": 0.5}], lr=9.0)

    inner, optimizer = two_groups(plain), two_groups(model)
    optimizer = distribute(model, optimizer, store, average=False, update_on_kvstore=True)
    for step in range(3):
        backward(plain, inner, step)
        for parameter in plain.parameters():
            parameter.grad *= 3
        inner.step()
        backward(model, optimizer, step)
        optimizer.step()
    optimizer.synchronize()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
    assert sorted(set(store.rates)) == [0.01, 0.1]


@pytest.mark.parametrize("change", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"nesterov": False}])
def test_changes_that_servers_would_not_notice_are_refused(change):
    model, optimizer = on_servers()
    train(model, optimizer, 1)  # with another learning rate, which is allowed
    optimizer.param_groups[0].update(change)
    backward(model, optimizer, 1)
    with pytest.raises(UserError, match="only the learning rate"):
        optimizer.step()


def test_gradients_cannot_be_reduced_where_servers_step():
    with pytest.raises(UserError, match="gradients cannot be changed"):
        on_servers()[1].reduce_gradients()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_saved_state_continues_bit_for_bit(kind):
    (model, optimizer), (again, continued) = on_servers(kind), on_servers(kind)
    train(model, optimizer, 2)
    continued.load_state_dict(optimizer.state_dict())
    for each, joined in ((model, optimizer), (again, continued)):
        backward(each, joined, 7)
        joined.step()
        joined.synchronize()
    assert torch.equal(weights(model), weights(again))


def test_a_state_of_an_optimizer_on_the_workers_is_refused():
    state = OPTIMIZERS["sgd"](model_of().parameters()).state_dict()
    with pytest.raises(UserError, match="on the workers.*dist_async"):
        on_servers(store=ServedStore("dist_async"))[1].load_state_dict(state)


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    model, optimizer = on_servers()
    before = weights(model)

    def closure():
        backward(model, optimizer, 0)
        return 4.0

    with torch.no_grad():
        assert optimizer.step(closure) == 4.0
    optimizer.synchronize()
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_sent_during_backward_or_with_the_step(overlap):
    store = ServedStore()
    model, optimizer = on_servers(store=store, overlap=overlap)
    backward(model, optimizer, 0)
    assert (len(store.rates) > 0) == overlap
    optimizer.step()
    assert len(store.rates) > 0


def test_a_new_rate_waits_for_no_weights():
    """The servers have the momentum that follows it."""
    model = model_of()
    inner = torch.optim.SGD([{"params": model.parameters(), "rate_in_momentum": True}], lr=0.1, momentum=0.9)
    optimizer = distribute(model, inner, ServedStore(), update_on_kvstore=True, defer=True)
    train(model, optimizer, 1)
    set_rate(optimizer, 0.5)
    assert optimizer._pending and optimizer.param_groups[0]["lr"] == 0.5
    optimizer.settle()
    assert not optimizer._pending
