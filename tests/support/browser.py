"""A real browser without a window, driven over its DevTools protocol, that ends with its driver.

Messages travel through two pipes, so no port and no further library is needed, and the browser
closes when the pipes do, whatever became of the test. It reaches this machine only. Every wait
has a deadline and says what the page showed when it passed.
"""

import base64
import fcntl
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTS_S = 60.0
ANSWER_S = 60.0
"""Longest wait for one answer; a busy machine draws slowly."""
APPEAR_S = 90.0
"""Longest wait for something to be drawn."""
CLICK_S = 15.0
"""Longest wait for what a click does."""
LOOK_S = 0.1
PAINTED_BYTES = 8192
"""A PNG of a canvas that shows anything is larger."""
SETTLE = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
LAUNCH = """\
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
SEEN = (
    "[document.body?.innerText ?? '', "
    "...Array.from(document.querySelectorAll('input, textarea'), field => field.value)].join('\\n')"
)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


class Browser:
    """One browser with one page; use it in a `with`."""

    def __init__(self, program: str, profile: Path, width: int = 1280, height: int = 800) -> None:
        """Start it.

        Args:
            program: path of Chromium.
            profile: folder for its files; made when missing.
            width: of the page, in CSS pixels.
            height: of the page, in CSS pixels.
        """
        profile.mkdir(parents=True, exist_ok=True)
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        # The browser reads descriptor 3 and writes descriptor 4; ours must not lie there.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]
        options = [*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        with (profile / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", LAUNCH, *map(str, theirs), program, *options, "about:blank"],
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for end in (read, write, *theirs):
            os.close(end)
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self._width, self._height = width, height

    def __enter__(self) -> "Browser":
        page = self._ask("Target.createTarget", {"url": "about:blank"}, STARTS_S)
        attached = self._ask("Target.attachToTarget", {"targetId": page["targetId"], "flatten": True})
        self._session = attached["sessionId"]
        self._ask("Page.enable")
        self.resize(self._width, self._height)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(20.0)

    def resize(self, width: int, height: int) -> None:
        """Give the page another size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, palette: str) -> None:
        """Tell the page that its reader prefers `light` or `dark` colours."""
        wish = {"name": "prefers-color-scheme", "value": palette}
        self._ask("Emulation.setEmulatedMedia", {"features": [wish]})

    def print_media(self, on: bool) -> None:
        """Lay the page out as for paper, or as for a screen again."""
        self._ask("Emulation.setEmulatedMedia", {"media": "print" if on else ""})

    def go(self, url: str) -> None:
        """Open an address; what it draws is waited for with `shows`."""
        answer = self._ask("Page.navigate", {"url": url})
        assert not answer.get("errorText"), f"{url}: {answer['errorText']}"

    def shows(self, *texts: str) -> str:
        """Wait until the page shows all texts, and return everything it shows.

        Raises:
            AssertionError: when the deadline passed; names what is missing.
        """
        ends = time.perf_counter() + APPEAR_S
        while missing := [text for text in texts if text not in (seen := self.text())]:
            if time.perf_counter() > ends:
                raise AssertionError(f"waited {APPEAR_S:g} s for {missing}; the page shows: {seen[:4000]}")
            time.sleep(LOOK_S)
        return self.text()

    def text(self) -> str:
        """Return what a reader of the page sees, the values of form fields included."""
        return str(self.run(SEEN))

    def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page and return its value; promises are awaited."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._ask("Runtime.evaluate", asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, text: str) -> None:
        """Wait for the innermost visible element with exactly this text and click it."""
        said = f"e.innerText?.trim() === {json.dumps(text)}"
        found = f"Array.from(document.querySelectorAll('*')).filter(e => e.offsetParent && {said}).pop()"
        self.wait_for(f"(e => e ? (e.click(), true) : false)({found})", f"nothing says {text!r}")

    def press_until(self, text: str, condition: str) -> None:
        """Click what says `text` until a JavaScript condition holds: a form that still reads what was typed
        takes no click. Each click has a quarter of a minute."""
        ends = time.perf_counter() + APPEAR_S
        while True:
            self.click(text)
            until = time.perf_counter() + CLICK_S
            while time.perf_counter() < until:
                if self.run(condition):
                    return
                time.sleep(LOOK_S)
            assert time.perf_counter() < ends, f"{condition} never held; the page shows: {self.text()[:4000]}"

    def write(self, text: str) -> None:
        """Write where the cursor is, and press Enter."""
        self._ask("Input.insertText", {"text": text})
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self._ask("Input.dispatchKeyEvent", {"type": "keyDown", "text": "\r", **enter})
        self._ask("Input.dispatchKeyEvent", {"type": "keyUp", **enter})

    def type(self, field: str, text: str) -> None:
        """Replace what stands in a field, given as a JavaScript expression, as a person at the keys does."""
        self.run(f"(field => {{ field.focus(); field.select(); }})({field})")
        self.run(SETTLE)
        self._ask("Input.insertText", {"text": text})
        self.run(SETTLE)
        self.wait_for(f"{field}.value === {json.dumps(text)}", f"the field did not take {text!r}")

    def picture(self, place: Path) -> None:
        """Write what the page shows now as a PNG."""
        self.run(SETTLE)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(self._capture({}))

    def wait_until_painted(self, selector: str) -> None:
        """Wait until a canvas shows more than one colour: an even area compresses to nearly nothing."""
        box = "(r => ({x: r.x, y: r.y, width: r.width, height: r.height, scale: 1}))"
        ends = time.perf_counter() + APPEAR_S
        while True:
            found = self.run(
                f"(e => e && {box}(e.getBoundingClientRect()))(document.querySelector('{selector}'))"
            )
            if found and found["width"] and len(self._capture({"clip": found})) > PAINTED_BYTES:
                return
            assert time.perf_counter() < ends, f"nothing was painted on {selector}"
            time.sleep(LOOK_S)

    def _capture(self, more: dict[str, Any]) -> bytes:
        return base64.b64decode(self._ask("Page.captureScreenshot", {"format": "png", **more})["data"])

    def wait_for(self, condition: str, excuse: str) -> None:
        """Wait until a JavaScript condition holds."""
        ends = time.perf_counter() + APPEAR_S
        while not self.run(condition):
            assert time.perf_counter() < ends, f"{excuse}; the page shows: {self.text()[:4000]}"
            time.sleep(LOOK_S)

    def _ask(
        self, method: str, parameters: dict[str, Any] | None = None, timeout_s: float = ANSWER_S
    ) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        ends = time.perf_counter() + timeout_s
        while True:
            told = self._next(method, ends)
            if told.get("id") == self._number:  # everything else is an event that nobody waits for
                assert "error" not in told, f"{method}: {told['error']}"
                result: dict[str, Any] = told["result"]
                return result

    def _next(self, method: str, ends: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = ends - time.perf_counter()
            ready = left > 0 and select.select([self._in], [], [], left)[0]
            assert ready, f"the browser did not answer {method} in time"
            more = os.read(self._in, 1 << 20)
            assert more, f"the browser ended at {method}"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        return told
