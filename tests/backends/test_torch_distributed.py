"""dmltrain.distribute with the kvstores of a whole job: what each of two workers has before and after steps."""

import copy
import warnings
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.distributed import layout, parts
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.base.errors import UserError
from dmltrain.kvstore import READ, Handle, KVStore, create
from tests.backends import trainers
from tests.backends.served_store import ServedStore
from tests.backends.trainers import MLP
from tests.backends.trainers import torch_trainer as make
from tests.connected import connected
from tests.device.devices import DEVICES

plain_step.postpone_compiler()  # which the optimizers that `has` makes would import in each process of the tests


class Net(nn.Module):
    """All its values are those of `rank`; but for a frozen parameter it trains everything, if it is `whole`: else its
    third layer is unused."""

    def __init__(self, rank, whole=False):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 2)
        self.whole = whole
        self.frozen = nn.Parameter(torch.full((2, 3), rank + 5.0), requires_grad=False)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1) + rank)
        self.register_buffer("mean", torch.tensor([rank + 1.0, rank + 2.0, rank + 3.0], dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(rank + 7))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                if parameter is not self.frozen:
                    values = torch.arange(parameter.numel(), dtype=torch.float32) / 10
                    parameter.copy_((values + number - rank).reshape(parameter.shape))

    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x) if self.whole else x


def sgd(model, **options):
    return torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5, **options
    )


def batch(rank):
    return torch.arange(6.0).reshape(2, 3) * (rank + 1)


def gradients(model, rank):
    model(batch(rank)).sum().backward()


def own_gradients(rank, whole):
    """Of that worker's batch alone, with the first worker's weights."""
    model = Net(0, whole)
    gradients(model, rank)
    return [each.grad if each.grad is not None else torch.zeros_like(each) for each in trained(model)]


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("early", [False, True])
def test_all_start_from_the_first_workers_weights_and_statistics(job, early):
    def one(store):
        model = Net(store.rank)
        connected(model, sgd(model), store, step_early=early)
        return model

    expected = Net(0).state_dict()
    for rank, model in enumerate(job.all(one)):
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name]), (rank, name)
            assert value.dtype == expected[name].dtype


def test_what_only_the_wrapped_optimizer_has_is_reached_through_it():
    class WithModes(torch.optim.SGD):
        def eval(self):
            return "evaluates"

    model = nn.Linear(2, 2)
    wrapped = connected(model, WithModes(model.parameters(), lr=0.1, fused=True), create("local"))
    assert wrapped.eval() == "evaluates" and not hasattr(wrapped, "train")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = model.bias.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(wrapped)
    torch.testing.assert_close(before - model.bias, torch.full((2,), 0.1))  # the gradient is 1, without the scale


FASTER = [{"foreach": True}, {"fused": True}, {"foreach": True, "nesterov": True, "momentum": 0.9}]


def has(kind, options):
    try:
        kind([nn.Parameter(torch.ones(2))], lr=0.1, **options)
    except (TypeError, RuntimeError, ValueError):
        return False
    return True


@pytest.mark.parametrize(
    "kind, options", [(kind, each) for kind in parts.PER_PARAMETER for each in FASTER if has(kind, each)]
)
def test_every_optimizer_steps_on_the_mean_in_the_servers_memory(job, kind, options):
    """Which it must not write: the servers' memory is read-only, and other workers read it."""

    def one(store):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        plain = copy.deepcopy(model)
        optimizer = connected(model, kind(model.parameters(), lr=0.1, **options), store, step_early=True)
        alone = kind(plain.parameters(), lr=0.1, **options)
        copied = list(zip(model.parameters(), plain.parameters(), strict=True))
        for mine, its in copied:
            its.data.copy_(mine.data)  # rank 0's
        for network, made in [(model, optimizer), (plain, alone)] * 2:
            network(batch(0)).sum().backward()
            made.step()
            made.zero_grad()
        return [(mine.detach().clone(), its.detach()) for mine, its in copied]

    for found in job.all(one):
        for mine, its in found:
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


