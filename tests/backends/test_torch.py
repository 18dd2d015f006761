"""The torch trainer against plain torch: steps, seeds, layouts, precision, the loss scale, state."""

import copy
import functools
import importlib
import math
import shutil
import warnings

import numpy as np
import pytest
import torch

from dmltrain import fit, models, optimizers
from dmltrain.backends.torch import devices, optimizer
from dmltrain.backends.torch import state as torch_state
from dmltrain.backends.torch import trainer as backend
from dmltrain.backends.torch.backend import TorchBackend, make_step
from dmltrain.backends.torch.loss_scale import FIRST, LossScale
from dmltrain.backends.torch.server_optimizer import SliceOptimizer
from dmltrain.base.env import TRANSPORTS
from dmltrain.base.errors import UserError
from dmltrain.data.images.mixing import Mixing
from dmltrain.kvstore import codec, types
from dmltrain.kvstore.local import LocalKVStore
from dmltrain.options import parse
from tests.backends.served_store import ServedStore
from tests.backends.trainers import MLP, RESNET, SMALL, batch
from tests.backends.trainers import torch_trainer as make


def arrays(made: backend.TorchTrainer) -> dict[str, torch.Tensor]:
    return made.state()["model"]


def assert_close(found: backend.TorchTrainer, expected: backend.TorchTrainer, relative: float) -> None:
    for name, value in arrays(expected).items():
        torch.testing.assert_close(arrays(found)[name], value, rtol=relative, atol=relative)


# -- averages of weights ----------------------------------------------------------------------------------------------


def averaged(line, function):
    """A trainer after five steps, each the end of an epoch, and torch's average of its weights and statistics."""
    made = make(RESNET, line)
    module = made.replicas.modules[0]
    expected = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=function, use_buffers=True)
    if function:
        expected.update_parameters(module)
    for step in range(5):
        made.train_step(*batch(RESNET, seed=step), 16, 0.05)
        made.average.end_epoch(step + 1)
        if function or step >= 2:
            expected.update_parameters(module)
    return made, expected.module


@pytest.mark.parametrize(
    "line, function",
    [("--ema-decay 0.75", torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)), ("--swa-from 3", None)],
)
def test_averages_are_torchs_are_evaluated_and_continue_bit_for_bit(line, function):
    made, expected = averaged(line, function)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(made.replicas.average.module.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    images, labels = batch(RESNET, seed=9)
    made.take_sums()
    made.evaluate(images, labels)
    logits = expected.eval()(torch.from_numpy(images))
    cross_entropy = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum").item()
    assert made.average.take_sums().cross_entropy == pytest.approx(cross_entropy, rel=1e-4)
    assert made.take_sums().cross_entropy != pytest.approx(cross_entropy, rel=1e-3)
    again = make(RESNET, line, state=torch_state.decode(torch_state.encode({"state": made.state()}))["state"])
    for each in (made, again):
        each.train_step(*batch(RESNET, seed=6), 16, 0.05)
        each.average.end_epoch(5)  # again, as a member does that joins at the end of the epoch
        each.average.end_epoch(6)
    assert made.average.digest() == again.average.digest() != made.digest()


# -- a step -----------------------------------------------------------------------------------------------------------


def test_steps_are_those_of_a_plain_loop():
    """The mean over `total` samples, momentum, and weight decay of weights and gammas only."""
    made, plain = make(RESNET, "--wd 0.01"), make(RESNET)
    module = plain.replicas.modules[0]
    decayed = [p for name, p in module.named_parameters() if name.endswith(("_weight", "_gamma"))]
    others = [p for name, p in module.named_parameters() if name.endswith(("_bias", "_beta"))]
    assert len(decayed) + len(others) == len(list(module.parameters())) and others
    sgd = torch.optim.SGD([{"params": decayed, "weight_decay": 0.01}, {"params": others}], momentum=0.9, lr=9.0)
    for step in range(3):
        images, labels = batch(RESNET, seed=step)
        made.train_step(images, labels, total=20, learning_rate=0.05)
        sgd.zero_grad()
        logits = module(torch.from_numpy(images))
        (torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum") / 20).backward()
        for group in sgd.param_groups:
            group["lr"] = 0.05
        sgd.step()
    assert_close(made, plain, 1e-4)


CLIPS = {  # options -> what torch's functions do to the gradients of a model
    "--clip-gradient-norm 0.1": lambda module: torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1),
    "--clip-gradient-norm 1e9": lambda module: None,
    "--clip-gradient-value 0.001": lambda module: torch.nn.utils.clip_grad_value_(module.parameters(), 0.001),
    "--clip-gradient-value 0.001 --clip-gradient-norm 0.02": lambda module: (
        torch.nn.utils.clip_grad_value_(module.parameters(), 0.001),
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.02),
    ),
}


