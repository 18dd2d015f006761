"""Images that cannot be decoded, or only by another way than libjpeg-turbo."""

import io
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from dmltrain.base.errors import UserError
from dmltrain.data.images import BrokenImage, ImageAugmentation, evaluation_image, training_image
from dmltrain.data.images.decode import MAX_PIXELS, Jpeg, open_image
from dmltrain.data.images.libraries import library

SHAPE = (3, 32, 32)
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
CENTRE = np.s_[4:36, 8:40]


def encoded(mode="RGB", format="PNG", **options):
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(buffer, format, **options)
    return buffer.getvalue()


JPEG = encoded(format="JPEG", quality=95)


def evaluated(image, augmentation=None, shape=SHAPE):
    out = np.empty((*shape[1:], shape[0]), np.uint8)
    evaluation_image(image, augmentation or ImageAugmentation(), shape, out)
    return out


def reason(image, augmentation=None):
    """Why the image is broken, in evaluation and in training."""
    with pytest.raises(BrokenImage) as found:
        evaluated(image, augmentation)
    with pytest.raises(BrokenImage) as again:
        training_image(image, augmentation or ImageAugmentation(), SHAPE, 1, np.empty((32, 32, 3), np.uint8))
    assert str(found.value) == str(again.value)
    return str(found.value)


