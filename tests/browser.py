"""A headless Chromium that tests drive, by the Chrome DevTools Protocol over a pipe (--remote-debugging-pipe).

    with Browser(program) as browser, browser.page() as page:
        page.open(path)
        page.value("document.title")

The protocol is https://chromedevtools.github.io/devtools-protocol/; messages are JSON, each ended by a NUL byte. A page
collects what no page of this project may have: exceptions, errors of the console, and requests to anything but its own
file. The browser has an empty profile, asks nothing of the network, and ends with the block.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.readable import readable

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",  # it runs as root in containers
    *("--headless", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--disable-extensions"),
    *("--no-first-run", "--no-default-browser-check", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--hide-scrollbars", "--mute-audio", "--force-color-profile=srgb"),
    "--remote-debugging-pipe",
)
ANSWER_SECONDS = 60.0


def chromium() -> str:
    """The path of Chromium. Without one the test is skipped, and in CI it fails."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        message = f"no browser: none of {', '.join(NAMES)} is installed (Debian: apt install chromium)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


class Browser:
    """A Chromium process; `with` ends it and removes its profile."""

    def __init__(self, program: str):
        self._profile = tempfile.mkdtemp(prefix="dmltrain-browser-")
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        command = [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        # The browser reads messages from descriptor 3 and writes to 4; the shell puts the pipes there.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": self._profile},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._write({"id": 0, "method": "Browser.close"})
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of one method of the protocol. RuntimeError has the browser's own words."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._write(message | ({"sessionId": session} if session else {}))
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                break
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def wait_for(self, method: str, session: str) -> None:
        """Return after an event that came since the last call of `page.open` or comes now."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not any(event.get("method") == method and event.get("sessionId") == session for event in self.events):
            self.events.append(self._read(deadline))

    @contextlib.contextmanager
    def page(self, width: int = 1200, height: int = 900) -> Iterator[Page]:
        """A new tab of that size in CSS pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.size(width, height)
        try:
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)

    def _write(self, message: dict[str, Any]) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._out, rest) :]

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not readable([self._in], max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the browser does not answer within {ANSWER_SECONDS:g} s")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise RuntimeError(f"the browser ended with {self._process.wait()}")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not among the descriptors that the browser uses."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def open(self, path: Path) -> None:
        """Load a file and wait until it is loaded."""
        self.forget()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._browser.wait_for("Page.loadEventFired", self._session)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not (value := self.value(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {ANSWER_SECONDS:g} s: {expression}")
            self.value("new Promise(requestAnimationFrame)")
        return value

    def size(self, width: int, height: int) -> None:
        """The size of the window in CSS pixels; a phone's is below 500."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def media(self, kind: str = "screen", scheme: str = "light") -> None:
        """Medium (screen, print) and colour scheme (light, dark) as CSS sees them."""
        self.call(
            "Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def point(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, which is scrolled into view."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.point(x, y, kind, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        x, y = self.value(
            f"(e => {{ e.scrollIntoView({{block: 'center', behavior: 'instant'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        return x, y

    def key(self, name: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, **more)

    def picture(self, clip: tuple[float, float, float, float]) -> bytes:
        """A PNG of (x, y, width, height) of the page."""
        place = dict(zip(("x", "y", "width", "height"), clip, strict=True)) | {"scale": 1}
        shown = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=place)
        return base64.b64decode(shown["data"])

    def printed(self) -> bytes:
        """The page as PDF, printed on A4."""
        answer = self.call("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(answer["data"])

    def forget(self) -> None:
        """Forget the problems so far."""
        events = self._browser.events
        events[:] = [event for event in events if event.get("sessionId") != self._session]

    def problems(self) -> list[str]:
        """Exceptions, errors and warnings of the console, and requests other than for the page's own file."""
        self.value("new Promise(requestAnimationFrame)")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            method, parameters = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(f"exception: {parameters['exceptionDetails']}")
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(f"console: {parameters['args']}")
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(f"log: {parameters['entry']['text']}")
            elif method == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")) or parameters["type"] != "Document":
                    found += [] if url.startswith("data:") else [f"request: {url}"]
        return found
