"""A headless Chromium, spoken to over the pipe of its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One page."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._number, self._left, self._session = to, back, 0, b"", None
        self.errors: list[str] = []
        """What scripts threw and the console was told."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._left:
                self._left += os.read(self._back, 1 << 20)
            line, self._left = self._left.split(b"\0", 1)
            answer = json.loads(line)
            is_error = answer.get("method") == "Runtime.consoleAPICalled" and answer["params"]["type"] in (
                "error",
                "warning",
            )
            if is_error or answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, url: str, width: int = 1400, height: int = 1000) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def prefer(self, scheme: str) -> None:
        """Light or dark, as the reader's system says."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def save_to(self, directory: Path) -> None:
        """Where downloads go."""
        self._call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(directory))

    def picture(self) -> bytes:
        """The whole page as a PNG."""
        picture = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(picture["data"])

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def drag(self, selector: str, start: float, end: float) -> None:
        """With the mouse, from one share of an element's width to another."""
        box = self.ask(
            f"(b => [b.left, b.top, b.width, b.height])(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        for kind, share in (("mouseMoved", start), ("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=box[0] + box[2] * share, y=box[1] + box[3] / 2, button="left",
                buttons=1, clickCount=1,
            )  # fmt: skip


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A browser of its own, with its files in a directory."""
    assert CHROMIUM is not None
    # Its own names: the browser reads from 3 and writes to 4.
    read_end, to = os.pipe()
    back, write_end = os.pipe()
    command = (
        f"exec '{CHROMIUM}' --headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir='{directory}' "
        f"3<&{read_end} 4>&{write_end}"
    )
    process = subprocess.Popen(["bash", "-c", command], pass_fds=(read_end, write_end), stderr=subprocess.DEVNULL)
    os.close(read_end)
    os.close(write_end)
    try:
        yield Browser(to, back)
    finally:
        process.kill()
        process.wait()
        os.close(to)
        os.close(back)
