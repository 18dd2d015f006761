"""The networks: parameter counts from MXNet and from papers, shapes, names, depths, and what is refused.

MXNET_COUNTS are the sums over `list_arguments()` (without the data) of MXNet's symbols, bound in MXNet 1.9.1:
example/image-classification/symbols/{mlp,lenet,resnet}.py and symbol_inception-bn-28-small.py (of 2015, its poolings
rounding up).
Residual networks are compared array by array with MXNet's model zoo in test_other_definitions.py.
MXNet also counts the gammas that `fix_gamma` fixes to 1; they are the second number and are no parameters here.
"""

import subprocess
import sys

import pytest

from dmltrain import models
from dmltrain.base.errors import UserError
from dmltrain.layers import BatchNorm, Conv, MaxPool, Normal, Xavier
from tests.models.mxnet_graphs import GRAPHS
from tests.models.other_networks import usual

SMALL = (3, 28, 28)
LARGE = (3, 224, 224)
MXNETS = {graph.network for graph in GRAPHS} | {"inception-bn-28-small"}
MXNET_COUNTS = [  # network, layers, classes, image, arguments in MXNet, of which fixed gammas
    ("mlp", None, 10, (1, 28, 28), 109_386, 0),
    ("mlp", None, 10, SMALL, 310_090, 0),
    ("mlp", None, 10, (1, 8, 8), 65 * 128 + 129 * 64 + 65 * 10, 0),  # by hand
    ("lenet", None, 10, (1, 28, 28), 431_080, 0),
    ("lenet", None, 10, (3, 32, 32), 657_080, 0),
    ("inception-bn-28-small", None, 10, SMALL, 1_652_826, 1_712),
    ("inception-bn-28-small", None, 10, (3, 32, 32), 1_662_906, 1_712),
    ("resnet", 20, 10, SMALL, 272_544, 3),
    ("resnet", 20, 100, (3, 32, 32), 272_544 + 90 * 65, 3),  # with 90 classes more
    ("resnet", 50, 10, (3, 32, 32), 758_624, 3),
    ("resnet", 164, 10, SMALL, 1_703_264, 3),
    ("resnet", 50, 1000, LARGE, 25_549_486, 3),
]


@pytest.mark.parametrize(("name", "layers", "classes", "image", "arguments", "fixed"), MXNET_COUNTS)
def test_parameter_counts_are_mxnets(name, layers, classes, image, arguments, fixed):
    network = models.create(name, layers, classes, image)
    assert network.num_parameters == arguments - fixed
    scales = [step for step in network.layer_calls if isinstance(step.layer, BatchNorm) and step.layer.fixed_scale]
    assert sum(step.input_shape[0] for step in scales) == fixed
    assert network.output_shape == (classes,)


# Of depths of which there is no graph of MXNet's (tests/mxnet_files/test_rebuild.py).
PUBLISHED = [  # network, layers, options, parameters with fixed gammas, of which fixed, what others have and we do not
    # torchvision 0.20's documentation
    ("vgg", 11, {}, 132_863_336, 0, 0),
    ("vgg", 13, {}, 133_047_848, 0, 0),
    ("vgg", 19, {}, 143_667_240, 0, 0),
    ("vgg", 19, {"batch_norm": True}, 143_678_248, 5_504, 0),
    ("resnet-v1", 34, {}, 21_797_672, 0, -(64 * 64 + 2 * 64)),  # its first stage has no projection
    ("resnet-v1", 101, {}, 44_549_160, 0, 0),
    ("resnet-v1", 152, {}, 60_192_808, 0, 0),
    # timm 1.0's table of results
    ("resnext", 101, {}, 44_177_704, 0, -3),  # it does not normalise the images
]


@pytest.mark.parametrize(("name", "layers", "options", "published", "fixed", "extra"), PUBLISHED)
def test_parameter_counts_are_those_of_others(name, layers, options, published, fixed, extra):
    image = models.NETWORKS[name].image_shape
    assert models.create(name, layers, 1000, image, **options).num_parameters == published - fixed - extra


def outputs(network, *names):
    return [step.output_shape for name in names for step in network.layer_calls if step.layer.name == name]


