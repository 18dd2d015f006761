"""What MXNet's own reader draws, seen in the pixels it returns: the same means and spreads as ours, option by option.

The image tells where each pixel comes from: red grows to the right, green downwards. It is a PNG, so that no decoder
rounds it otherwise.
"""

import cv2
import numpy as np
import pytest

from dmltrain.base import random_bits
from dmltrain.data.images import ImageAugmentation, training_image
from dmltrain.data.readers import recordio
from tests.data.drawing import assert_alike

mxnet = pytest.importorskip("mxnet", exc_type=ImportError)
pytestmark = pytest.mark.thorough

COUNT, BATCH = 1500, 500
SHAPE = (3, 32, 32)
HEIGHT, WIDTH = 48, 64
CROP = {"rand_crop": ("random_crop", True)}
RESIZED_CROP = {
    "random_resized_crop": ("random_resized_crop", True),
    "min_random_area": ("min_random_area", 0.3),
    "min_aspect_ratio": ("min_random_aspect_ratio", 0.75),
    "max_aspect_ratio": ("max_random_aspect_ratio", 1.25),
}
ROTATION = {"max_rotate_angle": ("max_random_rotate_angle", 20)}
COLOURS = {name: (name, 0.4) for name in ("brightness", "contrast", "saturation")}
CASES = {  # MXNet's parameter -> our field and the value of both
    "crop and mirror": {**CROP, "rand_mirror": ("random_mirror", True)},
    "resize and resized crop": {"resize": ("resize", 40), **RESIZED_CROP},
    "one angle": {"rotate": ("rotate", 30), **CROP},
    "shear": {"max_shear_ratio": ("max_random_shear_ratio", 0.3)},
    "scale": {"min_random_scale": ("min_random_scale", 0.8), "max_random_scale": ("max_random_scale", 1.5)},
    "aspect ratio": {"max_aspect_ratio": ("max_random_aspect_ratio", 0.25)},
    "square crop": {"min_crop_size": ("min_crop_size", 20), "max_crop_size": ("max_crop_size", 40), **CROP},
    "padding, rotation and resized crop": {"pad": ("pad_size", 6), **ROTATION, **RESIZED_CROP},
    "limits of the canvas": CROP
    | {name: (name, value) for name, value in (("min_random_scale", 0.5), ("min_img_size", 44.0))},
    "brightness, contrast and saturation": COLOURS,
    "noise": {"pca_noise": ("pca_noise", 0.1)},
    "hue": {"random_h": ("max_random_h", 36)},
    "saturation of HLS": {"random_s": ("max_random_s", 50)},
    "lightness": {"random_l": ("max_random_l", 50)},
}
PLACES = {  # of what is seen
    "left": lambda images: images[:, 0, :, 0].mean(1),
    "right": lambda images: images[:, 0, :, -1].mean(1),
    "top": lambda images: images[:, 1, 0].mean(1),
    "bottom": lambda images: images[:, 1, -1].mean(1),
    "width": lambda images: np.abs(images[:, 0, 16, 31] - images[:, 0, 16, 0]),
    "height": lambda images: images[:, 1, 31, 16] - images[:, 1, 0, 16],
}
COLOURS_SEEN = {  # one resampling is a little sharper than MXNet's two, so that the spread says nothing about places
    "blue": lambda images: images[:, 2].mean((1, 2)),
    "spread": lambda images: images.std((1, 2, 3)),
    "red at the left": lambda images: images[:, 0, 5, 5],
    "green at the right": lambda images: images[:, 1, 20, 28],
}


@pytest.fixture(scope="module")
def image():
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([x * 3 + 20, y * 4 + 10, (x + y) * 2], -1).astype(np.uint8)


@pytest.fixture(scope="module")
def record_file(image, tmp_path_factory):
    """The image COUNT times in RecordIO."""
    encoded = cv2.imencode(".png", image[:, :, ::-1])[1].tobytes()
    path = tmp_path_factory.mktemp("mxnet") / "same.rec"
    path.write_bytes(b"".join(recordio.encode(recordio.pack(0.0, 0, encoded))) * COUNT)
    return path


def mxnets(record_file, fields):
    how = {"dtype": "uint8", "ctx": "cpu", "device_id": -1, "preprocess_threads": 1, "fill_value": 127}
    fields = {name: int(value) if value is True else value for name, (_, value) in fields.items()}
    file = {"path_imgrec": str(record_file), "data_shape": SHAPE, "batch_size": BATCH, "verbose": False}
    batches = mxnet.io.ImageRecordIter(**file, **how, **fields)
    return np.concatenate([batch.data[0].asnumpy() for batch in batches])


def ours(image, fields):
    augmentation = ImageAugmentation(**dict(fields.values()))
    images = np.empty((COUNT, *SHAPE[1:], SHAPE[0]), np.uint8)
    words = random_bits.words(COUNT, 3, 0, random_bits.AUGMENTATION)
    for out, word in zip(images, words, strict=True):
        training_image(image, augmentation, SHAPE, int(word), out)
    return images.transpose(0, 3, 1, 2)


@pytest.mark.parametrize("name", CASES)
def test_draws_of_mxnets_reader(name, image, record_file):
    expected, found = (images.astype(float) for images in (mxnets(record_file, CASES[name]), ours(image, CASES[name])))
    assert len(expected) == COUNT
    colours = CASES[name].keys() & {*COLOURS, "pca_noise", "random_h", "random_s", "random_l"}
    for feature in (COLOURS_SEEN if colours else PLACES).values():
        assert_alike(feature(found), feature(expected))
