"""PyTorch as the launcher's and the options' backend: what it says it can do, and that it does it."""

import numpy as np

from dmltrain import optimizers
from dmltrain.backends.torch.backend import TorchBackend, make_step
from dmltrain.backends.torch.server_optimizer import Step
from dmltrain.env import TRANSPORTS
from dmltrain.kvstore import codec, types

BACKEND = TorchBackend()


def test_it_has_every_kvstore_codec_optimizer_and_transport():
    can = BACKEND.capabilities
    assert (BACKEND.name, BACKEND.title) == ("torch", "PyTorch")
    assert set(can.kvstores) == {each.name for each in types.TABLE}
    assert can.codecs == codec.TYPES and can.optimizers == optimizers.NAMES and can.transports == TRANSPORTS
    assert can.dtypes == ("float32", "bfloat16", "float16") and can.suffix == ".pt"
    assert can.compile and can.host_sum and can.residuals
    assert BACKEND.local_store("device").type == "device"
    assert type(make_step({"name": "sgd", "lr": 0.1}, 7, np.ones(1, np.float32))) is Step


def test_the_local_store_steps_with_torchs_optimizers():
    store = BACKEND.local_store("local")
    store.init("w", np.ones(3, np.float32))
    store.set_optimizer({"name": "sgd", "lr": 0.5})
    store.push("w", np.full(3, 2.0, np.float32))
    out = np.zeros(3, np.float32)
    store.pull("w", out)
    assert out.tolist() == [0.0] * 3
