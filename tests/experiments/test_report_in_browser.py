"""The page of a report in Chromium: figures are drawn, switches work, there are no errors and no requests."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import accounts

from hesscale.experiments.lab.plots import Heat, Plot, Section, Series
from hesscale.experiments.lab.report import Account, write_report

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-port=0"
DRAWN = """[...document.querySelectorAll("svg")].map(svg => {
  const box = svg.getBoundingClientRect();
  return box.width > 200 && box.height > 120 && svg.querySelectorAll("path, image").length > 2;
})"""
OPENED = "document.querySelectorAll('details').forEach(part => { part.open = true; })"
OVERFLOW = """[...document.querySelectorAll("body, body *:not(.wide *):not(pre *):not(svg *)")]
  .filter(node => node.getBoundingClientRect().right > innerWidth + 1).map(node => node.outerHTML.slice(0, 80))"""


class Browser:
    """A tab, spoken to in the DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.number = 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while (message := self.receive()).get("id") != self.number:
            pass
        assert "error" not in message, message
        return message["result"]

    def receive(self) -> dict[str, Any]:
        message = json.loads(self.socket.recv(timeout=60))
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path: Path, width: int, is_phone: bool = False, is_dark: bool = False) -> None:
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=is_phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.seen("Page.loadEventFired"):
            self.receive()
        self.value(OPENED)

    def seen(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] == method]

    def complaints(self) -> list[Any]:
        logged = [entry for entry in self.seen("Runtime.consoleAPICalled") if entry["type"] in ("error", "warning", "assert")]
        return logged + self.seen("Runtime.exceptionThrown") + self.seen("Log.entryAdded")

    def value(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def photograph(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    client = pytest.importorskip("websockets.sync.client")
    profile = tmp_path_factory.mktemp("profile")
    command = [CHROMIUM, *OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with client.connect(tab_of(profile / "DevToolsActivePort", process), max_size=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(timeout=30)


def tab_of(port_file: Path, process: subprocess.Popen[bytes]) -> str:
    """The address of the tab that chromium began with."""
    import urllib.request

    deadline = time.monotonic() + 60
    while not port_file.exists() or not port_file.read_text().strip():
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        assert time.monotonic() < deadline, "chromium did not start"
        time.sleep(0.1)
    port = port_file.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
        return next(tab["webSocketDebuggerUrl"] for tab in json.load(answer) if tab["type"] == "page")


@pytest.fixture(scope="module")
def report_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(accounts(), tmp_path_factory.mktemp("report"))


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "is_phone"), [(1280, False), (390, True)], ids=["desktop", "phone"])
def test_every_figure_is_drawn(browser, report_page, width, is_phone, is_dark):
    """HESSCALE_SCREENSHOTS names a folder to keep what was seen in."""
    browser.open(report_page, width, is_phone, is_dark)
    if folder := os.environ.get("HESSCALE_SCREENSHOTS"):
        browser.photograph(Path(folder) / f"{width}-{'dark' if is_dark else 'light'}.png")
    shown = browser.value(DRAWN)
    assert len(shown) == sum(isinstance(item, Plot | Heat) for account in accounts() for item in account.items)
    assert all(shown)
    assert browser.complaints() == []
    fetched = [event["request"]["url"] for event in browser.seen("Network.requestWillBeSent")]
    assert [url for url in fetched if not url.startswith("data:")] == [report_page.resolve().as_uri()]
    assert browser.value(OVERFLOW) == []
    assert browser.value("document.documentElement.scrollWidth") <= width
    background, ink = (browser.value(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    assert (lightness(background) < lightness(ink)) is is_dark


def lightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


@pytest.mark.parametrize("has_script", [True, False])
def test_a_switch_shows_one_view(browser, tmp_path, has_script):
    views = list(itertools.product(("test", "train"), ("epochs", "seconds")))
    plots = [Plot("-".join(view), " ".join(view), [Series("a", [1, 2], [1, 2])], group="g", view=view) for view in views]
    page = write_report([Account("a", "A", sections=[Section("S", items=plots)])], tmp_path)
    browser.call("Emulation.setScriptExecutionDisabled", value=not has_script)
    browser.open(page, 1280)
    seen = "[...document.querySelectorAll('.view')].filter(view => view.offsetHeight).map(view => view.innerText.split('\\n')[0])"
    assert browser.value(seen) == ["test epochs"]
    browser.value("document.querySelectorAll('.switches input')[1].click()")
    browser.value("document.querySelectorAll('.switches input')[3].click()")
    assert browser.value(seen) == ["train seconds"]
    browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_the_point_below_the_pointer_shows_its_values(browser, tmp_path):
    plot = Plot("p", "P", [Series("Adam", [1, 2, 4], [10, 1000, 100]), Series("SGD", [1, 2, 4], [20, 20, 20])], log_y=True)
    page = write_report([Account("a", "A", sections=[Section("S", items=[plot])])], tmp_path)
    browser.open(page, 390)
    place = browser.value("""(() => {
      const box = document.querySelectorAll("[data-series=Adam] use")[1].getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    })()""")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0] + 3, y=place[1] + 3)
    assert browser.value("document.querySelector('.tip').textContent") == "Adam: 2, 1000"
    assert browser.value(OVERFLOW) == []
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.value("document.querySelector('.tip').hidden")
    assert browser.complaints() == []
