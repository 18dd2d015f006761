"""dmltrain.distribute as users call it: worker 0 of a job is a script, which the test is."""

import sys

import pytest

import dmltrain
from dmltrain import kvstore
from dmltrain.api import script
from dmltrain.base.errors import UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.worker.store import DistKVStore
from tests.kvstore.whole_job import NEVER, begun
from tests.waiting import SECONDS

torch = pytest.importorskip("torch", reason="torch is not installed")

from dmltrain.backends.torch.backend import make_step  # noqa: E402
from tests.connected import connected  # noqa: E402


@pytest.fixture
def joined_by_script(whole_job, monkeypatch, tmp_path):
    """joined_by_script(...) -> WholeJob(...), whose worker 0 joins by dmltrain.distribute in this process."""

    def start(*words, **options):
        job = whole_job(*words, outside=1, **options)
        (tmp_path / "key").write_bytes(job.environment.key)
        its = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": 0, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLTRAIN_PROBE": 0}
        its |= {"DMLC_NUM_WORKER": 2, "DMLC_NUM_SERVER": job.environment.num_servers}
        its |= {"DMLC_PS_ROOT_PORT": job.environment.root_port, "DMLTRAIN_JOB": job.environment.job}
        its |= {"DMLTRAIN_KEY_FILE": tmp_path / "key", "DMLTRAIN_HEARTBEAT_TIMEOUT": job.environment.lost_seconds}
        for name, value in its.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # distribute replaces it
        monkeypatch.setattr(script, "_stores", [])
        monkeypatch.setattr(kvstore, "create", create)
        return job

    def create(kind, staleness, environment, elastic):
        """Beside other workers of this process, which must not end if the test fails."""
        return DistKVStore(kind, types.find(kind).bound(staleness), environment, NEVER)

    yield start
    for _, each in script._stores:
        each.abort("the test is over")


class Pulling(torch.nn.Module):
    """Its loss pulls its weights towards a worker's own values: gradients are exact differences."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(20_000))

    def forward(self, values):
        return (self.weight - values).square().sum() / 2


def train(rank, distribute):
    """Three steps of `distribute(model, optimizer)`: the weights after them, and the bytes that they sent."""
    model = Pulling()
    optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(rank))
    before = optimizer.store.bytes_sent
    for _ in range(3):
        optimizer.zero_grad()
        model(values).backward()
        optimizer.step()
    return model.weight.detach().numpy(), optimizer.store.bytes_sent - before


def of_store(store):
    return train(store.rank, lambda model, optimizer: connected(model, optimizer, store))


def linear():
    model = torch.nn.Linear(500, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_scripts_compression_sends_a_quarter_and_a_second_model_uses_the_same_kvstore(joined_by_script, whole_job):
    def other(store):
        store.set_gradient_compression({"type": "int8"})
        found = of_store(store)
        connected(*linear(), store, factors=1)
        return found

    job = joined_by_script()
    others = begun(lambda: other(job.stores[0]))
    weights, sent = train(0, lambda *words: dmltrain.distribute(*words, compression="int8"))
    for choices, said in (
        ({"kvstore": "dist_async", "compression": "int8"}, "^kvstore='dist_async': .*'dist_sync'"),
        ({}, "^compression='none': .*'int8'"),
        ({"compression": "int8", "transport": "tcp"}, "^transport='tcp': .*'auto'"),
    ):
        with pytest.raises(UserError, match=said):
            dmltrain.distribute(*linear(), **choices)
    same = {"compression": {"type": "int8"}, "transport": "auto", "factors": 1}
    assert dmltrain.distribute(*linear(), "dist_device_sync", **same).store is script._stores[0][1]
    assert others.result(SECONDS)[0].tobytes() == weights.tobytes()
    plain = whole_job().all(of_store)
    assert 0.25 < sent / plain[0][1] < 0.27 and plain[0][0].tobytes() != weights.tobytes()


class Slope(torch.nn.Module):
    """The gradient of each weight is 0.5."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self):
        return self.weight.sum() / 2


def test_a_scripts_staleness_bounds_its_steps_and_its_residual_keeps_what_is_below_the_threshold(joined_by_script):
    """Each gradient is half a threshold, so each second step changes the weights. The script's second step waits for
    the first of worker 1, with the default of 3 its fourth would."""
    compression = {"type": "2bit", "threshold": 1.0}

    def other(store):
        store.set_gradient_compression(compression)
        model = Slope()
        optimizer = connected(model, torch.optim.SGD(model.parameters(), lr=1.0), store, step_early=True)
        store.barrier()
        store.barrier()
        model().backward()
        optimizer.step()
        optimizer.settle()

    job = joined_by_script("dist_ssp", servers=1, staleness=1.0, make_step=make_step)
    others, model, found = begun(lambda: other(job.stores[0])), Slope(), []
    inner, options = torch.optim.SGD(model.parameters(), lr=1.0), {"staleness": 1, "transport": "tcp"}
    optimizer = dmltrain.distribute(model, inner, "dist_ssp", compression=compression, step_early=True, **options)
    for _ in range(2):
        optimizer.settle()
        found.append(model.weight.tolist())
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    optimizer.store.barrier()
    assert [handle.done for handle in optimizer._exchange.gradients.pending.values()] == [False]
    optimizer.store.barrier()
    optimizer.settle()
    assert [*found, model.weight.tolist()] == [[0.0] * 3, [0.0] * 3, [-1.0] * 3]
    assert optimizer.store._environment.transport == "tcp"
    others.result(SECONDS)
