"""A study from end to end, with the bundled specialists and a handful of problems."""

import json
from pathlib import Path

import pytest

import moemerge
import terminal
from moemerge.lab.study.plan import Command, Row, Table, in_order, plan_study
from moemerge.lab.study.run import Bench, Failure, run_commands
from moemerge.lab.study.settings import StudySettings, TableEntry
from moemerge.lab.study.tables import comparison_table, main_table, summarise
from moemerge.lab.testbed import bundled_set
from moemerge.runtime.progress import Silent

SMALL = Path(__file__).parents[3] / "examples" / "paper" / "small"
SETTINGS = {"device": "cpu", "figures": False}
FIRST = "HARC"


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
    base, sources, merged, averaged, harc = summary.rows
    assert merged.tasks.keys() == {"math", "chat"}
    assert 0 < harc.kl < merged.kl
    assert base.mismatch is None  # what is not merged has no routing to lose
    assert harc.against.first == "routers averaged"
    assert harc.against.paired.difference == pytest.approx(
        harc.overall.value - averaged.overall.value
    )
    pairs = [(c.first, c.second) for c in summary.comparisons]
    assert ("as merged", FIRST) in pairs
    assert ("base", FIRST) in pairs
    assert not (out / "models").exists()  # only results are kept
    # Plain text is measured by documents; several models, each on its own domain, are not.
    assert sources.perplexity == {}
    loss, change = harc.perplexity["plain"]
    control, none = averaged.perplexity["plain"]
    assert loss.count == 5
    assert none is None  # it is the control
    assert change.difference == pytest.approx(loss.value - control.value)


def test_the_files_show_the_tables(finished):
    out, report = finished
    (summary,) = report.summaries
    document = json.loads((out / "results.json").read_text())
    assert document[0]["rows"][4]["against"]["paired"]["won"] >= 0
    text, page = (out / "results.md").read_text(), (out / "index.html").read_text()
    assert main_table(summary).markdown() in text
    assert "| plain: loss | plain: perplexity | plain: Δ loss | plain: p |" in text
    assert comparison_table(summary).rows[0][1] in page
    assert (out / "table.csv").read_text().startswith("merge,variant,overall,Δ,p,95 %,won : lost,")


def test_a_study_resumes_and_measures_what_is_new(finished, config):
    out, _ = finished
    before = (out / "results.md").read_bytes()
    again = moemerge.study(config, out, **SETTINGS)
    assert (again.measured, again.known) == (0, 5)
    (lost,) = (out / "cells").glob("TIES,_HARC*.json")
    lost.unlink()
    resumed = moemerge.study(config, out, **SETTINGS)
    assert (resumed.measured, resumed.known) == (1, 4)
    assert (out / "results.md").read_bytes() == before
    later = {"calibrate": {"limit": 12}, "share": 0.01}
    plan = plan_study({**config, "repairs": {**config["repairs"], "later": later}})
    bench = Bench(plan, out, StudySettings())
    assert [c.name for c in plan.cells if not bench.path(c).exists()] == ["TIES, later"]


def test_figures_are_bars_or_lines(finished, config):
    pytest.importorskip("matplotlib")
    out, _ = finished
    repairs = {
        name: {**one, "x": float(n)} for n, (name, one) in enumerate(config["repairs"].items())
    }
    tables = {
        "bars": {"repairs": []},
        "lines": {"axis": "one and another"},
        "none": {"figure": "none"},
    }
    report = moemerge.study({**config, "repairs": repairs, "tables": tables}, out, device="cpu")
    assert report.known == 5
    assert {path.name for path in out.glob("*.svg")} == {"bars.svg", "lines.svg"}
    assert "one and another" in (out / "lines.svg").read_text()
    assert (out / "index.html").read_text().count('<figure class="card drawing">') == 2


def test_what_fails_is_told_and_the_rest_is_kept(config, tmp_path):
    repairs = {"too deep": {"calibrate": {"limit": 8, "layers": "90-95"}}}
    changes = {"repairs": repairs, "tables": {"t": {"reference": []}}, "diagnose": {"layers": "0"}}
    file, out = tmp_path / "study.yml", tmp_path / "out"
    file.write_text(json.dumps({**config, **changes}))
    words = ["study", file, out, "--device", "cpu", "--no-figures"]
    listed = terminal.succeed(*words, "--dry-run", "--json", tmp_path / "plan.json")
    assert "TIES, too deep" in listed.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [one["verb"] for one in plan["commands"]].count("measure") == 2
    assert not out.exists()
    told = terminal.moemerge(*words, "--keep", "models", "--json", tmp_path / "r.json")
    assert told.exit_code == 4, told.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert [failure["what"] for failure in report["failures"]] == ["calibrate TIES, too deep"]
    assert "Not measured: TIES, too deep." in (out / "results.md").read_text()
    assert [row["label"] for row in report["tables"][0]["rows"]] == ["as merged"]
    assert [path.name[:4] for path in (out / "models").iterdir()] == ["TIES"]


