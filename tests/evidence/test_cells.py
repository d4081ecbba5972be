"""Cells and tables from end to end, on a set that was hardly trained."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import zoo
from evidence import cells
from evidence.cells import Bench, Merge, Scale, Tuning
from evidence.data import PRESETS
from evidence.experiments import EXPERIMENTS, TWO, Scope
from evidence.forced import generate_forced
from evidence.journal import CellJournal
from evidence.layout import ARCHITECTURES
from evidence.methods import EVERY, METHODS, MergeFiles, chosen, merge_config
from evidence.run import TableRequest, missing_cells, plan_tables, run_tables, set_folder
from evidence.scoring import LONGEST_ANSWER, generate
from evidence.texts import (
    GENERAL_SEED,
    general_text,
    kept_text,
    read_texts,
    test_set,
    validation_problems,
)
from evidence.training import write_model
from moemerge import api
from moemerge.errors import UsageError
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.tasks import DOMAINS, problems
from moemerge.runtime.progress import Silent

test_set.__test__ = False  # not a test
SCALE = Scale(problems=8, held_out=4, rows=12, tuning_steps=1)
SCOPE = Scope(tuple(METHODS), layers=6)
AVERAGE = Merge("average", TWO)


@pytest.fixture
def bench(trained, tmp_path):
    found = Bench(trained.folder, tmp_path / "work", SCALE, "cpu")
    found.prepare()
    return found


def make(bench, cell, out):
    """Apply a cell's steps to its merge."""
    for merge in cell.nodes:
        bench.make(merge)
    (step,) = cell.steps
    step(bench, bench.merged(cell.nodes[0]), cell.domains, out)
    return out


# --- names and configs ----------------------------------------------------------------------------


def test_equal_names_mean_equal_cells_in_all_tables():
    seen = {}
    for one in EXPERIMENTS.values():
        rows = one.rows(SCOPE)
        labels = [(row.group, row.label) for row in rows]
        assert len(set(labels)) == len(labels)
        assert {label for pair in one.compare for label in pair} <= {x for _, x in labels}
        for row in rows:
            assert seen.setdefault(row.cell.name, row.cell) == row.cell
    assert len(seen) > 60


def test_names_are_those_of_the_recorded_cells():
    merge = Merge("wudi", TWO)
    cell = cells.calibrated(merge, text="truth", share=0.5, targets="source-features")
    assert cell.name == "wudi(math,code) calibrated[targets=source-features,text=truth,share=0.5]"
    kept = cells.refitted(merge, ridge=0.01, general=9, kept="chat")
    assert kept.name == "wudi(math,code) refitted[ridge=0.01,base=9,kept=chat]"
    assert cells.tuned(cells.calibrated(merge)).name == "wudi(math,code) calibrated[] tuned"
    assert cells.base(("math",)).name == "base on math"


def test_every_merge_config_is_valid():
    models = {"math": Path("m"), "code": Path("c")}
    text = {name: Path(f"{name}.jsonl") for name in models}
    files = MergeFiles(Path("b"), models, text, general=Path("general.jsonl"))
    for method in chosen((), EVERY):
        api.load_config(merge_config(method, files))
    weights = [m["parameters"]["weight"] for m in merge_config("ties", files)["models"]]
    assert weights == [0.4, 0.6]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"experiments": ("hesian",)}, "did you mean 'hessian'"),
        ({"methods": ("wuddi",)}, "did you mean 'wudi'"),
        ({"regimes": ("hard",)}, "soft, plain"),
        ({"jobs": 0}, "jobs"),
        ({"seeds": (-1,)}, "seeds"),
    ],
)
def test_wrong_requests_leave_nothing(wrong, words, tmp_path):
    request = replace(TableRequest(("hessian",), tmp_path / "x"), **wrong)
    with pytest.raises(UsageError, match=words):
        run_tables(request, Silent())
    assert not (tmp_path / "x").exists()


def test_the_bundled_set_need_not_be_trained(tmp_path):
    request = TableRequest(("methods",), tmp_path, preset="demo", seeds=(0, 1))
    keys = plan_tables(request)[0].sets
    assert set_folder(request, keys[0]) == bundled_set().folder
    assert set_folder(request, keys[1]) == tmp_path / "sets" / "olmoe-demo-soft-1"


# --- text -----------------------------------------------------------------------------------------


def test_validation_problems_are_not_test_problems():
    found = {p.prompt for p in validation_problems("math", 40, test=60)}
    assert len(found) == 40
    assert not found & {p.prompt for p in test_set("math", 60)}


def test_general_text_covers_all_domains_and_is_mostly_easy():
    text = {row["text"] for row in general_text(64)}
    for domain in DOMAINS:
        drawn = problems(domain, split="train", count=40, hard=True, seed=GENERAL_SEED)
        assert sum(p.prompt + p.answer in text for p in drawn) == 3
    kept = [
        p.prompt + p.answer for p in problems("chat", split="train", count=9, seed=GENERAL_SEED)
    ]
    assert [row["text"] for row in kept_text("chat", 9)] == kept


def test_kinds_of_text(bench):
    for domain in TWO:
        kinds = {
            kind: read_texts(bench.text(kind, domain), domain)
            for kind in ("correct", "answers", "truth", "prompts", "unrelated")
        }
        assert {len(rows) for rows in kinds.values()} == {SCALE.rows}
        assert [p.prompt for p in kinds["truth"]] == [p.prompt for p in kinds["answers"]]
        assert {p.answer for p in kinds["prompts"]} == {""}
        tested = {p.prompt for p in test_set(domain, 50)}
        assert not tested & {p.prompt for rows in kinds.values() for p in rows}


