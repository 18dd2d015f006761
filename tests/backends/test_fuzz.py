"""Mutated checkpoints: each is read or refused, in limited memory and time (tests/fuzzing.py)."""

import functools
import hashlib

import numpy as np
import pytest

from dmltrain.backends.table import BACKENDS
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import seal
from tests.archives import repacked
from tests.fuzzing import Fuzzed, parts, survive

ZIP = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7")


def read(backend: str, suffix: str, data: bytes) -> None:
    damage = seal.examine(data, suffix).damage
    if damage:
        raise UserError(damage)
    BACKENDS[backend].decode(data)


def torch_checkpoints() -> list[bytes]:
    import torch

    state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
    content = {
        "format": 1,
        "network": "mlp",
        "image_shape": [1, 8, 8],
        "circumstances": {"seed": 0, "dtype": "float32"},
        "state": {"model": {"weight": torch.ones(2, 3)}, "optimizer": state},
    }
    whole = BACKENDS["torch"].encode(content)
    return [whole, seal.sealed(whole)]


def sealed(data: bytes) -> bytes:
    """With the checksums of the members, and the sha256 that tells whether the file is whole."""
    data = repacked(data)
    if not seal.LINE.fullmatch(data[-seal.LINE_BYTES :]):
        return seal.sealed(data)
    content = data[: -seal.LINE_BYTES]
    return content + b"\ndmltrain sha256 %s\n" % hashlib.sha256(content).hexdigest().encode()


TORCH = Fuzzed(
    functools.partial(read, "torch", ".pt"),
    torch_checkpoints,
    (UserError,),
    (
        *ZIP,
        *(b"(", b"t", b"R", b"b", b"]", b"}", b"a", b"s", b"Q", b"q\x00", b"h\x00", b"r\xff\xff\xff\x7f"),
        *(b"cbuiltins\nbytearray\n", b"ctorch\nTensor\n", b"ctorch\nFloatStorage\n", b"J\xff\xff\xff\x7f"),
    ),
    (bytes, repacked, sealed),
)


def mxnet_checkpoints() -> list[bytes]:
    content = {
        "format": 1,
        "network": "mlp",
        "state": {"model": {"weight": np.ones((2, 3), np.float32)}, "optimizer": [1, {"m": np.zeros(3, np.float32)}]},
        "residuals": {"server 0": b"abc"},
    }
    whole = BACKENDS["mxnet"].encode(content)
    return [whole, seal.sealed(whole)]


MXNET = Fuzzed(
    functools.partial(read, "mxnet", ".npz"),
    mxnet_checkpoints,
    (UserError,),
    (*ZIP, b"<f4", b"|O", b"|V9", b"(3,)", b"True", b'"array:', b"[", b"{", b"null", b"'descr'"),
    (bytes, repacked, sealed),
)


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", ["TORCH", "MXNET"])
def test_no_checkpoint_can_break_a_program(name: str, part: int) -> None:
    survive(f"tests.backends.test_fuzz:{name}", part)
