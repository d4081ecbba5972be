"""The page in a browser: it draws, asks for nothing, sorts, changes colours, fits and prints."""

import csv
import json
import time

import pytest

from moemerge.report.page import write_page
from report.sample import HOSTILE, hostile, renamed, sample_document

pytest.importorskip("plotly")
LAYERS, EXPERTS, DOMAINS, MODELS = 6, 16, 2, 2
ROLES = ("source", "model", "change")
# What a reader can still read, in CSS pixels, and the contrast WCAG asks of text and lines.
SMALLEST_TEXT = 10.5
CONTRAST, LINE_CONTRAST = 4.5, 3.0

MARKS = """
const counted = {};
for (const plot of document.querySelectorAll(".plot")) {
  const marks = (selector) => plot.querySelectorAll(selector).length;
  counted[plot.id.replace("chart-", "")] = {
    points: marks(".scatterlayer path.point"), lines: marks(".scatterlayer path.js-line"),
    bars: marks(".barlayer .point path"), tiles: marks(".heatmaplayer image"),
    links: marks("path.sankey-link"), nodes: marks("rect.node-rect"),
  };
}
return counted;
"""
# Elements whose text leaves the window, except inside what scrolls on its own.
OUTSIDE = """
const inside = (e) => e.closest(".scroller, nav, .hidden, .skip");
return [...document.querySelectorAll("main *, header *, footer *")]
  .filter((e) => !inside(e) && !(e instanceof SVGElement) && e.getClientRects().length)
  .map((e) => [e, e.getBoundingClientRect()])
  .filter(([, box]) => box.right > innerWidth + 0.5 || box.left < -0.5)
  .map(([e]) => e.tagName + "." + e.className);
"""
SMALL = """
return [...document.querySelectorAll("main *, footer *")]
  .filter((e) => e.getClientRects().length)
  .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .filter((e) => parseFloat(getComputedStyle(e).fontSize) < arguments[0])
  .map((e) => e.tagName + " " + e.textContent.slice(0, 30) + " " + getComputedStyle(e).fontSize);
"""
CLIPPED = """
return [...document.querySelectorAll(".plot svg.main-svg")]
  .filter((svg) => svg.getBoundingClientRect().width > svg.closest(".card").clientWidth)
  .length;
"""
COLOURS = """
const style = getComputedStyle(document.documentElement);
const models = [0, 1, 2, 3, 4, 5].map((n) => "model-" + n);
return Object.fromEntries(["paper", "surface", "ink", "text", "muted", "accent-wash", ...models]
  .map((name) => [name, style.getPropertyValue("--" + name).trim()]));
"""


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    document = sample_document(layers=LAYERS, experts=EXPERTS, top_k=4, domains=DOMAINS)
    return write_page(document, tmp_path_factory.mktemp("page") / "diagnosis.html")


def check_quiet(browser, path):
    assert browser.run("return document.documentElement.dataset.ready") == "yes"
    assert browser.console() == []
    assert browser.asked_for() == [path.as_uri()]


def check_marks(browser, layers, domains, models):
    """Every chart has the marks that its figures ask for."""
    marks = browser.run(MARKS)
    for domain in range(domains):
        assert marks[f"mismatch-{domain}"]["points"] == layers * models
        assert marks[f"drift-{domain}"]["lines"] == models
        # The diagnosed model has a second line: its routers alone.
        assert marks[f"kl-{domain}"]["lines"] == models + 1
    for role in ROLES:
        assert marks[f"load-{role}"]["tiles"] == 1
    assert marks["flow"]["links"] > 3
    assert marks["flow"]["nodes"] > 3
    assert marks["swap-loss"]["bars"] == marks["swap-mismatch"]["bars"] == 3 * domains
    assert marks["shift"]["bars"] == 3 * layers
    assert marks["quadratic"]["points"] == layers * domains * models
    assert marks["residuals"]["lines"] == marks["steps"]["bars"] == layers
    assert marks["gain"]["points"] == 2 * layers
    assert all(any(counts.values()) for counts in marks.values())


def check_legible(browser):
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.run(OUTSIDE) == []
    assert browser.run(SMALL, SMALLEST_TEXT) == []
    assert browser.run(CLIPPED) == 0


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (500, "dark")])
def test_it_draws_quietly_and_legibly(browser, page, width, theme):
    browser.open(page, width=width, theme=theme)
    check_quiet(browser, page)
    check_marks(browser, LAYERS, DOMAINS, MODELS)
    check_legible(browser)
    assert width > 500 or browser.cut(".totals") == []
    colours = browser.run(COLOURS)
    assert (luminance(colours["paper"]) < 0.1) == (theme == "dark")
    for text in ("ink", "text", "muted"):
        for ground in ("paper", "surface", "accent-wash"):
            assert contrast(colours[text], colours[ground]) >= CONTRAST, (text, ground)
    models = [colours[f"model-{n}"] for n in range(6)]
    assert len(set(models)) == 6
    assert min(contrast(colour, colours["surface"]) for colour in models) >= LINE_CONTRAST


