"""The torch backend against plain torch: one step, several devices, statistics, precision, state."""

import math
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dmltrain import kvstore, models, optimizers
from dmltrain.backends.torch import state as torch_state
from dmltrain.backends.torch import trainer as backend
from dmltrain.backends.torch.loss_scale import FIRST, LossScale
from dmltrain.errors import UserError
from dmltrain.options import parse
from tests.backends.served_store import ServedStore

MLP = models.create("mlp", None, 10, (1, 8, 8))
RESNET = models.create("resnet", 8, 10, (3, 16, 16))  # with batch norm


def make(network=MLP, line="", state=None) -> backend.TorchTrainer:
    return backend.TorchTrainer(network, parse(line.split()), kvstore.create("local"), state)


def batch(network=MLP, count=16, seed=0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal((count, *network.input_shape), dtype=np.float32), draw.integers(0, 10, count)


def arrays(made: backend.TorchTrainer) -> dict[str, torch.Tensor]:
    return made.state()["model"]


def assert_close(found: backend.TorchTrainer, expected: backend.TorchTrainer, relative: float) -> None:
    for name, value in arrays(expected).items():
        torch.testing.assert_close(arrays(found)[name], value, rtol=relative, atol=relative)


# -- a step -----------------------------------------------------------------------------------------------------------


def test_steps_are_those_of_a_plain_loop():
    """The mean over `total` samples, momentum, and weight decay of weights and gammas only."""
    made, plain = make(RESNET, "--wd 0.01"), make(RESNET)
    module = plain._modules[0]
    decayed = [p for name, p in module.named_parameters() if name.endswith(("_weight", "_gamma"))]
    others = [p for name, p in module.named_parameters() if name.endswith(("_bias", "_beta"))]
    assert len(decayed) + len(others) == len(list(module.parameters())) and others
    sgd = torch.optim.SGD([{"params": decayed, "weight_decay": 0.01}, {"params": others}], momentum=0.9, lr=9.0)
    for step in range(3):
        images, labels = batch(RESNET, seed=step)
        made.train_step(images, labels, total=20, learning_rate=0.05)
        sgd.zero_grad()
        loss = (
            torch.nn.functional.cross_entropy(
                module(torch.from_numpy(images)), torch.from_numpy(labels), reduction="sum"
            )
            / 20
        )
        loss.backward()
        for group in sgd.param_groups:
            group["lr"] = 0.05
        sgd.step()
    assert_close(made, plain, 1e-4)


USUAL_RATES = {"lars": 10.0, "ftrl": 1.0, "dcasgd": 0.05}


@pytest.mark.parametrize("name", [name for name in optimizers.NAMES if name != "sgld"])  # it samples, with noise
def test_every_optimizer_learns(name):
    kind = "dist_async" if optimizers.BY_NAME[name].asynchronous else "local"
    settings = parse(f"--optimizer {name} --kv-store {kind}".split())
    store = ServedStore(kind) if kind == "dist_async" else kvstore.create(kind)
    made = backend.TorchTrainer(MLP, settings, store)
    images, labels = batch()
    for _ in range(20):
        made.train_step(images, labels, 16, USUAL_RATES.get(name, 0.01))
    first = made.take_sums()
    made.evaluate(images, labels)
    assert made.take_sums().cross_entropy / 16 < first.cross_entropy / 320 / 2


def test_a_worker_without_samples_takes_part_with_a_zero_gradient():
    made, before = make(RESNET, "--wd 0 --mom 0"), make(RESNET)
    images, labels = batch(RESNET, 0)
    made.train_step(images, labels, 7, 0.1)
    assert all(parameter.grad is not None for parameter in made._modules[0].parameters())
    assert made.digest() == before.digest()
    assert made.take_sums().samples == 0


def test_counting():
    logits = torch.tensor([[0.0, 1, 2], [2, 1, 0], [1, 2, 0]])
    counted = backend.count(logits, torch.tensor([2, 1, 2]), torch.tensor(1.5), top_k=2)
    assert counted.tolist() == [3, 1, 2, 1.5]


def test_evaluation_counts_and_changes_nothing():
    made = make(RESNET, "--top-k 3")
    digest = made.digest()
    images, labels = batch(RESNET, 40)
    for start in (0, 16, 32):
        made.evaluate(images[start : start + 16], labels[start : start + 16])
    sums = made.take_sums()
    assert sums.samples == 40 and sums.correct <= sums.correct_top_k <= 40 and sums.cross_entropy > 0
    assert made.digest() == digest
    assert made.take_sums().samples == 0


def test_the_seed_decides():
    assert make(RESNET).digest() == make(RESNET).digest() != make(RESNET, "--seed 1").digest()


# -- layouts and precision --------------------------------------------------------------------------------------------


def test_convolutions_run_channels_last_unless_told_otherwise():
    weight = make(RESNET)._modules[0].conv0_weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert make(RESNET, "--memory-format contiguous")._modules[0].conv0_weight.is_contiguous()
    assert make(MLP)._layout is torch.contiguous_format
    assert make(RESNET).digest() == make(RESNET, "--memory-format contiguous").digest()


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.05), ("float16", 0.01)])
def test_low_precision_stays_near_float32(dtype, tolerance):
    made, full = make(RESNET, f"--dtype {dtype}"), make(RESNET)
    images, labels = batch(RESNET)
    for each in (made, full):
        each.train_step(images, labels, 16, 0.05)
    assert made.digest() != full.digest()
    assert {value.dtype for value in arrays(made).values()} == {torch.float32}
    assert_close(made, full, tolerance)


