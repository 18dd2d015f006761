"""The optimizer of an elastic job: a step is made by all members that go on or by none, whenever members are lost."""

import numpy as np
import pytest
import torch
from torch import nn

from dmltrain.backends.torch.distributed import layout
from dmltrain.base.errors import UserError
from dmltrain.kvstore import rules
from tests.backends.changing_store import ChangingStore
from tests.backends.late_store import LateStore
from tests.backends.test_torch_overlap import OPTIMIZERS as IN_PARTS
from tests.backends.trainers import batch, torch_trainer
from tests.connected import connected
from tests.device.devices import DEVICES

STEPS, OWN = 3, 4  # steps of a run, samples of each member in a step
RECEIPT = [OWN, 100.0, 2.0**40]


def whole(make):
    """The optimizer, of a class of its own: such ones make whole steps."""

    def made(parameters):
        optimizer = make(parameters)
        optimizer.__class__ = type("Own", (type(optimizer),), {})
        return optimizer

    return made


OPTIMIZERS = IN_PARTS | {f"{name}, whole": whole(IN_PARTS[name]) for name in ("sgd", "adam")}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(layout, "BUCKET_BYTES", 64)


def network(device="cpu"):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)).to(device)


def backward(model, step, dealt):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(OWN, 4, generator=generator).to(next(model.parameters()).device)
    (model(images).pow(2).sum() / dealt).backward()


def begin(optimizer, model, step, dealt=3 * OWN):
    """A round with gradients of this step."""
    optimizer.round(dealt, np.array(RECEIPT))
    optimizer.zero_grad()
    backward(model, step, dealt)


def run(model, store, kind="sgd", dealt=3 * OWN, steps=STEPS, early=True, between=lambda model: None):
    """Train; returns the optimizer and the committed receipt of each step. `between` backward and step."""
    optimizer = connected(model, OPTIMIZERS[kind](model.parameters()), store, average=False, step_early=early)
    committed = []
    for step in range(steps):
        begin(optimizer, model, step, dealt)
        between(model)
        optimizer.step()
        committed.append(optimizer.committed.tolist())
    return optimizer, committed


def expected(members, kind="sgd", dealt=12, device="cpu", between=lambda model: None):
    """The weights after steps with so many members each, without a store."""
    model = network(device)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step, count in enumerate(members):
        optimizer.zero_grad()
        backward(model, step, dealt)
        for parameter in model.parameters():
            parameter.grad = parameter.grad * count * (dealt / (OWN * count))
        between(model)
        optimizer.step()
    return weights(model)


def weights(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_a_change_the_steps_are_those_of_a_job_that_is_not_elastic(kind, early):
    plain, elastic = network(), network()
    optimizer = connected(plain, OPTIMIZERS[kind](plain.parameters()), LateStore(), average=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(plain, step, 8)
        optimizer.step()
    _, committed = run(elastic, ChangingStore(members=2), kind, dealt=8, early=early)
    assert torch.equal(weights(plain), weights(elastic))
    assert committed == [[8, 200, 2.0**41]] * STEPS


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_not_touched_before_the_commit(device):
    model, seen = network(device), []
    before = weights(model).clone()

    def recognised():
        own = network(device)
        backward(own, 0, 12)
        seen.append(all(torch.equal(a.grad, b.grad) for a, b in zip(own.parameters(), model.parameters(), strict=True)))
        seen.append(torch.equal(weights(model), before))

    run(model, ChangingStore(changes={7}, recognised=recognised), steps=1)
    assert seen == [True, True]
    assert not torch.equal(weights(model), before)


def calls(kind):
    store = ChangingStore()
    run(network(), store, kind)
    return store.calls


QUICK = ("sgd", "sgd, whole")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each in QUICK else pytest.mark.thorough) for each in OPTIMIZERS]
)
def test_a_member_may_be_lost_at_any_call(device, kind):
    """Each round is made with the members that are left, and the others' weights are those of plain steps."""
    ways = set()
    for number in range(1, calls(kind) + 1):
        model, store = network(device), ChangingStore(changes={number})
        _, committed = run(model, store, kind)
        ways.add(tuple(store.rounds))
        assert torch.equal(weights(model), expected(store.rounds, kind, device=device)), number
        assert committed == [[count * each for each in RECEIPT] for count in store.rounds]
    assert ways == {(3, 3, 3), (3, 3, 2), (3, 2, 2), (2, 2, 2)}  # the first is after the last round


