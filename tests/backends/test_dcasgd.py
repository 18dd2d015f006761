"""dcasgd in a real dist_async job: each push is compensated for the steps that its worker had not pulled."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
from dmltrain.backends.torch.server_optimizer import Step
from tests.kvstore.whole_job import WholeJob

RATE, LAMDA, MOMENTUM = 0.25, 0.5, 0.5
SPEC = {"name": "dcasgd", "lr": RATE, "lamda": LAMDA, "momentum": MOMENTUM}


@pytest.fixture
def job():
    made = WholeJob("dist_async", workers=2, servers=2, staleness=float("inf"), make_step=Step)
    yield made
    made.close()


def test_a_push_is_compensated_for_the_steps_since_its_workers_pull(job):
    size = 200_000  # on both servers
    first, second = job.stores
    job.all(lambda store: store.init("w", np.ones(size, np.float32)))
    job.all(lambda store: store.set_optimizer(SPEC))

    def pushed(store, gradient):
        """The value after this worker's push."""
        out = np.empty(size, np.float32)
        store.pushpull("w", np.full(size, gradient, np.float32), out)
        assert (out == out[0]).all()
        return out[0]

    weight, buffer = 1.0, 0.0
    pulled = {first: 1.0, second: 1.0}
    for store, gradient in ((first, 1.0), (first, -2.0), (second, 3.0), (first, 1.5), (second, 0.5)):
        delayed = gradient + LAMDA * gradient * gradient * (weight - pulled[store])
        buffer = MOMENTUM * buffer + delayed
        weight -= RATE * buffer
        pulled[store] = weight
        assert pushed(store, gradient) == pytest.approx(weight, rel=1e-6)
    assert pulled[first] != pulled[second]


def test_without_delay_it_is_sgd():
    values = [np.ones(3, np.float32) for _ in range(3)]
    steps = [Step(SPEC, 0, values[0]), Step(SPEC, 0, values[1])]
    steps.append(Step({"name": "sgd", "lr": RATE, "momentum": MOMENTUM}, 0, values[2]))
    for gradient in (1.0, -2.0, 3.0):
        gradients = np.full(3, gradient, np.float32)
        steps[0](values[0], gradients.copy(), -1.0)
        steps[1](values[1], gradients.copy(), -1.0, values[1].copy())
        steps[2](values[2], gradients.copy(), -1.0)
    np.testing.assert_allclose(values[0], values[2], rtol=1e-6)
    np.testing.assert_allclose(values[1], values[2], rtol=1e-6)
    assert set(steps[1].state()) == {"momentum_buffer"}  # not the pulled weights, which are the server's
