"""Study files: what is read and refused, files laid over each other, commands and their keys."""

import json
import shutil
from pathlib import Path

import pytest

import zoo
from moemerge.config.models import ModelRef
from moemerge.errors import CheckpointError, ConfigError
from moemerge.lab.study.plan import (
    check_study,
    in_order,
    load_study,
    overlaid,
    parse_overrides,
    plan_study,
)

ROOT = Path(__file__).parents[3]
PARTS = {"models.yml", "texts.yml", "three.yml", "math.yml", "code.yml", "chat.yml"}
PAPER = [p for p in sorted((ROOT / "examples/paper").rglob("*.yml")) if p.name not in PARTS]

STUDY = {
    "base": "org/base",
    "size": "2GB",
    "sources": {"math": "org/math", "code": "org/code"},
    "data": {"math": "org/text-math", "code": "org/text-code"},
    "merges": {
        "average": {"merge_method": "linear", "parameters": {"weight": 0.5}},
        "TIES": {"merge_method": "ties", "parameters": {"weight": 0.5, "density": 0.5}},
    },
    "repairs": {
        "control": {"routers": "average"},
        "HARC": {"calibrate": {}},
        "the same": {"calibrate": {"alpha": 0.9}},
        "later": {"refit": {}, "after": "HARC"},
    },
    "evaluate": {"tasks": ["gsm8k", "humaneval+"], "samples": 2, "limit": 10},
}


def plan_of(**changes):
    return plan_study({**STUDY, **changes})


def commands_of(plan):
    return {one.name: one for one in in_order(plan.cells) if one.verb != "measure"}


def key_of(name="TIES, HARC", **changes):
    return next(cell.key for cell in plan_of(**changes).cells if cell.name == name)


# --- the file ---


def test_what_a_study_says():
    config = check_study(load_study(STUDY))
    assert config.sources == {"math": ModelRef("org/math"), "code": ModelRef("org/code")}
    assert config.repairs["HARC"].kind == "calibrate"
    assert config.evaluate.settings.samples == 2
    assert config.diagnose is None
    assert config.keep == "results"


def test_faults_of_the_file_come_at_once_with_their_lines():
    text = "sources: {a: ./a}\nmerges: {m: {merge_method: ties}}\nevaluate: {tasks: x, sample: 4}\n"
    with pytest.raises(ConfigError) as error:
        check_study(load_study(text + "tabels: {}\n"))
    said = str(error.value)
    assert "line 3: evaluate.sample: unknown key, did you mean 'samples'?" in said
    assert "line 4: tabels: unknown key, did you mean 'tables'?" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"maths": "t", "code": "t"}}, "source is called 'maths', did you mean 'math'"),
        ({"data": {"math": "org/t"}}, "no text of code"),
        ({"repairs": {"x": {"refit": {}, "after": "y"}}}, "no repair is called 'y'"),
        ({"repairs": {"x": {"routers": "averages"}}}, "no source is called 'averages'"),
        ({"repairs": {"x": {"refit": {}, "text": "z"}}}, "no kind of text is called 'z'"),
        ({"repairs": {"x": {}}}, "give one of routers, prune, calibrate, refit, distill, tune"),
        (
            {"repairs": {"x": {"refit": {}, "after": "y"}, "y": {"refit": {}, "after": "x"}}},
            "from itself",
        ),
        ({"sources": {"base": "./b"}}, "the base has its own key"),
        ({"sources": {"math": {"tune": {}}}}, "is missing: the rows to learn"),
        ({"merges": {"m": "ties"}}, "expected a merge"),
        ({"merges": {"m": {"merge_method": "tis"}}}, "unknown merge method 'tis'"),
        (
            {"merges": {"m": {"merge_method": "linear", "models": [{"model": "meth"}]}}},
            "no source is called 'meth', did you mean 'math'",
        ),
        (
            {"merges": {"m": {"merge_method": "linear", "calibration": {}}}},
            "repairs of merges belong under `repairs`",
        ),
        ({"tables": {"one": {"merges": ["TIS"]}}}, "no merge is called 'TIS', did you mean 'TIES'"),
        ({"tables": {"one": {"compare": [["x", "HARC"]]}}}, "no repair is called 'x'"),
        ({"evaluate": {"tasks": ["perplexity"]}}, "the task perplexity needs text"),
    ],
)
def test_what_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        plan_of(**changes)


def test_missing_models_and_files_are_refused():
    with pytest.raises(CheckpointError, match="gone"):
        plan_of(sources={"math": "./gone", "code": "org/code"})


