"""The page of a report in chromium: every figure is drawn, nothing complains, nothing is fetched, a phone is wide enough."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import accounts

from hesscale.experiments.lab.plots import Plot
from hesscale.experiments.lab.report import write_report

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-port=0"
DRAWN = """[...document.querySelectorAll(".plot")].map(place => {
  const box = place.querySelector(".cartesianlayer")?.getBoundingClientRect();
  return Boolean(box && box.width > 80 && box.height > 80 && place.querySelector(".trace, .points path, .hm image"));
})"""
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

    def open(self, path: Path, width: int, height: int, is_phone: bool) -> None:
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.seen("Page.loadEventFired"):
            self.receive()
        # two frames later plotly has drawn, and has fitted its margins to what it drew
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

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


def expected_figures() -> list[bool]:
    """For each figure of the page whether it has anything to draw."""
    drawn: list[bool] = []
    for item in (item for account in accounts() for item in account.items):
        drawn += [bool(item.series)] if isinstance(item, Plot) else [True] * len(getattr(item, "panels", ()))
    return drawn


@pytest.mark.parametrize(("width", "height", "is_phone"), [(1280, 900, False), (375, 812, True)], ids=["desktop", "phone"])
def test_every_figure_is_drawn(browser, report_page, width, height, is_phone):
    """HESSCALE_SCREENSHOTS names a folder to keep what was seen in."""
    browser.open(report_page, width, height, is_phone)
    if folder := os.environ.get("HESSCALE_SCREENSHOTS"):
        browser.photograph(Path(folder) / f"{'phone' if is_phone else 'desktop'}.png")
    assert browser.value(DRAWN) == expected_figures()
    assert browser.complaints() == []
    fetched = [event["request"]["url"] for event in browser.seen("Network.requestWillBeSent")]
    assert [url for url in fetched if not url.startswith(("data:", "blob:"))] == [report_page.resolve().as_uri()]
    assert browser.value(OVERFLOW) == []
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_the_page_follows_the_width_of_its_window(browser, report_page):
    browser.open(report_page, 1280, 900, False)
    browser.call("Emulation.setDeviceMetricsOverride", width=375, height=812, deviceScaleFactor=1, mobile=False)
    browser.value("new Promise(done => setTimeout(() => done(1), 1000))")
    assert browser.value(OVERFLOW) == []
    assert browser.value(DRAWN) == expected_figures()


def test_no_button_offers_to_upload(browser, report_page):
    browser.open(report_page, 1280, 900, False)
    titles = set(browser.value("[...document.querySelectorAll('.modebar-btn')].map(node => node.dataset.title)"))
    assert titles == {"Zoom", "Pan", "Reset axes"}


def test_a_label_hides_what_it_names(browser, report_page):
    browser.open(report_page, 1280, 900, False)
    button = "document.querySelector('.legend button')"
    lines = f"{button}.closest('figure').querySelectorAll('.scatterlayer .trace, .barlayer .trace').length"
    before = browser.value(lines)
    browser.value(f"{button}.click()")
    assert browser.value(lines) == before - 2  # its dots and their medians
    browser.value(f"{button}.click()")
    assert browser.value(lines) == before
    assert browser.complaints() == []
