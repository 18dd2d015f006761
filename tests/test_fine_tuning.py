"""A network with a new last layer, whose other weights come from a checkpoint."""

import numpy as np
import pytest

from dmltrain import initial, models
from dmltrain.backends.torch.backend import TorchBackend
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import checkpoint
from dmltrain.kvstore import create
from dmltrain.layers import Conv, Flatten, GlobalAvgPool, Network, chain
from dmltrain.options import parse
from dmltrain.train import common_network, fine_tuning
from tests.test_fit import RESNET, backend, run, train  # noqa: F401  (fixtures)

SMALL = ["--num-examples", 300]
NETWORK = [*RESNET[:4], "--image-shape", "1,8,8"]


def build(line: str, num_classes: int = 3, shape=(1, 8, 8)) -> fine_tuning.FineTuned:
    options = parse([*line.split(), "--pretrained-model", "m"])
    network = common_network.create(options, None, shape, create("local"))
    return fine_tuning.build(options, network, num_classes)


def arrays(path) -> dict[str, np.ndarray]:
    model = TorchBackend().decode(path.read_bytes())["state"]["model"]
    return {name: array.numpy() for name, array in model.items()}


def test_the_last_layer_or_those_after_the_named_one_are_replaced_and_learn_faster():
    found = build("--network resnet --num-layers 8 --last-lr-mult 10")
    usual = models.create("resnet", 8, 3, (1, 8, 8))
    assert found.new == {"fc1_weight", "fc1_bias"} and found.network.num_classes == 3
    assert [parameter.shape for parameter in found.network.parameters()] == [
        parameter.shape for parameter in usual.parameters()
    ]
    assert {parameter.name for parameter in found.network.parameters() if parameter.lr_mult == 10.0} == found.new
    found = build("--network lenet --layer-before-fullc activation1_output", shape=(1, 28, 28))
    names = [parameter.name for parameter in found.network.parameters()]
    assert names[-2:] == ["fc_weight", "fc_bias"] and not any(name.startswith("fullyconnected") for name in names)
    with pytest.raises(UserError, match="--layer-before-fullc flat: network lenet has no such layer.*activation1"):
        build("--network lenet --layer-before-fullc flat", shape=(1, 28, 28))


def test_auxiliary_classifiers_get_new_last_layers_too():
    found = build("--network caffe-googlenet --last-lr-mult 10", shape=(3, 224, 224))
    classifiers = ("loss1_classifier", "loss2_classifier", "loss3_classifier")
    assert found.new == {f"{name}_{kind}" for name in classifiers for kind in ("weight", "bias")}
    shapes = {parameter.name: parameter.shape for parameter in found.network.parameters()}
    assert [shapes[f"{name}_bias"] for name in classifiers] == [(3,)] * 3 and shapes["loss1_fc_bias"] == (1024,)
    rates = {parameter.lr_mult for parameter in found.network.parameters() if parameter.name in found.new}
    assert rates == {10.0, 20.0}  # Caffe's biases learn at twice the rate
    cut = build("--network caffe-googlenet --layer-before-fullc inception_4b_output", shape=(3, 224, 224))
    assert cut.new == {"fc_weight", "fc_bias", "loss1_classifier_weight", "loss1_classifier_bias"}


def test_a_network_without_a_dense_layer_at_its_end_needs_a_name():
    network = Network("n", chain(Conv("c", 3), GlobalAvgPool("pool"), Flatten("flat")), (1, 8, 8), 3)
    with pytest.raises(UserError, match="n ends with Flatten 'flat', not .* --layer-before-fullc, one of c, pool"):
        fine_tuning.build(parse([]), network, 5)
    found = fine_tuning.build(parse(["--layer-before-fullc", "pool", "--pretrained-model", "m"]), network, 5)
    assert [parameter.shape for parameter in found.network.parameters()] == [(3, 1, 1, 1), (3,), (5, 3), (5,)]


