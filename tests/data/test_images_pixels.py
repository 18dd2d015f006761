"""From files to pixels: what MXNet's reader makes of the same images, and what each step does to them."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import simplejpeg

from dmltrain.data.augment import Augmentation, choose, training_images
from dmltrain.data.images import ImageAugmentation, augmentation_level, evaluation_image, training_image
from dmltrain.data.images.decode import open_image
from dmltrain.data.images.draws import RandomNumbers
from dmltrain.data.images.geometry import training_geometry
from dmltrain.data.images.resample import reduction, resample
from dmltrain.data.readers import open_reader

SHAPE = (3, 224, 224)
RESIZED_CROP = ImageAugmentation(random_resized_crop=True, min_random_area=0.08, random_mirror=True)
COLOURS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "pca_noise": 0.1}
SCALES = {"min_random_scale": 0.9, "max_random_scale": 1.1}
EVERYTHING = ImageAugmentation(resize=256, **augmentation_level(3), **COLOURS, pad_size=4, **SCALES)


def smooth(height, width, channels=3):
    """An image without sharp edges, so that a shift by a part of a pixel changes little."""
    y, x = np.mgrid[:height, :width]
    planes = [128 + 100 * np.sin(x / 25 + k) * np.cos(y / 30 + k) for k in range(channels)]
    return np.stack(planes, -1).astype(np.uint8)


def trained(image, augmentation, word=0, shape=SHAPE):
    out = np.full((*shape[1:], shape[0]), 99, np.uint8)
    training_image(image, augmentation, shape, word, out)
    return out


def evaluated(image, augmentation=None, shape=SHAPE):
    out = np.full((*shape[1:], shape[0]), 99, np.uint8)
    evaluation_image(image, augmentation or ImageAugmentation(), shape, out)
    return out


@pytest.mark.parametrize("make", [evaluated, trained])
@pytest.mark.parametrize(
    "file, expected, resize", [("sample-256", "center_of_256", -1), ("sample", "resize_256_center", 256)]
)
def test_centre_crops_have_the_pixels_of_mxnets_reader(mxnet_files, file, expected, resize, make):
    reader = open_reader(mxnet_files / f"{file}.rec")
    for number, planes in enumerate(np.load(mxnet_files / "reader.npz")[expected]):
        pixels = make(reader.read(number).image, ImageAugmentation(resize=resize))
        assert np.array_equal(pixels, planes.transpose(1, 2, 0))


@pytest.mark.parametrize("pad", [0, 4])
def test_pixels_of_cifar10_are_those_of_its_binary_files(pad):
    """Crop, mirror and padding resample nothing."""
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    words = np.random.Philox(1).random_raw(20)
    old = Augmentation((28, 28), pad=pad, mirror=True)
    expected = training_images(images, np.arange(20), old, choose(old, 32, 32, words))
    new = ImageAugmentation(random_crop=True, random_mirror=True, pad_size=pad)
    for image, word, planes in zip(images, words, expected, strict=True):
        found = trained(np.ascontiguousarray(image.transpose(1, 2, 0)), new, word, (3, 28, 28))
        assert np.array_equal(found.transpose(2, 0, 1), planes)


def test_padding_can_mirror_the_image():
    """As numpy, torch and torchvision do it: without the edge's pixels twice."""
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    mirrored = ImageAugmentation(pad_size=4, pad_mode="reflect")
    assert np.array_equal(trained(image, mirrored, 0, (3, 40, 40)), padded)
    assert (trained(np.full_like(image, 10), replace(mirrored, rotate=45), 0, (3, 40, 40)) == 10).all()


