"""A real browser for tests: headless Chromium, spoken to in its own protocol over two pipes.

No package is needed for that: the protocol is JSON, each message ends with a zero byte, and Chromium reads and writes
it on the file descriptors 3 and 4 when it is told to. `find_browser` says where a browser is, or None: the one that
`make test` has put into .venv (`tools/get_browser.py`, which pins it), else one of the machine's own.
"""

import base64
import fcntl
import itertools
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
VARIABLE = "TORCH_RECOMPUTE_BROWSER"


# Where `make test` puts one.
OURS = Path(sys.prefix) / "browser"


def find_browser() -> str | None:
    """The path of a Chromium: what the variable names, else the pinned one, else the first on the path."""
    named = os.environ.get(VARIABLE)
    if named:
        return shutil.which(named)
    return next(filter(None, map(shutil.which, (str(OURS / "chromium"), *NAMES))), None)


def why_none() -> str:
    """What a person needs to know where no browser is found."""
    named, said = os.environ.get(VARIABLE), OURS / "why-not.txt"
    if named:
        return f"{VARIABLE} names {named}, which is no program"
    why = said.read_text(encoding="utf-8") if said.is_file() else f"there is none in {OURS}, where `make test` puts one"
    return f"needs a Chromium: on the path, or its path in the variable {VARIABLE}. The pinned one: {why}"


class Browser:
    """One page in a browser. Use it in a `with` block.

    Args:
        program: Path of the browser.
        profile: An empty folder, for what it keeps.
    """

    def __init__(self, program: str, profile: Path) -> None:
        self._numbers = itertools.count(1)
        self._waiting: list[dict[str, Any]] = []
        self._rest = b""
        down_read, self._down = os.pipe()
        self._up, up_write = os.pipe()
        # Out of the way of 3 and 4, which they are to become.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (down_read, up_write)]
        silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        spoken = [(os.POSIX_SPAWN_DUP2, end, number) for end, number in zip(ends, (3, 4), strict=True)]
        command = [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        ]
        self._process = os.posix_spawn(program, command, os.environ, file_actions=[*silent, *spoken])
        for end in ends:
            os.close(end)
        os.close(down_read)
        os.close(up_write)
        self._session = ""
        self.problems: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> "Browser":
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._down)  # at which it ends
        deadline = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self._process, signal.SIGKILL)
            time.sleep(0.02)
        os.close(self._up)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._down, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def open(self, path: Path) -> None:
        """Opens a file and waits until it is loaded."""
        self.problems.clear()
        self.requests.clear()
        self.send("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 60
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") != path.as_uri():
            assert time.monotonic() < deadline, "the page was not loaded"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def look(self, *, width: int = 1100, height: int = 900, scheme: str = "light", media: str = "") -> None:
        """How the page is looked at."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def picture(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def printed(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"])

    def move(self, x: float, y: float) -> None:
        """Moves the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Clicks with the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        code = {"ArrowLeft": 37, "ArrowRight": 39}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["exception"].get("description", ""))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._up, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