def test_training_starts_from_the_other_weights(train, backend, tmp_path):  # noqa: F811
    train(*NETWORK, *SMALL, "--num-epochs", 2, "--model-prefix", tmp_path / "old")
    words = [*NETWORK, *SMALL, "--backend", "torch", "--lr", 0, "--wd", 0, "--num-epochs", 1, "--seed", 5]
    log = train(*words, "--pretrained-model", f"{tmp_path}/old,1", "--model-prefix", tmp_path / "new")
    assert "old-0001" in log.text and "the new last layer has fc1_bias and fc1_weight and 1 times" in log.text
    new = arrays(checkpoint.path(tmp_path / "new", 1))
    first = initial.first_values(models.create("resnet", 8, 10, (1, 8, 8)), 5)
    for name in ("fc1_weight", "fc1_bias"):
        assert np.array_equal(new[name], first[name])
    assert not np.array_equal(new["conv0_weight"], first["conv0_weight"])
    if backend == "torch":
        assert np.array_equal(new["conv0_weight"], arrays(checkpoint.path(tmp_path / "old", 1))["conv0_weight"])
    newest = train(*words, "--pretrained-model", tmp_path / "old")
    assert "old-0002" in newest.text
    words += ["--pretrained-model", tmp_path / "old", "--model-prefix", tmp_path / "new"]
    resumed = train(*words, "--load-epoch", 1)
    assert "Loaded checkpoint of epoch 1" in resumed.text and "Starting from" not in resumed.text


def test_a_larger_rate_of_the_last_layer_moves_it_further(run, tmp_path):  # noqa: F811
    """A single step without momentum: the change is proportional to the rate."""
    run(*NETWORK, *SMALL, "--num-epochs", 1, "--model-prefix", tmp_path / "old")
    words = [*NETWORK, *SMALL, "--max-iter", 1, "--mom", 0, "--wd", 0, "--lr", 0.001]
    words += ["--pretrained-model", tmp_path / "old"]
    changes = []
    for rate in (0, 1, 10):
        run(*words, "--last-lr-mult", rate, "--model-prefix", tmp_path / f"new{rate}")
        changes.append(arrays(checkpoint.path(tmp_path / f"new{rate}", 0, ".pt", 1)))
    still, slow, fast = (change["fc1_weight"].astype(np.float64) for change in changes)
    assert np.abs(fast - still - 10 * (slow - still)).max() < 1e-6 < np.abs(slow - still).max()
    assert np.array_equal(changes[1]["conv0_weight"], changes[2]["conv0_weight"])


def test_a_checkpoint_of_another_network_is_refused(run, tmp_path):  # noqa: F811
    run(*SMALL, "--num-epochs", 1, "--model-prefix", tmp_path / "mlp")
    text = run(*NETWORK, *SMALL, "--pretrained-model", tmp_path / "mlp", code=2).text
    assert "mlp-0001.pt does not fit network resnet-8: " in text and "expected (1,), found nothing" in text
    text = run(*NETWORK, *SMALL, "--pretrained-model", f"{tmp_path}/mlp,7", code=2).text
    assert "no checkpoint" in text and "mlp-0007.pt" in text and "mlp-0001.pt" in text


def test_a_graph_of_mxnet_is_tuned_for_other_classes(run, mxnet_files):  # noqa: F811
    prefix = mxnet_files / "resnet20"
    words = "--layer-before-fullc flatten0 --dataset synthetic --image-shape 3,28,28 --num-examples 64 --num-epochs 1"
    files = ["--network", f"{prefix}-symbol.json", "--pretrained-model", f"{prefix},3"]
    log = run(*files, *words.split(), "--initializer", "zero")
    assert "resnet20-0003.params; the new last layer has fc_bias and fc_weight" in log.text
    assert "may come from one of MXNet's programs" in log.text and "then add --rgb-mean" in log.text
    assert len(log.values("Validation-accuracy")) == 1


def test_an_initializer_replaces_the_networks(run, tmp_path):  # noqa: F811
    run(*SMALL, "--lr", 0, "--wd", 0, "--num-epochs", 1, "--initializer", "one", "--model-prefix", tmp_path / "m")
    found = arrays(checkpoint.path(tmp_path / "m", 1))
    weights = [array for name, array in found.items() if name.endswith("_weight")]
    assert weights and all((array == 1).all() for array in weights)
    assert all((array == 0).all() for name, array in found.items() if name.endswith("_bias"))


@pytest.mark.parametrize(
    "line, essentials",
    [
        ("--layer-before-fullc flatten0", "--pretrained-model is missing.*--layer-before-fullc"),
        ("--last-lr-mult 10", "--pretrained-model is missing.*--last-lr-mult"),
        ("--pretrained-model old/m --load-epoch 3", "--load-epoch resumes.*--pretrained-model PREFIX,EPOCH"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(line, essentials):
    with pytest.raises(UserError, match=essentials):
        parse(line.split())
