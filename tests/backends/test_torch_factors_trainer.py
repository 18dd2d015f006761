"""--factors: training programs whose dense layers send sufficient factors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dmltrain import kvstore, models  # noqa: E402
from dmltrain.backends.torch.distributed import choice  # noqa: E402
from dmltrain.backends.torch.trainer import TorchTrainer  # noqa: E402
from dmltrain.errors import UserError  # noqa: E402
from dmltrain.options import parse  # noqa: E402
from tests.kvstore.whole_job import WholeJob  # noqa: E402


@pytest.fixture
def job():
    made = WholeJob()
    yield made
    made.close()


@pytest.mark.parametrize(
    "line", ["--factors auto", "--factors auto --macrobatch-size 64", "--factors auto --gc-type bf16"]
)
def test_a_trainer_takes_the_same_steps_with_factors(job, line):
    """In the second step one of the workers has no samples. Other layers stay compressed."""
    wide = models.create("mlp", None, 10, (1, 8, 8))
    shares = [(16, 16), (16, 0), (3, 16)]

    def one(store, words):
        made = TorchTrainer(wide, parse(["--kv-store", "dist_sync", "--batch-size", "16", *words]), store)
        for seed, counts in enumerate(shares):
            own = slice(0, counts[0]) if store.rank == 0 else slice(counts[0], sum(counts))
            draw = np.random.default_rng(seed)
            images, labels = draw.standard_normal((32, 1, 8, 8), dtype=np.float32), draw.integers(0, 10, 32)
            if "--macrobatch-size" in words:
                made.accumulate(images[own], labels[own], 2 * sum(counts))
            made.train_step(images[own], labels[own], sum(counts) * (2 if "--macrobatch-size" in words else 1), 0.1)
        made.synchronize()
        return made.state()["model"], made.choices(), store.bytes_sent

    words = line.split()
    (found, choices, sent), (other, *_) = job.all(lambda store: one(store, words))
    assert all(torch.equal(value, other[name]) for name, value in found.items())
    assert len(choices) == 3 and choices[0].startswith("Layer fc1_weight (128 x 64) sends factors: they are smaller; ")
    if "bf16" not in line:  # there gradients are rounded, and factors are not
        expected = alone(wide, shares, two="--macrobatch-size" in words)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def alone(network, shares, two):
    made = TorchTrainer(network, parse(["--kv-store", "local"]), kvstore.create("local"))
    for seed, counts in enumerate(shares):
        draw = np.random.default_rng(seed)
        images, labels = draw.standard_normal((32, 1, 8, 8), dtype=np.float32), draw.integers(0, 10, 32)
        used = slice(0, sum(counts))
        if two:
            made.accumulate(images[used], labels[used], 2 * sum(counts))
        made.train_step(images[used], labels[used], sum(counts) * (2 if two else 1), 0.1)
    made.synchronize()
    return made.state()["model"]


def test_a_resumed_training_sends_the_same_layers_factors(job, monkeypatch):
    """Also if a new measurement would choose others; residuals of the compressed layers come back with them."""
    options = parse(["--kv-store", "dist_sync", "--batch-size", "4", "--factors", "auto", "--gc-type", "int8"])
    wide = models.create("mlp", None, 10, (1, 8, 8))

    def one(store):
        first = TorchTrainer(wide, options, store)
        images, labels = np.ones((4, 1, 8, 8), np.float32), np.zeros(4, np.int64)
        first.train_step(images, labels, 8, 0.1)
        first.synchronize()
        return first.state(store.residuals()), first.choices()

    (state, choices), _ = job.all(one)
    assert state["factored"] and len(state["factored"]) < len(choices)
    job.close()
    monkeypatch.setattr(choice, "decide", lambda *_: pytest.fail("it decides again"))
    again = WholeJob()
    try:
        for lines in again.all(lambda store: TorchTrainer(wide, options, store, state).choices()):
            told = [line.split()[1] for line in lines if "sends factors: as told" in line]
            assert told == state["factored"]
    finally:
        again.close()


@pytest.mark.parametrize(
    "line, said",
    [
        ("--kv-store dist_async", "--factors auto does not work with --kv-store dist_async: use --kv-store dist_sync"),
        ("--kv-store local", "--factors auto does not work with --kv-store local: use --kv-store dist_sync"),
        (
            "--kv-store dist_sync --update-on-kvstore 1",
            "the optimizer on the servers: use --update-on-kvstore 0, or lea",
        ),
        ("--kv-store dist_sync --dtype bfloat16", "--dtype bfloat16: use --dtype float32, or leave --factors out"),
        ("--kv-store dist_sync --compile", "--compile: use no --compile, or"),
        ("--kv-store dist_sync --devices cpu:2", "several devices a worker: use one device for each worker, or"),
        (
            "--kv-store dist_sync --backend mxnet",
            "--factors auto: --backend mxnet does not support this; use off, or --b",
        ),
    ],
)
def test_options_that_exclude_factors_are_named_with_a_fix(line, said):
    with pytest.raises(UserError, match=said):
        parse(["--factors", "auto", *line.split()])


@pytest.mark.parametrize(
    "line, said",
    [
        (
            "--kv-store dist_ssp",
            "--server-shares links does not work with --kv-store dist_ssp: use --kv-store dist_sync or dist_local, or",
        ),
        (
            "--kv-store dist_sync --update-on-kvstore 1",
            "--server-shares links does not work with the optimizer on the serve",
        ),
        (
            "--kv-store dist_sync --gc-type int8",
            "--server-shares links does not work with --gc-type int8, which keeps residuals: use --gc-type none",
        ),
        (
            "--kv-store dist_sync --backend mxnet",
            "--server-shares links: --backend mxnet does not support this; use equal,",
        ),
    ],
)
def test_options_that_exclude_shares_by_links_are_named_with_a_fix(line, said):
    with pytest.raises(UserError, match=said):
        parse(["--server-shares", "links", *line.split()])
