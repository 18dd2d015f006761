"""The MXNet trainer against plain gluon and the torch trainer: steps, precision, states, MXNet's own files."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from dmltrain import kvstore
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.backends.mxnet import replicas
from dmltrain.backends.mxnet import state as mxnet_state
from dmltrain.backends.mxnet import trainer as backend
from dmltrain.backends.mxnet.optimizer import Updater, spec_of
from dmltrain.base.errors import UserError
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
        moved[dtype] = {
            parameter.name: arrays(made)[parameter.name] - before[parameter.name] for parameter in SMALL.parameters()
        }
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


LOST = mxnet_state.encode({"a": np.zeros(3)}).replace(b"array:0", b"array:9")
OBJECTS = io.BytesIO()  # arrays with pickles in them, which could run code
np.savez(OBJECTS, content=np.array([Path("evil")], dtype=object))


@pytest.mark.parametrize(
    "content", [b"noise", pickle.dumps({"epoch": 1}), mxnet_state.encode([1]), LOST, OBJECTS.getvalue()]
)
def test_a_file_that_is_not_a_checkpoint_is_refused(content):
    with pytest.raises(UserError, match="not a checkpoint"):
        mxnet_state.decode(content)


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-0003.params", "m-symbol.json"]
    images = mx.nd.array(batch(RESNET)[0])
    block = mx.gluon.SymbolBlock.imports(str(tmp_path / "m-symbol.json"), ["data"], str(tmp_path / "m-0003.params"))
    expected = trained.replicas._block(images).asnumpy()
    np.testing.assert_allclose(block(images).asnumpy(), expected, rtol=1e-5, atol=1e-5)


# -- devices and the local stores -------------------------------------------------------------------------------------


def test_devices_by_name_and_who_computes():
    assert replicas.find_contexts(("cpu", "cpu")) == [mx.cpu(0), mx.cpu(1)]
    with pytest.raises(UserError, match="GPU 99 .*--gpus"):
        replicas.find_contexts(("gpu:99",))
    assert make().describe().startswith("mxnet 1.9.1, ") and make().describe().endswith(" threads")
    assert make().device_memory() is None


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_local_store_sums_devices_and_can_run_the_optimizer(kind, tmp_path):
    store = kvstore.create(kind, backend="mxnet")
    devices = [mx.cpu(0), mx.cpu(1)]
    values = [mx.nd.ones(4, device) * (index + 1) for index, device in enumerate(devices)]
    store.init(["a", "b"], [mx.nd.zeros(4), mx.nd.zeros(4)])
    store.push("b", values)
    store.pull("b", values, wait=True)
    assert [value.asnumpy().tolist() for value in values] == [[3.0] * 4] * 2
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


# -- optimizers from specs --------------------------------------------------------------------------------------------

EXTRA = {"sgd": {"momentum": 0.9}, "nag": {"momentum": 0.9}, "rmsprop": {"centered": True}}


def spec(name: str, **more) -> dict:
    return {"name": name, "lr": 0.1, "wd": 0.01, **EXTRA.get(name, {}), **more}


def gradients(count: int = 6, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).standard_normal((count, 7), dtype=np.float32))


def stepped(updater, weight=None, steps=None, key: int = 3):
    """`weight` after these steps; it changes in place."""
    weight = mx.nd.array(np.linspace(-1, 1, 7)) if weight is None else weight
    for gradient in gradients() if steps is None else steps:
        updater(key, mx.nd.array(gradient), weight)
    return weight


@pytest.mark.parametrize("name", mxnet_optimizer.TABLE)
def test_state_resumes_bit_exactly_also_twice(name):
    """An updater that has loaded a state can save it before its first step."""
    whole = stepped(Updater(spec(name))).asnumpy()
    first = Updater(spec(name))
    weight = stepped(first, steps=gradients()[:3])
    second, third = Updater(spec(name)), Updater(spec(name))
    second.load(first.state())
    third.load(second.state())
    assert third.state().keys() == first.state().keys() and "3/updates" in third.state()
    assert np.array_equal(stepped(third, weight, gradients()[3:]).asnumpy(), whole)


def test_loading_replaces_the_previous_state():
    updater = Updater(spec("adam"))
    stepped(updater)
    updater.load({})
    assert updater.state() == {}
    assert np.array_equal(stepped(updater).asnumpy(), stepped(Updater(spec("adam"))).asnumpy())


@pytest.mark.parametrize(
    "state, essentials",
    [({"3/0": np.zeros(5)}, ["key 3", "(5,)", "expected (7,)"]), ({"3/updates": np.array(4)}, ["key 3", "None"])],
)
def test_a_state_of_another_network_is_refused_at_the_keys_first_step(state, essentials):
    updater = Updater(spec("sgd"))
    updater.load(state)
    with pytest.raises(UserError) as caught:
        stepped(updater)
    for essential in essentials:
        assert essential in str(caught.value)


@pytest.mark.parametrize("name", ["momentum", "3/momentum", "x/0", "/updates", ""])
def test_a_state_with_other_names_is_refused(name):
    with pytest.raises(ValueError, match="KEY/updates"):
        Updater(spec("sgd")).load({name: np.zeros(7)})


def test_the_learning_rate_is_live_and_keys_have_multipliers():
    keys = {"1": {"wd_mult": 0.0}, "2": {"lr_mult": 10.0, "wd_mult": 0.0}}
    updater, ones = Updater({"name": "sgd", "lr": 0.1, "wd": 0.5, "keys": keys}), [np.ones(7, np.float32)]
    found = []
    for key, rate in ((0, 0.1), (1, 0.1), (2, 0.1), (1, 0.2)):
        updater.set_learning_rate(rate)
        found.append(1 - stepped(updater, mx.nd.ones(7), ones, key).asnumpy()[0])
    assert found == [pytest.approx(value) for value in (0.15, 0.1, 1.0, 0.2)]


def test_lars_has_one_rate_for_what_is_no_weight():
    given = mx.optimizer.LARS(momentum=0.5, param_idx2name={0: "fc_weight", 1: "fc_bias", 2: "bn_gamma"})
    found = spec_of(given)
    assert (found["name"], found["momentum"], found["eta"]) == ("lars", 0.5, 0.001)
    plain = {"lr_mult": 1.0, "wd_mult": 0.0, "layerwise": False}
    assert found["keys"] == {"0": {"lr_mult": 1.0, "wd_mult": 1.0}, "1": plain, "2": plain}


@pytest.mark.parametrize("kind", ["Nadam", "DCASGD"])
def test_classes_that_ours_replace_are_accepted(kind):
    assert spec_of(getattr(mx.optimizer, kind)(wd=0.25))["wd"] == 0.25


class Mine(mx.optimizer.SGD):
    """A program's own optimizer."""