@pytest.mark.parametrize("size", [28, 32])
def test_cifar_resnet_shapes(size):
    network = models.create("resnet", 20, 10, (3, size, size))
    found = outputs(network, "conv0", "stage1_unit3_conv2", "stage2_unit3_conv2", "stage3_unit3_conv2", "pool1")
    sizes = ((16, size), (16, size), (32, size // 2), (64, size // 4), (64, 1))
    assert found == [(channels, pixels, pixels) for channels, pixels in sizes]


def test_inception_shapes():
    network = models.create("inception-bn-28-small")
    joined = [step.output_shape for step in network.layer_calls if type(step.layer).__name__ == "Concat"]
    sizes = [(64, 28), (80, 28), *[(160, 14)] * 4, (144, 14), (240, 7), (336, 7), (336, 7)]
    assert joined == [(channels, pixels, pixels) for channels, pixels in sizes]


def test_names_are_mxnets():
    resnet = [parameter.name for parameter in models.create("resnet", 20).parameters()]
    assert resnet[:4] == ["bn_data_beta", "conv0_weight", "stage1_unit1_bn1_gamma", "stage1_unit1_bn1_beta"]
    assert resnet[-4:] == ["bn1_gamma", "bn1_beta", "fc1_weight", "fc1_bias"]
    inception = [parameter.name for parameter in models.create("inception-bn-28-small").parameters()]
    assert inception[:4] == ["convolution0_weight", "convolution0_bias", "batchnorm0_beta", "convolution1_weight"]
    statistics = [each.name for each in models.create("resnet", 20).auxiliary()]
    assert statistics[:2] == ["bn_data_moving_mean", "bn_data_moving_var"]


def test_inception_uses_mxnets_defaults_where_mxnets_file_does():
    steps = models.create("inception-bn-28-small").layer_calls
    norms = {(s.layer.epsilon, s.layer.momentum, s.layer.fixed_scale) for s in steps if isinstance(s.layer, BatchNorm)}
    assert norms == {(1e-3, 0.9, True)}
    assert all(step.layer.bias for step in steps if isinstance(step.layer, Conv))
    assert [step.layer.rounding for step in steps if isinstance(step.layer, MaxPool)] == ["full", "full"]


@pytest.mark.parametrize("spelling", ["inception_bn_28_small", "Inception-BN-28-small"])
def test_spellings(spelling):
    assert models.create(spelling) == models.create("inception-bn-28-small")


@pytest.mark.parametrize("name", ["resnet", "resnet-v1", "resnext"])
@pytest.mark.parametrize(
    ("height", "stages", "first"), [(28, 3, (16, 28, 40)), (32, 3, (16, 32, 40)), (33, 4, (64, 17, 20))]
)
def test_the_height_of_images_decides_between_cifar_and_imagenet_networks(name, height, stages, first):
    """Their height alone: at 32 as in resnext.py, of MXNet's three files; see residual.py."""
    network = models.create(name, 50, 10, (3, height, 40))
    assert outputs(network, "conv0") == [first]
    found = {parameter.name[:6] for parameter in network.parameters() if parameter.name.startswith("stage")}
    assert found == {f"stage{number}" for number in range(1, stages + 1)}


def test_usual_depths_are_mxnets_defaults():
    assert models.create("resnet") == models.create("resnet", 110) != models.create("resnet", 20)
    assert models.create("resnet", None, 1000, LARGE) == models.create("resnet", 50, 1000, LARGE)


SINGLE = [name for name in models.NETWORKS if not models.NETWORKS[name].depths]
DEEP, SHALLOW = "18, 34, 50, 101, 152, 200, 269", "20, 32, 44, 50, 56, 110, 164"


@pytest.mark.parametrize(
    ("arguments", "options", "essentials"),
    [
        (("vgg7",), {}, ["'vgg7'", ", ".join(sorted(models.NETWORKS))]),
        (("resnet", 18), {}, ["resnet of 18", SHALLOW]),
        *((("resnet", depth), {}, [f"resnet of {depth} "]) for depth in (2, 165, -4)),
        (("resnet", 20, 1000, LARGE), {}, ["resnet of 20", DEEP]),
        (("resnet-v1", 21), {}, ["resnet-v1 of 21", SHALLOW]),
        (("resnext", 51, 10, LARGE), {}, ["resnext of 51", DEEP]),
        (("vgg", 12, 10, LARGE), {}, ["vgg of 12", "11, 13, 16, 19"]),
        (("mlp", 3), {}, ["mlp has a single depth", "--num-layers 3"]),
        *(((name, 3, 10, models.NETWORKS[name].image_shape), {}, [f"{name} has a single depth"]) for name in SINGLE),
        (("vgg", 16, 10, SMALL), {}, ["vgg cannot take images of 3x28x28", "'pool5'", "512x1x1"]),
        (("alexnet", None, 10, (3, 64, 64)), {}, ["alexnet", "images of 3x64x64", "larger than the input 256x2x2"]),
        (("googlenet", None, 10, SMALL), {}, ["googlenet cannot take images of 3x28x28"]),
        (("inception-bn", None, 10, (3, 24, 24)), {}, ["images of 3x24x24", "'global_pool'"]),
        (("inception-bn", None, 10, (3, 192, 192)), {}, ["images of 3x192x192", "'global_pool'", "1024x6x6"]),
        (("inception-v3", None, 10, LARGE), {}, ["3x224x224", "'global_pool'", "2048x5x5", "images: 3x299x299"]),
        (("inception-v4", None, 10, (3, 200, 200)), {}, ["images of 3x200x200", "'global_avgpool'"]),
        (("lenet", None, 10, (1, 8, 8)), {}, ["lenet cannot take images of 1x8x8", "'convolution1'", "20x2x2"]),
        (("inception-bn-28-small", None, 10, (3, 16, 16)), {}, ["images of 3x16x16", "'global_pool'"]),
        (("mlp", None, 0), {}, ["mlp", "at least one class", "0 classes"]),
        (("mlp", None, 10, (0, 8, 8)), {}, ["positive size", "(0, 8, 8)"]),
        (("mlp",), {"batch_norm": True}, ["mlp has no option --batch-norm", "networks with it: vgg"]),
        (("mlp",), {"add_stn": True}, ["mlp has no option --add-stn", "networks with it: lenet"]),
        (("vgg", 11, 10, LARGE), {"num_group": 2}, ["vgg has no option --num-group", "resnext"]),
        (("lenet",), {"num_legs": 4}, ["lenet has no option --num-legs; no network"]),
        (("resnext", 18, 10, LARGE), {"num_group": 2}, ["18 layers has no grouped", "50, 101, 152, 200 or 269"]),
        (("resnext", 20), {"num_group": 2}, ["20 layers has no grouped", "at least 164"]),
        (("resnext", 50, 10, LARGE), {"num_group": 3}, ["divide the 128 channels", "is 3"]),
        (("resnext", 164), {"num_group": 64}, ["divide the 32 channels", "is 64"]),
        (("resnext", 164), {"num_group": 0}, ["divide the 32 channels", "is 0"]),
        (("mobilenet", None, 10, (3, 64, 64)), {"multiplier": 0.3}, ["multiplier 0.3", "0.25, 0.5, 0.75, 1.0"]),
        (("mobilenet", None, 10, (3, 64, 50)), {}, ["multiples of 32", "64x50"]),
        (("mobilenetv2", None, 10, (3, 64, 64)), {"multiplier": 0.01}, ["at least 0.05", "found 0.01"]),
        (("mobilenetv2", None, 10, (3, 64, 64)), {"multiplier": float("inf")}, ["found inf"]),
        (("keras-resnet", 20, 10, (3, 32, 32)), {}, ["keras-resnet of 20", "18, 34, 50, 101, 152"]),
    ],
)
def test_invalid_requests_are_user_errors(arguments, options, essentials):
    with pytest.raises(UserError) as caught:
        models.create(*arguments, **options)
    for essential in essentials:
        assert essential in str(caught.value)


def test_first_weights_are_those_of_mxnets_program():
    """The choice of common/fit.py by the network's name."""
    chosen = {name: row.build(None, 10, row.image_shape).initialiser for name, row in models.NETWORKS.items()}
    assert chosen.pop("alexnet") == Normal(0.01)
    assert chosen.pop("vgg") == Xavier("uniform", "avg", 3)
    mxnets = {name: rule for name, rule in chosen.items() if name in MXNETS}
    assert set(mxnets.values()) == {Xavier("gaussian", "in", 2)}


def test_options_of_networks_change_them():
    plain, normalised = (models.create("vgg", 11, 10, LARGE, batch_norm=each) for each in (False, True))
    assert (plain.name, normalised.name) == ("vgg-11", "vgg-11-bn")
    assert sum(isinstance(step.layer, BatchNorm) for step in normalised.layer_calls) == 8
    assert models.create("vgg", 11, 10, LARGE) == plain
    few = models.create("resnext", 50, 1000, LARGE, num_group=8)
    assert few.name == "resnext-50-groups-8"
    assert {step.layer.groups for step in few.layer_calls if isinstance(step.layer, Conv)} == {1, 8}
    assert models.create("resnext", 50, 1000, LARGE, num_group=32) == models.create("resnext", 50, 1000, LARGE)


def test_every_graph_of_mxnet_has_a_network(mxnet_networks):
    """Whose layers and arrays are the same: tests/mxnet_files/test_rebuild.py."""
    files = {path.name.removesuffix("-symbol.json") for path in mxnet_networks.glob("*-symbol.json")}
    assert {graph.file for graph in GRAPHS} == files


def test_the_usual_form_of_every_network_has_its_usual_number_of_logits():
    for name, row in models.NETWORKS.items():
        assert usual(name).output_shape == (row.num_classes,), name


def test_no_framework_is_imported():
    program = """
import sys
from dmltrain import models
models.create("resnet", 20)
print(sorted({"torch", "mxnet", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
