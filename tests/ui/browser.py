"""A real browser over the WebDriver protocol: Debian's Chromium and its driver, which speaks HTTP."""

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from embedded.tied import tie
from tests.waiting import wait_until

WIDTH, HEIGHT = 1280, 640  # of a picture
_SCALE = 0.8  # the Web UI cuts its times off in a narrower window
MISSING = (
    "`make test-ui` looks at the Web UI in a real browser and finds no {}; "
    "on Debian and Ubuntu: apt-get install chromium chromium-driver"
)

_PATIENCE = 30.0  # seconds
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--hide-scrollbars",
    "--lang=en-US",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # whatever a page asks for, it gets it from here
    f"--force-device-scale-factor={_SCALE}",
)


def programs() -> tuple[str, str]:
    """(browser, driver). Raises FileNotFoundError with a sentence for a person when one is missing."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if browser is None:
        raise FileNotFoundError(MISSING.format("Chromium"))
    if driver is None:
        raise FileNotFoundError(MISSING.format("chromedriver"))
    return browser, driver


# The Web UI renders what may hold Markdown in frames of its own.
_TEXT = """
    const pages = [document, ...[...document.querySelectorAll('iframe')].map(each => each.contentDocument)]
    return pages.map(each => each?.body?.innerText ?? '').join(' ')
"""


class Browser:
    """One window. What it is asked for is what a person sees: text that is visible, and pictures of it."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        """`session`: its path below the driver's URL, which is the client's base."""
        self._client = client
        self._session = session

    def open(self, url: str) -> None:
        """Go to that page."""
        self._post("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What JavaScript returns."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def text(self) -> str:
        """All visible text of the page and of the frames in it, white space as one blank each."""
        return " ".join(str(self.run(_TEXT)).split())

    def wait_for(self, *words: str, timeout: float = _PATIENCE) -> str:
        """The page's text once it shows all of these. Raises AssertionError with what it shows instead."""
        with contextlib.suppress(AssertionError):
            return wait_until(lambda: self._text_with(words), timeout, "the words are shown")
        shown = self.text()
        missing = [word for word in words if word not in shown]
        raise AssertionError(f"not within {timeout:g} s on the page: {missing}; it shows: {shown}")

    def click(self, text: str) -> None:
        """Click on the button, tab or link with exactly this text (and perhaps a count behind it), once it is there."""
        find = """return [...document.querySelectorAll('a, button, [role=tab]')].find(
            each => each.innerText.replace(/\\s+\\d*$/, '').trim() === arguments[0] && each.checkVisibility())"""
        element = wait_until(lambda: self.run(find, text), _PATIENCE, f"something to click on that says {text!r}")
        (reference,) = element.values()
        self._post(f"element/{reference}/click")

    def picture(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        self.run("document.activeElement?.blur()")  # no frame around what was clicked on
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._get("screenshot")))

    def resize(self, width: int, height: int) -> None:
        """Give the page that room; the window's own frame comes on top."""
        for _ in range(2):  # the frame is known once there is a window of that size
            inner = self.run("return [innerWidth, innerHeight, outerWidth, outerHeight]")
            frame = [inner[2] - inner[0], inner[3] - inner[1]]
            self._post("window/rect", width=width + frame[0], height=height + frame[1])

    def _text_with(self, words: tuple[str, ...]) -> str:
        shown = self.text()
        return shown if all(word in shown for word in words) else ""

    def _get(self, what: str) -> Any:
        return _value(self._client.get(f"{self._session}/{what}"))

    def _post(self, what: str, **parameters: Any) -> Any:
        return _value(self._client.post(f"{self._session}/{what}", json=parameters))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser for the block, its profile and log below `folder`; its processes end with it."""
    program, driver = programs()
    (folder / "home").mkdir(parents=True)
    with (folder / "chromedriver.log").open("wb") as log:
        process = tie(
            subprocess.Popen(
                [driver, "--port=0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "HOME": str(folder / "home"), "TMPDIR": str(folder)},
            )
        )
    try:
        with _session(_port(process), program, folder / "profile") as window:
            yield window
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the driver, and a browser that outlived its session
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _port(process: "subprocess.Popen[bytes]") -> int:
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(rb"started successfully on port (\d+)", line)
        if found:
            return int(found[1])
    raise AssertionError("chromedriver does not start")


@contextlib.contextmanager
def _session(port: int, program: str, profile: Path) -> Iterator[Browser]:
    options = {"binary": program, "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
    wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        session = f"session/{_value(client.post('session', json=wanted))['sessionId']}"
        try:
            window = Browser(client, session)
            window.resize(round(WIDTH / _SCALE), round(HEIGHT / _SCALE))
            yield window
        finally:
            client.delete(session)


def _value(response: httpx.Response) -> Any:
    value = response.json()["value"]
    assert response.status_code == 200, f"{value['error']}: {value['message']}"
    return value
