"""Overlap: sums are awaited where they are needed, and results equal those of steps that wait for all sums."""

import copy

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dmltrain.backends.torch import layers as torch_layers
from dmltrain.base.errors import JobLost, UserError
from dmltrain.layers import Dense, Network, chain
from tests.backends.late_store import LateStore
from tests.connected import connected

WIDTH = 512  # a weight of 512 x 512 fills a bucket of one mebibyte


def sequential() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])


def straight_line() -> nn.Module:
    torch.manual_seed(1)
    layers = [Dense(f"fc{number}", WIDTH, bias=False) for number in range(3)]
    module = torch_layers.build(Network("three", chain(*layers), (WIDTH,), WIDTH))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.05)
    return module


class Attention(nn.Module):
    """Reads weights of modules whose own forward never runs: out_proj's, and the tied embedding's. `never_read` has its
    gradients from the script."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(700, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.never_read = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x[:1, :32].abs().mul(100).long() % 700)
        x, _ = self.attention(x, x, x, need_weights=False)
        return nn.functional.linear(x, self.embedding.weight)


class ByName(nn.Module):
    """Gives weights to operators by name, and several in one list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.third = (nn.Parameter(0.05 * torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(input=x, weight=self.first)
        return torch.linalg.multi_dot([x, self.second]) + torch.addmm(mat1=x, mat2=self.third, input=x)


MODELS = {"modules": sequential, "straight line": straight_line, "attention": Attention, "by name": ByName}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True),
    "nag": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def joined(model, kind="sgd", store=None, **options):
    inner = OPTIMIZERS[kind](model.parameters())
    return connected(model, inner, store or LateStore(), step_early=True, **options)


def backward(model, optimizer, seed=0):
    optimizer.zero_grad()
    for parameter in model.never_read.parameters() if isinstance(model, Attention) else ():
        parameter.grad = torch.ones_like(parameter)
    images = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(images).pow(2).mean().backward()


def rates(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.02 / (step + 1)


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train(model, optimizer, steps=4):
    for step in range(steps):
        rates(optimizer, step)
        backward(model, optimizer, step)
        optimizer.step()
    optimizer.synchronize()
    return flat(model)


def deferred(make=None, **options):
    """A model with its optimizer after a step whose sums nobody has awaited."""
    model = (make or sequential)()
    optimizer = joined(model, defer=True, **options)
    backward(model, optimizer)
    optimizer.step()
    return model, optimizer


# -- when -------------------------------------------------------------------------------------------------------------


class Operators(TorchFunctionMode):
    """Notes which sums have come when the forward makes an operation, and lets them come after the first one."""

    def __init__(self, handles):
        super().__init__()
        self.handles, self.seen = handles, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            self.seen.append([handle.came for handle in self.handles])
            for handle in self.handles:
                handle.arrive()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [sequential, straight_line])
def test_the_first_layer_starts_before_the_last_buckets_sum_has_arrived(make):
    store = LateStore(comes_when_awaited=False)  # who waits for a sum that has not come gets JobLost after 5 s
    model, optimizer = deferred(make, store=store)  # whose step returns though no sum is there
    handles = [store.handles[bucket.name] for bucket in optimizer._exchange.gradients.buckets]
    handles[0].arrive()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad(), Operators(handles) as operators:
        model(torch.ones(1, WIDTH))
    assert operators.seen == [[True, False, False], [True, True, True], [True, True, True]]
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("defer", [False, True])
def test_arrived_buckets_are_stepped_while_the_next_is_awaited(defer):
    """Without deferring the step waits for all sums."""
    store, model = LateStore(), sequential()
    optimizer = joined(model, store=store, defer=defer)
    backward(model, optimizer)
    first, middle, last = [bucket.name for bucket in optimizer._exchange.gradients.buckets]
    store.handles[middle].arrive()
    optimizer.step()
    waited = len(store.waited)
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    assert store.waited == ([middle, first, last] if defer else [middle, last, first])  # else in order of departure
    assert defer or waited == 3


# -- the same numbers -------------------------------------------------------------------------------------------------


def train_plainly(model, optimizer):
    """No kvstore at all: the mean of two equal gradients is the gradient."""
    for step in range(4):
        rates(optimizer, step)
        backward(model, optimizer, step)
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_by_bucket_equal_whole_steps_bit_for_bit(kind, defer):
    plain, model = sequential(), sequential()
    expected = train_plainly(plain, OPTIMIZERS[kind](plain.parameters()))
    assert torch.equal(expected, train(model, joined(model, kind, defer=defer)))


@pytest.mark.parametrize("name", MODELS)
def test_every_read_of_a_weight_finds_it_finished(name):
    plain, deferred = MODELS[name](), MODELS[name]()
    expected = train_plainly(plain, OPTIMIZERS["sgd"](plain.parameters()))
    assert torch.equal(expected, train(deferred, joined(deferred, defer=True)))


def test_weights_are_finished_for_other_ways_of_reading_them():
    reads = {
        "model's state": lambda model, _: model.state_dict(),
        "state": lambda _, each: each.state_dict(),
        "settle": lambda _, each: each.settle(),
        "momentum": lambda _, each: each.state,
        "synchronize": lambda _, each: each.synchronize(),
        "zeros": lambda _, each: each.zero_grad(False),
    }
    plain = sequential()
    expected = train_plainly(plain, OPTIMIZERS["sgd"](plain.parameters()))[:5]
    for name, read in reads.items():
        model = sequential()
        optimizer = joined(model, defer=True)
        train(model, optimizer, 3)
        backward(model, optimizer, 3)
        rates(optimizer, 3)
        optimizer.step()
        assert not torch.equal(model[0].weight[0, :5], expected), name
        read(model, optimizer)
        assert torch.equal(model[0].weight[0, :5], expected), name


@pytest.mark.parametrize("evaluated", [{0}, {0, 1, 2, 3}, {2}], ids=["the first", "each", "a later one"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_an_evaluation_in_inference_mode_may_come_first(kind, evaluated):
    """The optimizer's state from the first steps is changed by later steps of the training."""
    plain, model = sequential(), sequential()
    expected = train_plainly(plain, OPTIMIZERS[kind](plain.parameters()))
    optimizer = joined(model, kind, defer=True)
    for step in range(4):
        rates(optimizer, step)
        backward(model, optimizer, step)
        optimizer.step()
        if step in evaluated:
            with torch.inference_mode():
                model(torch.ones(1, WIDTH))
    optimizer.settle()
    assert not any(item.is_inference() for state in optimizer.state.values() for item in state.values())
    assert torch.equal(expected, flat(model))


@pytest.mark.thorough
@pytest.mark.parametrize("make", [sequential, straight_line])
def test_a_compiled_model_finds_its_weights(make):
    torch.compiler.reset()  # its code for another test's model, which has no gates, would be taken for this one
    plain, model = make(), make()
    expected = train_plainly(plain, OPTIMIZERS["sgd"](plain.parameters()))
    optimizer = joined(model, defer=True)
    train(torch.compile(model, backend="eager"), optimizer)
    torch.testing.assert_close(expected, flat(model))
    torch.compiler.reset()


@pytest.mark.parametrize("make", [sequential, straight_line])
def test_a_copy_of_the_model_is_independent_of_the_original(make):
    model = make()
    optimizer = joined(model, defer=True)
    copied = copy.deepcopy(model)  # an average of weights, say
    backward(model, optimizer)
    optimizer.step()
    with torch.no_grad():
        copied(torch.ones(1, WIDTH))
    assert all(torch.equal(one, other) for one, other in zip(copied.parameters(), make().parameters(), strict=True))


# -- what parts cannot do, and what users can get wrong ---------------------------------------------------------------


@pytest.mark.parametrize(
    "prepare",
    [
        lambda inner: inner.register_step_post_hook(lambda *_: None),
        lambda inner: setattr(inner, "grad_scale", torch.ones(())),  # as torch.amp.GradScaler does for fused optimizers
        lambda inner: setattr(inner, "found_inf", torch.zeros(())),
    ],
)
def test_an_optimizer_whose_step_does_more_makes_whole_steps_at_once(prepare):
    model = sequential()
    inner = OPTIMIZERS["sgd"](model.parameters())
    optimizer = connected(model, inner, LateStore(), defer=True)
    before = model[0].weight.detach().clone()
    backward(model, optimizer)
    prepare(inner)
    optimizer.step()
    assert not torch.equal(model[0].weight, before), "not deferred"


def test_a_programs_own_hook_before_the_forward_sees_finished_weights():
    """Also a hook that was registered before the optimizer was joined."""
    model, seen = sequential(), []
    model.register_forward_pre_hook(lambda model, _: seen.append(model[2].weight.sum().item()))
    optimizer = joined(model, defer=True)
    backward(model, optimizer)
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    assert seen[1] == model[2].weight.sum().item() != seen[0]


class OfAllWeights(torch.optim.SGD):
    """Divides the learning rate by the number of weights that it sees, as optimizers do that look at a whole norm."""

    @torch.no_grad()
    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight in weights:
            weight -= self.param_groups[0]["lr"] / len(weights) * weight.grad


@pytest.mark.parametrize("defer", [False, True])
def test_a_subclass_of_an_optimizer_steps_all_weights_at_once(defer):
    plain, model = sequential(), sequential()
    expected = train_plainly(plain, OfAllWeights(plain.parameters(), lr=0.1))
    optimizer = connected(model, OfAllWeights(model.parameters(), lr=0.1), LateStore(), defer=defer, step_early=True)
    assert torch.equal(expected, train(model, optimizer))


def test_a_fused_optimizer_stays_fused():
    model = sequential()
    optimizer = joined(model, defer=True)
    with torch.profiler.profile() as profile:
        backward(model, optimizer)
        optimizer.step()
        model(torch.ones(1, WIDTH))
    names = [event.name for event in profile.events()]
    assert names.count("aten::_fused_sgd_") == 3 and "aten::_foreach_add_" not in names


def test_weights_read_outside_the_forward_and_gradients_zeroed_while_they_are_sent_are_refused():
    model, _ = deferred()
    with pytest.raises(UserError, match=r"outside the model's forward.*optimizer.settle\(\)"):
        model[1](torch.ones(1, WIDTH)).sum().backward()
    model, _ = deferred()
    model.zero_grad(set_to_none=False)
    with pytest.raises(UserError, match="before their sum had arrived"):
        model(torch.ones(1, WIDTH))


def test_a_lost_job_ends_the_forward_that_waits_for_it():
    store = LateStore(comes_when_awaited=False)
    model, _ = deferred(store=store)
    for handle in store.handles.values():
        handle.fail("server 0 was lost")
    with pytest.raises(JobLost, match="server 0 was lost"):
        model(torch.ones(1, WIDTH))