def clipped_steps(module, line, shares=(1.0,)):
    """Steps with the mean over the samples of two batches, as torch makes them, times the sum of these shares."""
    sgd = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(2):
        sgd.zero_grad()
        for number in range(2):
            images, labels = batch(seed=2 * step + number)
            logits = module(torch.from_numpy(images))
            (torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum") / 32).backward()
        CLIPS[line](module)
        for parameter in module.parameters():
            parameter.grad *= sum(shares)
        sgd.step()


def steps_of_two_batches(made, total):
    for step in range(2):
        made.accumulate(*batch(seed=2 * step), total)
        made.train_step(*batch(seed=2 * step + 1), total, 0.5)
    made.synchronize()


@pytest.mark.parametrize("line", CLIPS)
def test_gradients_are_clipped_as_by_torch_also_where_the_loss_is_scaled(line):
    made, plain = make(line=f"--mom 0 --wd 0 {line}"), make()
    scaled, first = make(line=f"--mom 0 --wd 0 --dtype float16 {line}"), arrays(plain)
    clipped_steps(plain.replicas.modules[0], line)
    steps_of_two_batches(made, 32)
    assert_close(made, plain, 1e-6)
    scaled._scale.value.fill_(128.0)  # the usual first scale overflows here
    steps_of_two_batches(scaled, 32)
    for name, expected in arrays(plain).items():
        assert (arrays(scaled)[name] - expected).norm() < 0.02 * (expected - first[name]).norm()


@pytest.mark.parametrize("name", ["sgd", "lion", "muon"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf])
@pytest.mark.parametrize("clips", ["--clip-gradient-value 0.1", "--clip-gradient-value 0.1 --clip-gradient-norm 1"])
def test_clipping_leaves_a_gradient_that_overflows_to_the_loss_scale(name, bad, clips):
    """Neither weights nor the optimizer's averages change."""
    made = make(SMALL, f"--dtype float16 --optimizer {name} {clips}")
    made._scale.value.fill_(2.0**7)
    made.train_step(*batch(SMALL), 16, 0.01)
    before = copy.deepcopy((dict(made.replicas.modules[0].named_parameters()), made.state()["optimizer"]))
    made.replicas.modules[0].fc0_bias.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(3), bad))
    made.train_step(*batch(SMALL, seed=1), 16, 0.01)
    after = (dict(made.replicas.modules[0].named_parameters()), made.state()["optimizer"])
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
    assert made.state()["loss_scale"] == [2.0**6, 0.0]


@pytest.mark.parametrize("kind, total, shares", [("dist_sync", 64, (0.5, 1.0)), ("dist_async", 32, (1.0, 2.0))])
def test_steps_on_servers_have_each_workers_own_gradient_clipped(kind, total, shares):
    """The second worker pushes twice what the first does: of a mean over 64 samples, or of its own 32."""
    line = "--clip-gradient-norm 0.1"
    words = "--update-on-kvstore 1" if kind == "dist_sync" else ""
    made, plain = make(line=f"--mom 0 --wd 0 {line} {words}", store=ServedStore(kind)), make()
    clipped_steps(plain.replicas.modules[0], line, shares)
    steps_of_two_batches(made, total)
    assert_close(made, plain, 1e-6)


def binary(logits, targets):
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / 10


