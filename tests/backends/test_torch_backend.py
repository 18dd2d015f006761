"""PyTorch as the launcher's and the options' backend: what it says it can do, and that it does it."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from dmltrain import models, optimizers  # noqa: E402
from dmltrain.backends.torch.backend import TorchBackend, make_step  # noqa: E402
from dmltrain.env import TRANSPORTS  # noqa: E402
from dmltrain.kvstore import codec, types  # noqa: E402
from dmltrain.options import parse  # noqa: E402

MLP = models.create("mlp", None, 10, (1, 8, 8))
BACKEND = TorchBackend()


def test_it_has_every_kvstore_codec_optimizer_and_transport():
    can = BACKEND.capabilities
    assert (BACKEND.name, BACKEND.title) == ("torch", "PyTorch")
    assert set(can.kvstores) == {each.name for each in types.TABLE}
    assert can.codecs == codec.TYPES and can.optimizers == optimizers.NAMES and can.transports == TRANSPORTS
    assert can.dtypes == ("float32", "bfloat16", "float16") and can.suffix == ".pt"
    assert can.compile and can.host_sum and can.residuals


def test_a_trainer_continues_from_an_encoded_state():
    settings, store = parse(["--kv-store", "local", "--mom", "0.5"]), BACKEND.local_store("device")
    assert store.type == "device"
    made = BACKEND.trainer(MLP, settings, store)
    draw = np.random.default_rng(0)
    made.train_step(draw.standard_normal((4, 1, 8, 8), np.float32), draw.integers(0, 10, 4), 4, 0.1)
    state = BACKEND.decode(BACKEND.encode(made.state()))
    continued = BACKEND.trainer(MLP, settings, BACKEND.local_store("local"), state)
    assert continued.digest() == made.digest() != BACKEND.trainer(MLP, settings, store).digest()


def test_the_local_store_steps_with_torchs_optimizers():
    store = BACKEND.local_store("local")
    store.init("w", np.ones(3, np.float32))
    store.set_optimizer({"name": "sgd", "lr": 0.5})
    store.push("w", np.full(3, 2.0, np.float32))
    out = np.zeros(3, np.float32)
    store.pull("w", out)
    assert out.tolist() == [0.0] * 3


def test_a_step_has_the_options_of_its_key():
    for key, expected in ((7, 0.9), (8, 0.5)):
        spec = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "keys": {"7": {}, "8": {"lr": 0.5}}}
        value = np.ones(1, np.float32)
        make_step(spec, key, value)(value, np.ones(1, np.float32), -1.0)
        assert value.tolist() == [pytest.approx(expected)]
