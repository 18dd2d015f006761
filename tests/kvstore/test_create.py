"""Which store `create` returns, and the stores that need no servers."""

import numpy as np
import pytest

from dmltrain import kvstore
from dmltrain.env import Environment
from dmltrain.errors import UserError

ALONE = Environment()
LAUNCHED = Environment(launched=True, num_workers=2)


@pytest.mark.parametrize(
    "kind, options, environment, message",
    [
        ("dist", {}, ALONE, "local, device, dist_sync"),
        ("dist_sync", {}, ALONE, "dmltrain-launch -n WORKERS"),
        ("dist_sync", {}, LAUNCHED, "at least one server, .*-s 0"),
        ("dist_sync", {"transport": "udp"}, LAUNCHED, "transport='udp': .* auto, tcp, shm"),
        ("dist_sync", {"host_sum": "on"}, LAUNCHED, "host_sum='on': .* auto, off"),
        ("dist_sync", {"server_shares": "link"}, LAUNCHED, "server_shares='link': .* equal, links"),
        ("dist_sync", {"staleness": 3}, LAUNCHED, "staleness is .* dist_ssp"),
        ("dist_local", {"backend": "mxnet"}, LAUNCHED, "dist_local: MXNet .* local, "),
        ("dist_ssp", {"backend": "mxnet"}, LAUNCHED, "MXNet .* local, dist_sync, dist_async"),
    ],
)
def test_mistakes_are_explained(kind, options, environment, message):
    with pytest.raises(UserError, match=message):
        kvstore.create(kind, environment=environment, **options)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_single_worker_sums_its_devices(kind):
    kv = kvstore.create(kind, environment=ALONE)
    kv.init(["a", "b"], [np.zeros(2, np.float32), np.ones((2, 2), np.float32)])
    kv.push("a", [np.array([1, 2], np.float32), np.array([10, 20], np.float32)])
    outs = [np.zeros(2, np.float32), np.zeros(2, np.float32)]
    kv.pull("a", outs)
    kv.pull("b", square := np.zeros((2, 2), np.float32))
    assert [out.tolist() for out in (*outs, square)] == [[11, 22], [11, 22], [[1, 1], [1, 1]]]


def test_an_optimizer_in_the_local_store_and_its_state(tmp_path):
    stores = []
    for _ in range(2):
        kv = kvstore.create("local", environment=ALONE)
        kv.init("w", np.zeros(3, np.float32))
        kv.set_optimizer({"name": "sgd", "lr": 0.5, "momentum": 0.9})
        stores.append(kv)
    first, second = stores
    gradient, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    first.pushpull("w", gradient, out)
    assert out.tolist() == [-0.5] * 3
    first.save_optimizer_states(str(tmp_path / "states"))
    second.push("w", gradient)
    second.load_optimizer_states(str(tmp_path / "states"))
    for kv in stores:
        kv.pushpull("w", gradient, out)
        assert out.tolist() == pytest.approx([-0.5 - 0.5 * 1.9] * 3)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda kv: kv.set_optimizer({"name": "magic"}), "unknown optimizer 'magic'"),
        (lambda kv: kv.set_optimizer({"name": "sgd", "lr": 0.1, "speed": 3}), "sgd takes lr, momentum"),
        (lambda kv: kv.set_optimizer({"name": "sgd", "lr": "fast"}), "lr='fast': expected a finite number"),
        (lambda kv: kv.push("x", np.zeros(1, np.float32)), "'x' was not declared: call init first"),
        (lambda kv: kv.init(["a", "b"], [np.zeros(1, np.float32)]), "2 keys but 1 values"),
        (lambda kv: kv.init("a", np.zeros(1, np.int64)), "float32 or float64, .* int64"),
        (lambda kv: kv.push("x", np.zeros(1, np.float32), rate=float("nan")), "rate is nan, expected a finite number"),
        (lambda kv: kv.set_gradient_compression({"type": "2bit"}), "compression '2bit' is not available"),
    ],
)
def test_wrong_calls_are_explained(call, message):
    kv = kvstore.create("local", environment=ALONE)
    kv.init("w", np.zeros(3, np.float32))
    with pytest.raises(UserError, match=message):
        call(kv)
