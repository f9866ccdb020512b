"""A real browser, driven over a pipe by the DevTools protocol: nothing to install but Chromium itself."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
KEYS = {
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "End": 35,
}


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium. `requests` are the addresses it asked for, `errors` what its console said."""

    def __init__(self, program: str, profile: Path) -> None:
        read_here, self._write_there = os.pipe()
        self._read_there, write_here = os.pipe()

        def connect() -> None:  # Chromium reads commands from 3 and writes answers to 4
            kept = os.dup(read_here), os.dup(write_here)
            os.dup2(kept[0], 3)
            os.dup2(kept[1], 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_here)
        os.close(write_here)
        self._buffer, self._next, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer; events on the way are noted."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_there, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(60)
            if answer.get("id") == self._next:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, seconds: float) -> dict[str, Any]:
        limit = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready = select.select([self._read_there], [], [], max(0.0, limit - time.monotonic()))[0]
            assert ready, "the browser does not answer"
            chunk = os.read(self._read_there, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"][:200])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"][:500])
        elif event == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {params['message']}")
            self.call("Page.handleJavaScriptDialog", accept=True)

    # ------------------------------------------------------------------------------------------------ for the tests

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.requests.clear()
        self.errors.clear()
        self.resize(width, height)
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.call("Emulation.setEmulatedMedia", features=features)  # smooth scrolling would move targets under a click
        self.call("Page.navigate", url=file.as_uri())
        self.wait("document.readyState === 'complete' && !location.href.startsWith('about')")

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        limit = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < limit, f"never true: {condition}"
            time.sleep(0.02)

    def place(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """A point of an element in the window, after scrolling it there; x and y are shares of its size."""
        script = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            f"const b = e.getBoundingClientRect(); return [b.left + {x} * b.width, b.top + {y} * b.height]; }})()"
        )
        left, top = self.run(script)
        return left, top

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        left, top = self.place(selector, x, y)
        self.mouse("mouseMoved", left, top)

    def click(self, selector: str) -> None:
        left, top = self.place(selector)
        self.mouse("mousePressed", left, top, button="left", clickCount=1)
        self.mouse("mouseReleased", left, top, button="left", clickCount=1)

    def drag(self, selector: str, start: float, end: float) -> None:
        left, top = self.place(selector, start)
        self.mouse("mousePressed", left, top, button="left", clickCount=1)
        left, top = self.place(selector, end)
        self.mouse("mouseMoved", left, top, button="left", buttons=1)
        self.mouse("mouseReleased", left, top, button="left", clickCount=1)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def press(self, key: str, *, shift: bool = False) -> None:
        code = KEYS.get(key, ord(key[0]))
        extra = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        modifiers = 8 if shift else 0
        for kind in ("keyDown", "keyUp"):
            text = extra if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=modifiers, **text
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write_there)
        os.close(self._read_there)
