"""Both backends normalise pixels to the bit as numpy does, whatever the order of the images in memory."""

import numpy as np
import pytest

from dmltrain.normalisation import Normalisation

SHAPE = (5, 3, 6, 7)  # images, channels, height, width
MEAN_IMAGE = np.random.default_rng(2).uniform(0, 255, SHAPE[1:]).astype(np.float32)


def images(order: str) -> np.ndarray:
    """uint8 of SHAPE; NHWC: channels last in memory."""
    pixels = np.random.default_rng(1).integers(0, 256, SHAPE, dtype=np.uint8)
    if order == "NCHW":
        return pixels
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


NORMALISATIONS = pytest.mark.parametrize(
    "normalisation",
    [
        Normalisation(),
        Normalisation((123.68, 116.779, 103.939), (58.393, 57.12, 57.375)),
        Normalisation(MEAN_IMAGE, (1.0,)),
    ],
    ids=["one number", "channels", "mean image"],
)
ORDERS = pytest.mark.parametrize("order", ["NCHW", "NHWC"])


@NORMALISATIONS
def test_numpy_follows_the_definition(normalisation):
    found = normalisation.apply(images("NHWC"))
    mean = np.asarray(normalisation.mean)
    mean = mean if mean.ndim == 3 else mean[:, None, None]
    expected = (images("NCHW") - mean) / np.array(normalisation.std)[:, None, None]
    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


@NORMALISATIONS
@ORDERS
def test_torch(normalisation, order):
    torch = pytest.importorskip("torch")
    from dmltrain.backends.torch.normalise import Normalise

    given = torch.from_numpy(images(order))
    found = Normalise(normalisation, [torch.device("cpu")])(0, given)
    assert found.stride() == given.stride(), "the memory format has changed"
    assert np.array_equal(found.numpy(), normalisation.apply(images(order)))


@NORMALISATIONS
@ORDERS
def test_mxnet(normalisation, order):
    mx = pytest.importorskip("mxnet")
    from dmltrain.backends.mxnet.normalise import Normalise

    found = Normalise(normalisation, [mx.cpu()])(0, mx.nd.array(images(order), dtype="uint8"))
    assert np.array_equal(found.asnumpy(), normalisation.apply(images(order)))


def test_a_trainer_without_a_normalisation_takes_floats_alone():
    torch = pytest.importorskip("torch")
    from dmltrain.backends.torch.normalise import Normalise

    made, floats = Normalise(None, [torch.device("cpu")]), torch.ones(SHAPE)
    assert made(0, floats) is floats
    with pytest.raises(ValueError, match="uint8 images, but the trainer was made without a normalisation"):
        made(0, torch.from_numpy(images("NCHW")))


def test_an_mxnet_trainer_without_a_normalisation_takes_floats_alone():
    mx = pytest.importorskip("mxnet")
    from dmltrain.backends.mxnet.normalise import Normalise

    made = Normalise(None, [mx.cpu()])
    assert np.array_equal(made(0, mx.nd.ones(SHAPE, dtype="float64")).asnumpy(), np.ones(SHAPE, np.float32))
    with pytest.raises(ValueError, match="uint8 images, but the trainer was made without a normalisation"):
        made(0, mx.nd.array(images("NCHW"), dtype="uint8"))
