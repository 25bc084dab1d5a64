"""A headless Chromium, spoken to by the DevTools protocol over pipes: no library, no download."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

from tests.support.patience import PATIENCE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
# The protocol's two pipes are the third and fourth file of the process.
START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
START += "os.execv(sys.argv[3], sys.argv[3:])"
OPTIONS = ("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu")
OPTIONS += ("--disable-dev-shm-usage", "--hide-scrollbars", "--no-proxy-server")
# Of keys: codes, and what they write.
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}
# What a page may do wrong: events, and what is wrong in them.
COMPLAINTS = {
    "Runtime.exceptionThrown": lambda told: told["exceptionDetails"],
    "Runtime.consoleAPICalled": lambda told: told if told["type"] in ("error", "warning") else None,
    "Log.entryAdded": lambda told: told["entry"] if told["entry"]["level"] == "error" else None,
}


class Browser:
    """A process, and its messages."""

    def __init__(self, folder):
        (given, self.out), (self.into, taken) = os.pipe(), os.pipe()
        command = [sys.executable, "-c", START, str(given), str(taken), CHROMIUM, *OPTIONS]
        command += [f"--user-data-dir={folder}", *["--no-sandbox"] * (os.geteuid() == 0)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(given, taken), **quiet)
        os.close(given)
        os.close(taken)
        self.rest, self.number, self.events = b"", 0, []

    def ask(self, method, session=None, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self):
        until = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            assert select.select([self.into], [], [], until - time.monotonic())[0], "it is silent"
            more = os.read(self.into, 2**20)
            assert more, "it has ended"
            self.rest += more
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    @contextmanager
    def page(self, url, width=1280, height=900, scheme="light"):
        """A window of this size on ``url``."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        found = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, found["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.ask("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.ask("Emulation.setEmulatedMedia", features=[feature])
        page.ask("Page.navigate", url=url)
        page.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        yield page
        self.ask("Target.closeTarget", targetId=target)

    def close(self):
        self.process.terminate()
        self.process.wait(PATIENCE)
        os.close(self.out)
        os.close(self.into)


class Page:
    """A window, as its user has it."""

    def __init__(self, browser, session):
        self.browser, self.session = browser, session

    def ask(self, method, **params):
        return self.browser.ask(method, self.session, **params)

    def js(self, code):
        """What an expression gives, as JSON has it."""
        given = {"expression": code, "returnByValue": True, "awaitPromise": True}
        found = self.ask("Runtime.evaluate", **given)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, code):
        until = time.monotonic() + PATIENCE
        while not self.js(f"!!({code})"):
            assert time.monotonic() < until, f"{code}; {self.complaints()}; {self.text()}"
            time.sleep(0.05)

    def text(self):
        return self.js("document.body.innerText")

    def type(self, text, selector="#text"):
        """In place of what stands there."""
        self.js(f"(e => (e.focus(), e.select()))(document.querySelector({selector!r}))")
        self.ask("Input.insertText", text=text)

    def press(self, key):
        code, text = KEYS[key]
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.ask(
            "Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {})
        )
        self.ask("Input.dispatchKeyEvent", type="keyUp", **given)

    def click(self, words):
        """The last button that says so, when nothing runs."""
        found = f"[...document.querySelectorAll('button')].findLast(b => b.innerText === {words!r})"
        self.wait(f"!running && (b => b && (b.click(), true))({found})")

    def told(self, method):
        """What the window told by events of a kind."""
        self.js("0")
        mine = (e for e in self.browser.events if e.get("sessionId") == self.session)
        return [event["params"] for event in mine if event["method"] == method]

    def complaints(self):
        """Errors on the console."""
        return [
            bad for kind, wrong in COMPLAINTS.items() for e in self.told(kind) if (bad := wrong(e))
        ]

    def screenshot(self, path):
        taken = self.ask("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(taken["data"]))
