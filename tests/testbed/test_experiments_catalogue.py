"""Every experiment's cells: consistent names, configs that the product accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from moemerge import api
from moemerge.cli.testbed_table import parse_seeds
from moemerge.errors import UsageError
from moemerge.testbed.experiments.ablations import Scope
from moemerge.testbed.experiments.bench import Scale
from moemerge.testbed.experiments.catalogue import EXPERIMENTS, experiment
from moemerge.testbed.experiments.merges import (
    EVERY,
    METHODS,
    MergeFiles,
    chosen,
    graft_config,
    merge_config,
)
from moemerge.testbed.experiments.recipes import Merged, Trained, calibrated, measured
from moemerge.testbed.experiments.run import TableRequest, make_plan

SCOPE = Scope(tuple(METHODS), layers=6)


def test_one_name_is_one_cell_everywhere():
    seen = {}
    for one in EXPERIMENTS.values():
        for row in one.rows(SCOPE):
            assert seen.setdefault(row.cell.name, row.cell) == row.cell
    assert len(seen) > 60


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_rows_have_their_own_labels_and_compared_ones_exist(name):
    rows = EXPERIMENTS[name].rows(SCOPE)
    labels = [(row.group, row.label) for row in rows]
    assert len(set(labels)) == len(labels)
    assert {label for pair in EXPERIMENTS[name].compare for label in pair} <= {x for _, x in labels}


def test_ablations_share_the_main_tables_models():
    main = {row.cell.name for row in EXPERIMENTS["two-model"].rows(SCOPE)}
    for name in ("hessian", "last-layers", "fraction", "alpha-gamma", "layers", "router-swap"):
        own = {row.cell.name for row in EXPERIMENTS[name].rows(SCOPE)}
        assert len(own & main) >= 2, name


def test_a_recipes_name_tells_its_settings():
    merged = Merged("wudi", ("math", "code"))
    assert calibrated(merged).name == "wudi(math,code) calibrated[]"
    model = calibrated(merged, text="truth", share=0.5, targets="source-features")
    assert model.name == (
        "wudi(math,code) calibrated[targets=source-features,text=truth,share=0.5]"
    )
    cell = measured(model, ("math", "code"))
    assert cell.models == (model, Trained("math"), Trained("code"))
    assert measured(Trained("base"), ("math",)).name == "base on math"


def test_weights_are_the_papers_for_two_and_equal_for_three():
    two = {"math": Path("m"), "code": Path("c")}
    ties = merge_config("ties", MergeFiles(Path("b"), two, {}))
    assert [m["parameters"] for m in ties["models"]] == [
        {"density": 0.6, "weight": 0.4},
        {"density": 0.6, "weight": 0.6},
    ]
    three = merge_config("ties", MergeFiles(Path("b"), {**two, "chat": Path("x")}, {}))
    assert {m["parameters"]["weight"] for m in three["models"]} == {1 / 3}


def test_every_config_is_accepted():
    models = {"math": Path("m"), "code": Path("c")}
    text = {name: Path(f"{name}.jsonl") for name in models}
    given = MergeFiles(Path("b"), models, text, general=Path("general.jsonl"))
    for method in chosen((), EVERY):
        api.load_config(merge_config(method, given))
    api.load_config(graft_config(Path("m"), Path("c")))


def test_what_is_refused():
    with pytest.raises(UsageError, match="did you mean 'hessian'"):
        experiment("hesian")
    with pytest.raises(UsageError, match="did you mean 'wudi'"):
        chosen(["wuddi"])
    for wrong in ({"regimes": ("hard",)}, {"preset": "huge"}, {"arch": "bert"}, {"jobs": 0}):
        with pytest.raises(UsageError):
            make_plan(TableRequest(("two-model",), Path("x"), **wrong))


def test_qwen3_brings_its_own_architecture_and_all_means_all():
    request = TableRequest(("all",), Path("x"), regimes=("soft", "plain"), seeds=(3,))
    plan = make_plan(request)
    assert len(plan.tables) == 2 * len(EXPERIMENTS)
    names = {key.name for key in plan.cells()}
    assert names == {
        f"{arch}-small-{regime}-3"
        for arch in ("olmoe", "qwen3_moe")
        for regime in ("soft", "plain")
    }
    assert plan.request.scale == Scale()


@pytest.mark.parametrize(("text", "seeds"), [("0-2", (0, 1, 2)), ("5,1-2,1", (5, 1, 2))])
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1"])
def test_seeds_that_are_none(text):
    with pytest.raises(UsageError):
        parse_seeds(text)


def test_tables_about_methods_have_all_that_fit_so_many_models():
    request = TableRequest(("methods", "methods-three", "two-model"), Path("x"), seeds=(0,))
    two, three, main = (table.rows for table in make_plan(request).tables)
    titles = {row.group for row in two}
    assert {EVERY[m].title for m in EVERY if EVERY[m].fewest == 2} <= titles
    assert EVERY["lore"].title not in titles
    others = {row.group for row in three}
    assert EVERY["lore"].title in others
    assert EVERY["nuslerp"].title not in others
    assert len({row.group for row in main}) == len(METHODS) + 1