def one_hot(labels, on=1.0, off=0.0):
    return torch.nn.functional.one_hot(labels, 10) * (on - off) + off


LOSSES = {  # of the sum over a batch with 10 classes; the targets are those of timm's BinaryCrossEntropy
    "--label-smoothing 0.1": lambda logits, labels: torch.nn.functional.cross_entropy(
        logits, one_hot(labels, 0.91, 0.01), reduction="sum"
    ),
    "--loss bce": lambda logits, labels: binary(logits, one_hot(labels)),
    "--loss ce,bce --label-smoothing 0.2": lambda logits, labels: binary(logits, one_hot(labels, 0.82, 0.02)),
    "--loss bce --label-smoothing 0.2 --bce-threshold 0.01": lambda logits, labels: binary(
        logits, one_hot(labels, 1.0, 1.0)
    ),
}


@pytest.mark.parametrize("line", LOSSES)
def test_losses_are_those_of_torchs_functions_and_the_cross_entropy_is_reported(line):
    made, plain = make(line=f"--mom 0 --wd 0 {line}"), make()
    module, (images, labels) = plain.replicas.modules[0], batch()
    logits, expected = module(torch.from_numpy(images)), torch.from_numpy(labels)
    (LOSSES[line](logits, expected) / 20).backward()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    made.train_step(images, labels, total=20, learning_rate=0.5)
    assert_close(made, plain, 1e-6)
    cross_entropy = torch.nn.functional.cross_entropy(logits, expected, reduction="sum").item()
    assert made.take_sums().cross_entropy == pytest.approx(cross_entropy, rel=1e-6)


MIXINGS = [Mixing(0.7), Mixing(0.3), Mixing(0.875, (2, 4, 4, 8)), Mixing(0.75, (4, 0, 8, 4))]
MIXED_LOSSES = {  # of logits and the targets of two labels in their shares, by torchvision's and timm's formulas
    "": lambda logits, mix: torch.nn.functional.cross_entropy(logits, mix(1.0, 0.0), reduction="sum"),
    "--devices cpu:2": lambda logits, mix: torch.nn.functional.cross_entropy(logits, mix(1.0, 0.0), reduction="sum"),
    "--label-smoothing 0.1": lambda logits, mix: torch.nn.functional.cross_entropy(
        logits, mix(0.91, 0.01), reduction="sum"
    ),
    "--loss bce --label-smoothing 0.1": lambda logits, mix: binary(logits, mix(0.91, 0.01)),
    "--loss bce --bce-threshold 0.28": lambda logits, mix: binary(logits, (mix(1.0, 0.0) > 0.28).float()),
}