@pytest.mark.parametrize("kind", [mx.optimizer.LBSGD, mx.optimizer.SGLD, Mine])
def test_a_class_of_a_program_or_with_options_that_ours_lacks_is_refused(kind):
    with pytest.raises(UserError, match=f"{kind.__name__} cannot run on the servers.* sgd, nag.*update_on_kvstore 0"):
        spec_of(kind())


@pytest.mark.parametrize(
    "wrong, essentials",
    [
        ({"name": "lion"}, ["'lion'", "sgd, nag", "adam"]),
        ({}, ["unknown optimizer ''"]),
        ({"name": "sgd", "beta1": 0.9}, ["sgd takes lr, momentum", "'beta1'"]),
        ({"name": "sgd", "lr": "0.1"}, ["lr='0.1'", "number"]),
        ({"name": "sgd", "wd": float("nan")}, ["wd=nan", "finite"]),
        ({"name": "sgd", "momentum": [0.9]}, ["momentum=[0.9]"]),
        ({"name": "sgd", "keys": {"a": {"wd_mult": 0.0}}}, ["keys", "'a'"]),
        ({"name": "sgd", "keys": {"1": {"momentum": 0.0}}}, ["keys", "lr_mult, wd_mult"]),
        ({"name": "sgd", "keys": {"1": 3}}, ["keys", "lr_mult, wd_mult"]),
    ],
)
def test_the_error_for_a_wrong_spec_lists_what_is_valid(wrong, essentials):
    with pytest.raises(ValueError) as caught:
        mxnet_optimizer.make(wrong)
    for essential in essentials:
        assert essential in str(caught.value)


# -- MXNet's own objects as specs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mxnet_optimizer.TABLE)
def test_an_optimizer_as_a_spec_makes_the_same_steps(name):
    numbers = {"rescale_grad": 0.3, "clip_gradient": 1.5}
    original = spec(name, **numbers, keys={"3": {"wd_mult": 0.5, "lr_mult": 2.0}})
    if mxnet_optimizer.TABLE[name].own is None:
        theirs = mx.optimizer.create(name, learning_rate=0.1, wd=0.01, **EXTRA.get(name, {}), **numbers)
        theirs.set_wd_mult({3: 0.5})
        theirs.set_lr_mult({3: 2.0})
        expected = stepped(mx.optimizer.get_updater(theirs)).asnumpy()
        tolerance = 1e-5 if name == "lamb" else 0  # MXNet's joins several keys
        np.testing.assert_allclose(stepped(Updater(original)).asnumpy(), expected, rtol=tolerance)
    again = spec_of(mxnet_optimizer.make(original))
    assert np.array_equal(stepped(Updater(again)).asnumpy(), stepped(Updater(original)).asnumpy())
    assert not np.array_equal(stepped(Updater(again)).asnumpy(), stepped(Updater(spec(name))).asnumpy())


def test_parameter_names_select_weight_decay_as_in_mxnets_module():
    names = {0: "fc_weight", 1: "fc_bias"}
    found = spec_of(mx.optimizer.SGD(learning_rate=0.3, momentum=0.9, wd=0.1, param_idx2name=names))
    assert (found["name"], found["lr"], found["momentum"], found["wd"]) == ("sgd", 0.3, 0.9, 0.1)
    assert {key: numbers["wd_mult"] for key, numbers in found["keys"].items()} == {"0": 1.0, "1": 0.0}
    parameter = mx.gluon.Parameter("fc_bias", shape=(3,), wd_mult=0.0, lr_mult=2.0)  # gluon's do too
    found = spec_of(mx.optimizer.Adam(param_dict={4: parameter}))
    assert found["keys"] == {"4": {"lr_mult": 2.0, "wd_mult": 0.0}}


def test_a_learning_rate_schedule_is_refused_with_a_fix():
    with pytest.raises(UserError, match="lr_scheduler.*set_learning_rate"):
        spec_of(mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(1)))
