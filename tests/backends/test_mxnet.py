"""The MXNet trainer against plain gluon and the torch trainer: steps, precision, states, MXNet's own files."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from dmltrain import kvstore
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import state as mxnet_state
from dmltrain.backends.mxnet import trainer as backend
from dmltrain.errors import UserError
from dmltrain.mxnet_files import weights as weight_files
from dmltrain.options import parse
from tests.backends.trainers import MLP, RESNET, batch
from tests.forked_job import run_forked

mx = mxnet_compat.load()

ROOT = Path(__file__).parents[2]


def make(network=MLP, line="", state=None, kind="local") -> backend.MXNetTrainer:
    store = kvstore.create(kind, backend="mxnet")
    return backend.MXNetTrainer(network, parse(["--backend", "mxnet", *line.split()]), store, state)


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
    words = ["--backend", "mxnet", "--dtype", "bfloat16", "--kv-store", "local", "--num-epochs", "1"]
    environment = {**os.environ, "DNNL_MAX_CPU_ISA": "AVX2"}
    program = ROOT / "examples/train_digits.py"
    code, text = run_forked(tmp_path, program, *words, environment=environment, backend="mxnet")
    assert code == 2 and "Traceback" not in text, text
    assert "--dtype bfloat16" in text and "cpu(0)" in text


# -- state ------------------------------------------------------------------------------------------------------------


LOST = mxnet_state.encode({"a": np.zeros(3)}).replace(b"array:0", b"array:9")
OBJECTS = io.BytesIO()  # arrays with pickles in them, which could run code
np.savez(OBJECTS, content=np.array([Path("evil")], dtype=object))


@pytest.mark.parametrize(
    "content", [b"noise", pickle.dumps({"epoch": 1}), mxnet_state.encode([1]), LOST, OBJECTS.getvalue()]
)
def test_a_file_that_is_not_a_checkpoint_is_refused(content):
    with pytest.raises(UserError, match="not a checkpoint"):
        mxnet_state.decode(content)


# -- MXNet's own files ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """A network whose statistics and weights are not the first ones."""
    made = make(RESNET)
    made.train_step(*batch(RESNET), total=16, learning_rate=0.1)
    return made


def test_gluon_reads_our_weights(trained, tmp_path):
    """So does MXNet's module: tests/mxnet_files/test_write.py."""
    for path, content in trained.other_files(str(tmp_path / "m"), 3).items():
        path.write_bytes(content)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m-0003.params", "m-symbol.json"]
    images = mx.nd.array(batch(RESNET)[0])
    block = mx.gluon.SymbolBlock.imports(str(tmp_path / "m-symbol.json"), ["data"], str(tmp_path / "m-0003.params"))
    expected = trained._block(images).asnumpy()
    np.testing.assert_allclose(block(images).asnumpy(), expected, rtol=1e-5, atol=1e-5)


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


def test_devices_by_name_and_who_computes():
    assert backend.find_contexts(("cpu", "cpu")) == [mx.cpu(0), mx.cpu(1)]
    with pytest.raises(UserError, match="GPU 99 .*--gpus"):
        backend.find_contexts(("gpu:99",))
    assert make().describe().startswith("mxnet 1.9.1, ") and make().describe().endswith(" threads")
    assert make().device_memory() is None


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
    store.init("a", mx.nd.zeros(1))
    for said, mistake in (
        ("'x'", lambda: store.push("x", mx.nd.zeros(1))),
        ("set_optimizer", lambda: store.set_learning_rate(0.1)),
        ("lion", lambda: store.set_optimizer({"name": "lion"})),
        ("compress", lambda: store.set_gradient_compression({"type": "2bit"})),
    ):
        with pytest.raises(UserError, match=said):
            mistake()
    store.set_optimizer({"name": "sgd", "lr": 0.1})
    for said, mistake in (
        ("is nan", lambda: store.push("a", mx.nd.zeros(1), rate=float("nan"))),  # below 0 means: none
        ("is inf", lambda: store.set_learning_rate(float("inf"))),
    ):
        with pytest.raises(UserError, match=f"learning rate {said}"):
            mistake()