def mixed_by_hand(images, mixing):
    """v2.MixUp and v2.CutMix of torchvision for this share and box."""
    partners = np.roll(images, 1, 0)
    if not mixing.box:
        return partners * (1.0 - mixing.share) + images * mixing.share
    top, left, bottom, right = mixing.box
    images = images.copy()
    images[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
    return images


@pytest.mark.parametrize("line", MIXED_LOSSES)
def test_mixed_batches_have_torchvisions_images_and_the_loss_of_both_labels(line):
    """Two steps, each with the gradients of two batches; partners are those of the same device."""
    made, plain = make(line=f"--mom 0 --wd 0 {line}"), make()
    module, groups = plain.replicas.modules[0], 2 if "cpu:2" in line else 1
    sgd, correct, cross_entropy = torch.optim.SGD(module.parameters(), lr=0.5), 0, 0.0
    for number, mixing in enumerate(MIXINGS):
        images, labels = batch(count=9, seed=number)
        parts = zip(np.array_split(images, groups), np.array_split(labels, groups), strict=True)
        for part, own in parts:
            logits = module(torch.from_numpy(mixed_by_hand(part, mixing).astype(np.float32)))
            both = torch.from_numpy(own), torch.from_numpy(np.roll(own, 1))

            def mix(on, off, both=both, share=mixing.share):
                return share * one_hot(both[0], on, off) + (1.0 - share) * one_hot(both[1], on, off)

            (MIXED_LOSSES[line](logits, mix) / 18).backward()
            larger = both[mixing.share < 0.5]
            correct += (logits.argmax(1) == larger).sum().item()
            cross_entropy += torch.nn.functional.cross_entropy(logits, larger, reduction="sum").item()
        if number % 2 == 0:
            made.accumulate(images, labels, 18, mixing)
            continue
        made.train_step(images, labels, 18, 0.5, mixing=mixing)
        sgd.step()
        sgd.zero_grad()
    assert_close(made, plain, 1e-6)
    sums = made.take_sums()
    assert (sums.samples, sums.correct) == (36, correct)
    assert sums.cross_entropy == pytest.approx(cross_entropy, rel=1e-6)


def test_flipped_validation_averages_the_outputs_for_an_image_and_its_mirror():
    made, (images, labels) = make(RESNET, "--val-flip 1 --ema-decay 0.75"), batch(RESNET)
    made.train_step(images, labels, 16, 0.5)
    made.take_sums()
    made.evaluate(images, labels)
    for module, found in (
        (made.replicas.modules[0], made.take_sums()),
        (made.average.module, made.average.take_sums()),
    ):
        module.eval()
        with torch.no_grad():
            logits = (module(torch.from_numpy(images)) + module(torch.from_numpy(images[..., ::-1].copy()))) / 2
            expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum").item()
        assert found.cross_entropy == pytest.approx(expected, rel=1e-5) and found.samples == 16


def test_the_seed_of_a_step_is_the_same_in_every_version():
    make().seed(1, 2, 3)
    assert torch.initial_seed() == 5014325815932447471


def test_who_computes_is_described():
    made = make()
    assert made.describe() == f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    assert made.device_memory() is None
    assert made.other_files("m", 1) == {}
    assert devices.find("cpu") == torch.device("cpu")


def test_metrics_are_summed_in_double_precision():
    made, whole = make(), 0.0
    for seed in range(20):
        made.evaluate(*batch(seed=seed))
        whole += made.take_sums().cross_entropy
    for seed in range(20):
        made.evaluate(*batch(seed=seed))
    assert made.take_sums().cross_entropy == whole


@pytest.mark.parametrize(
    "line, kind, expected",
    [
        ("--gc-type 2bit --gc-threshold 0.5", "dist_sync", {"type": "2bit", "threshold": 0.5 / 20}),  # of both workers
        ("--gc-type 2bit --gc-threshold 0.5", "dist_async", {"type": "2bit", "threshold": 0.5 / 10}),
        ("--gc-type int8", "dist_sync", {"type": "int8"}),
        ("--gc-type topk --gc-ratio 0.25", "dist_sync", {"type": "topk", "ratio": 0.25}),  # of no samples
    ],
)
def test_a_threshold_is_of_the_sum_over_a_steps_samples(line, kind, expected):
    settings = parse(f"--kv-store {kind} --batch-size 10 {line}".split())
    assert optimizer.compression(settings, ServedStore(kind)) == expected


# -- layouts and precision --------------------------------------------------------------------------------------------


def test_convolutions_run_channels_last_unless_told_otherwise():
    weight = make(RESNET).replicas.modules[0].conv0_weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert make(RESNET, "--memory-format contiguous").replicas.modules[0].conv0_weight.is_contiguous()
    assert make(MLP).replicas._layout is torch.contiguous_format
    assert make(RESNET).digest() == make(RESNET, "--memory-format contiguous").digest()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 0.0), ("bfloat16", 0.05), ("float16", 0.01)])
def test_low_precision_stays_near_float32_and_training_gives_no_warnings(dtype, tolerance):
    made, full = make(RESNET, f"--dtype {dtype}"), make(RESNET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (made, full):
            each.train_step(*batch(RESNET), 16, 0.05)
            each.evaluate(*batch(RESNET))
    assert (made.digest() == full.digest()) == (dtype == "float32")
    assert {value.dtype for value in arrays(made).values()} == {torch.float32}
    assert_close(made, full, tolerance)


def scaled(*gradients, **options):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in gradients]
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=1.0, fused=True, **options)
    scale = LossScale(optimizer, torch.device("cpu"))
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = None if gradient is None else torch.full((2,), gradient)
    return weights, optimizer, scale


