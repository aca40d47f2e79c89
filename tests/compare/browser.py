"""A real browser without a window, spoken to over two pipes: the DevTools protocol, by the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMIT = 60.0  # seconds for one answer: a browser that hangs is a failed test
# The browser speaks at the file descriptors 3 and 4, which must be ours by then.
START = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
# No network but what a page asks for; no sandbox, which root in a container cannot have.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
]

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on the PATH; on Debian: apt-get install chromium"
)


class Browser:
    """One browser with one page; collects what the page asks the network for, and what it complains about."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        for number in (theirs_in, theirs_out):
            os.set_inheritable(number, True)
        words = [sys.executable, "-c", START, str(theirs_in), str(theirs_out), CHROMIUM, *FLAGS]
        self._log = (folder / "chromium.log").open("w")
        self._process = subprocess.Popen(
            [*words, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "HOME": str(folder)},
            start_new_session=True,
        )
        for number in (theirs_in, theirs_out):
            os.close(number)
        self._in, self._out, self._rest, self._number = ours_in, ours_out, b"", 0
        self._events: list[dict[str, Any]] = []
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        os.close(self._in)
        os.close(self._out)

    def open(self, file: Path, *, width: int, scheme: str) -> None:
        """Show a file in a window of this width, to somebody who likes pages light or dark."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self._call("Page.navigate", url=file.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._take(time.monotonic() + LIMIT)
        self.ask("new Promise(done => setTimeout(done, 100))")  # for whatever a page does when it is loaded

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, file: Path) -> None:
        """Write the whole page as a PNG file."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def requests(self) -> list[str]:
        """What was asked for since the page was opened, other than the page itself."""
        told = [event["params"] for event in self._events if event["method"] == "Network.requestWillBeSent"]
        urls = [str(one["request"]["url"]) for one in told if one.get("type") != "Document"]
        return [url for url in urls if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """Errors, warnings and other lines of the console."""
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self._events if event["method"] in methods]

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while True:
            answer = self._take(end)
            if answer is not None and answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def _take(self, end: float) -> dict[str, Any] | None:
        """The next message if it is an answer; an event is kept."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser did not answer within {LIMIT:g} s"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "id" in message:
            return message
        self._events.append(message)
        return None
