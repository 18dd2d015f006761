"""Makes the pictures of dmltrain-report's page in this folder: python docs/pictures/make.py

Needs Chromium and Pillow. It trains a small network for the pictures of time, and takes the runs of logs/reference for
those of accuracy.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
RUNS = [f"logs/reference/cifar10-resnet20-{name}" for name in ("sync", "async", "local")]
COLOURS = 128  # of a picture, which keeps its file small

sys.path.insert(0, str(ROOT))
from tests.browser import Browser, Page, chromium  # noqa: E402  (tests is no installed package)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Browser(chromium()) as browser:
        compared, trained = Path(folder, "compared.html"), Path(folder, "trained.html")
        _run("dmltrain-report", *RUNS, "-o", str(compared))
        job = Path(folder, "demo")
        options = ("--kv-store", "dist_ssp", "--num-epochs", "12", "--batch-size", "16")
        _run("dmltrain-launch", "-n", "4", "-s", "2", "--log-dir", str(job), "examples/train_digits.py", *options)
        _run("dmltrain-report", str(job), "-o", str(trained))
        with browser.page(1160, 860) as page:
            page.open(compared)
            page.value("window.scrollTo(0, 0)")
            _hover(page, "accuracy-by-epoch", 0.68)
            _save("page", page.picture())
        with browser.page(1160, 900) as page:
            page.media("screen", "dark")
            page.open(trained)
            page.value("document.getElementById('time').scrollIntoView({behavior: 'instant'})")
            _hover(page, "parts-by-epoch-0", 0.3)
            _save("page-dark", page.picture())
        with browser.page(380, 760) as page:
            page.open(compared)
            page.value("document.getElementById('summary').scrollIntoView({behavior: 'instant'})")
            _save("page-phone", page.picture())


def _run(program: str, *words: str) -> None:
    subprocess.run([str(BIN / program), *words], cwd=ROOT, check=True)


def _hover(page: Page, chart: str, at: float) -> None:
    """Put the pointer at a share of a chart's width, without scrolling."""
    x, y = page.value(
        f"(r => [r.x + r.width * {at}, r.y + r.height / 2])"
        f"(document.querySelector('#{chart} .chart').getBoundingClientRect())"
    )
    page.point(x - 4, y)
    page.point(x, y)
    page.wait(f"document.querySelector('#{chart} .hover')?.innerText")


def _save(name: str, picture: bytes) -> None:
    with Image.open(io.BytesIO(picture)) as image:
        small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        small.save(HERE / f"{name}.png", optimize=True)
    print(f"{name}.png: {(HERE / f'{name}.png').stat().st_size} bytes")


if __name__ == "__main__":
    main()