def test_a_step_that_overflows_is_left_out_and_the_scale_halved():
    weights, optimizer, scale = scaled(0.0, momentum=0.9)
    for gradient, expected in [(math.inf, 1.0), (FIRST / 2, 0.0), (math.nan, 0.0), (0.0, -0.9)]:
        weights[0].grad = torch.full((2,), gradient)
        optimizer.step()
        torch.testing.assert_close(weights[0].data, torch.full((2,), expected))
    assert scale.state() == [FIRST / 4, 1.0]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_gradient_that_overflows_skips_the_step_of_all(bad):
    gradients = [FIRST / 2] * 3
    gradients[bad] = float("inf")
    weights, optimizer, scale = scaled(*gradients)
    scale.load_state([FIRST, 1998.0])
    optimizer.step()
    assert [weight.tolist() for weight in weights] == [[1.0, 1.0]] * 3
    assert scale.state() == [FIRST / 2, 0.0], "good steps are counted from there"


def test_the_scale_grows_after_many_good_steps_and_divides_what_was_made_with_it():
    weights, optimizer, scale = scaled(4.0, None, momentum=0.0)
    scale.load_state([8.0, 1998.0])
    for weight, expected in ((0.5, [8.0, 1999.0]), (0.0, [16.0, 0.0]), (-0.25, [16.0, 1.0])):
        weights[0].grad = torch.full((2,), 4.0)
        optimizer.step()
        assert weights[0].tolist() == [weight] * 2 and weights[1].tolist() == [1.0, 1.0]
        assert scale.state() == expected
    assert not any("momentum_buffer" in each for each in optimizer.state.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_the_loss_of_float16_is_scaled(dtype):
    """From 65536 on, as a checkpoint says."""
    state = make(line=f"--dtype {dtype}").state()
    assert state.get("loss_scale") == ([65536.0, 0.0] if dtype == "float16" else None)


def test_float16_is_refused_where_the_environment_puts_the_optimizer_on_servers(monkeypatch, capsys):
    job = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1"}
    for name, value in {**job, "MXNET_UPDATE_ON_KVSTORE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert fit.main(["--dtype", "float16", "--kv-store", "dist_sync"], prog="train") == 2
    assert "--kv-store dist_sync --update-on-kvstore 1 servers make the steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, asked, on_servers", [("dist_sync", 0, False), ("dist_sync", 1, True), ("dist_ssp", 0, True)]
)
def test_the_optimizer_runs_in_the_requested_place(kind, asked, on_servers):
    made = backend.TorchTrainer(MLP, parse(["--update-on-kvstore", str(asked)]), ServedStore(kind))
    assert ("servers" in made.state()["optimizer"]) == on_servers


def test_a_missing_compiler_is_a_user_error(monkeypatch):
    importlib.import_module("torch._inductor.config")  # which reads the variable once
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    torch.compiler.reset()
    made = make(line="--compile")
    with torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/g++",), "force_disable_caches": True}):  # noqa: SIM117
        with pytest.raises(UserError, match=r"--compile: .*C\+\+"):
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "layers", "changes", "sizes"),
    [
        ("resnet-v1b", 8, {"blur_pool": True, "zero_gamma": True, "stochastic_depth": 0.5}, [24, 32]),
        ("airbench94", None, {}, [32]),
        pytest.param("inception-v3", None, {}, [299], marks=pytest.mark.exhaustive),  # it takes no smaller images
    ],
)
def test_networks_of_recipes_are_compiled_in_each_size_and_make_the_same_steps(
    name, layers, changes, sizes, monkeypatch
):
    """Traced, but run without a compiler of machine code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    network = models.create(name, layers, 10, (3, sizes[-1], sizes[-1]), **changes)
    line = "--label-smoothing 0.1 --clip-gradient-norm 0.5"
    compiled, eager = make(network, f"--compile {line}"), make(network, line)
    for number, size in enumerate(sizes):
        count = 1 if size == 299 else 4
        images, labels = np.random.default_rng(0).standard_normal((count, 3, size, size), np.float32), np.arange(count)
        for each in (compiled, eager):
            each.seed(number)
            each.train_step(images, labels, count, 0.05, mixing=Mixing(0.7))
            each.evaluate(images, labels)
    assert compiled.take_sums().cross_entropy == pytest.approx(eager.take_sums().cross_entropy, rel=1e-4)
    assert_close(compiled, eager, 1e-4)
    torch.compiler.reset()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_missing_gpu():
    with pytest.raises(UserError, match="GPU 0 .*--devices cpu"):
        make(line="--gpus 0,1")


# -- state ------------------------------------------------------------------------------------------------------------


class Residuals(LocalKVStore):
    """Notes what it is given."""

    given = None

    def load_residuals(self, residuals):
        self.given = residuals


@pytest.mark.parametrize("name", ["residuals", "held_back"])
def test_residuals_go_into_a_checkpoint_and_back_to_the_store(name):
    """Up to version 0.4 under another name."""
    values = {"worker 0": np.arange(3, dtype=np.float32)}
    state = make().state(values)
    assert "residuals" not in make().state({}) and "residuals" not in make().state()
    state[name] = state.pop("residuals")
    state = torch_state.decode(torch_state.encode(state))
    store = Residuals("local")
    make(store=store, state=state)
    assert list(store.given) == ["worker 0"] and store.given["worker 0"].tolist() == [0, 1, 2]
    del state[name]
    store = Residuals("local")
    make(store=store, state=state)
    assert store.given is None


@pytest.mark.parametrize("more", [{"residuals": {}}, {"optimizer": {"servers": []}}])
def test_flat_memory_in_another_order_is_refused(more):
    with pytest.raises(UserError, match=r"weight \w+.*--memory-format channels_last"):
        make(RESNET, "--memory-format contiguous", state={**make(RESNET).state(), **more})


def test_a_state_does_not_change_with_the_network():
    made = make()
    state = made.state()
    before = state["model"]["fc1_weight"].clone()
    made.train_step(*batch(), 16, 0.5)
    assert torch.equal(state["model"]["fc1_weight"], before)
    assert not torch.equal(made.state()["model"]["fc1_weight"], before)


@pytest.mark.parametrize("before, after", [("float16", "float32"), ("float32", "float16")])
def test_a_checkpoint_can_be_continued_with_another_precision(before, after):
    """The scale of the loss is dropped, or begins anew."""
    made = make(line=f"--dtype {before}")
    made.train_step(*batch(), 16, 0.1)
    continued = make(line=f"--dtype {after}", state=copy.deepcopy(made.state()))
    assert continued.digest() == made.digest()
    assert ("loss_scale" in continued.state()) == (after == "float16")


# -- what the backend says that it can do -----------------------------------------------------------------------------


BACKEND = TorchBackend()


def test_it_has_every_kvstore_codec_optimizer_and_transport():
    can = BACKEND.capabilities
    assert (BACKEND.name, BACKEND.title) == ("torch", "PyTorch")
    assert set(can.kvstores) == {each.name for each in types.TABLE}
    assert can.codecs == codec.TYPES and can.optimizers == optimizers.NAMES and can.transports == TRANSPORTS
    assert can.dtypes == ("float32", "bfloat16", "float16") and can.suffix == ".pt"
    assert can.compile and can.host_sum and can.residuals
    assert BACKEND.local_store("device").type == "device"
    assert type(make_step({"name": "sgd", "lr": 0.1}, 7, np.ones(1, np.float32))) is SliceOptimizer


def test_the_local_store_steps_with_torchs_optimizers():
    store = BACKEND.local_store("local")
    store.init("w", np.ones(3, np.float32))
    store.set_optimizer({"name": "sgd", "lr": 0.5})
    store.push("w", np.full(3, 2.0, np.float32))
    out = np.zeros(3, np.float32)
    store.pull("w", out)
    assert out.tolist() == [0.0] * 3
