"""From study files to nodes, cells and tables; and what they will take."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

import zoo
from moemerge.config.faults import parse_settings
from moemerge.config.text_settings import DataRecipe
from moemerge.config.yaml_lines import Document
from moemerge.errors import CheckpointError, ConfigError, ResourceError
from moemerge.lab.data.job import DataRequest, select_prompts
from moemerge.lab.experiments.cells import SetCells, work_of
from moemerge.lab.experiments.estimate import estimate
from moemerge.lab.experiments.plan import plan_study
from moemerge.lab.experiments.settings import StudySettings
from moemerge.lab.experiments.study import SET, bench_of
from moemerge.lab.experiments.study_file import from_its_folder, load_study

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
    return plan_study(load_study({**STUDY, **changes}))


def costs(plan, tmp_path, **how):
    return estimate(plan, list(plan.cells.values()), tmp_path, **{"jobs": 1, "keep": False, **how})


def test_rows_are_merges_times_repairs_after_what_they_are_measured_against():
    (table,) = plan_of().tables
    labels = [(row.group, row.label) for row in table.rows]
    assert labels[:2] == [("reference", "base"), ("reference", "sources")]
    # A plain average has averaged routers as it is: no control of its own.
    assert labels[2:6] == [("average", x) for x in ("as merged", "HARC", "the same", "later")]
    assert labels[6:8] == [("TIES", "as merged"), ("TIES", "control")]
    assert table.form.compare == tuple(("control", x) for x in ("HARC", "the same", "later"))
    sources = table.rows[1].cell
    assert [(domain, node.name) for domain, node in sources.runs] == [
        ("math", "math"),
        ("code", "code"),
    ]


def test_what_says_the_same_is_one_node():
    plan = plan_of()
    cells = plan.cells
    (harc,), (same,) = cells["TIES, HARC"].models, cells["TIES, the same"].models
    assert harc == same  # alpha 0.9 is the default
    assert cells["TIES, HARC"].made_of == cells["TIES, the same"].made_of
    (later,) = cells["TIES, later"].models
    assert later.parents[0] == harc
    kinds = [node.kind for node in plan.nodes(list(cells.values()))]
    assert kinds.count("calibrate") == 2
    assert kinds.count("merge") == 3  # and the average whose routers the control takes


def test_numbers_depend_on_what_is_asked_and_made_but_not_on_the_device():
    def digest(**changes):
        return plan_of(**changes).cells["TIES, HARC"].made_of

    usual = digest()
    assert digest(evaluate={**STUDY["evaluate"], "device": "cpu", "workers": 3}) == usual
    assert digest(evaluate={**STUDY["evaluate"], "samples": 3}) != usual
    assert digest(sources={**STUDY["sources"], "math": "org/math@v2"}) != usual
    assert digest(repairs={**STUDY["repairs"], "HARC": {"calibrate": {"alpha": 0.8}}}) != usual
    assert digest(diagnose={}) != usual


def test_merges_are_checked_like_configs():
    wrong = {"TIES": {"merge_method": "tis"}, "other": {"merge_method": "linear"}}
    with pytest.raises(ConfigError, match=r"merge 'TIES'.*\n.*unknown merge method 'tis'"):
        plan_of(merges=wrong)
    unknown = {"TIES": {"merge_method": "linear", "models": [{"model": "meth"}]}}
    with pytest.raises(ConfigError, match="no source is called 'meth', did you mean 'math'"):
        plan_of(merges=unknown)
    inside = {"TIES": {"merge_method": "linear", "calibration": {}}}
    with pytest.raises(ConfigError, match="repairs of merges belong under `repairs`"):
        plan_of(merges=inside)


def test_text_of_one_file_is_made_in_one_way():
    def texts(**math):
        recipe = {"file": "x.jsonl", "text": "org/c4", "limit": 5}
        return {"math": {**recipe, **math}, "code": recipe}

    plan = plan_of(data=texts())
    nodes = plan.nodes(list(plan.cells.values()))
    assert [node.name for node in nodes if node.kind == "text"] == ["text x.jsonl"]
    with pytest.raises(ConfigError, match=r"another way.*x\.jsonl"):
        plan_of(data=texts(limit=6))


def test_text_that_a_recipe_makes_is_known_by_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def digest(limit):
        math = {"file": "x.jsonl", "text": "org/c4", "limit": limit}
        return plan_of(data={"math": math, "code": "code.jsonl"}).cells["TIES, HARC"].made_of

    (tmp_path / "code.jsonl").write_text("{}\n")
    usual = digest(5)
    (tmp_path / "x.jsonl").write_text("{}\n")
    assert digest(5) == usual != digest(6)
    (tmp_path / "code.jsonl").write_text("{}\n{}\n")  # a file that is given: by its content
    assert digest(5) != usual


def test_a_folder_is_known_by_its_weights(zoo_folder, tmp_path):
    folder = tmp_path / "math"
    shutil.copytree(zoo_folder("olmoe"), folder)

    def digest():
        sources = {"math": str(folder), "code": "org/code"}
        return plan_of(sources=sources).cells["TIES, HARC"].made_of

    usual = digest()
    (folder / "README.md").write_text("other words")
    assert digest() == usual
    shutil.rmtree(folder)
    zoo.perturb(zoo_folder("olmoe"), folder, seed=1)
    assert digest() != usual


def test_what_a_study_says_goes_where_it_says(tmp_path):
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
    nodes = {node.name: node for node in plan.nodes(list(plan.cells.values()))}
    assert nodes["TIES"].values["base_model"] == "base"
    assert [model["model"] for model in nodes["TIES"].values["models"]] == ["math", "code"]
    assert "base_model" not in nodes["one"].values
    assert "data" not in nodes["TIES"].values
    assert nodes["RegMean"].values["data"] == {"math": ["org/text-math"], "code": ["org/text-code"]}
    # Given to the base, of which what is tuned here is made.
    (base,) = [node for node in nodes["math"].parents if node.is_model]
    assert (base.kind, base.values["chat_template"]) == ("merge", "chatml")
    assert nodes["math"].values["settings"] == {"epochs": 1.0}
    assert [p.name for p in nodes["TIES, of code"].parents] == ["TIES", "code"]
    kind = nodes["TIES, kind"]
    assert (kind.kind, kind.values["settings"]["ridge"], kind.values["share"]) == (
        "refit", 0.5, 0.25,
    )  # fmt: skip
    files = [node.values["files"] for node in kind.parents if node.kind == "files"]
    assert files == [["org/kind-math"], ["org/kind-code"]]
    assert nodes["TIES, tuned"].parents[0] == kind


def test_seeds_share_what_does_not_depend_on_them():
    tuned = {"tune": {"data": "org/rows", "seed": {"seed": None}}}  # YAML's `seed: {seed}`
    changes = {"seeds": [0, 1], "sources": {"math": tuned, "code": "org/code-{seed}"}}
    plan = plan_of(**changes)
    assert len(plan.cells) == 2 * len(plan_of().cells)
    assert next(iter(plan.cells)) == "base, seed 0"
    nodes = plan.nodes(list(plan.cells.values()))
    assert [node.values["settings"]["seed"] for node in nodes if node.kind == "tune"] == [0, 1]
    given = [node.values["model"] for node in nodes if node.kind == "given"]
    assert sorted(given) == ["org/base", "org/code-0", "org/code-1"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluate": {"tasks": ["gsm8k"], "seed": "{seed}"}}, "all seeds share their tasks"),
        ({"seeds": [1, 1]}, "the same seed twice"),
        ({"seeds": list(range(5000))}, "5000 seeds, at most 100"),
        ({"seeds": "1"}, "seeds"),
        ({"seeds": [2**64]}, "seeds[0]: must be less than 4294967296"),
        (
            {
                "sources": {"math": "org/math-{seed}", "code": "org/code"},
                "data": {
                    "math": {"file": "m.jsonl", "prompts": "org/p", "keep": "all"},
                    "code": "org/text-code",
                },
            },
            "put {seed} into its name",
        ),
    ],
)
def test_seeds_that_cannot_be_told_apart_are_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        plan_of(**{"seeds": [0, 1], **changes})
    assert words in str(caught.value)


def test_what_a_study_takes(tmp_path):
    expected = costs(plan_of(), tmp_path)
    # 10 problems, 2 samples, two tasks of at most 1024 tokens.
    assert expected.cells[0].completions == 40
    assert expected.cells[0].tokens == 40 * 1024
    assert expected.tokens == len(expected.cells) * 40 * 1024
    assert {one.what for one in expected.missing} >= {"org/base", "org/text-math"}
    assert {one.where for one in expected.missing} == {"to fetch"}
    by_name = {node.name: node for node in expected.nodes}
    assert by_name["TIES, HARC"].bytes == 2 * 10**9
    # TIES, the average and the control that is made of both; later TIES, HARC and its refit.
    assert expected.peak_bytes == 3 * 2 * 10**9
    kept = costs(plan_of(), tmp_path, keep=True)
    assert kept.peak_bytes == 8 * 2 * 10**9
    assert costs(plan_of(size=None), tmp_path).peak_bytes is None


def test_what_was_made_last_is_measured_first(tmp_path):
    plan = plan_of()
    settings = parse_settings(StudySettings, {"device": "cpu"}, "settings")
    cells = SetCells(SET, bench_of(plan, tmp_path, settings), list(plan.cells.values()))
    ranks = {item.key: item.rank for item in work_of(cells, 0)}
    made = {key: rank for key, rank in ranks.items() if ": make " in key}
    measured = [rank for key, rank in ranks.items() if ": measure " in key]
    assert max(measured) < min(made.values())  # the lesser goes first
    first, second, third = (made[f"study: make {n}"] for n in ("TIES, later", "TIES, HARC", "TIES"))
    assert first < second < third


def test_tokens_of_text_are_guessed_from_the_size_of_its_files(tmp_path):
    row = json.dumps({"text": "x" * 27}) + "\n"
    assert len(row) == 40  # ten tokens
    (tmp_path / "math.jsonl").write_text(row * 10)
    (tmp_path / "code.jsonl.gz").write_bytes(gzip.compress((row * 30).encode()))
    data = {"math": str(tmp_path / "math.jsonl"), "code": str(tmp_path / "code.jsonl.gz")}
    repairs = {
        "all": {"calibrate": {}},
        "limit": {"calibrate": {"limit": 12}},
        "both": {"calibrate": {"limit": 12, "max_tokens": 30}},
        "share": {"refit": {"limit": 12}, "share": 0.5},
        "epochs": {"tune": {"limit": 12}},
        "shared": {"tune": {"epochs": 1}, "share": 0.5},
        "steps": {"tune": {"steps": 3, "batch": 4}},
    }
    merges = {
        **STUDY["merges"],
        "RegMean": {"merge_method": "regmean", "collecting": {"limit": 5, "max_tokens": 45}},
    }
    plan = plan_of(data=data, repairs=repairs, merges=merges)
    tokens = {node.name: node.tokens for node in costs(plan, tmp_path).nodes}
    assert tokens["TIES"] is None
    assert tokens["RegMean"] == 2 * 45
    found = {name: tokens[f"TIES, {name}"] for name in repairs}
    assert found == {
        "all": 100 + 300,
        "limit": 100 + 120,
        "both": 30 + 30,
        "share": 50 + 50,  # of the smallest text's rows, in every text
        "epochs": 2 * 120,  # of all rows together
        "shared": 2 * 50,
        "steps": 3 * 4 * 10,
    }


def test_problems_of_local_tasks_are_counted(tmp_path):
    rows = '{"question": "1 + 1", "answer": "2"}\n'
    (tmp_path / "own.jsonl").write_text(rows * 7)
    (tmp_path / "own.yml").write_text("title: t\ndomain: math\nverify: exact\ndata: own.jsonl\n")

    def cell(tasks, **evaluate):
        expected = costs(plan_of(evaluate={"tasks": tasks, "samples": 2, **evaluate}), tmp_path)
        return expected.cells[0].completions, expected.notices

    own = str(tmp_path / "own.yml")
    assert cell([own]) == (14, ())
    assert cell([own], limit=5) == (10, ())
    # Local rows in place of those of a task whose number of problems is known.
    assert cell(["gsm8k"], data={"gsm8k": str(tmp_path / "own.jsonl")}) == (14, ())
    unknown, (notice,) = cell(["gsm8k"], data={"gsm8k": "org/problems"})
    assert unknown is None
    assert "unknown before they are downloaded" in notice


def test_what_cannot_begin_is_refused(tmp_path):
    with pytest.raises(ResourceError, match=r"6000\.0 TB"):
        costs(plan_of(size="2000TB"), tmp_path).refuse()
    data = {"math": "gone.jsonl", "code": "org/text-code"}
    with pytest.raises(CheckpointError, match=r"gone\.jsonl \(text of math\)"):
        costs(plan_of(data=data), tmp_path).refuse()


def test_paths_start_from_the_folder_of_the_file_that_contains_them(
    zoo_folder, tmp_path, monkeypatch
):
    study = tmp_path / "of" / "study.yml"
    (tmp_path / "of" / "parts").mkdir(parents=True)
    for name in ("base", "math", "chat"):
        zoo.perturb(zoo_folder("olmoe"), tmp_path / "of" / name, seed=1)
    (tmp_path / "of" / "tasks.yml").write_text(
        "title: t\ndomain: math\nverify: exact\ndata: org/asked\n"
    )
    for name in ("math", "parts/m", "parts/h"):
        (tmp_path / "of" / f"{name}.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "of" / "parts" / "below.yml").write_text(
        "data: {math: ../math.jsonl, code: {file: c.jsonl, text: org/c4:x, limit: 3}}\n"
        "repairs:\n"
        "  more: {calibrate: {sources: {chat: ../chat}, data: {math: m.jsonl, chat: h.jsonl}}}\n"
        "  list: {calibrate: {sources: [math], data: {math: m.jsonl}}}\n"
    )
    study.write_text(
        "extends: [parts/below.yml, parts/below.yml]\nbase: base\n"
        "sources: {math: math, code: org/code}\n"
        "merges: {a: {merge_method: linear, parameters: {weight: 1}}}\n"
        "evaluate: {tasks: [tasks.yml, gsm8k], data: {gsm8k: ../g.jsonl}, limit: 3}\n"
    )

    def paths(given, folder):
        config = load_study(given).config
        repairs = config.repairs
        texts = [config.data["math"][0], config.data["code"].file]
        texts += [repairs["more"].block.data["chat"][0], repairs["list"].block.data["math"][0]]
        texts += [config.evaluate.tasks[0], config.evaluate.data["gsm8k"][0]]
        models = [config.base, config.sources["math"], repairs["more"].block.sources["chat"]]
        assert config.data["code"].text == ("org/c4:x",)
        assert config.evaluate.tasks[1] == "gsm8k"
        assert repairs["list"].block.sources == ("math",)
        assert str(config.sources["code"]) == "org/code"
        return [os.path.relpath(path, folder) for path in (*texts, *map(str, models))]

    expected = [
        *("math.jsonl", "parts/c.jsonl", "parts/h.jsonl", "parts/m.jsonl", "tasks.yml"),
        *("../g.jsonl", "base", "math", "chat"),
    ]
    monkeypatch.chdir(tmp_path)
    assert paths("of/study.yml", "of") == expected
    assert paths(study, study.parent) == expected
    cells = {name: cell.made_of for name, cell in plan_study(load_study(study)).cells.items()}
    monkeypatch.chdir(study.parent)
    assert paths("study.yml", ".") == expected
    # Inputs are known by their content, so that a study resumes from any folder.
    again = plan_study(load_study("study.yml")).cells
    assert {name: cell.made_of for name, cell in again.items()} == cells
    merged = from_its_folder(Document("of/study.yml", {"base": "org/code+adapter"}))
    assert merged.data == {"base": "org/code+of/adapter"}
    gone = load_study("study.yml", {"data": {"math": "gone.jsonl"}})
    with pytest.raises(CheckpointError, match="start from its folder, others from the current one"):
        costs(plan_study(gone), tmp_path).refuse()


@pytest.mark.parametrize("file", PAPER, ids=lambda p: str(p.relative_to(ROOT / "examples/paper")))
def test_the_papers_studies_can_be_planned(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = costs(plan_study(load_study(file)), tmp_path)
    assert {one.where for one in expected.missing} <= {"to fetch"}
    if "small" in file.parts:
        assert not expected.missing
    assert expected.peak_bytes is not None


@pytest.mark.parametrize(
    "file", [p for p in PAPER if p.parent.name == "small"], ids=lambda p: p.stem
)
def test_small_studies_ask_their_prompts_as_they_are(file, tmp_path, monkeypatch):
    """What the paper's files say of other columns and templates does not reach them."""
    monkeypatch.chdir(tmp_path)
    plan = plan_study(load_study(file))
    for node in plan.nodes(list(plan.cells.values())):
        if node.kind == "text":
            recipe = DataRecipe.model_validate(node.values["recipe"])
            request = DataRequest("m", tmp_path / "o.jsonl", recipe.settings, recipe.prompts)
            chosen = select_prompts(request)[0]
            assert all(row.user_text == row.fields["prompt"] for row in chosen)
            assert all(row.reference for row in chosen)