def test_mappings_are_laid_over_each_other_and_null_takes_away():
    below = {"a": {"x": 1, "y": 2}, "b": [1, 2], "c": 3}
    assert overlaid(below, {"a": {"y": 5, "z": 6}, "b": [7], "c": None, "d": None}) == {
        "a": {"x": 1, "y": 5, "z": 6},
        "b": [7],
    }
    assert parse_overrides(["evaluate.limit=10", "evaluate.tasks=[a, b]", "keep=models"]) == {
        "evaluate": {"limit": 10, "tasks": ["a", "b"]},
        "keep": "models",
    }
    with pytest.raises(ConfigError, match=r"KEY\.KEY=VALUE"):
        parse_overrides(["limit"])


def test_a_file_extends_others(tmp_path):
    (tmp_path / "whole.yml").write_text(json.dumps(STUDY))
    (tmp_path / "few.yml").write_text("evaluate: {samples: 1}\nrepairs: {control: null}\n")
    top = tmp_path / "top.yml"
    top.write_text("extends: [whole.yml, few.yml]\nevaluate: {limit: 7}\n")
    config = check_study(load_study(top, {"evaluate": {"seed": 3}}))
    assert (config.evaluate.samples, config.evaluate.limit, config.evaluate.seed) == (1, 7, 3)
    assert "control" not in config.repairs
    for wrong, words in (("top.yml", "end somewhere"), ("gone.yml", "cannot read")):
        top.write_text(f"extends: {wrong}\n")
        with pytest.raises(ConfigError, match=words):
            load_study(top)


def test_paths_start_from_the_folder_of_their_file(tmp_path):
    (tmp_path / "below" / "base").mkdir(parents=True)
    (tmp_path / "below" / "s.yml").write_text(
        "base: ./base\nsources: {math: org/math, code: ./code+lora}\n"
        "data: {math: m.jsonl, code: {file: c.jsonl, prompts: p.jsonl}}\n"
        "merges: {m: {merge_method: linear}}\nevaluate: {tasks: [gsm8k, t.yml]}\n"
        "repairs: {r: {refit: {sources: [math], data: {math: r.jsonl}}}}\n"
    )
    (tmp_path / "top.yml").write_text("extends: below/s.yml\n")
    data = load_study(tmp_path / "top.yml").data
    below = str(tmp_path / "below")
    assert data["base"] == f"{below}/base"
    assert data["sources"] == {"math": "org/math", "code": f"{below}/code+{below}/lora"}
    assert data["data"]["math"] == f"{below}/m.jsonl"
    assert data["data"]["code"] == {"file": f"{below}/c.jsonl", "prompts": f"{below}/p.jsonl"}
    assert data["evaluate"]["tasks"] == ["gsm8k", f"{below}/t.yml"]
    assert data["repairs"]["r"]["refit"]["sources"] == ["math"]
    assert data["repairs"]["r"]["refit"]["data"] == {"math": f"{below}/r.jsonl"}


# --- commands ---


def test_rows_are_merges_times_repairs_after_what_they_are_measured_against():
    (table,) = plan_of().tables
    labels = [(row.group, row.label) for row in table.rows]
    assert labels[:2] == [("reference", "base"), ("reference", "sources")]
    # A plain average has averaged routers already: no control of its own.
    assert labels[2:6] == [("average", x) for x in ("as merged", "HARC", "the same", "later")]
    assert labels[6:8] == [("TIES", "as merged"), ("TIES", "control")]
    assert table.compare == tuple(("control", x) for x in ("HARC", "the same", "later"))
    sources = table.rows[1].cells[0]
    assert sources.arguments["solves"] == [["math"], ["code"]]
    assert [model.name for model in sources.inputs] == ["math", "code"]


def test_what_says_the_same_is_one_command():
    plan = plan_of()
    cells = {row.label: row.cells[0] for row in plan.tables[0].rows if row.group == "TIES"}
    assert cells["HARC"] == cells["the same"]  # alpha 0.9 is the default
    verbs = [one.verb for one in in_order(plan.cells)]
    assert verbs.count("calibrate") == 2
    assert verbs.count("merge") == 3  # and the average whose routers the control takes
    later = commands_of(plan)["TIES, later"]
    assert later.inputs[0] == commands_of(plan)["TIES, HARC"]


def test_keys_depend_on_what_is_asked_and_made_but_not_on_the_device():
    usual = key_of()
    assert key_of(evaluate={**STUDY["evaluate"], "device": "cpu", "workers": 3}) == usual
    assert key_of(evaluate={**STUDY["evaluate"], "samples": 3}) != usual
    assert key_of(sources={**STUDY["sources"], "math": "org/math@v2"}) != usual
    assert key_of(repairs={**STUDY["repairs"], "HARC": {"calibrate": {"alpha": 0.8}}}) != usual
    assert key_of(diagnose={}) != usual


