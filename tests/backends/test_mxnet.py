"""The MXNet backend against plain gluon and the torch backend: steps, devices, statistics, state, MXNet's own files."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dmltrain import kvstore, layers, models
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.errors import UserError
from dmltrain.mxnet_files import weights as weight_files
from dmltrain.options import parse
from tests.forked_job import run_forked

mxnet_compat.fit_numpy()
mx = pytest.importorskip("mxnet", reason="mxnet is not installed: the mxnet backend is not tried")
from dmltrain.backends.mxnet import state as mxnet_state  # noqa: E402
from dmltrain.backends.mxnet import trainer as backend  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")  # MXNet's own
ROOT = Path(__file__).parents[2]
MLP = models.create("mlp", None, 10, (1, 8, 8))
RESNET = models.create("resnet", 8, 10, (3, 16, 16))  # with batch norm
DROPPING = layers.Network(
    "dropping", layers.chain(layers.Flatten(), layers.Dropout(rate=0.5), layers.Dense("fc", 10)), (1, 8, 8), 10
)


def make(network=MLP, line="", state=None, kind="local") -> backend.MXNetTrainer:
    store = kvstore.create(kind, backend="mxnet")
    return backend.MXNetTrainer(network, parse(["--backend", "mxnet", *line.split()]), store, state)


def batch(network=MLP, count=16, seed=0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal((count, *network.input_shape), dtype=np.float32), draw.integers(0, 10, count)


def arrays(made) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in made.state()["model"].items()}


def assert_close(found, expected, relative: float) -> None:
    found, expected = arrays(found), arrays(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=relative, atol=relative, err_msg=name)


# -- a step -----------------------------------------------------------------------------------------------------------


def test_steps_are_those_of_a_plain_gluon_loop():
    """The mean over `total` samples, momentum, and weight decay of weights and gammas only."""
    made, plain = make(RESNET, "--wd 0.01"), make(RESNET)
    parameters = plain._block.collect_params()
    for name, parameter in parameters.items():
        parameter.wd_mult = float(name.endswith(("_weight", "_gamma")))
    trainer = mx.gluon.Trainer(parameters, "sgd", {"momentum": 0.9, "wd": 0.01}, kvstore=None)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(3):
        images, labels = batch(RESNET, seed=step)
        made.train_step(images, labels, total=20, learning_rate=0.05)
        with mx.autograd.record():
            loss = loss_of(plain._block(mx.nd.array(images)), mx.nd.array(labels)).sum() / 20
        loss.backward()
        trainer.set_learning_rate(0.05)
        trainer.step(1)
    assert_close(made, plain, 1e-5)


def test_an_epoch_equals_torchs():
    """SGD without momentum and without batch norm: the same first weights, losses and weights after 45 steps."""
    torch = pytest.importorskip("dmltrain.backends.torch.trainer", reason="torch is not installed")
    line = "--mom 0 --wd 0.01 --batch-size 32"
    ours = make(MLP, line)
    theirs = torch.TorchTrainer(MLP, parse(line.split()), kvstore.create("local"))
    for name, value in arrays(theirs).items():
        assert np.array_equal(arrays(ours)[name], value), name
    for step in range(45):
        for each in (ours, theirs):
            each.train_step(*batch(MLP, 32, seed=step), total=32, learning_rate=0.05)
        if step in (0, 44):
            found, expected = ours.take_sums(), theirs.take_sums()
            assert found.values() == pytest.approx(expected.values(), rel=1e-5)
    assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.parametrize("count", [16, 15, 1])
def test_two_devices_make_the_same_step_as_one(count, kind):
    """Also with unequal shares, and with none for the second device."""
    one, two = make(MLP, "--mom 0.9"), make(MLP, "--mom 0.9 --devices cpu:2", kind=kind)
    for step in range(3):
        for each in (one, two):
            each.train_step(*batch(MLP, count, seed=step), total=count, learning_rate=0.1)
    assert_close(two, one, 1e-5)
    for name, parameter in two._arrays.items():
        first, second = (each.asnumpy() for each in parameter.list_data())
        assert np.array_equal(first, second), name
    assert one.take_sums().values() == pytest.approx(two.take_sums().values(), rel=1e-6)


def test_a_worker_without_samples_takes_part_in_the_step():
    """Its gradient is zero: only momentum acts."""
    made = make(MLP, "--mom 0.5 --wd 0")
    before = arrays(made)
    made.train_step(*batch(), total=16, learning_rate=0.1)
    first = arrays(made)
    made.train_step(*batch(count=0), total=16, learning_rate=0.1)
    for name, value in arrays(made).items():
        np.testing.assert_allclose(value - first[name], (first[name] - before[name]) / 2, atol=1e-6)
    assert made.take_sums().samples == 16


def test_counted_losses_and_samples():
    made = make(MLP, "--top-k 3 --devices cpu:2")
    images, labels = batch(count=31)
    made.evaluate(images, labels)
    logits = made._block(mx.nd.array(images)).asnumpy().astype(np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    places = (-logits).argsort(1)
    expected = (
        31,
        (places[:, 0] == labels).sum(),
        (places[:, :3] == labels[:, None]).sum(),
        -np.log(chances[range(31), labels]).sum(),
    )
    assert made.take_sums().values() == pytest.approx(expected, rel=1e-5)
    assert made.take_sums().values() == (0, 0, 0, 0)


def test_evaluation_changes_nothing():
    made = make(RESNET)
    before = made.digest()
    made.evaluate(*batch(RESNET))
    assert made.digest() == before


def test_seed_fixes_dropout():
    def weights(seed: int) -> bytes:
        made = make(DROPPING)
        for step in range(2):
            made.seed(0, step, seed)
            made.train_step(*batch(DROPPING), total=16, learning_rate=0.1)
        return arrays(made)["fc_weight"].tobytes()

    assert weights(1) == weights(1) != weights(2)


def test_steps_in_bfloat16_are_near_those_in_float32_and_weights_stay_float32():
    if "avx512" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512, without which MXNet 1.9.1 has no bfloat16")
    exact, rounded = make(RESNET), make(RESNET, "--dtype bfloat16")
    for each in (exact, rounded):
        each.train_step(*batch(RESNET), total=16, learning_rate=0.01)
    assert_close(rounded, exact, 0.05)
    assert rounded.digest() != exact.digest()
    assert {array.dtype.name for array in arrays(rounded).values()} == {"float32"}
    assert b"amp_cast" not in rounded.other_files("m", 1)[Path("m-symbol.json")]


def test_bfloat16_where_the_processor_lacks_it_is_refused(tmp_path):
    """oneDNN is limited to AVX2."""
    code, text = run_forked(
        *(tmp_path, ROOT / "examples/train_digits.py", "--backend", "mxnet", "--dtype", "bfloat16"),
        *("--kv-store", "local", "--num-epochs", 1),
        environment={**os.environ, "DNNL_MAX_CPU_ISA": "AVX2"},
        backend="mxnet",
    )
    assert code == 2 and "Traceback" not in text, text
    assert "--dtype bfloat16: MXNet 1.9.1 does not support it on cpu(0)" in text


# -- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_are_merged_by_samples_over_devices_and_workers():
    made = make(RESNET, "--devices cpu:2")
    made.train_step(*batch(RESNET, 15), total=15, learning_rate=0.1)  # 8 and 7 samples
    before = {name: [each.asnumpy() for each in made._arrays[name].list_data()] for name in made._statistics}

    def other_worker(what: str, own: np.ndarray) -> np.ndarray:  # has seen 5 samples, and only ones
        return own + 5 * np.ones_like(own)

    made.merge_statistics(other_worker, 2)
    assert len(before) > 6
    for name, (first, second) in before.items():
        for each in made._arrays[name].list_data():
            np.testing.assert_allclose(each.asnumpy(), (8.0 * first + 7.0 * second + 5) / 20, rtol=1e-5)
        assert not np.array_equal(first, second), name


def test_without_samples_statistics_are_unchanged():
    made = make(RESNET, "--devices cpu:2")
    before = made.digest()
    made.merge_statistics(lambda what, own: own, 1)
    assert made.digest() == before


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["", "--optimizer adam", "--devices cpu:2 --optimizer nag"])
def test_a_state_resumes_bit_exactly_from_its_file(line):
    whole = make(RESNET, line)
    whole.train_step(*batch(RESNET), total=16, learning_rate=0.1)
    whole.merge_statistics(lambda what, own: own, 1)
    content = mxnet_state.encode({"epoch": 1, "state": whole.state(), "list": [1, 2.5, None, "text"]})
    found = mxnet_state.decode(content)
    assert (found["epoch"], found["list"]) == (1, [1, 2.5, None, "text"])
    resumed = make(RESNET, line, found["state"])
    for each in (whole, resumed):
        each.train_step(*batch(RESNET, seed=1), total=16, learning_rate=0.1)
    assert resumed.digest() == whole.digest()


@pytest.mark.parametrize(
    "content",
    [
        b"noise",
        pickle.dumps({"epoch": 1}),
        mxnet_state.encode([1]),
        mxnet_state.encode({"a": np.zeros(3)}).replace(b"array:0", b"array:9"),
    ],
    ids=["noise", "pickle", "list", "lost"],
)
def test_a_file_that_is_not_a_checkpoint_is_refused(content):
    with pytest.raises(UserError, match="not a checkpoint"):
        mxnet_state.decode(content)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("evil"),)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_pickled_arrays_in_a_checkpoint_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stream, evil = io.BytesIO(mxnet_state.encode({"a": np.zeros(3)})), io.BytesIO()
    np.save(evil, np.array([Evil()], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("content.npy", evil.getvalue())  # hides the one before
    with pytest.raises(UserError, match="not a checkpoint.*bytes of object .* expected"):
        mxnet_state.decode(stream.getvalue())
    assert not list(tmp_path.iterdir())


def test_states_of_another_network_or_optimizer_place_are_refused():
    state = make(MLP).state({})
    with pytest.raises(UserError, match="to another network: .* expected"):
        make(RESNET, state=state)
    with pytest.raises(UserError, match="optimizer on the servers, but it now runs on the worker"):
        make(MLP, state={**state, "optimizer": {"servers": []}})


# -- MXNet's own files ------------------------------------------------------------------------------------------------


def written(made, prefix: Path) -> None:
    for path, content in made.other_files(str(prefix), 3).items():
        path.write_bytes(content)


@pytest.fixture(scope="module")
def trained():
    """A network whose statistics and weights are not the first ones."""
    made = make(RESNET)
    made.train_step(*batch(RESNET), total=16, learning_rate=0.1)
    return made


def test_mxnets_programs_read_our_weights(trained, tmp_path):
    written(trained, tmp_path / "m")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m-0003.params", "m-symbol.json"]
    images, _ = batch(RESNET)
    expected = trained._block(mx.nd.array(images)).asnumpy()

    symbol, weights, statistics = mx.model.load_checkpoint(str(tmp_path / "m"), 3)
    module = mx.mod.Module(symbol, label_names=None)
    module.bind(data_shapes=[("data", images.shape)], for_training=False)
    module.set_params(weights, statistics)
    module.forward(mx.io.DataBatch([mx.nd.array(images)]))
    np.testing.assert_allclose(module.get_outputs()[0].asnumpy(), expected, rtol=1e-5, atol=1e-5)

    block = mx.gluon.SymbolBlock.imports(str(tmp_path / "m-symbol.json"), ["data"], str(tmp_path / "m-0003.params"))
    np.testing.assert_allclose(block(mx.nd.array(images)).asnumpy(), expected, rtol=1e-5, atol=1e-5)


def test_weights_of_an_old_job_are_read(trained, tmp_path):
    """As MXNet's image-classification examples save them: Module, SoftmaxOutput, arg: and aux:."""
    symbol = mx.sym.SoftmaxOutput(trained._symbol, name="softmax")
    weights, statistics = (
        {name: trained._arrays[name].list_data()[0] for name in names if name in trained._arrays}
        for names in (symbol.list_arguments(), symbol.list_auxiliary_states())
    )
    mx.model.save_checkpoint(str(tmp_path / "old"), 7, symbol, weights, statistics)
    source = tmp_path / "old-0007.params"
    found = weight_files.fitting(source, weight_files.read(source), RESNET)
    assert make(RESNET, state={"model": found}).digest() == trained.digest()
    with pytest.raises(UserError, match="to another network"):
        make(MLP, state={"model": found})


