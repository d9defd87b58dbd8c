"""Headless Chromium through its debugging pipe: no driver, no package, nothing downloaded.

The browser reads commands from file descriptor 3 and answers on 4, one JSON message each, ended by a zero byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser; use as a context manager."""

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.commands = os.pipe()
        self.answers, from_browser = os.pipe()
        # Out of the way first: the pipe's own numbers may be 3 and 4, in the wrong order.
        ours = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser, from_browser)]
        arguments = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
            "--allow-file-access-from-files", "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "about:blank",
        ]  # fmt: skip
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(arguments, pass_fds=(3, 4), preexec_fn=lambda: [os.dup2(fd, 3 + i) for i, fd in enumerate(ours)], **quiet)
        for fd in (to_browser, from_browser, *ours):
            os.close(fd)
        self.number, self.buffer, self.session = 0, b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)
        os.close(self.commands)
        os.close(self.answers)
        self.profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; RuntimeError when the browser refuses it or does not answer in half a minute."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self, method: str) -> dict[str, Any]:
        end = time.monotonic() + 30
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], max(0, end - time.monotonic()))[0]:
                raise RuntimeError(f"{method}: the browser did not answer")
            chunk = os.read(self.answers, 1 << 16)
            if not chunk:
                raise RuntimeError(f"{method}: the browser ended")
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, page: Path, width: int, theme: str = "light", height: int = 740) -> None:
        """Load a page of the built book at this width and in this theme, and wait until it and its fonts are there."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        # The theme takes its mode from here; set before any script of the page runs.
        code = f"try {{ localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}') }} catch (e) {{}}"
        script = self.call("Page.addScriptToEvaluateOnNewDocument", source=code)["identifier"]
        self.call("Page.navigate", url=page.as_uri())
        end = time.monotonic() + 30
        while self.run("document.readyState + location.href") != "complete" + page.as_uri():
            if time.monotonic() > end:
                raise RuntimeError(f"{page.name} did not load")
            time.sleep(0.05)
        self.run("document.fonts.ready.then(() => 0)")
        self.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)

    def run(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page (a promise is awaited); RuntimeError when it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "the page's script failed"))
        return answer["result"].get("value")

    def errors(self) -> list[str]:
        """Uncaught exceptions of the page's own scripts since it was opened."""
        thrown = [e["params"]["exceptionDetails"] for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        return [t.get("exception", {}).get("description", t["text"]) for t in thrown]
