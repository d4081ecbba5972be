"""The page as text: what is in it, what cannot get into it, and what is refused."""

import base64
import gzip
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from moemerge.errors import CheckpointError, UsageError
from moemerge.report.page import render_page, require_page, write_page
from report.sample import HOSTILE, hostile, renamed, sample_document

pytest.importorskip("plotly")
LIMIT = 6_000_000


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the page without its scripts."""

    def __init__(self, page):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_data(self, data):
        if self._inside and self._inside[-1] not in ("script", "style"):
            self.text += data

    def named(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def charts_of(page):
    """The packed charts by their keys."""
    match = re.search(r'<script type="text/plain" id="charts">([A-Za-z0-9+/=]+)</script>', page)
    charts = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return {chart["key"]: chart for chart in charts}


def tiny(**changes):
    """One layer, two experts, one domain: figures that can be worked out by hand."""
    row = {
        "model": "model",
        "domain": "math",
        "layer": 3,
        "router": "r",
        "tokens": 10,
        "mismatch": 0.25,
        "any_mismatch": 0.5,
        "kl": 0.2,
        "kl_on_features": 0.1,
        "quadratic": 0.08,
        "logit_shift": 0.15,
        "shift_small": 0.3,
        "shift_moderate": 0.7,
        "load_source": [0.5, 0.25, 0.25, 0.0],
        "load": [0.25, 0.25, 0.25, 0.25],
        "dead": [],
        "overloaded": [3],
        "drift": 0.1,
        "flow": [[0, 3, 0.2], [1, 3, 0.05]],
    }
    return {
        **sample_document(layers=1, domains=1, models=("model",), swaps=False, calibration=False),
        "models": [{"name": "model", "label": "merged"}],
        "layers": [row],
        "totals": [{"model": "model", "domain": "math", "loss": 1.5, "loss_source": 1.0}],
        **changes,
    }


def test_one_file_that_asks_for_nothing(tmp_path):
    path = write_page(sample_document(layers=4, experts=8), tmp_path / "page.html")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    page = path.read_text("utf-8")
    elements = Elements(page)
    addresses = [a[k] for _, a in elements.found for k in ("href", "src", "srcset") if k in a]
    assert all(address and address.startswith(("#", "data:")) for address in addresses)
    assert "@import" not in page
    assert "url(" not in page
    policy = next(a["content"] for a in elements.named("meta") if "http-equiv" in a)
    assert "default-src 'none'" in policy


def test_same_document_same_page():
    document = sample_document(layers=3, experts=8)
    assert render_page(document) == render_page(json.loads(json.dumps(document)))


def test_verdict_numbers_advice_and_command_are_in_the_text():
    document = sample_document(layers=4, experts=8)
    text = Elements(render_page(document)).text
    assert document["verdict"]["words"] in text
    for number in document["verdict"]["numbers"]:
        assert number["text"] in text
        assert number["label"] in text
    for advice in document["advice"]:
        assert advice in text
    assert document["command"] in text


@pytest.mark.parametrize(("layers", "experts", "domains"), [(48, 128, 3), (64, 512, 6)])
def test_big_models_stay_below_six_megabytes(layers, experts, domains, tmp_path):
    document = sample_document(layers=layers, experts=experts, domains=domains)
    path = write_page(document, tmp_path / "big.html")
    assert path.stat().st_size < LIMIT


def test_labels_cannot_leave_their_place():
    plain = sample_document(layers=2, experts=8)
    expected = Elements(render_page(plain))
    page = render_page(renamed(hostile(plain)))
    elements = Elements(page)
    assert len(elements.named("script")) == len(expected.named("script")) == 4
    assert not elements.named("img")
    assert not any(key.startswith("on") for _, attributes in elements.found for key in attributes)
    assert HOSTILE in elements.text
    assert "49" not in re.findall(r"hacked=1>%{x}(\d+)", elements.text)
    # What goes into a figure is escaped for plotly, which reads tags and %{…}.
    for chart in charts_of(page).values():
        drawn = json.dumps([chart["data"], chart["layout"]], ensure_ascii=False)
        assert "<script" not in drawn
        assert "<img" not in drawn
        for name in re.findall(r"hacked=1[^\"]*", drawn):
            assert "%{x}" not in name


def test_hand_computed_figures():
    swap = {"domain": "math", "weights_of": "model", "routers_of": "math", "mismatch": 0.1}
    charts = charts_of(render_page(tiny(swaps=[{**swap, "loss": 1.2}])))
    # Loads in multiples of an equal share, a quarter.
    loads = {"source0": [[2.0, 1.0, 1.0, 0.0]], "model0,0": [[1.0, 1.0, 1.0, 1.0]]}
    assert charts["load-source"]["arrays"] == loads
    assert charts["load-change"]["views"][""]["data"][0]["z"] == "@model0,0-@source0"
    assert "overloaded ones in layer 3" in charts["load-change"]["views"][""]["note"]
    flow = charts["flow"]["views"]["0"]
    assert flow["data"][0]["link"] == {"source": [0, 1], "target": [2, 2], "value": [0.2, 0.05]}
    assert flow["data"][0]["node"]["label"] == ["expert 0", "expert 1", "expert 3"]
    assert "100.0% of what moved" in flow["note"]
    bands = [band["y"][0] for band in charts["shift"]["views"][""]["data"]]
    assert bands == pytest.approx([0.3, 0.4, 0.3])
    losses = {trace["name"]: trace["y"] for trace in charts["swap-loss"]["data"]}
    assert losses["model"] == [0.5]
    assert losses["model, source's routers"] == [0.2]
    [_, dots] = charts["quadratic"]["data"]
    assert (dots["x"], dots["y"]) == ([0.1], [0.08])


def test_a_model_has_one_colour_throughout_and_the_recommended_one_stands_out():
    models = ("model", "averaged", "calibrated")
    document = sample_document(layers=3, experts=8, domains=1, models=models)
    document["verdict"]["recommended"] = ["calibrated"]
    document["calibration_of"] = "calibrated"
    page = render_page(document)
    charts = charts_of(page)
    colours = {}
    for key in ("mismatch-0", "kl-0", "drift-0", "quadratic"):
        for trace in charts[key]["data"]:
            if "name" in trace and not trace["name"].endswith("routers alone"):
                colours.setdefault(trace["name"], set()).add(trace["marker"]["color"])
    assert colours == {
        "calibrated": {"var(--model-2)"},
        "averaged": {"var(--model-1)"},
        "out/calibrated": {"var(--model-0)"},
    }
    *others, last = charts["mismatch-0"]["data"]
    assert last["name"] == "calibrated"
    assert last["line"]["width"] > max(trace["line"]["width"] for trace in others)
    assert {"var(--model-2)"} == set(charts["steps"]["data"][0]["marker"]["color"])
    assert charts["swap-loss"]["data"][0]["marker"]["color"] == "var(--model-0)"
    text = Elements(page).text
    assert text.count("recommended") == 1 + len(("mismatch", "kl", "drift", "quadratic"))
    swatches = re.findall(r'class="swatch" style="background:(var\(--model-\d\))', page)
    assert swatches == 2 * ["var(--model-0)", "var(--model-1)", "var(--model-2)"]
    # Gains, losses and sources have colours of their own.
    styles = [charts[key]["data"][0]["colorscale"] for key in ("load-model", "load-change")]
    assert "model" not in json.dumps(styles)
    document["verdict"]["recommended"] = ["calibrated", "averaged"]
    text = Elements(render_page(document)).text
    assert "routes best" in text
    assert "predicts best" in text
    assert "recommended" not in text


def test_a_question_is_answered():
    document = sample_document(layers=2, experts=8, domains=1)
    page = render_page(document)
    first = "calibrated: yes: 80.0% of the tokens are within Lemma 1&#39;s neighbourhood."
    assert f'<p class="answer">{first}</p>' in page
    assert ">Theory</a>" in page


def test_a_new_figure_needs_no_change_of_the_page():
    document = tiny()
    new = {"name": "margin", "heading": "margin of the last", "meaning": "how near it was"}
    document["figures"].append({**new, "quantity": "share", "summary": True})
    for row in (*document["layers"], *document["totals"]):
        row["margin"] = 0.125
    page = render_page(document)
    column = 'data-key="margin" data-kind="number" data-title="Margin of the last"'
    assert column in page
    assert '<td data-v="0.125">12.5%</td>' in page
    assert '<span class="figure">12.5%</span>' in page
    assert "<dt>Margin of the last</dt><dd>How near it was.</dd>" in page


def test_missing_parts_leave_no_hole():
    charts = charts_of(render_page(tiny()))
    assert not any(key.startswith(("swap", "residuals", "steps", "gain")) for key in charts)
    bare = tiny()["layers"][0]
    for key in ("load", "load_source", "flow", "dead", "overloaded"):
        bare = {k: v for k, v in bare.items() if k != key}
    bare |= {"kl": None, "quadratic": None, "drift": None}
    charts = charts_of(render_page(tiny(layers=[bare])))
    assert {"mismatch-0", "kl-0", "drift-0", "shift", "quadratic"} == set(charts)
    assert charts["kl-0"]["data"][-1]["y"] == [None]


def test_zero_mismatch_is_a_page_too():
    row = {**tiny()["layers"][0], "mismatch": 0.0, "kl": 0.0, "kl_on_features": 0.0}
    row |= {"quadratic": 0.0, "drift": 0.0, "flow": [], "load": [0.5, 0.25, 0.25, 0.0]}
    charts = charts_of(render_page(tiny(layers=[row, {**row, "layer": 4, "flow": [[0, 1, 0.1]]}])))
    assert charts["flow"]["views"]["0"]["data"] == []
    assert charts["mismatch-0"]["layout"]["yaxis"]["range"][1] > 0
    assert charts["quadratic"]["data"][1]["x"] == []


def test_the_solver_is_shown_with_or_without_its_history():
    document = sample_document(layers=3, experts=8, domains=1)
    rows = document["calibration"]["layers"]
    rows[1]["status"] = "max_steps"
    document["calibration_of"] = "ties-merge"
    assert "ties-merge carries the report" in render_page(document)
    charts = charts_of(render_page(document))
    curves = {trace["name"]: trace["y"] for trace in charts["residuals"]["data"]}
    assert curves["layer 2"] == pytest.approx(rows[2]["residuals"], rel=1e-3)
    assert charts["steps"]["data"][0]["marker"]["color"][1] == "var(--lost)"
    assert "not converged (orange): layer 1" in render_page(document)
    for row in rows:
        del row["residuals"]
    ends = charts_of(render_page(document))["residuals"]["data"]
    steps = {f"layer {row['layer']}": [row["iterations"]] for row in rows}
    assert {trace["name"]: trace["x"] for trace in ends} == steps


def test_a_refit_is_shown_by_kind_of_map_and_layer():
    left = {"calibration": {"q_proj": 0.25, "router": 0.5}, "held_out": {}}
    layers = [
        {"layer": 0, "error_left": left, "drift_before": {"math": 0.5}, "drift_after": {}},
        {
            "layer": 1,
            "error_left": left | {"held_out": {"q_proj": 0.75}},
            "drift_before": {},  # what is not known is not drawn
            "drift_after": {"math": 0.125},
        },
        {"layer": None, "error_left": {}, "drift_before": {}, "drift_after": {}},
    ]
    page = render_page(
        sample_document(layers=2) | {"refit": {"layers": layers}, "refit_of": "model"}
    )
    charts = charts_of(page)
    assert charts["refit-calibration"]["data"][0]["z"] == [[0.25, 0.25, None], [0.5, 0.5, None]]
    assert charts["refit-calibration"]["data"][0]["x"] == ["0", "1", "head"]
    assert charts["refit-held_out"]["data"][0]["z"] == [[None, 0.75, None]]
    before, after = charts["refit-drift-0"]["data"]
    assert (before["x"], before["y"], after["y"]) == ([1], [None], [0.125])
    assert "What the refit repaired" in page
    assert "What the refit repaired" not in render_page(sample_document(layers=2))
    bare = render_page(sample_document(layers=2) | {"refit": {"layers": [{"layer": 0}]}})
    assert "What the refit repaired" not in bare


def test_paths_are_short_where_people_read_and_whole_where_they_look():
    document = tiny(models=[{"name": "model", "label": "some/where/merged"}])
    text = render_page(document)
    assert '<strong title="some/where/merged">merged</strong>' in text
    assert '<span class="clip" title="some/where/merged">merged</span>' in text
    assert "<dd>some/where/merged</dd>" in text


def test_without_plotly_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError, match=r'pip install "moemerge\[report\]"'):
        require_page()


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_page(tiny(), tmp_path / "absent" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_page(tiny(), tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