def test_text_of_one_file_is_made_in_one_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def texts(**math):
        recipe = {"file": "x.jsonl", "text": "org/c4", "limit": 5}
        return {"math": {**recipe, **math}, "code": recipe}

    verbs = [one.verb for one in in_order(plan_of(data=texts()).cells)]
    assert verbs.count("data") == 1
    with pytest.raises(ConfigError, match=r"another way.*x\.jsonl"):
        plan_of(data=texts(limit=6))
    # What a recipe makes is known by the recipe, a file that is given by its content.
    math = {"file": "x.jsonl", "text": "org/c4", "limit": 5}
    (tmp_path / "code.jsonl").write_text("{}\n")
    usual = key_of(data={"math": math, "code": "code.jsonl"})
    (tmp_path / "x.jsonl").write_text("{}\n")
    assert key_of(data={"math": math, "code": "code.jsonl"}) == usual
    assert key_of(data={"math": {**math, "limit": 6}, "code": "code.jsonl"}) != usual
    (tmp_path / "code.jsonl").write_text("{}\n{}\n")
    assert key_of(data={"math": math, "code": "code.jsonl"}) != usual


def test_a_folder_is_known_by_its_weights(zoo_folder, tmp_path):
    folder = tmp_path / "math"
    shutil.copytree(zoo_folder("olmoe"), folder)
    sources = {"math": str(folder), "code": "org/code"}
    usual = key_of(sources=sources)
    (folder / "README.md").write_text("other words")
    assert key_of(sources=sources) == usual
    shutil.rmtree(folder)
    zoo.perturb(zoo_folder("olmoe"), folder, seed=1)
    assert key_of(sources=sources) != usual


def test_what_a_study_says_goes_where_it_says():
    plan = plan_of(
        chat_template="chatml",
        texts={"kind": {"math": "org/kind-math", "code": "org/kind-code"}},
        merges={
            "TIES": STUDY["merges"]["TIES"],
            "one": {**STUDY["merges"]["average"], "models": [{"model": "math"}, {"model": "base"}]},
            "RegMean": {"merge_method": "regmean"},
        },
        sources={"math": {"tune": {"data": "org/rows", "epochs": 1}}, "code": "org/code"},
        repairs={
            "of code": {"routers": "code"},
            "kind": {"refit": {"ridge": 0.5}, "text": "kind", "share": 0.25},
            "tuned": {"tune": {"steps": 3}, "after": "kind"},
        },
    )
    made = commands_of(plan)
    assert made["TIES"].arguments["base_model"] == "base"
    assert [model["model"] for model in made["TIES"].arguments["models"]] == ["math", "code"]
    assert "base_model" not in made["one"].arguments
    assert made["RegMean"].arguments["data"] == {
        "math": ["org/text-math"],
        "code": ["org/text-code"],
    }
    # The chat template is given to the base, of which what is tuned here is made.
    (base,) = [one for one in made["math"].inputs if one.is_model]
    assert (base.verb, base.arguments["chat_template"]) == ("merge", "chatml")
    assert made["math"].arguments["settings"] == {"epochs": 1.0}
    assert [one.name for one in made["TIES, of code"].inputs] == ["TIES", "code"]
    kind = made["TIES, kind"]
    assert (kind.verb, kind.arguments["settings"]["ridge"]) == ("refit", 0.5)
    assert kind.arguments["share"] == 0.25
    files = [one.arguments["files"] for one in kind.inputs if one.verb == "files"]
    assert files == [["org/kind-math"], ["org/kind-code"]]
    assert made["TIES, tuned"].inputs[0] == kind


def test_seeds_share_what_does_not_depend_on_them():
    tuned = {"tune": {"data": "org/rows", "seed": {"seed": None}}}  # YAML's `seed: {seed}`
    plan = plan_of(seeds=[0, 1], sources={"math": tuned, "code": "org/code-{seed}"})
    assert len(plan.cells) == 2 * len(plan_of().cells) - 1  # the base is measured once
    ordered = in_order(plan.cells)
    assert [o.arguments["settings"]["seed"] for o in ordered if o.verb == "tune"] == [0, 1]
    given = [one.arguments["model"] for one in ordered if one.verb == "model"]
    assert sorted(given) == ["org/base", "org/code-0", "org/code-1"]
    with pytest.raises(ConfigError, match="all seeds share their tasks"):
        plan_of(seeds=[0, 1], evaluate={**STUDY["evaluate"], "seed": "{seed}"})


@pytest.mark.parametrize("path", PAPER, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_are_planned(path):
    sources = {"sources": {"math": "org/math", "code": "org/code"}} if "table6" in path.name else {}
    assert plan_study(path, sources).cells
