"""Pages in a real browser, Debian's Chromium: what they complain about, what they fetch, and what axe finds in them."""

import gzip
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.paths import ROOT

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
AXE = ROOT / "tests/data/axe.min.js.gz"
"""axe-core 4.14.1 (MPL-2.0), from its npm package."""
in_a_browser = [
    pytest.mark.costly,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install --no-install-recommends chromium"),
]
WAIT_MS = 120_000


@contextmanager
def browser() -> Iterator[Any]:
    """A browser that has just been started."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@dataclass(slots=True)
class Watched:
    """A page of a browser, and what it complained about or asked others for."""

    page: Any
    own: str
    """What the address of everything begins with that a page may fetch."""
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        page = self.page
        page.on("console", lambda said: self.complaints.append(f"console: {said.text}") if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda asked: None if asked.url.startswith((self.own, "data:")) else self.complaints.append(asked.url))

    def open(self, path: str = "") -> Any:
        """Go to an address and wait until its scripts have started."""
        self.page.goto(self.own + path, wait_until="load")
        self.page.wait_for_selector("html[data-ready], html[data-failed]", state="attached", timeout=WAIT_MS)
        return self.page

    def serious(self) -> list[str]:
        """What axe finds that keeps a person from using the page."""
        if not self.page.evaluate("typeof axe !== 'undefined'"):
            # By the debugger, which the page's policy does not concern.
            self.page.evaluate(gzip.decompress(AXE.read_bytes()).decode())
        found = json.loads(self.page.evaluate("axe.run({resultTypes: ['violations']}).then((found) => JSON.stringify(found.violations))"))
        return [
            f"{one['id']}: {node['html'][:160]} {node['any'][0]['message'] if node['any'] else ''}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]
