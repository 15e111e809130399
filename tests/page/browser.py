"""Headless Chromium for the page's tests and pictures, over its own pipe: no driver, no port, no further package.

Source: Chrome DevTools Protocol; ``--remote-debugging-pipe`` reads commands from descriptor 3 and writes to 4, JSON
texts that each end in a zero byte.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
WITHIN_S: Final = 30.0
_FLAGS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-default-apps", "--disable-extensions", "--metrics-recording-only", "--force-color-profile=srgb"),
    # Whatever the page asks of other machines fails here, and is seen as a request.
    *("--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE localhost"),
    *("--remote-debugging-pipe", "about:blank"),
)


def chromium() -> str | None:
    """The program; None: not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser ended, answered with an error, or a condition was not met in time."""


@final
class Chromium:
    """A running browser, at the ends of its pipe; `tab` opens a tab in a profile of its own."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events = commands, events
        self._readable = select.poll()  # not select(): a test run may have more than 1,024 files open
        self._readable.register(events, select.POLLIN)
        self._left = b""
        self._number = 0

    @contextlib.contextmanager
    def tab(self) -> Iterator["Browser"]:
        """A tab in an empty profile; both are gone after the block."""
        profile = self.call("Target.createBrowserContext")["browserContextId"]
        try:
            target = self.call("Target.createTarget", url="about:blank", browserContextId=profile)["targetId"]
            yield Browser(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=profile)

    def call(
        self,
        method: str,
        *,
        session: str = "",
        note: Callable[[str, dict[str, Any]], None] = lambda *_: None,
        **parameters: object,
    ) -> dict[str, Any]:
        """The result of one command. ``note`` gets the events of the same ``session`` before it.

        Errors: `BrowserError`.
        """
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            if session and answer.get("sessionId") == session:
                note(answer.get("method", ""), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready = self._readable.poll(1000 * WITHIN_S)
            part = os.read(self._events, 1 << 16) if ready else b""
            if not part:
                raise BrowserError("the browser does not answer")
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@final
class Browser:
    """One tab. What it logged and requested is in ``problems`` and ``requested``."""

    def __init__(self, program: Chromium, session: str) -> None:
        self._program, self._session = program, session
        self.problems: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to this address."""
        answer = self._call("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserError(f"{url}: {answer['errorText']}")
        self.until(
            f"location.href.startsWith({json.dumps(url.partition('#')[0])}) && document.readyState === 'complete'"
        )

    def value(self, expression: str) -> Any:
        """What an expression is in the page. `Any`: it is JSON."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str, *, within_s: float = WITHIN_S) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + within_s
        while not self.value(f"!!({expression})"):
            if time.monotonic() > deadline:
                raise BrowserError(
                    f"not within {within_s:.0f} s: {expression}\n{self.value('document.body.innerText')}"
                )
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """One key, as a person presses it."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38, "End": 35, "Home": 36}
        more: dict[str, object] = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        self._call("Input.dispatchKeyEvent", type="keyDown", **more, **({"text": text} if text else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **more)

    def size(self, width: int, height: int, *, scale: float = 1, dark: bool = False) -> None:
        """The window's size in CSS pixels, and the colours that the person prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def hidden(self, *, hidden: bool) -> None:
        """The tab is hidden, or shown again."""
        state = "hidden" if hidden else "visible"
        self.value(
            f"Object.defineProperty(document, 'hidden', {{get: () => {json.dumps(hidden)}, configurable: true}});"
            f"Object.defineProperty(document, 'visibilityState', {{get: () => '{state}', configurable: true}});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

    def picture(self, *, whole: bool = False) -> bytes:
        """The window as a PNG, or the whole page."""
        clip: dict[str, object] = {}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {**size, "scale": 1}, "captureBeyondViewport": True}
        return base64.b64decode(self._call("Page.captureScreenshot", format="png", **clip)["data"])

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        return self._program.call(method, session=self._session, note=self._note, **parameters)

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(event["args"]))
        elif method == "Log.entryAdded":
            self.problems.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its children: each of them would write into the profile while that is removed."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.01)


@contextlib.contextmanager
def running(program: str) -> Iterator[Chromium]:
    """A browser that has no profile yet, gone after the block."""
    command_read, command_write = os.pipe()
    event_read, event_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="bypassd-browser-", ignore_cleanup_errors=True) as profile:
        # Descriptors 3 and 4 must be these two: the shell puts them there.
        shell = f'exec "$0" "$@" 3<&{command_read} 4>&{event_write}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", shell, program, f"--user-data-dir={profile}", *_FLAGS],
            pass_fds=(command_read, event_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
            start_new_session=True,
        )
        os.close(command_read)
        os.close(event_write)
        try:
            yield Chromium(command_write, event_read)
        finally:
            _end(process)
            os.close(command_write)
            os.close(event_read)


@contextlib.contextmanager
def browsing(program: str) -> Iterator[Browser]:
    """The one tab of a browser with an empty profile, gone after the block."""
    with running(program) as browser, browser.tab() as tab:
        yield tab