EARLY, DEFERRED, WITHOUT_OVERLAP = {"step_early": True}, {"defer": True}, {"overlap": False}


@pytest.mark.parametrize(
    "options", [{}, EARLY, EARLY | WITHOUT_OVERLAP, DEFERRED, DEFERRED | WITHOUT_OVERLAP], ids="-".join
)
@pytest.mark.parametrize("average", [False, True])
def test_a_step_is_of_the_mean_or_sum_of_all_gradients(job, average, options):
    whole = bool(options)  # steps that are early need all gradients

    def one(store):
        model = Net(store.rank, whole)
        optimizer = connected(model, sgd(model), store, average=average, **options)
        optimizer.zero_grad()
        gradients(model, store.rank)
        if "overlap" in options:
            optimizer.push_gradients()
        optimizer.step()
        optimizer.synchronize()
        return model

    parts = zip(trained(Net(0)), own_gradients(0, whole), own_gradients(1, whole), strict=True)
    expected = [start - 0.5 * (first + second) / (2 if average else 1) for start, first, second in parts]
    for model in job.all(one):
        for parameter, value in zip(trained(model), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), value.detach())
        assert (model.frozen == 5.0).all()


@pytest.mark.parametrize("early", [False, True])
def test_gradients_are_all_workers_after_backward_and_early_ones_once_they_were_reduced(job, early):
    """What no backward has produced stays None; several backward passes are added up, and sent with the last."""

    def one(store):
        model = Net(store.rank, whole=early)
        optimizer = connected(model, sgd(model, momentum=0.9), store, step_early=early)
        optimizer.zero_grad()
        with mock.patch.object(store, "pushpull") as push, optimizer.accumulate():
            gradients(model, store.rank)
            gradients(model, store.rank)
        assert not push.called
        gradients(model, store.rank)
        if early:
            optimizer.reduce_gradients()
        found = [copy.deepcopy(each.grad) for each in trained(model)]
        torch.nn.utils.clip_grad_norm_(trained(model), 1e-3)
        optimizer.step()
        moved = [each.detach() - start for each, start in zip(trained(model), trained(Net(0)), strict=True)]
        assert torch.linalg.vector_norm(torch.cat([each.reshape(-1) for each in moved])) < 6e-4
        optimizer.zero_grad()
        gradients(model, store.rank)
        optimizer.step()
        assert optimizer.state[model.first.weight]["momentum_buffer"].abs().sum() > 0
        return found

    owns = zip(own_gradients(0, early), own_gradients(1, early), strict=True)
    expected = [1.5 * (first + second) for first, second in owns]
    for found in job.all(one):
        used = found if early else found[:3]
        assert early or found[3:] == [None, None]
        for mean, value in zip(used, expected, strict=False):
            torch.testing.assert_close(mean, value)


def test_mistakes_with_gradients_under_way_are_explained(job):
    def one(store):
        model = Net(store.rank)
        optimizer = connected(model, sgd(model), store, step_early=True)
        gradients(model, store.rank)
        with pytest.raises(UserError, match="third.weight has no gradient at step"):
            optimizer.step()
        for parameter in model.third.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.push_gradients()
        with pytest.raises(UserError, match=r"backward\(\) ran twice .*optimizer.accumulate\(\)"):
            gradients(model, store.rank)
        with pytest.raises(UserError, match="before dmltrain.distribute"):
            optimizer.add_param_group({"params": []})
        model.second.weight.grad.mul_(2.0)
        with pytest.raises(UserError, match=r"after they had been sent.*optimizer.reduce_gradients\(\)"):
            optimizer.step()
        optimizer._exchange.gradients.wait()

    job.all(one)


