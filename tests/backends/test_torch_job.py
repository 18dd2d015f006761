"""The torch trainer in jobs: several workers make the step of one, and the network is used while others compute."""

import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from dmltrain.backends.torch.distributed import distribute, layout
from dmltrain.kvstore import Handle
from tests.backends.served_store import ServedStore
from tests.backends.trainers import MLP, batch
from tests.backends.trainers import torch_trainer as make


@pytest.mark.parametrize("line", ["", "--devices cpu:2"])
def test_two_workers_with_half_a_batch_each_make_the_step_of_one_worker(job, line):
    """In the second step one of them has no samples."""
    shares = [(10, 6), (16, 0), (1, 15)]

    def one(store):
        made = make(MLP, line, store)
        for seed, sizes in enumerate(shares):
            images, labels = batch(seed=seed)
            mine = slice(0, sizes[0]) if store.rank == 0 else slice(sizes[0], 16)
            made.train_step(images[mine], labels[mine], 16, 0.1)
        made.synchronize()
        sums = made.take_sums()
        return made.state()["model"], sums

    alone = make(MLP)
    for seed in range(len(shares)):
        alone.train_step(*batch(seed=seed), 16, 0.1)
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
        weight = made._modules[0].fc1_weight
        before = weight.detach().clone()
        made.train_step(*batch(), 16, 0.1)
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
    made.train_step(*batch(), 16, 0.1)
    assert store.within and set(store.within) == {within}


@pytest.mark.parametrize("options", [{}, {"overlap": False}])
def test_gradients_are_averaged_and_sent_before_the_step_unless_told_otherwise(job, options):
    def one(store):
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), store, **options)
        store.barrier()
        with mock.patch.object(store, "pushpull", wraps=store.pushpull) as push:
            model(torch.tensor([[1.0, 2.0]]) * (1 + 2 * store.rank)).sum().backward()
            assert push.called == (not options)
            optimizer.step()
            assert push.called
        return model.weight.tolist()

    assert job.all(one) == [[[-1.0, -3.0]]] * 2


# -- one bucket -------------------------------------------------------------------------------------------------------


def bucket_of(model):
    (made,) = layout.make_buckets(model, torch.optim.SGD(model.parameters(), lr=1.0), "b")
    made.lay_out(made.host_weights())
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
