"""The GPU of a test: a real one, or CPU memory that stands for the memory of a GPU and for pinned memory."""

from types import SimpleNamespace

import pytest
import torch

from dmltrain.backends.torch.distributed import buckets

DEVICES = [
    "cpu",
    "stand-in",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


class _Torch:
    """torch, which makes all memory on the CPU."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros_like(self, tensor, device):
        assert device is buckets.Bucket.device
        return torch.zeros_like(tensor)

    def empty_like(self, tensor, pin_memory=False, device=None):
        assert pin_memory or device == "meta"
        return torch.empty_like(tensor, device=device)


def device_for(name, monkeypatch):
    """torch's device of that name. From a stand-in on buckets take CPU memory for a GPU's."""
    if name == "stand-in":
        monkeypatch.setattr(buckets, "torch", _Torch())
        monkeypatch.setattr(buckets.Bucket, "device", SimpleNamespace(type="cuda"))
        return torch.device("cpu")
    return torch.device(name)