@pytest.mark.parametrize("device", DEVICES)
def test_an_aborted_round_is_pushed_again_with_the_same_bits(device):
    again, count = 0, calls("sgd") // STEPS + 6
    for first in range(1, count):
        for second in range(first, count):
            model, store = network(device), ChangingStore(members=3, changes={first, second})
            run(model, store)
            assert torch.equal(weights(model), expected(store.rounds, device=device)), (first, second)
            for pushes in store.pushes[:STEPS]:
                assert all(len(set(push)) == 1 for push in pushes.values())
                again += max(map(len, pushes.values())) > 1
    assert again > 2 * count


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_round_without_samples_changes_nothing(kind):
    """Also with momentum and weight decay."""

    def state():
        arrays = (value for parameter in model.parameters() for value in optimizer.state[parameter].values())
        return [weights(model).clone(), *(torch.as_tensor(value).clone() for value in arrays)]

    model = network()
    optimizer, _ = run(model, ChangingStore(), kind)
    before = state()
    optimizer.round(12, np.zeros(3))
    optimizer.zero_grad()
    (model(torch.zeros(1, 4)).sum() * 0.0).backward()
    optimizer.step()
    assert all(map(torch.equal, state(), before)) and len(before) > 1 and not optimizer._exchange.gradients.pending
    begin(optimizer, model, STEPS)
    optimizer.step()  # goes on as if that round had not been
    assert torch.equal(weights(model), expected([3] * (STEPS + 1), kind))


def test_who_does_not_go_on_makes_no_step():
    class Ended(Exception):
        pass

    class Ending(ChangingStore):
        def enter(self):
            raise Ended

    model = network()
    before = weights(model).clone()
    with pytest.raises(Ended):
        run(model, Ending(changes={9}))
    assert torch.equal(weights(model), before)


# -- gradients when backward() returns --------------------------------------------------------------------------------


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize("kind", ["sgd", "adam, whole"])
def test_gradients_are_those_of_the_round_wherever_a_member_is_lost(kind):
    count = ChangingStore()
    run(network(), count, kind, early=False)
    for number in range(1, count.calls + 1):
        model, store = network(), ChangingStore(changes={number})
        run(model, store, kind, early=False, between=clip)
        assert torch.allclose(weights(model), expected(store.rounds, kind, between=clip)), number


def late(model):
    return connected(model, OPTIMIZERS["nag"](model.parameters()), ChangingStore(), average=False)


def test_what_no_member_uses_keeps_no_gradient():
    """So that neither momentum nor weight decay moves it."""
    model = network()
    optimizer, before = late(model), model[2].weight.clone()
    for _ in range(2):
        optimizer.round(12, np.array(RECEIPT))
        optimizer.zero_grad()
        model[:2](torch.ones(1, 4)).sum().backward()
        assert [parameter.grad is None for parameter in model.parameters()] == [False, False, False, True, True]
        optimizer.step()
    assert torch.equal(model[2].weight, before)


def test_a_step_may_be_left_out():
    model = network()
    optimizer, before, made = late(model), weights(model).clone(), []
    assert not optimizer.skip_round()
    optimizer.round(12, np.array(RECEIPT), made.append)
    backward(model, 0, 12)
    assert optimizer.skip_round() and len(made) == 1
    assert torch.equal(weights(model), before)
    begin(optimizer, model, 0)
    optimizer.step()
    assert torch.equal(weights(model), expected([3], "nag"))