@pytest.mark.parametrize("early", [False, True])
def test_a_closure_is_called_once_with_gradients_and_its_mean_loss_returned(job, early):
    """Where steps are early, the worker's own."""

    def one(store):
        model = Net(store.rank, whole=early)
        optimizer, calls = connected(model, sgd(model), store, step_early=early), []

        def closure():
            optimizer.zero_grad()
            loss = model(batch(store.rank)).sum()
            loss.backward()
            calls.append(loss.item())
            return loss.item()

        with torch.no_grad():
            returned = optimizer.step(closure)
        return calls, returned, [each.detach().clone() for each in trained(model)]

    ((one_loss,), one_returned, one_weights), ((other_loss,), other_returned, other_weights) = job.all(one)
    mean = (one_loss + other_loss) / 2
    assert [one_returned, other_returned] == ([one_loss, other_loss] if early else [mean, mean])
    assert one_loss != other_loss and all(map(torch.equal, one_weights, other_weights))
    assert not torch.equal(one_weights[0], trained(Net(0))[0])


# -- buckets ----------------------------------------------------------------------------------------------------------


def lengths(made):
    return [[parameter.numel() for parameter in bucket.parameters] for bucket in made]


def test_buckets_are_of_a_mebibyte_and_one_kind_in_the_models_order():
    quarter = 1 << 16  # float32 elements
    sizes = [quarter, 2 * quarter, quarter, 1, 8 * quarter, 3]
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    made = layout.make_buckets(model, torch.optim.SGD(reversed(list(model)), lr=1.0), "b")
    assert lengths(made) == [sizes[:3], [1], [8 * quarter], [3]]
    assert [bucket.name for bucket in made] == ["b.0", "b.1", "b.2", "b.3"]
    assert [bucket.priority for bucket in made] == [4, 3, 2, 1], "what the next forward reads first comes first"
    dtypes = (torch.float32, torch.float64) * 2
    model = nn.ParameterList([nn.Parameter(torch.zeros(3 + n, dtype=dtype)) for n, dtype in enumerate(dtypes)])
    model[2].requires_grad = False
    made = layout.make_buckets(model, torch.optim.SGD(list(model), lr=1.0), "b")
    assert lengths(made) == [[3], [4, 6]]
    groups = [{"params": [model[3]]}, {"params": [model[0], model[1]]}]
    made = layout.make_buckets(model, torch.optim.SGD(groups, lr=1.0), "b")
    assert [(bucket.group, lengths([bucket])[0]) for bucket in made] == [(1, [3]), (1, [4]), (0, [6])]


def test_weights_that_cannot_be_in_buckets_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(UserError, match="1.weight is torch.float16"):
        layout.make_buckets(model, torch.optim.SGD(model.parameters(), lr=1.0), "b")
    with pytest.raises(UserError, match="2 parameters .* not the model's"):
        layout.make_buckets(model[0], torch.optim.SGD(model.parameters(), lr=1.0), "b")


@pytest.mark.parametrize(
    "weight, kept",
    [
        (torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last), True),
        (torch.arange(48.0).reshape(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d), True),
        (torch.arange(24.0).reshape(2, 3, 4), True),
        (torch.arange(24.0).reshape(4, 6).t(), True),
        (torch.arange(48.0).reshape(4, 12)[:, ::2], False),
        (torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)[..., ::2], False),
    ],
)
def test_weights_keep_their_order_in_memory_where_it_is_dense(weight, kept):
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(weight)])
    strides, values = model[1].stride(), model[1].detach().clone()
    (bucket,) = layout.make_buckets(model, torch.optim.SGD(model.parameters(), lr=1.0), "b")
    assert (model[1].stride() == strides) == kept
    assert model[1].stride() == torch.zeros_like(weight).stride(), "as the optimizer's state lies"
    flat = bucket.weights.on_host()
    assert flat[:2].tolist() == [1.0, 1.0]
    if kept:
        assert flat[2:].tolist() == weight.as_strided((weight.numel(),), (1,)).tolist(), "as they lie"
    bucket.weights.set(torch.from_numpy(flat + 1))
    assert torch.equal(model[1], values + 1) and model[0].tolist() == [2.0, 2.0]


