"""The page of a study in a browser: a narrow screen shows the columns that decide."""

from __future__ import annotations

from experiments.test_verdicts import ROWS, summary_of
from moemerge.experiments.report import write_report


def test_a_narrow_screen_shows_what_decides(browser, tmp_path):
    summary = summary_of(tmp_path, ROWS)
    page = write_report(tmp_path, [summary], figures=False, title="Mine")[0]
    browser.open(page, width=500)
    assert not {"Δ", "p", "95 %"} & set(browser.cut(".results"))
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth") is True
    assert browser.find(".verdicts li").text.startswith("Not distinguishable from the base")
    browser.command("Emulation.setEmulatedMedia", {"media": "print"})
    browser.command(
        "Emulation.setDeviceMetricsOverride",
        {"width": 690, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    assert browser.cut(".results") == []  # on paper nothing can be scrolled
    browser.command("Emulation.setEmulatedMedia", {"media": ""})
    assert browser.asked_for() == [page.as_uri()]
    assert browser.console() == []
