"""One browser for the tests of a file, and a page in it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmltrain.report.page import cli
from tests.browser import Browser, Page, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(chromium()) as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab. At its end nothing may have gone wrong in it, and nothing may have been asked of a network."""
    with browser.page() as opened:
        yield opened
        assert opened.problems() == []


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Path]:
    """`report(*logs)`: the page of these logs; the program must succeed."""

    def make(*logs: object, code: int = 0, output: Path | None = None) -> Path:
        page = output or tmp_path / "report.html"
        assert cli.main([*map(str, logs), "-o", str(page)]) == code
        return page

    return make