def flat_jpeg(edge):
    """Grey of edge x edge pixels in few bytes: all blocks but the first have the same six bits, so that four make three
    bytes."""
    small = simplejpeg.encode_jpeg(np.full((64, 64, 1), 128, np.uint8), colorspace="GRAY")
    frame, scan = small.find(b"\xff\xc0"), small.find(b"\xff\xda")
    start = scan + 2 + int.from_bytes(small[scan + 2 : scan + 4], "big")
    assert small[start:].startswith(b"\x28\xa2\x8a" * 4)
    head = bytearray(small[:start])
    head[frame + 5 : frame + 9] = edge.to_bytes(2, "big") * 2
    return bytes(head) + b"\x28\xa2\x8a" * -(-((-(-edge // 8)) ** 2) // 4) + b"\xff\xd9"


@pytest.mark.parametrize(
    "image, message",
    [
        (b"", "the image is empty: it has 0 bytes"),
        (b"GIF", "3 bytes that begin with 47 49 46 cannot be decoded"),
        (JPEG[:2], "2 bytes that begin with ff d8 cannot be decoded"),
        (JPEG[:300], "300 bytes that begin with ff d8 ff e0 00 10 4a 46 cannot be decoded: "),
        (JPEG[:-200], "the JPEG is damaged: Corrupt JPEG data: premature end"),
        (JPEG[:900] + b"\xff\xd9" + JPEG[900:], "the JPEG is damaged: "),
        (encoded()[:-500], "cannot be decoded: "),
        (
            encoded(format="EPS"),
            "no known format of images",
        ),  # no program runs for a file: Pillow's would be Ghostscript
    ],
)
def test_damaged_files(image, message):
    assert message in reason(image)


@pytest.mark.parametrize("tail", [b"", b"\x00abcdefg\xff\xd9", b"\xff\xd9" + bytes(300)])
def test_damage_that_costs_no_pixel_is_accepted(tail):
    """No marker of the end, bytes before it, bytes after it."""
    assert np.array_equal(evaluated(JPEG[:-2] + tail), evaluated(JPEG))


@pytest.mark.parametrize("pixels", [np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8)])
def test_arrays_that_are_no_images(pixels):
    assert f"pixels of type {pixels.dtype} and shape" in reason(pixels)


@pytest.mark.parametrize(
    "image, difference",
    [
        *((encoded(), 0), (encoded("RGBA"), 0), (encoded(format="BMP"), 0)),
        (encoded(format="GIF"), 70),  # of at most 256 colours
        (encoded("CMYK", "JPEG", quality=100, subsampling=0), 8),
    ],
)
def test_formats_other_than_jpeg_in_rgb(image, difference):
    found = np.abs(evaluated(image).astype(int) - PIXELS[CENTRE])
    assert found.max() <= difference


def test_cmyk_is_converted_as_by_opencv_and_a_palette_without_its_transparency(recwarn):
    for quality in (60, 95):
        image = encoded("CMYK", "JPEG", quality=quality)
        expected = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
        assert np.array_equal(evaluated(image), expected[CENTRE])
    image = encoded("P", transparency=bytes(range(256)))
    colours = np.asarray(Image.open(io.BytesIO(image)).convert("RGBA"))[..., :3]
    assert np.array_equal(evaluated(image), colours[CENTRE]) and not list(recwarn)


def test_grey_files_rotation_by_exif_and_one_pixel():
    grey = np.asarray(Image.fromarray(PIXELS).convert("L"))
    deep = cv2.imencode(".png", grey.astype(np.uint16) * 257)[1].tobytes()
    for image in (encoded("L"), deep, encoded("L", "JPEG", quality=100)):
        found = evaluated(image)
        assert np.abs(found[:, :, 1].astype(int) - grey[CENTRE]).max() <= 2
        assert np.array_equal(found[:, :, 0], found[:, :, 2])
        assert np.array_equal(evaluated(image, shape=(1, 32, 32))[:, :, 0], found[:, :, 0])
    turned = Image.Exif()
    turned[0x0112] = 6
    assert np.array_equal(evaluated(encoded(format="JPEG", quality=95, exif=turned)), evaluated(JPEG))
    image = simplejpeg.encode_jpeg(np.full((1, 1, 3), 77, np.uint8))
    assert (evaluated(image, ImageAugmentation(resize=64)) == 77).all() and (evaluated(image) == 77).all()


def test_images_of_too_many_pixels():
    assert MAX_PIXELS < 20_000**2
    assert "20000 x 20000 pixels, and at most 67,108,864" in reason(flat_jpeg(20_000))
    assert (evaluated(flat_jpeg(9000), ImageAugmentation(resize=40)) == 128).all(), "it is reduced"
    wide = np.zeros((2, 40_000, 3), np.uint8)
    assert "40000 x 2 pixels has an edge of more than 32766" in reason(wide, ImageAugmentation(resize=4000))
    several_scans = flat_jpeg(9000).replace(b"\xff\xc0", b"\xff\xc2", 1)
    assert "9000 x 9000 pixels" in reason(several_scans, ImageAugmentation(resize=40))
    interleaved = bytearray(flat_jpeg(9000))
    interleaved[interleaved.find(b"\xff\xda") + 4] = 0
    assert open_image(bytes(interleaved)).max_reduction == 1
    end = flat_jpeg(9000).find(b"\xff\xda")
    for length in range(end - 3, end + 12):
        assert Jpeg(flat_jpeg(9000)[:length], (9000, 9000)).max_reduction == (8 if length > end + 10 else 1), length
    buffer = io.BytesIO()
    Image.new("L", (9000, 9000)).save(buffer, "PNG")
    assert "9000 x 9000 pixels" in reason(buffer.getvalue(), ImageAugmentation(resize=40))


@pytest.mark.thorough
def test_memory_of_a_very_large_jpeg(tmp_path: Path):
    """20,000 x 20,000 pixels would take 1.2 GB."""
    (tmp_path / "large.jpg").write_bytes(flat_jpeg(20_000))
    program = """if True:
        import resource, sys
        import numpy as np
        from dmltrain.data.images import ImageAugmentation, evaluation_image
        out, options = np.empty((32, 32, 3), np.uint8), ImageAugmentation(resize=40)
        evaluation_image(np.zeros((64, 64, 3), np.uint8), options, (3, 32, 32), out)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        evaluation_image(open(sys.argv[1], "rb").read(), options, (3, 32, 32), out)
        assert (out == 128).all()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    command = [sys.executable, "-c", program, str(tmp_path / "large.jpg")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert int(done.stdout) < 60_000  # kB: 19 MB of pixels, the file itself, buffers


def test_a_missing_library_is_named():
    with pytest.raises(UserError, match=r"module nowhere, .*'dmltrain\[images\]'"):
        library("nowhere.at_all")