class Commands:
    """Commands that touch files: a stand-in for a study's folders."""

    def __init__(self, folder, failing=()):
        self.folder, self.failing = folder, failing

    def make(self, one):
        if one.name in self.failing:
            return "it fails"
        assert all((self.folder / needed.name).exists() for needed in one.inputs)
        (self.folder / one.name).touch()
        return None

    def remove(self, one):
        (self.folder / one.name).unlink()


@pytest.mark.parametrize("jobs", [1, 2])
def test_commands_run_after_their_inputs_and_without_what_failed(tmp_path, jobs):
    a = Command("a", "merge", "a", {})
    b = Command("b", "calibrate", "b", {}, (a,))
    c = Command("c", "measure", "c", {}, (b,))
    d = Command("d", "measure", "d", {}, (a,))
    bench = Commands(tmp_path, failing=("b",))
    failures = run_commands(in_order([c, d]), bench, jobs, Silent())
    assert failures == [Failure("calibrate b", "it fails")]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "d"}  # b still needs a
    assert not run_commands(in_order([c, d]), Commands(tmp_path), jobs, Silent())
    assert {path.name for path in tmp_path.iterdir()} == {"c", "d"}  # models are removed


# --- numbers by hand ---


def cell(name):
    return Command(name, "measure", name, {})


def entry(x, y, z):
    return {
        "domains": {"a": {"tasks": {"x": x, "y": y}}, "b": {"tasks": {"z": z}}},
        "perplexity": {},
    }


def table(*rows, control=""):
    tasks = {"a": {"x": "X", "y": "Y"}, "b": {"z": "Z"}}
    return Table("t", TableEntry(), rows, tasks, (), control, ("base",))


def summary_of():
    """Return a small table with numbers that are known."""
    rows = [Row("reference", "base", {0: cell("base")})]
    rows += [Row("m", label, {0: cell(label)}) for label in ("as merged", "control", "HARC")]
    entries = {
        "base": entry([1.0, 0.0], [0.5, 0.5], [1.0, 1.0]),
        "as merged": entry([0.0, 0.0], [0.5, 0.5], [1.0, 0.0]),
        "control": entry([0.0, 0.0], [0.5, 0.5], [1.0, 0.0]),
        "HARC": entry([1.0, 0.0], [0.5, 1.0], [1.0, 1.0]),
    }
    return summarise(table(*rows, control="control"), lambda one: entries.get(one.name))


def test_scores_over_problems_by_hand():
    base, merged, control, harc = summary_of().rows
    # Domain a: (0 + 0.5) / 2, b: 0.5.
    assert merged.overall.value == pytest.approx(0.375)
    # Standard errors: x 0, y 0 and z 0.5, which has half the weight.
    assert merged.overall.error == pytest.approx(0.25)
    assert control.against is None
    pair = harc.against.paired
    assert pair.difference == pytest.approx((0.5 + 0.25) / 4 + 0.5 / 2)
    assert (pair.won, pair.lost) == (3, 0)
    assert base.against is None


def test_over_seeds_a_problem_has_its_mean():
    rows = [Row("m", label, {0: cell(f"{label} 0"), 1: cell(f"{label} 1")}) for label in "pq"]
    first, second = (
        entry([0.0, 0.0], [0.5, 0.5], [1.0, 0.0]),
        entry([1.0, 0.0], [0.5, 1.0], [1.0, 1.0]),
    )
    entries = {"p 0": first, "p 1": first, "q 0": first, "q 1": second}
    summary = summarise(table(*rows), lambda one: entries.get(one.name))
    _, q = summary.rows
    assert summary.seeds == (0, 1)
    assert q.by_seed == {0: pytest.approx(0.375), 1: pytest.approx(0.8125)}
    assert q.overall.value == pytest.approx((0.375 + 0.8125) / 2)
    assert q.tasks["a"]["x"] == pytest.approx(0.25)
    assert q.against.paired.difference == pytest.approx(0.4375 / 2)
    assert (q.against.seeds.wins, q.against.seeds.difference.count) == (1, 2)
    assert "p, seeds" in main_table(summary).headings


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
        "diagnose": None,
    }
    study = {key: value for key, value in {**config, **changes}.items() if value is not None}
    report = moemerge.study(study, tmp_path, **SETTINGS)
    assert not report.failures
    assert report.measured == 5  # the base is measured once
    (summary,) = report.summaries
    base, merged, control = summary.rows
    assert summary.seeds == (3, 8)
    assert len(set(base.by_seed.values())) == 1
    assert control.against is None
    assert merged.against.paired.difference == pytest.approx(merged.against.seeds.difference.value)