# --- models and measurements ----------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_forcing_a_models_own_routing_changes_nothing(arch, tmp_path):
    shape = PRESETS["tiny"].shape(arch)
    one, other = tmp_path / "one", tmp_path / "other"
    for seed, folder in enumerate((one, other)):
        generator = torch.Generator().manual_seed(seed)
        flat = 0.3 * torch.randn(shape.parameters, generator=generator)
        write_model(folder, flat, shape, torch.float32)
    prompts = [p.prompt for p in test_set("code", 6)]
    settings = {"max_new_tokens": LONGEST_ANSWER, "device": "cpu"}
    plain = generate(one, prompts, **settings)
    assert any(plain)
    assert generate_forced(one, one, prompts, **settings) == plain
    assert generate_forced(one, other, prompts, **settings) != plain


def test_calibration_uses_a_share_of_the_text(bench, tmp_path):
    out = make(bench, cells.calibrated(AVERAGE, share=0.5), tmp_path / "out")
    rows = min(len(read_texts(bench.text("correct", d), d)) for d in TWO)
    assert f'"limit": {round(rows / 2)}' in (out / "moemerge_report.json").read_text()


def test_a_refit_has_the_base_as_a_source_if_requested(bench, tmp_path):
    cell = cells.refitted(AVERAGE, ridge=0.01, rows=6, general=9)
    out = make(bench, cell, tmp_path / "out")
    report = json.loads((out / "moemerge_report.json").read_text())["refit"]
    assert report["settings"]["limit"] == 6
    assert list(report["sources"]) == ["math", "code", "base"]


def test_a_pruned_specialist_is_repaired_to_itself(bench):
    plain, repaired = (
        bench.measure(cells.pruned(("math",), 0.5, repair=repair))
        for repair in (None, "refitted, chat")
    )
    assert set(plain["domains"]) == {"math"}
    assert set(plain["untouched"]) == {"code", "chat"}
    assert plain["untouched"]["chat"]["problems"] == SCALE.problems
    assert repaired["domains"].keys() == plain["domains"].keys()


def test_a_distilled_refit_starts_from_the_refit(bench, tmp_path):
    refit = cells.refitted(AVERAGE, ridge=0.01)
    cell = cells.distilled(refit, general=6, steps=1, learning_rate=1e-4)
    assert cell.name == (
        "average(math,code) refitted[ridge=0.01] distilled[learning_rate=0.0001,steps=1,base=6]"
    )
    model = bench.make(AVERAGE)
    for number, step in enumerate(cell.steps):
        step(bench, model, cell.domains, tmp_path / str(number))
        model = tmp_path / str(number)
    report = json.loads((model / "moemerge_report.json").read_text())
    assert list(report["distill"]["sources"]) == ["math", "code", "base"]


@pytest.mark.slow
def test_the_best_of_several_fine_tunings_is_measured(bench):
    bench.make(AVERAGE)
    tunings = (Tuning(1, 1e-5), Tuning(2, 1e-5), Tuning(2, 0.1))
    found = bench.measure(cells.tuned(cells.merged(AVERAGE), tunings))
    assert set(found["untouched"]) == {"chat"}
    tried = found["choice"]["tried"]
    assert [(one["steps"], one["lr"]) for one in tried] == [(1, 1e-5), (2, 1e-5), (2, 0.1)]
    best = max(tried, key=lambda one: one["validation"])
    assert found["choice"]["chosen"] == {"steps": best["steps"], "lr": best["lr"]}


@pytest.mark.parametrize("method", ["aim", "neuron", "sens"])
def test_methods_that_need_files_get_them(bench, method):
    own, plain = (zoo.tensors(bench.make(Merge(name, TWO))) for name in (method, "sum"))
    assert own.keys() == plain.keys()
    assert any(not torch.equal(own[name], plain[name]) for name in own)


def test_a_table_is_measured_once_and_resumes(trained, tmp_path):
    request = TableRequest(
        ("hessian", "router-swap"),
        tmp_path / "out",
        preset="tiny",
        seeds=(0,),
        sets=trained.folder.parent,
        device="cpu",
        methods=("average",),
        jobs=1,
        scale=SCALE,
    )
    summaries, failures, written = run_tables(request, Silent())
    assert not failures
    hessian, swap = summaries
    assert [row.label for row in hessian.rows] == ["none", "identity", "diagonal", "full"]
    by = {row.label: row for row in swap.rows}
    assert by["specialists"].mismatch.value == 0.0
    assert by["merged, source routers"].mismatch.value < by["as merged"].mismatch.value
    assert by["merged, source routing forced"].mismatch is None
    full, none = (hessian.row("Weight averaging", label) for label in ("full", "none"))
    assert full.kl.value < none.kl.value
    assert not (request.out / "work").exists()
    contents = {path: path.read_bytes() for path in [*written, request.out / "cells.jsonl"]}
    shutil.copytree(trained.folder, tmp_path / "sets" / trained.folder.name)
    request = replace(request, sets=tmp_path / "sets")
    assert run_tables(request, Silent())[0] == summaries
    assert contents == {path: path.read_bytes() for path in contents}
    # Another training of the set is measured again.
    manifest = tmp_path / "sets" / trained.folder.name / "testbed.json"
    manifest.write_text(manifest.read_text() + " ")
    journal = CellJournal(request.out, asdict(SCALE))
    (left,) = missing_cells(plan_tables(request), request, journal).values()
    assert len(left) == 8
