"""The page of an evaluation in a browser: it asks for nothing, filters, escapes and fits."""

import pytest

from lab.study.test_study import summary_of
from moemerge.lab.pages import write_scores_page
from moemerge.lab.study.tables import write_report
from report.scores_sample import HOSTILE, sample_page
from report.test_page_browser import OUTSIDE, SMALL, SMALLEST_TEXT

SELECT = """
const select = document.getElementById(arguments[0]);
select.value = arguments[1];
select.dispatchEvent(new Event("change"));
"""
LISTED = 'return document.querySelectorAll("#list button").length;'


@pytest.fixture(scope="module")
def document():
    return sample_page()


@pytest.fixture(scope="module")
def page(document, tmp_path_factory):
    return write_scores_page(document, tmp_path_factory.mktemp("page") / "scores.html")


def test_it_opens_from_disk_and_asks_for_nothing(browser, page):
    browser.open(page)
    assert browser.run("return document.documentElement.dataset.ready") == "yes"
    assert browser.asked_for() == [page.as_uri()]
    assert browser.console() == []


def test_problems_that_were_won_and_lost(browser, page, document):
    browser.open(page)
    problems = document["answers"]["tasks"][0]["problems"]
    won = [p for p in problems if p["scores"][1] > p["scores"][0]]
    lost = [p for p in problems if p["scores"][1] < p["scores"][0]]
    pair = document["results"][0]["pairs"][0]
    assert (len(won), len(lost)) == (pair["won"], pair["lost"])
    for show, expected in (
        ("differing", len(won) + len(lost)), ("won", len(won)), ("lost", len(lost)),
        ("cut", 1), ("all", len(problems)),
    ):  # fmt: skip
        browser.run(SELECT, "show", show)
        assert browser.run(LISTED) == expected
    browser.run(SELECT, "show", "won")
    browser.run('document.querySelectorAll("#list button")[1].click();')
    assert browser.find("#problem h3").text == won[1]["name"]
    texts = [e.text for e in browser.driver.find_elements("css selector", "#problem .side pre")]
    assert [text.split(" says")[0] for text in texts] == ["merged", "calibrated"]
    grades = [e.text for e in browser.driver.find_elements("css selector", "#problem .grade")]
    assert grades[:2] == ["wrong", "right"]


def test_search_and_another_task(browser, page):
    browser.open(page)
    browser.run(SELECT, "show", "all")
    browser.run(SELECT, "task", "2")
    browser.find("#search").send_keys("problem 17?")
    assert browser.run(LISTED) == 1
    assert browser.find("#problem h3").text == "17"
    assert browser.find("#count").text == "1 of 40 problems"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_it_fits_and_can_be_read(browser, page, theme, width):
    browser.open(page, theme=theme, width=width)
    assert browser.run("return document.documentElement.dataset.theme") == theme
    assert browser.run(OUTSIDE) == []
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth") is True
    assert browser.run(SMALL, SMALLEST_TEXT) == []


def test_a_narrow_screen_cuts_no_column(browser, page):
    browser.open(page, width=500)
    assert browser.cut("#scores") == []
    assert browser.cut(".pair") == []


def test_three_models_one_of_them_with_a_wicked_name(browser, tmp_path):
    page = write_scores_page(sample_page(models=3, tasks=1), tmp_path / "three.html")
    browser.open(page)
    assert len(browser.driver.find_elements("css selector", "table.pair")) == 3
    browser.run(SELECT, "right", "2")
    assert HOSTILE in browser.find("#problem .side:last-child h4").text
    assert browser.console() == []


def test_a_narrow_screen_shows_what_decides(browser, tmp_path):
    page = write_report(tmp_path, [summary_of()], figures=False, title="Mine", about="")[0]
    browser.open(page, width=500)
    assert not {"Δ", "p", "95 %"} & set(browser.cut(".results"))
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth") is True
    browser.command("Emulation.setEmulatedMedia", {"media": "print"})
    browser.command(
        "Emulation.setDeviceMetricsOverride",
        {"width": 690, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    assert browser.cut(".results") == []  # on paper nothing can be scrolled
    browser.command("Emulation.setEmulatedMedia", {"media": ""})
    assert browser.asked_for() == [page.as_uri()]
    assert browser.console() == []
