"""What the tests do with a page in a browser."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 90  # seconds; a page is ready in two, on a busy machine in many more

HEADINGS_CUT = """
return [...document.querySelectorAll(arguments[0] + " thead th")]
  .filter((cell) => cell.getClientRects().length)
  .filter((cell) => cell.getBoundingClientRect().right >
    cell.closest(".scroller").getBoundingClientRect().right + 0.5)
  .map((cell) => cell.textContent.trim());
"""


@dataclass
class Browser:
    """The few things the tests do with a page."""

    driver: Any

    def open(self, path: Path, *, width: int = 1280, theme: str = "light") -> None:
        """Load a page from disk, which includes that its charts are drawn."""
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.command("Emulation.setEmulatedMedia", media)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self._read_logs()
        self.driver.get(path.as_uri())

    def wait(self, script: str) -> Any:
        end = time.monotonic() + PATIENCE
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"still false: {script}"
            time.sleep(0.05)
        return found

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def command(self, name: str, values: dict[str, Any]) -> Any:
        return self.driver.execute_cdp_cmd(name, values)

    def pdf(self) -> bytes:
        found = self.command("Page.printToPDF", {"printBackground": True})
        return base64.b64decode(found["data"])

    def cut(self, table: str) -> list[str]:
        """The headings of a table that are not whole on the screen."""
        found: list[str] = self.run(HEADINGS_CUT, table)
        return found

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def console(self) -> list[str]:
        """What the page said since it was opened."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def asked_for(self) -> list[str]:
        """Every address requested since the page was opened, but for what it holds itself."""
        return [url for url in self._read_logs() if not url.startswith(("data:", "blob:"))]

    def _read_logs(self) -> list[str]:
        events = [json.loads(entry["message"]) for entry in self.driver.get_log("performance")]
        messages = [event["message"] for event in events]
        sent = [m for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [m["params"]["request"]["url"] for m in sent]
