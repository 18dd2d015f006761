"""A bucket's memory: where gradients are pushed from, and where their results come to."""

import numpy as np
import pytest
import torch
from torch import nn

from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.kvstore import READ, Handle, KVStore
from tests.backends.a_gpu import DEVICES, device_for


class Noting(KVStore):
    """Notes what is pushed and where the result shall go."""

    def pushpull(self, key, value, out=None, priority=0, wait=True, rate=-1.0):
        self.value, self.out = value, out
        return Handle(0, "sum", 1.0)


def bucket_on(device, keep):
    model = nn.Linear(3, 2).to(device)
    made = Bucket("b", group=0, priority=1, parameters=list(model.parameters()))
    made.lay_out(made.host_weights(), keep)
    made.gradients.copy_(torch.arange(8.0))
    return made


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", DEVICES)
def test_a_result_comes_to_the_pushed_memory_only_if_that_may_change(name, keep, monkeypatch):
    bucket, store = bucket_on(device_for(name, monkeypatch), keep), Noting()
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
def test_gradients_that_are_kept_can_be_pushed_again(name, monkeypatch):
    bucket, store = bucket_on(device_for(name, monkeypatch), keep=True), Noting()
    bucket.send(store)
    first = store.value
    if store.out is not READ:
        store.out[:] = 3.0  # of a round that is not used
    bucket.send(store)
    assert store.value.tolist() == list(range(8)) and np.shares_memory(first, store.value)