def test_weights_that_are_pulled_lie_where_the_values_arrive():
    model = nn.Linear(3, 2)
    (bucket,) = layout.make_buckets(model, torch.optim.SGD(model.parameters(), lr=1.0), "b")
    bucket.lay_out(bucket.weights.on_host())
    before = model.weight.detach().clone()
    bucket.weights.adopt()
    assert torch.equal(model.weight, before)
    bucket.weights.pulled[:] = range(8)
    assert model.weight.flatten().tolist() == [0, 1, 2, 3, 4, 5] and model.bias.tolist() == [6, 7]


# -- where gradients are pushed from, and where their results come to -------------------------------------------------


class Noting(KVStore):
    """Notes what is pushed and where the result shall go."""

    def pushpull(self, key, value, out=None, priority=0, wait=True, rate=-1.0):
        self.value, self.out = value, out
        return Handle(0, "sum", 1.0)


def bucket_on(device, keep):
    model = nn.Linear(3, 2).to(device)
    made = Bucket("b", group=0, priority=1, parameters=list(model.parameters()))
    made.lay_out(made.weights.on_host(), keep)
    made.gradients.copy_(torch.arange(8.0))
    return made


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", DEVICES)
def test_a_result_comes_to_the_pushed_memory_only_if_that_may_change(name, keep):
    bucket, store = bucket_on(name, keep), Noting()
    handle = bucket.send(store)
    assert store.value.tolist() == list(range(8))
    if name == "cpu":
        assert store.out is READ
        return
    assert np.shares_memory(store.value, store.out) == (not keep)
    store.out[:] = 3.0  # the result
    assert bucket.gradients.tolist() == list(range(8))
    assert store.value.tolist() == (list(range(8)) if keep else [3.0] * 8)
    bucket.take_result(handle, 0.5)
    assert bucket.gradients.tolist() == [1.5] * 8


@pytest.mark.parametrize("name", DEVICES)
def test_gradients_that_are_kept_can_be_pushed_again(name):
    bucket, store = bucket_on(name, keep=True), Noting()
    bucket.send(store)
    first = store.value
    if store.out is not READ:
        store.out[:] = 3.0  # of a round that is not used
    bucket.send(store)
    assert store.value.tolist() == list(range(8)) and np.shares_memory(first, store.value)


# -- a script's default device ----------------------------------------------------------------------------------------


def stepped(store, default, **choices):
    """The weights after a step, where the script makes tensors on the `default` device (of its thread)."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.ones(4, 3).cumsum(0)
    for parameter in model.parameters():  # torch's random numbers are those of all threads
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    torch.set_default_device(default)
    try:
        wrapped = connected(model, optimizer, store, **choices)
        model(x).square().mean().backward()
        wrapped.step()
        wrapped.synchronize()
        wrapped.load_state_dict(wrapped.state_dict())
    finally:
        torch.set_default_device(None)
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("choices", [{}, {"step_early": True}, {"broadcast_buffers": True}, {"factors": 8}], ids=str)
def test_a_scripts_default_device_changes_nothing(job, choices):
    """On a device without memory, torch's meta, a tensor that the exchange makes without a device is lost."""
    expected, found = (job.all(partial(stepped, default=each, **choices)) for each in ("cpu", "meta"))
    torch.testing.assert_close(found, expected)  # factors are chosen by times, and round otherwise


def test_a_scripts_default_device_does_not_matter_to_averages_and_servers(alone):
    runs = [alone.all(partial(stepped, default=each)) for each in ("cpu", "meta")]
    runs += [
        [stepped(ServedStore(), each, step_early=early, update_on_kvstore=True) for early in (False, True)]
        for each in ("cpu", "meta")
    ]
    for expected, found in (runs[:2], runs[2:]):
        assert all(map(torch.equal, found[0] + found[1], expected[0] + expected[1]))


# -- the torch trainer: workers make the step of one, and use the network meanwhile -----------------------------------