def test_a_step_that_overflows_is_left_out_and_the_scale_halved():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=True)
    scale = LossScale(optimizer, torch.device("cpu"))
    for gradient, expected in [(math.inf, 1.0), (FIRST / 2, 0.5), (math.nan, 0.5), (0.0, 0.05)]:
        weight.grad = torch.full((3,), gradient)
        optimizer.step()
        torch.testing.assert_close(weight.data, torch.full((3,), expected))
    assert scale.state() == [FIRST / 4, 1.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_the_loss_of_float16_is_scaled(dtype):
    """From 65536 on, as a checkpoint says."""
    state = make(line=f"--dtype {dtype}").state()
    assert state.get("loss_scale") == ([65536.0, 0.0] if dtype == "float16" else None)


@pytest.mark.parametrize(
    "line, kind, said",
    [
        ("", "dist_async", "needs the optimizer on the workers: use --kv-store dist_sync"),
        ("", "dist_ssp", "needs the optimizer on the workers: use --kv-store dist_sync"),
        ("--update-on-kvstore 1", "dist_sync", "needs the optimizer on the workers: use --kv-store dist_sync"),
        ("--optimizer adamax", "dist_sync", "optimizer adamax does not support here: use one of sgd, nag, signum"),
    ],
)
def test_float16_is_refused_where_the_loss_cannot_be_scaled(line, kind, said):
    with pytest.raises(UserError, match=said):
        backend.TorchTrainer(MLP, parse(f"--dtype float16 {line}".split()), ServedStore(kind))


@pytest.mark.parametrize(
    "kind, asked, on_servers", [("dist_sync", 0, False), ("dist_sync", 1, True), ("dist_ssp", 0, True)]
)
def test_the_optimizer_runs_in_the_requested_place(kind, asked, on_servers):
    made = backend.TorchTrainer(MLP, parse(["--update-on-kvstore", str(asked)]), ServedStore(kind))
    assert ("servers" in made.state()["optimizer"]) == on_servers


def test_the_scale_grows_after_many_good_steps():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=True)
    scale = LossScale(optimizer, torch.device("cpu"))
    scale.load_state([8.0, 1998.0])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert scale.state() == [8.0, 1999.0]
    optimizer.step()
    assert scale.state() == [16.0, 0.0]


