"""A study from end to end, with the bundled specialists and a handful of problems."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import moemerge
import terminal
from moemerge.config.faults import parse_settings
from moemerge.lab.experiments.plan import plan_study
from moemerge.lab.experiments.settings import StudySettings
from moemerge.lab.experiments.study import IN_MEMORY, workers_for
from moemerge.lab.experiments.study_file import load_study
from moemerge.lab.experiments.summary import (
    overall_by_problems,
    packed,
    paired_by_problems,
    pooled,
    scores_of,
)
from moemerge.lab.experiments.tables import TableForm
from moemerge.lab.testbed import bundled_set
from moemerge.runtime.devices import available_memory, cpu_count, resolve_device
from moemerge.text.domains import TextSettings, load_domain
from moemerge.text.tokens import load_tokenizer

ROOT = Path(__file__).parents[3]
SMALL = ROOT / "examples" / "paper" / "small"
SETTINGS = {"device": "cpu", "jobs": 1, "figures": False}
FIRST, LATER = "HARC", "half of the text"


@pytest.fixture(scope="module")
def config():
    bundle = bundled_set()
    domains = ("math", "chat")
    return {
        "title": "Two of them",
        "base": str(bundle.base),
        "sources": {domain: str(bundle.models[domain]) for domain in domains},
        "data": {domain: str(bundle.data[domain]) for domain in domains},
        "merges": {"TIES": {"merge_method": "ties", "parameters": {"weight": 0.5, "density": 0.5}}},
        "repairs": {
            "routers averaged": {"routers": "average"},
            FIRST: {"calibrate": {"limit": 12}},
        },
        "evaluate": {
            "tasks": [*(str(SMALL / f"{domain}.yml") for domain in domains), "perplexity"],
            "data": {"plain": str(bundle.data["code"])},
            "samples": 1,
            "temperature": 0,
            "limit": 5,
        },
        "diagnose": {"limit": 4, "holdout": 0.0},
    }


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    return out, moemerge.study(config, out, **SETTINGS)


def undiagnosed(config):
    """The same without `diagnose`, which is diagnosed with defaults where it is empty."""
    return {key: value for key, value in config.items() if key != "diagnose"}


def files(out):
    return {p.name: p.read_bytes() for p in out.iterdir() if p.suffix in (".md", ".html", ".tex")}


def test_a_table_of_everything(finished):
    out, report = finished
    assert not report.failures
    assert (report.measured, report.known) == (5, 0)
    (summary,) = report.summaries
    labels = [(row.group, row.label) for row in summary.rows]
    assert labels == [
        ("reference", "base"),
        ("reference", "sources"),
        *(("TIES", label) for label in ("as merged", "routers averaged", FIRST)),
    ]
    merged, averaged, harc = summary.rows[2:]
    assert merged.tasks.keys() == {"math", "chat"}
    assert 0 < harc.kl.value < merged.kl.value
    assert merged.mismatch is not None
    assert summary.rows[0].mismatch is None  # what is not merged has no routing to lose
    assert harc.against_first.paired.difference == pytest.approx(
        harc.overall.value - merged.overall.value
    )
    (compared,) = summary.comparisons
    assert (compared.first, compared.second) == ("routers averaged", FIRST)
    assert not (out / "models").exists()  # only results are kept
    document = json.loads((out / "table.json").read_text())
    assert document["rows"][4]["against_first"]["paired"]["won"] >= 0
    assert averaged.kl.value != merged.kl.value


def test_plain_text_is_measured_by_documents(finished):
    out, report = finished
    (summary,) = report.summaries
    base, sources, merged, averaged, harc = summary.rows
    assert sources.perplexity == {}  # several models, each on its own domain
    for row in (base, merged, averaged, harc):
        assert row.perplexity["plain"].loss.count == 5
        assert row.perplexity["plain"].loss.error > 0
    assert averaged.perplexity["plain"].difference is None  # it is the control
    pair = harc.perplexity["plain"].difference
    own, control = harc.perplexity["plain"].loss.value, averaged.perplexity["plain"].loss.value
    assert pair.difference == pytest.approx(own - control)
    table = (out / "table.md").read_text()
    assert "| plain: loss | plain: perplexity | plain: Δ loss | plain: p |" in table
    assert f"{own:.3f} ± " in table
    assert "Loss of plain text" in (out / "index.html").read_text()
    document = json.loads((out / "table.json").read_text())
    assert document["rows"][4]["perplexity"]["plain"]["loss"]["value"] == own


def test_perplexity_needs_text_and_another_task(config):
    evaluate = config["evaluate"]
    alone = {**config, "evaluate": {**evaluate, "tasks": ["perplexity"]}}
    with pytest.raises(moemerge.ConfigError, match="besides perplexity, a study needs a task"):
        plan_study(load_study(alone))
    without = {**config, "evaluate": {**evaluate, "data": {}}}
    with pytest.raises(moemerge.ConfigError, match="the task perplexity needs text"):
        plan_study(load_study(without))


def test_the_same_again_measures_nothing_and_a_lost_cell_comes_back(finished, config):
    out, report = finished
    before = files(out)
    again = moemerge.study(config, out, **SETTINGS)
    assert (again.measured, again.known) == (0, 5)
    assert files(out) == before
    # Killed while it wrote its last cell: its answers are there, and it ends the same.
    cells = out / "cells.jsonl"
    text = cells.read_text()
    cells.write_text(text[: text.rindex('{"set"') + 50])
    resumed = moemerge.study(config, out, **SETTINGS)
    assert (resumed.measured, resumed.known) == (1, 4)
    assert files(out) == before
    assert resumed.summaries == report.summaries


def test_a_study_that_grows_measures_what_is_new(finished, config):
    out, _ = finished
    repairs = {**config["repairs"], LATER: {"calibrate": {"limit": 12}, "share": 0.01}}
    plan = plan_study(load_study({**config, "repairs": repairs}))
    known = {json.loads(line)["made_of"] for line in (out / "cells.jsonl").read_text().splitlines()}
    assert [cell.name for cell in plan.cells.values() if cell.made_of not in known] == [
        f"TIES, {LATER}"
    ]


def test_what_fails_is_told_and_the_rest_is_kept(config, tmp_path):
    repairs = {"too deep": {"calibrate": {"limit": 8, "layers": "90-95"}}}
    changes = {"repairs": repairs, "tables": {"t": {"reference": []}}, "diagnose": {"layers": "0"}}
    file, out = tmp_path / "study.yml", tmp_path / "out"
    file.write_text(json.dumps({**config, **changes}))
    words = ["study", file, out, "--device", "cpu", "--jobs", "1", "--no-figures"]
    told = terminal.moemerge(*words, "--keep", "models", "--json", tmp_path / "r.json")
    assert told.exit_code == 4, told.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert [failure["what"] for failure in report["failures"]] == ["study: make TIES, too deep"]
    assert "Not measured: TIES, too deep." in (out / "t.md").read_text()
    assert [row["label"] for row in report["tables"][0]["rows"]] == ["as merged"]
    assert [path.name[:4] for path in (out / "models").iterdir()] == ["TIES"]
    # Where `diagnose` says nothing else, the routing is that of the rows that repairs hold out.
    cell = json.loads((out / "cells.jsonl").read_text())
    for domain, path in config["data"].items():
        tokenizer = load_tokenizer(Path(config["sources"][domain]))
        text = load_domain(domain, Path(path), tokenizer, TextSettings(holdout="auto"))
        assert text.holdout
        assert cell["domains"][domain]["tokens"] == sum(len(row) for row in text.holdout)


def test_workers_are_as_many_as_cores_and_memory_allow():
    def count(cells, largest=0, **values):
        settings = parse_settings(StudySettings, {"device": "cpu", **values}, "settings")
        return workers_for(settings, cells, largest).count

    assert count(99) == cpu_count()
    assert count(99, jobs=3) == 3
    assert count(1, jobs=3) == 1
    # Two do not fit.
    assert count(99, available_memory(resolve_device("cpu")) * 2 // (3 * IN_MEMORY)) == 1


def test_a_worker_for_each_gpu_or_for_the_one_that_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-6,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def workers(cells, **values):
        found = workers_for(parse_settings(StudySettings, values, "settings"), cells, 0)
        return found.count, found.gpus

    assert workers(99) == (3, ("4", "GPU-6", "7"))
    assert workers(2, device="cuda") == (2, ("4", "GPU-6", "7"))
    assert workers(99, jobs=6) == (6, ("4", "GPU-6", "7"))
    assert workers(99, device="cuda:1") == (1, ("GPU-6",))
    assert workers(99, device="cuda:2", jobs=2) == (2, ("7",))
    assert workers(99, device="cpu")[1] == ()


def test_every_kind_of_figure_and_of_file(finished, config, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    kinds = ("groups", "bars", "lines", "layers", "none")
    repairs = {
        name: {**repair, "x": float(place)}
        for place, (name, repair) in enumerate(config["repairs"].items())
    }
    tables = {kind: {"figure": kind, "axis": "one and another"} for kind in kinds}
    study = {**config, "about": "A word below.", "repairs": repairs, "tables": tables}
    report = moemerge.study(study, out, **{**SETTINGS, "figures": True})
    assert (report.measured, report.known) == (0, 5)
    page, text = (out / "index.html").read_text(), (out / "results.md").read_text()
    without = (finished[0] / "index.html").read_text()
    assert page.count("<svg") - without.count("<svg") == text.count(".png") == len(kinds) - 1
    for words in ("Two of them", "A word below."):
        assert words in page
        assert words in text
    for kind in kinds:
        drawn = set() if kind == "none" else {".png", ".svg"}
        made = {path.suffix for path in out.glob(f"{kind}.*")}
        assert made == {".md", ".tex", ".csv", ".json"} | drawn
        assert f"## {kind}" in text
    assert "\\toprule" in (out / "bars.tex").read_text()
    assert 'overall,"overall, ±"' in (out / "bars.csv").read_text()


def test_the_verb_shows_what_would_be_done(config, tmp_path):
    file = tmp_path / "study.yml"
    file.write_text(json.dumps(undiagnosed(config)))
    out = tmp_path / "out"
    words = ["study", file, out, "--dry-run", "--set", "evaluate.limit=3"]
    result = terminal.succeed(*words, "--json", tmp_path / "plan.json")
    assert "5 of 5 cells to measure" in " ".join(result.output.split())
    assert not out.exists()
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["cells"][0]["completions"] == 6
    assert document["missing"] == []
    result = terminal.moemerge("study", file, out, "--set", "data.math=gone.jsonl")
    assert result.exit_code == 3
    assert not list(out.glob("*.md"))


def test_scores_over_problems_by_hand():
    form = TableForm(
        "t", "t", "", ("a", "b"), "none",
        tasks={"a": {"x": "X", "y": "Y"}, "b": {"z": "Z"}}, paired_by="problems",
    )  # fmt: skip

    def entry(x, y, z):
        tasks = {"x": packed(x), "y": packed(y)}
        return {"domains": {"a": {"tasks": tasks}, "b": {"tasks": {"z": packed(z)}}}}

    assert packed([1.0, 0.0, 1.0]) == {"solved": "d"}
    assert scores_of(packed([0.25, 1.0])) == [0.25, 1.0]
    first = entry([0.0, 0.0], [0.5, 0.5], [1.0, 0.0])
    second = entry([1.0, 0.0], [0.5, 1.0], [1.0, 1.0])
    # Domain a: (0 + 0.5) / 2, b: 0.5.
    assert overall_by_problems(form, first).value == pytest.approx(0.375)
    # Standard errors: x 0, y 0 and z 0.5, which has half the weight.
    assert overall_by_problems(form, first).error == pytest.approx(0.25)
    pair = paired_by_problems(form, first, second)
    assert pair.difference == pytest.approx((0.5 + 0.25) / 4 + 0.5 / 2)
    assert (pair.won, pair.lost) == (3, 0)
    # Two seeds: a problem's score is its mean over them.
    both = pooled(form, [first, second])
    assert scores_of(both["domains"]["a"]["tasks"]["x"]) == [0.5, 0.0]
    assert scores_of(both["domains"]["b"]["tasks"]["z"]) == [1.0, 0.5]
    assert paired_by_problems(form, first, both).difference == pytest.approx(pair.difference / 2)


def test_a_study_is_repeated_over_seeds(config, tmp_path):
    dare = {
        "merge_method": "dare_ties",
        "seed": "{seed}",
        "parameters": {"weight": 1, "density": 0.5},
    }
    changes = {
        "seeds": [3, 8],
        "merges": {"DARE": dare},
        "repairs": {"routers averaged": {"routers": "average"}},
        "evaluate": {**config["evaluate"], "limit": 2},
        "tables": {"t": {"reference": ["base"]}},
    }
    report = moemerge.study({**undiagnosed(config), **changes}, tmp_path, **SETTINGS)
    assert not report.failures
    assert report.measured == 6
    (summary,) = report.summaries
    base, merged, control = summary.rows
    assert summary.seeds == (3, 8)
    assert len(set(base.by_seed.values())) == 1  # the same model, asked once
    for row in summary.rows:
        assert row.overall.value == pytest.approx(sum(row.by_seed.values()) / 2)
    against = control.against_first
    assert against.paired.difference == pytest.approx(against.accuracy.difference.value)
    assert against.paired.difference == pytest.approx(control.overall.value - merged.overall.value)
    answers = sorted(p.name for p in (tmp_path / "answers").iterdir() if p.is_dir())
    assert len(answers) == 5
    page = (tmp_path / "results.md").read_text()
    assert "Seeds 3, 8." in page
    assert "| p, seeds |" in page
