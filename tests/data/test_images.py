"""Images from files to pixels: what MXNet's reader makes of them, and what is drawn at random."""

import numpy as np
import pytest

from dmltrain.data.images import ImageAugmentation, evaluation_image, training_image

SHAPE = (3, 224, 224)
RANDOM = ImageAugmentation(random_resized_crop=True, random_mirror=True, min_random_area=0.1, brightness=0.4)


def records(path):
    """The images of a RecordIO file whose records are not split."""
    data, position, images = path.read_bytes(), 0, []
    while position < len(data):
        magic, length = np.frombuffer(data, "<u4", 2, position)
        assert magic == 0xCED7230A
        images.append(data[position + 8 + 24 : position + 8 + length])  # after IRHeader
        position += 8 + (int(length) + 3) // 4 * 4
    return images


@pytest.mark.parametrize(
    "file, expected, resize", [("sample-256", "center_of_256", -1), ("sample", "resize_256_center", 256)]
)
def test_evaluation_has_the_pixels_of_mxnets_reader(mxnet_files, file, expected, resize):
    out = np.empty((224, 224, 3), np.uint8)
    for image, planes in zip(
        records(mxnet_files / f"{file}.rec"), np.load(mxnet_files / "reader.npz")[expected], strict=False
    ):
        evaluation_image(image, ImageAugmentation(resize=resize), SHAPE, out)
        assert np.array_equal(out, planes.transpose(1, 2, 0))


def test_the_word_alone_decides(ilsvrc12_sample):
    image = next((ilsvrc12_sample / "images").iterdir()).read_bytes()
    outs = np.empty((3, 224, 224, 3), np.uint8)
    for out, word in zip(outs, (7, 7, 8), strict=True):
        training_image(image, RANDOM, SHAPE, word, out)
    assert np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[0], outs[2])