# -- devices and the local stores -------------------------------------------------------------------------------------


def test_devices_by_name():
    assert backend.find_contexts(("cpu", "cpu")) == [mx.cpu(0), mx.cpu(1)]
    with pytest.raises(UserError, match="GPU 99 does not exist: this machine has .* cores; choose other --gpus"):
        backend.find_contexts(("gpu:99",))


def test_facts():
    made = make()
    assert made.describe().startswith("mxnet 1.9.1, ") and made.describe().endswith(" threads")
    assert made.device_memory() is None


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_local_store_sums_devices_and_can_run_the_optimizer(kind, tmp_path):
    store = kvstore.create(kind, backend="mxnet")
    devices = [mx.cpu(0), mx.cpu(1)]
    values = [mx.nd.ones(4, each) * (index + 1) for index, each in enumerate(devices)]
    store.init(["a", "b"], [mx.nd.zeros(4), mx.nd.zeros(4)])
    store.push("b", values)
    store.pull("b", values, wait=True)
    assert [each.asnumpy().tolist() for each in values] == [[3.0] * 4] * 2
    store.set_optimizer({"name": "sgd", "lr": 0.1, "momentum": 0.5})
    store.set_learning_rate(1.0)
    store.push("a", values[0])
    store.save_optimizer_states(str(tmp_path / "s"))
    store.load_optimizer_states(str(tmp_path / "s"))
    store.push("a", values[0])
    out = mx.nd.zeros(4)
    store.pull("a", out)
    assert out.asnumpy().tolist() == [-3.0 - 4.5] * 4
    assert (store.key_number("b"), store.num_workers, store.is_distributed) == (1, 1, False)


def test_mistakes_with_a_local_store():
    store = kvstore.create("local", backend="mxnet")
    for mistake in (
        lambda: store.push("x", mx.nd.zeros(1)),
        lambda: store.set_learning_rate(0.1),
        lambda: store.set_optimizer({"name": "lion"}),
        lambda: store.set_gradient_compression({"type": "2bit"}),
    ):
        with pytest.raises(UserError):
            mistake()


def test_the_learning_rate_of_a_local_store_must_be_finite():
    store = kvstore.create("local", backend="mxnet")
    store.init("a", mx.nd.zeros(1))
    store.set_optimizer({"name": "sgd", "lr": 0.1})
    for mistake in (
        lambda: store.push("a", mx.nd.zeros(1), rate=float("nan")),  # below 0 means: none
        lambda: store.set_learning_rate(float("inf")),
    ):
        with pytest.raises(UserError, match="the learning rate is (nan|inf), expected a finite number"):
            mistake()