def test_a_missing_compiler_is_a_user_error(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    torch.compiler.reset()
    made = make(line="--compile")
    with torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/g++",), "force_disable_caches": True}):  # noqa: SIM117
        with pytest.raises(UserError, match=r"--compile: .*C\+\+ compiler"):
            made.train_step(*batch(), 16, 0.05)
    torch.compiler.reset()


@pytest.mark.thorough  # it compiles C++ for ten seconds
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++")
@pytest.mark.skipif(" " in torch.__file__, reason="torch.compile fails where PyTorch's own path has a space")
def test_compiled_is_the_same_network():
    made, eager = make(line="--compile"), make()
    images, labels = batch()
    for each in (made, eager):
        for _ in range(2):
            each.train_step(images, labels, 16, 0.05)
        each.evaluate(images, labels)
    assert_close(made, eager, 1e-5)


# -- several devices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_several_devices_make_the_same_step_as_one(count):
    several, one = make(line=f"--devices cpu:{count}"), make()
    for step, size in enumerate([16, 7, 2, 1]):  # shares are unequal, the last ones empty
        images, labels = batch(count=size, seed=step)
        for each in (several, one):
            each.train_step(images, labels, size, 0.05)
    several.synchronize()
    assert_close(several, one, 1e-5)
    for module in several._modules:
        for own, first in zip(module.parameters(), several._modules[0].parameters(), strict=True):
            assert torch.equal(own, first)
    assert several.take_sums().samples == one.take_sums().samples == 26


def test_statistics_are_merged_over_devices_and_workers_by_samples():
    made = make(RESNET, "--devices cpu:2")
    images, labels = batch(RESNET, 5)  # 3 samples on the first device, 2 on the second
    made.train_step(images, labels, 5, 0.05)
    first, second = (backend.statistics(module)[0].clone() for module in made._modules)
    assert not torch.equal(first, second)
    other = 15.0  # samples of another worker, whose statistics are all 1

    def all_reduce(name: str, mine: np.ndarray) -> np.ndarray:
        assert mine[-1] == 5
        return mine + np.append(np.full(len(mine) - 1, other), other)

    made.merge_statistics(all_reduce, num_workers=2)
    expected = (3 * first.double() + 2 * second.double() + other) / 20
    for module in made._modules:
        torch.testing.assert_close(backend.statistics(module)[0], expected.float())


def test_a_single_device_merges_nothing():
    made, without_statistics = make(RESNET), make(MLP)
    made.train_step(*batch(RESNET), 16, 0.05)
    before, calls = [made.digest(), without_statistics.digest()], []

    def all_reduce(name: str, mine: np.ndarray) -> np.ndarray:
        calls.append(name)
        return mine

    made.merge_statistics(all_reduce, num_workers=1)
    without_statistics.merge_statistics(all_reduce, num_workers=2)
    assert not calls
    assert [made.digest(), without_statistics.digest()] == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_missing_gpu():
    with pytest.raises(UserError, match=r"GPU 0 .* no GPU that PyTorch .* --devices cpu"):
        make(line="--gpus 0,1")


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["", "--optimizer adam", "--devices cpu:2", "--dtype float16"])
def test_a_saved_state_continues_bit_for_bit(line):
    whole = make(RESNET, line)
    images, labels = batch(RESNET)
    whole.train_step(images, labels, 16, 0.05)
    whole.merge_statistics(lambda name, mine: mine, 1)
    content = torch_state.encode({"state": whole.state()})
    whole.train_step(images, labels, 16, 0.05)
    resumed = make(RESNET, line, torch_state.decode(content)["state"])
    resumed.train_step(images, labels, 16, 0.05)
    assert resumed.digest() == whole.digest()


def test_another_networks_state_is_refused():
    with pytest.raises(UserError, match="another network: .* expected .*, found "):
        make(RESNET, state=make(MLP).state())


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_no_code(tmp_path):
    content = torch_state.encode({"state": Bomb(tmp_path / "ran")})
    with pytest.raises(UserError, match="not a checkpoint"):
        torch_state.decode(content)
    with pytest.raises(UserError, match="not a checkpoint"):
        torch_state.decode(pickle.dumps({"a": 1}))
    with pytest.raises(UserError, match="holds a list"):
        torch_state.decode(_saved([1]))
    assert not (tmp_path / "ran").exists()


def _saved(content: object) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