@pytest.mark.parametrize("line", ["", "--devices cpu:2"])
def test_two_workers_with_half_a_batch_each_make_the_step_of_one_worker(job, line):
    """In the second step one of them has no samples."""
    shares = [(10, 6), (16, 0), (1, 15)]

    def one(store):
        made = make(MLP, line, store)
        for seed, sizes in enumerate(shares):
            images, labels = trainers.batch(seed=seed)
            mine = slice(0, sizes[0]) if store.rank == 0 else slice(sizes[0], 16)
            made.train_step(images[mine], labels[mine], 16, 0.1)
        made.synchronize()
        sums = made.take_sums()
        return made.state()["model"], sums

    alone = make(MLP)
    for seed in range(len(shares)):
        alone.train_step(*trainers.batch(seed=seed), 16, 0.1)
    expected = alone.state()["model"]
    results = job.all(one)
    for found, _ in results:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    assert [sums.samples for _, sums in results] == [27, 21]


@pytest.mark.parametrize("line, later", [("", True), ("--devices cpu:2", False)])
def test_weights_are_awaited_where_they_are_read_unless_they_have_to_be_copied(job, line, later):
    def one(store):
        made = make(MLP, line, store)
        weight = made.replicas.modules[0].fc1_weight
        before = weight.detach().clone()
        made.train_step(*trainers.batch(), 16, 0.1)
        unchanged = torch.equal(weight, before)
        made.synchronize()
        assert not torch.equal(weight, before)
        return unchanged

    assert job.all(one) == [later] * 2


class Watched(ServedStore):
    """Notes of each push whether it came from within a backward pass."""

    def __init__(self):
        super().__init__("dist_async")
        self.within = []

    def push(self, key, value, priority=0, rate=-1.0):
        self.within.append(torch._C._current_graph_task_id() >= 0)
        super().push(key, value, priority, rate)


@pytest.mark.parametrize("line, within", [("", True), ("--devices cpu:2", False)])
def test_gradients_are_sent_during_the_backward_pass_that_completes_them(line, within):
    """Those of several devices only when they are added up."""
    store = Watched()
    made = make(MLP, line, store)
    made.train_step(*trainers.batch(), 16, 0.1)
    assert store.within and set(store.within) == {within}


@pytest.mark.parametrize("options, sent", [({}, True), (EARLY, True), (EARLY | WITHOUT_OVERLAP, False)])
def test_gradients_are_averaged_and_sent_before_the_step_unless_told_otherwise(job, options, sent):
    def one(store):
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = connected(model, torch.optim.SGD(model.parameters(), lr=1.0), store, **options)
        store.barrier()
        with mock.patch.object(store, "pushpull", wraps=store.pushpull) as push:
            model(torch.tensor([[1.0, 2.0]]) * (1 + 2 * store.rank)).sum().backward()
            assert push.called == sent
            optimizer.step()
            assert push.called
        return model.weight.tolist()

    assert job.all(one) == [[[-1.0, -3.0]]] * 2


def bucket_of(model):
    (made,) = layout.make_buckets(model, torch.optim.SGD(model.parameters(), lr=1.0), "b")
    made.lay_out(made.weights.on_host())
    return made


@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0])
def test_a_sum_replaces_the_gradient_and_is_copied_only_to_scale_it(factor):
    model = nn.Linear(2, 1)
    bucket = bucket_of(model)
    total = np.array([2, 4, 6], np.float32)
    total.flags.writeable = False  # a server's memory
    model.weight.grad = before = torch.zeros(1, 2)
    handle = Handle(0, "sum", 1.0)
    handle.values = [total]
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with bucket.result_in_place(handle, factor):
                assert model.weight.grad.tolist() == [[2 * factor, 4 * factor]]
                assert model.bias.grad.tolist() == [6 * factor]
                assert (model.weight.grad.data_ptr() == total.ctypes.data) == (factor == 1.0)
    finally:
        torch.set_warn_always(False)
    assert total.tolist() == [2, 4, 6]
    assert model.weight.grad is before and model.bias.grad is None