@pytest.mark.parametrize("size, resize", [((100, 150), -1), ((300, 180), -1), ((90, 250), 40), ((1, 1), -1)])
def test_small_images_are_enlarged_as_by_mxnet(size, resize):
    """MXNet enlarges until height and then width suffice."""
    pixels = expected = smooth(*size)
    if resize != -1:
        expected = cv2.resize(expected, (resize * 250 // 90, resize))
    if expected.shape[0] < 224:
        expected = cv2.resize(expected, (int(np.float32(224) / expected.shape[0] * expected.shape[1]), 224))
    if expected.shape[1] < 224:
        expected = cv2.resize(expected, (224, int(np.float32(224) / expected.shape[1] * expected.shape[0])))
    top, left = (expected.shape[0] - 224) // 2, (expected.shape[1] - 224) // 2
    found = evaluated(pixels, ImageAugmentation(resize=resize))
    difference = np.abs(found.astype(int) - expected[top : top + 224, left : left + 224])
    assert difference.mean() < 1 and difference.max() <= 4


@pytest.mark.parametrize(
    "method, size, expected", [(0, 256, 0), (2, 256, 2), (3, 256, 3), (4, 256, 4), (9, 256, 3), (9, 400, 2)]
)
def test_methods_of_resizing(method, size, expected):
    pixels = smooth(300, 320)
    resized = cv2.resize(pixels, (size * 320 // 300, size), interpolation=expected)
    top, left = (size - 224) // 2, (size * 320 // 300 - 224) // 2
    for make in (evaluated, trained):
        found = make(pixels, ImageAugmentation(resize=size, inter_method=method))
        assert np.array_equal(found, resized[top : top + 224, left : left + 224])


@pytest.mark.parametrize("resize", [-1, 100])
@pytest.mark.parametrize("word", [0, 3 << 60, 2**64 - 1])
def test_resized_crops_are_cut_and_resized(resize, word):
    """With resize the crop comes from the image itself, in one resampling: nearly the same pixels."""
    pixels, augmentation = smooth(400, 300), replace(RESIZED_CROP, resize=resize)
    size = (400, 300) if resize == -1 else (133, 100)
    geometry = training_geometry(augmentation, size, SHAPE[1:], RandomNumbers(word))
    top, left, height, width = geometry.region
    source = pixels if resize == -1 else cv2.resize(pixels, (100, 133))
    expected = cv2.resize(source[top : top + height, left : left + width], (224, 224))
    found = trained(pixels, augmentation, word)
    difference = np.abs((expected[:, ::-1] if geometry.mirror else expected).astype(int) - found)
    assert difference.max() == 0 if resize == -1 else difference.mean() < 1


def mxnets_steps(geometry, pixels, fill):
    """The steps one after another, each resampled, as MXNet does them."""
    if geometry.resized != geometry.source:
        pixels = cv2.resize(pixels, geometry.resized[::-1])
    if geometry.affine is not None:
        size = geometry.canvas[::-1]
        pixels = cv2.warpAffine(pixels, geometry.affine[:2], size, borderValue=(fill,) * 3, flags=cv2.INTER_LINEAR)
    pixels = cv2.copyMakeBorder(pixels, *[geometry.pad] * 4, cv2.BORDER_CONSTANT, value=(fill,) * 3)
    top, left, height, width = geometry.region
    pixels = cv2.resize(pixels[top : top + height, left : left + width], geometry.scaled[::-1])
    top, left = geometry.crop
    pixels = pixels[top : top + 224, left : left + 224]
    return pixels[:, ::-1] if geometry.mirror else pixels


@pytest.mark.parametrize(
    "fields",
    [
        augmentation_level(3),
        {**augmentation_level(3), "resize": 256},
        {**augmentation_level(3), "resize": 230, "pad_size": 20},
        {"random_resized_crop": True, "min_random_area": 0.3, "pad_size": 9, "max_random_rotate_angle": 40},
        {"min_crop_size": 100, "max_crop_size": 250, "random_crop": True, "max_random_shear_ratio": 0.3},
        {"min_random_scale": 0.5, "max_random_scale": 1.5, "random_crop": True, "pad_size": 3},
        {"rotate_list": (90, 180), "max_img_size": 260.0},
    ],
)
def test_one_resampling_is_like_mxnets_steps(fields):
    pixels, augmentation = smooth(300, 400), ImageAugmentation(**{**fields, "max_random_h": 0})
    for word in range(1 << 60, 1 << 64, 7 << 60):
        geometry = training_geometry(augmentation, (300, 400), (224, 224), RandomNumbers(word))
        found = np.empty((224, 224, 3), np.uint8)
        resample(geometry, pixels, 127, found)
        difference = np.abs(found.astype(int) - mxnets_steps(geometry, pixels, 127))
        assert difference.mean() < 1 and (difference > 8).mean() < 0.01  # a line along the edge of the image


def test_long_edges_are_not_made_whole_and_fill_value_shows_where_the_image_does_not_reach():
    """1 x 20,000 pixels with a shorter edge of 256 would have 1.3 billion."""
    assert (evaluated(np.full((1, 20_000, 3), 77, np.uint8), ImageAugmentation(resize=256)) == 77).all()
    image = np.full((224, 224, 3), 10, np.uint8)
    assert set(np.unique(trained(image, ImageAugmentation(rotate=45, fill_value=200, inter_method=0)))) == {10, 200}


@pytest.mark.parametrize("augmentation", [RESIZED_CROP, replace(EVERYTHING, resize=-1), ImageAugmentation(resize=240)])
def test_any_strides_of_the_output(augmentation):
    batch = np.zeros((2, 3, 224, 230), np.uint8)
    out = batch[1].transpose(1, 2, 0)[:, 3:-3]
    training_image(smooth(300, 400), augmentation, SHAPE, 5, out)
    assert np.array_equal(out, trained(smooth(300, 400), augmentation, 5))
    evaluation_image(smooth(300, 400), augmentation, SHAPE, out)
    assert np.array_equal(out, evaluated(smooth(300, 400), augmentation))
    assert not batch[0].any() and not batch[1, :, :, :3].any() and not batch[1, :, :, -3:].any()


@pytest.mark.parametrize("augmentation", [ImageAugmentation(resize=256, random_mirror=True), RESIZED_CROP, EVERYTHING])
def test_grey_output(augmentation):
    plain = replace(augmentation, **dict.fromkeys(COLOURS, 0), max_random_h=0, max_random_s=0, max_random_l=0)
    grey = smooth(300, 400, 1)
    for image in (grey, grey[:, :, 0], np.repeat(grey, 3, 2)):
        found = trained(image, plain, 9, (1, 224, 224))
        assert np.abs(found.astype(int) - trained(grey, plain, 9)[:, :, :1]).max() <= 1
        assert np.array_equal(evaluated(image, shape=(1, 200, 200)), grey[50:250, 100:300])


def test_large_jpegs_are_reduced_in_decoding():
    pixels = smooth(1600, 2400)
    image = simplejpeg.encode_jpeg(pixels, quality=95)
    augmentation = ImageAugmentation(resize=256)
    geometry = training_geometry(augmentation, (1600, 2400), SHAPE[1:], RandomNumbers(0))
    assert reduction(geometry) == 2  # 1600 / 256 is 6.25: two pixels are left for each
    assert open_image(image).decode(3, 2).shape == (800, 1200, 3)
    assert open_image(image).decode(1, 8).shape == (200, 300, 1)
    difference = np.abs(trained(image, augmentation).astype(int) - evaluated(image, augmentation))
    assert 0 < difference.mean() < 1 and difference.max() <= 4
    turned = ImageAugmentation(resize=256, rotate=30, max_random_shear_ratio=0.3, random_mirror=True)
    for word in (1, 1 << 63):
        difference = np.abs(trained(image, turned, word).astype(int) - trained(pixels, turned, word))
        assert difference.mean() < 1


@pytest.mark.parametrize("factor, expected", [(1, 1), (3.9, 1), (4, 2), (8, 4), (15.9, 4), (16, 8), (99, 8)])
def test_reduction_leaves_two_pixels_for_each(factor, expected):
    source = (round(224 * factor), round(224 * factor))
    geometry = training_geometry(ImageAugmentation(resize=224), source, SHAPE[1:], RandomNumbers(0))
    assert reduction(geometry) == expected


def test_pictures_of_the_sample_resized_are_close_to_whole_ones(ilsvrc12_sample):
    """Bar: 1 level on average, 4 for any picture; only large pictures are reduced."""
    paths = (ilsvrc12_sample / "images").iterdir()
    large = [data for data in (path.read_bytes() for path in paths) if max(open_image(data).size) > 1000]
    assert large
    for image in large:
        augmentation = ImageAugmentation(resize=256)
        difference = np.abs(trained(image, augmentation).astype(int) - evaluated(image, augmentation))
        assert difference.mean() < 4