def column(browser, key):
    return list(
        browser.run(
            """
            const table = document.getElementById("rows");
            const keys = [...table.tHead.rows[0].cells].map((c) => c.dataset.key);
            const at = keys.indexOf(arguments[0]);
            return [...table.tBodies[0].rows].map((row) => row.cells[at].dataset.v);
            """,
            key,
        )
    )


def test_the_page_can_be_operated(browser, page, tmp_path):
    """Sort by click and by key, download, select, change the theme, and print."""
    browser.open(page)
    before = column(browser, "mismatch")
    header = browser.find('#rows th[data-key="mismatch"]')
    button = header.find_element("css selector", "button")
    browser.run("arguments[0].click()", button)
    falling = [float(value) for value in column(browser, "mismatch")]
    assert falling == sorted(map(float, before), reverse=True)
    assert header.get_attribute("aria-sort") == "descending"
    button.send_keys("\ue007")  # Enter
    assert [float(value) for value in column(browser, "mismatch")] == falling[::-1]
    assert header.get_attribute("aria-sort") == "ascending"
    browser.find('#rows th[data-key="domain"] button').send_keys("\ue007")
    assert column(browser, "domain") == sorted(column(browser, "domain"))
    assert header.get_attribute("aria-sort") is None

    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.command("Browser.setDownloadBehavior", where)
    browser.find("#csv").send_keys("\ue007")
    file = tmp_path / "moemerge-diagnosis.csv"
    end = time.monotonic() + 30
    while not (file.exists() and file.stat().st_size) and time.monotonic() < end:
        time.sleep(0.05)
    rows = list(csv.DictReader(file.read_text("utf-8").splitlines()))
    assert len(rows) == LAYERS * DOMAINS * MODELS
    assert [row["mismatch"] for row in rows] == column(browser, "mismatch")
    assert sorted(float(row["mismatch"]) for row in rows) == sorted(map(float, before))

    flow = 'return JSON.stringify(document.getElementById("chart-flow").data[0].link.value)'
    note = 'return document.getElementById("chart-flow-note").textContent'
    first = browser.run(flow)
    assert f"Layer {LAYERS - 1}:" in browser.run(note)  # the worst one
    browser.find('[data-group="flow"] label:last-child select').send_keys("0")
    browser.wait(
        'return document.getElementById("chart-flow-note").textContent.includes("Layer 0:")'
    )
    assert browser.run(flow) != first

    load = 'return JSON.stringify(document.getElementById("chart-load-model").data[0].z)'
    math = browser.run(load)
    browser.find('[data-group="load"] select').send_keys("code")
    assert browser.run(load) != math
    source, change = (json.loads(browser.run(load.replace("model", role))) for role in ROLES[::2])
    model = json.loads(browser.run(load))
    assert change[0] == pytest.approx([a - b for a, b in zip(model[0], source[0], strict=True)])

    scale = 'return document.getElementById("chart-kl-0").layout.yaxis.type'
    browser.find('[data-group="kl"] select').send_keys("log")
    assert browser.run(scale) == "log"

    drawn = 'return document.querySelector("#chart-mismatch-0 path.js-line").style.stroke'
    light = browser.run(drawn)
    browser.find("#theme").send_keys(" ")
    assert browser.run("return document.documentElement.dataset.theme") == "dark"
    dark = browser.run(drawn)
    assert dark != light

    assert browser.pdf().startswith(b"%PDF")
    browser.wait('return !document.documentElement.classList.contains("printing")')
    assert browser.run("return document.documentElement.dataset.theme") == "dark"
    assert browser.run(drawn) == dark
    check_quiet(browser, page)
    browser.run("localStorage.clear()")


def test_hostile_labels_stay_text(browser, tmp_path):
    document = renamed(hostile(sample_document(layers=2, experts=8, domains=2)))
    path = write_page(document, tmp_path / "hostile.html")
    browser.open(path, width=400)
    check_quiet(browser, path)
    assert browser.run("return window.hacked === undefined")
    assert HOSTILE in browser.run('return document.querySelector("h1").textContent')
    assert browser.run('return document.querySelectorAll("main img").length') == 0
    check_legible(browser)


@pytest.mark.parametrize(
    "shape",
    [
        {"layers": 48, "experts": 128, "domains": 3},
        {"layers": 1, "experts": 8, "domains": 1, "models": ("model",), "top_k": 2},
    ],
)
def test_large_and_small_models_are_drawn(browser, tmp_path, shape):
    document = sample_document(**shape, swaps=False, calibration=False)
    path = write_page(document, tmp_path / "page.html")
    browser.open(path)
    check_quiet(browser, path)
    check_legible(browser)
    marks = browser.run(MARKS)
    assert all(any(counts.values()) for counts in marks.values())
    assert not any(key.startswith(("swap", "residuals")) for key in marks)
