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
from dmltrain.options import parse
from tests.backends.trainers import MLP, RESNET, SMALL, batch
from tests.forked_job import run_forked

mx = mxnet_compat.load()

ROOT = Path(__file__).parents[2]


def make(network=MLP, line="", state=None, kind="local") -> backend.MXNetTrainer:
    store = kvstore.create(kind, backend="mxnet")
    return backend.MXNetTrainer(network, parse(["--backend", "mxnet", *line.split()]), store, state)


def arrays(made) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in made.state()["model"].items()}


# -- a step -----------------------------------------------------------------------------------------------------------


def test_steps_in_bfloat16_are_near_those_in_float32_and_weights_stay_float32():
    if "avx512" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512, without which MXNet 1.9.1 has no bfloat16")
    moved = {}
    for dtype in ("float32", "bfloat16"):
        made = make(SMALL, f"--dtype {dtype} --mom 0 --wd 0")
        before = arrays(made)
        made.train_step(*batch(SMALL), total=16, learning_rate=0.1)
        assert {array.dtype.name for array in arrays(made).values()} == {"float32"}
        moved[dtype] = {each.name: arrays(made)[each.name] - before[each.name] for each in SMALL.parameters()}
        assert b"amp_cast" not in made.other_files("m", 1)[Path("m-symbol.json")]
    for name, exact in moved["float32"].items():
        if name != "conv0_bias":  # undone by the batch norm
            apart = np.linalg.norm(moved["bfloat16"][name] - exact) / np.linalg.norm(exact)
            assert 1e-4 < apart < 0.05, name  # one rounding is up to 4e-3


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
