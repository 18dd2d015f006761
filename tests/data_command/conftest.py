"""Folders of small images, and dmltrain-data as a user calls it."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dmltrain.data_command import cli

cv2 = pytest.importorskip("cv2", reason="opencv-python-headless is not installed: pip install 'dmltrain[images]'")
CLASSES = ("ant", "bee", "cow")
EACH = 5  # images of a class


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def command(*words: object) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(word) for word in words])
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """A folder for each class, with images of 40 x 30 and 30 x 40 pixels, each of one colour."""
    root = tmp_path_factory.mktemp("images")
    for label, name in enumerate(CLASSES):
        (root / name).mkdir()
        for number in range(EACH):
            pixels = np.full((30, 40, 3) if number % 2 else (40, 30, 3), 60 * label + 10 * number, np.uint8)
            assert cv2.imwrite(str(root / name / f"{name} {number}.jpg"), pixels)
    return root


@pytest.fixture(scope="session")
def packed(images, tmp_path_factory) -> Path:
    """The images in RecordIO, in their order."""
    folder = tmp_path_factory.mktemp("packed")
    done = command("pack", folder / "x", images, "--recursive", "--no-shuffle", "--pass-through", "--no-verify")
    assert done.code == 0
    return folder / "x.rec"


@pytest.fixture(scope="session")
def run():
    return command


def refused(done: Done, *essentials: str) -> None:
    assert done.code == 2 and "error: " in done.err and "Traceback" not in done.err, done.err
    for essential in essentials:
        assert essential in done.err
