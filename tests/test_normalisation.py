"""Both backends normalise pixels to the bit as numpy does, whatever the order of the images in memory."""

import numpy as np
import pytest

from dmltrain import kvstore
from dmltrain.backends.table import BACKENDS
from dmltrain.base.normalisation import Normalisation
from dmltrain.layers import Dense, Flatten, Network, chain
from dmltrain.options import parse

SHAPE = (5, 3, 6, 7)  # images, channels, height, width
NETWORK = Network("dense", chain(Flatten(), Dense("d", 10)), SHAPE[1:], 10)
MEAN_IMAGE = np.random.default_rng(2).uniform(0, 255, SHAPE[1:]).astype(np.float32)


def images(order: str) -> np.ndarray:
    """uint8 of SHAPE; NHWC: channels last in memory."""
    pixels = np.random.default_rng(1).integers(0, 256, SHAPE, dtype=np.uint8)
    if order == "NCHW":
        return pixels
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


ILSVRC12 = (123.68, 116.779, 103.939), (58.393, 57.12, 57.375)
NORMALISATIONS = pytest.mark.parametrize(
    "normalisation",
    [Normalisation(), Normalisation(*ILSVRC12), Normalisation(MEAN_IMAGE, (1.0,))],
    ids=["one number", "channels", "mean image"],
)


@NORMALISATIONS
def test_numpy_follows_the_definition(normalisation):
    found = normalisation.apply(images("NHWC"))
    mean = np.asarray(normalisation.mean)
    mean = mean if mean.ndim == 3 else mean[:, None, None]
    expected = (images("NCHW") - mean) / np.array(normalisation.std)[:, None, None]
    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


def normalised(backend: str, normalisation: Normalisation | None, pixels: np.ndarray) -> np.ndarray:
    """The network's input, as a trainer makes it."""
    pytest.importorskip(backend)
    settings, store = parse(["--backend", backend]), kvstore.create("local", backend=backend)
    made = BACKENDS[backend].trainer(NETWORK, settings, store, None, normalisation)
    ((found, _),) = made.replicas.parts(pixels, np.zeros(len(pixels), np.int64))
    return found.asnumpy() if backend == "mxnet" else found.numpy()


@NORMALISATIONS
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("backend", ["torch", "mxnet"])
def test_backends_do_as_numpy(backend, normalisation, order):
    assert np.array_equal(normalised(backend, normalisation, images(order)), normalisation.apply(images(order)))


@pytest.mark.parametrize(("backend", "kind"), [("torch", np.float64), ("mxnet", np.float32)])
def test_a_trainer_without_a_normalisation_takes_floats_alone(backend, kind):
    found = normalised(backend, None, np.ones(SHAPE, np.float64))
    assert np.array_equal(found, np.ones(SHAPE)) and found.dtype == kind
    with pytest.raises(ValueError, match="uint8 images, but the trainer was made without a normalisation"):
        normalised(backend, None, images("NCHW"))