def test_gradients_are_exchanged_once_for_a_batch():
    model = network()
    optimizer = late(model)
    begin(optimizer, model, 0)
    with pytest.raises(UserError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(UserError, match="accumulate"):
        backward(model, 0, 12)


# -- what is refused, and the trainer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"factors": 4}, {"broadcast_buffers": True}])
def test_what_an_elastic_job_cannot_have_is_refused_with_the_reason(given):
    model, ((name, value),) = network(), given.items()
    with pytest.raises(UserError, match=f"--elastic, .*{name}={value}: {rules.NOT_ELASTIC[name]}; leave these out"):
        connected(model, OPTIMIZERS["sgd"](model.parameters()), ChangingStore(), average=False, **given)


def clipped(changes=()):
    """Steps whose gradients are clipped after their reduction; the weights, the norms, the rounds' members, the calls
    of the store."""
    model, store, norms = network(), ChangingStore(changes=changes), []
    optimizer = connected(model, OPTIMIZERS["sgd"](model.parameters()), store, average=False)
    for step in range(STEPS):
        begin(optimizer, model, step)
        optimizer.reduce_gradients()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        optimizer.reduce_gradients()  # again: nothing
        optimizer.step()
    return weights(model), norms, store.rounds, store.calls


def test_gradients_can_be_clipped_when_the_round_is_made():
    """Whenever a member is lost: all members have the same, so the mean is that of one."""
    one, inner_norms = network(), []
    inner = OPTIMIZERS["sgd"](one.parameters())
    for step in range(STEPS):
        inner.zero_grad()
        backward(one, step, OWN)
        inner_norms.append(float(nn.utils.clip_grad_norm_(one.parameters(), 0.01)))
        inner.step()
    expected_, (_, _, _, calls) = weights(one), clipped()
    assert max(inner_norms) > 0.01
    for number in range(calls + 1):
        found, norms, rounds, _ = clipped({number})
        torch.testing.assert_close(found, expected_)
        assert norms == pytest.approx(inner_norms) and len(rounds) == STEPS


def test_a_reduction_and_a_step_need_their_round():
    optimizer, _ = run(network(), ChangingStore(), steps=1)
    for early in (optimizer.reduce_gradients, optimizer.step):
        with pytest.raises(UserError, match="one step for each batch"):
            early()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changes, left", [((), 3), ((9,), 2)])
def test_weighed_gradients_give_the_mean_over_the_committed_samples(device, changes, left):
    """All members have 4 of the 12 samples, and losses are the means over these."""
    after = []
    model, one = network(device), network(device)
    optimizer = connected(model, OPTIMIZERS["sgd"](model.parameters()), ChangingStore(3, changes))
    optimizer.weigh(OWN * 3 / 12)
    optimizer.round(12, np.array(RECEIPT), after.append)
    backward(model, 0, OWN)
    optimizer.step()
    backward(one, 0, OWN)  # the mean of what all have
    OPTIMIZERS["sgd"](one.parameters()).step()
    torch.testing.assert_close(weights(model), weights(one))
    assert not torch.equal(weights(model), weights(network(device)))
    assert [each.tolist() for each in after] == [[left * each for each in RECEIPT]]


@pytest.mark.parametrize("weight", [0.5, 2.0, 0.0])
def test_an_aborted_round_is_weighed_once(weight):
    """Weight 0 makes zeros of any gradients, also of nan."""
    model, twin, store = network(), network(), ChangingStore(3, changes=(9,))
    optimizer = connected(model, OPTIMIZERS["sgd"](model.parameters()), store)
    optimizer.weigh(weight)
    optimizer.round(12, np.array(RECEIPT))
    for each in (model, twin):
        if weight:
            backward(each, 0, OWN)
        else:
            (each(torch.ones(1, 4)).sum() * float("nan")).backward()
    own = [parameter.grad * weight if weight else torch.zeros_like(parameter) for parameter in twin.parameters()]
    optimizer.step()
    pushes = [store.pushes[0][bucket.name] for bucket in optimizer._exchange.gradients.buckets]
    expected_ = torch.cat([each.reshape(-1) for each in own]).numpy().tobytes()
    assert b"".join(push[0] for push in pushes) == b"".join(push[-1] for push in pushes) == expected_


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rates_are_multiplied_where_weights_change_and_nowhere_else(kind):
    """Who joins in the middle of the step gets the rates without it."""
    given = []

    class Giving(ChangingStore):
        def enter(self):
            super().enter()
            given.append([group["lr"] for group in optimizer.state_dict()["param_groups"]])

    model, twin = network(), network()
    inner = OPTIMIZERS[kind](model.parameters())
    optimizer = connected(model, inner, Giving(changes=(9,)), average=False)
    expected_ = OPTIMIZERS[kind](twin.parameters())
    own = [group["lr"] for group in inner.param_groups]
    optimizer.rate_factor = 0.75
    begin(optimizer, model, 0)
    backward(twin, 0, OWN)
    for group in expected_.param_groups:
        group["lr"] *= 0.75
    optimizer.step()
    expected_.step()
    torch.testing.assert_close(weights(model), weights(twin))
    assert given == [own] and [group["lr"] for group in inner.param_groups] == own


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_a_trainer_returns_the_receipts_of_the_members_that_made_the_step(devices):
    trained = {}
    for members, changes in {(3, (5,)), (2, ())}:
        made = torch_trainer(line=f"--devices {devices}", store=ChangingStore(members, changes))
        found = made.train_step(*batch(count=4), 4 * members, 0.1, np.array(RECEIPT))
        assert found.tolist() == [2 * each for each in RECEIPT]
        trained[members] = made.state()["model"]
    for name, value in trained[3].items():
        torch.testing.assert_close(value, trained[2][name])
