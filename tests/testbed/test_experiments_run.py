"""Tables from end to end on a set that has hardly been trained: small, but everything real."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch

import zoo
from moemerge.errors import UsageError
from moemerge.experiments import plots
from moemerge.experiments.journal import CellJournal
from moemerge.runtime.progress import Silent
from moemerge.testbed.accuracy import LONGEST_ANSWER, compare_routing, generate
from moemerge.testbed.experiments import Scale, TableRequest, run_tables
from moemerge.testbed.experiments.bench import Bench
from moemerge.testbed.experiments.forced import generate_forced
from moemerge.testbed.experiments.recipes import (
    Grafted,
    Merged,
    Trained,
    Tuned,
    Tuning,
    calibrated,
    measured,
    refitted,
)
from moemerge.testbed.experiments.run import left_to_measure, make_plan, set_folder
from moemerge.testbed.experiments.texts import (
    GENERAL_SEED,
    asked_problems,
    general_text,
    held_out_text,
    read_texts,
    validation_problems,
)
from moemerge.testbed.network.layout import ARCHITECTURES
from moemerge.testbed.tasks import DOMAINS as ALL_DOMAINS
from moemerge.testbed.tasks import problems
from moemerge.testbed.training import PRESETS, bundled_set
from moemerge.testbed.training import run as running
from moemerge.testbed.training.sets import write_model
from testbed import whole_models
from testbed.one_set import train

SCALE = Scale(problems=8, held_out=4, rows=12, tuning_steps=1)
DOMAINS = ("math", "code")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    settings = {"preset": "tiny", "regime": "soft", "steps_scale": 0.002, "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "TEST_PROBLEMS", 4)
        train(folder / "olmoe-tiny-soft-0", arch="olmoe", seed=0, **settings)
    return folder


@pytest.fixture
def bench(sets, tmp_path):
    found = Bench(sets / "olmoe-tiny-soft-0", tmp_path, DOMAINS, SCALE, "cpu")
    found.prepare()
    return found


def request_for(sets, out, *experiments, **values):
    return TableRequest(
        experiments or ("hessian",),
        out,
        preset="tiny",
        seeds=(0,),
        sets=sets,
        device="cpu",
        **{"methods": ("average", "ties"), "jobs": 1, "scale": SCALE, **values},
    )


def test_routing_is_compared_as_whole_models_do(sets):
    one = sets / "olmoe-tiny-soft-0"
    specialists = {domain: one / domain for domain in DOMAINS}
    texts = {domain: held_out_text(domain, 5) for domain in DOMAINS}
    agreements = compare_routing(one / "base", specialists, texts, device="cpu")
    for domain in DOMAINS:
        expected = whole_models.compare(one / "base", specialists[domain], texts[domain])
        for name, value in asdict(expected).items():
            assert getattr(agreements[domain], name) == pytest.approx(value, rel=1e-4), name
        assert agreements[domain].mismatch > 0
    same = compare_routing(one / "math", {"math": one / "math"}, {"math": texts["math"]})
    assert same["math"].mismatch == same["math"].kl == 0.0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_under_its_own_routing_writes_what_it_writes(arch, tmp_path):
    shape = PRESETS["tiny"].shape(arch)
    one, other = tmp_path / "one", tmp_path / "other"
    for seed, folder in enumerate((one, other)):
        generator = torch.Generator().manual_seed(seed)
        flat = 0.3 * torch.randn(shape.parameters, generator=generator)  # wild enough to babble
        write_model(folder, flat, shape, torch.float32)
    prompts = [p.prompt for p in asked_problems("code", 6)]
    settings = {"max_new_tokens": LONGEST_ANSWER, "device": "cpu"}
    plain = generate(one, prompts, **settings)
    assert any(plain)
    assert generate_forced(one, one, prompts, **settings) == plain
    forced = generate_forced(one, other, prompts, **settings)
    assert forced not in (plain, generate(other, prompts, **settings))


def test_a_graft_has_one_models_weights_and_the_others_routers(bench):
    grafted = zoo.tensors(bench.make(Grafted(Trained("math"), Trained("code"))))
    math, code = (zoo.tensors(bench.path(Trained(name))) for name in DOMAINS)
    for name, tensor in grafted.items():
        wanted = code if name.endswith("mlp.gate.weight") else math
        assert torch.equal(tensor, wanted[name]), name


def test_models_are_made_once_with_all_they_need(bench):
    merged = Merged("ties", DOMAINS)
    tuned = Tuned(calibrated(merged, share=0.5), DOMAINS)
    folder = bench.make(tuned)
    assert bench.path(merged).exists()
    before = (folder / "config.json").stat().st_mtime_ns
    assert bench.make(tuned) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    report = json.loads((bench.path(tuned.model) / "moemerge_report.json").read_text())
    rows = min(len(read_texts(bench.text("correct", d), d)) for d in DOMAINS)
    assert f'"limit": {round(rows / 2)}' in json.dumps(report)
    bench.remove(merged)
    assert not bench.path(merged).exists()
    bench.remove(Trained("math"))  # trained models are never ours to remove
    assert bench.path(Trained("math")).exists()


def test_a_refit_has_the_base_beside_the_specialists_where_it_is_asked_for(bench):
    merged = Merged("average", DOMAINS)
    plain, with_base = (
        json.loads((bench.make(model) / "moemerge_report.json").read_text())["refit"]
        for model in (refitted(merged, ridge=0.01, rows=6), refitted(merged, ridge=0.01, general=9))
    )
    assert plain["settings"]["limit"] == 6
    assert list(plain["sources"]) == ["math", "code"]
    assert list(with_base["sources"]) == ["math", "code", "base"]
    assert with_base["tokens"]["base"] > 0
    kept = refitted(merged, ridge=0.01, general=9, kept="chat")
    assert kept.name == "average(math,code) refitted[ridge=0.01,base=9,kept=chat]"
    rows = bench._sources(kept, {})["data"]["base"]
    assert [row["text"] for row in rows] == [
        p.prompt + p.answer for p in problems("chat", split="train", count=9, seed=GENERAL_SEED)
    ]


def test_of_several_fine_tunings_the_best_on_validation_problems_is_taken(bench):
    merged = Merged("average", DOMAINS)
    tuned = Tuned(merged, DOMAINS, (Tuning(1, 1e-5), Tuning(2, 1e-5), Tuning(2, 0.1)))
    bench.make(tuned)
    found = bench.measure(measured(tuned, DOMAINS))
    assert set(found["untouched"]) == {"chat"}
    tried = found["choice"]["tried"]
    assert [(one["steps"], one["lr"]) for one in tried] == [(1, 1e-5), (2, 1e-5), (2, 0.1)]
    best = max(tried, key=lambda one: one["validation"])
    assert found["choice"]["chosen"] == {"steps": best["steps"], "lr": best["lr"]}
    start, end = (zoo.tensors(bench.path(model)) for model in (merged, tuned))
    moved = max(float((end[name] - start[name]).abs().max()) for name in start)
    assert 0 < moved <= 1.1 * best["lr"] * best["steps"]  # Adam's steps are no longer than the rate


def test_a_model_read_once_for_all_domains_routes_each_as_alone(bench):
    merged = Merged("average", DOMAINS)
    bench.make(merged)
    found = bench.measure(measured(merged, DOMAINS))["domains"]
    assert list(found) == list(DOMAINS)
    for domain in DOMAINS:
        sources = {domain: bench.path(Trained(domain))}
        texts = {domain: held_out_text(domain, SCALE.held_out)}
        alone = compare_routing(bench.path(merged), sources, texts, device="cpu")[domain]
        assert asdict(alone).items() <= found[domain].items()


def test_validation_problems_are_none_of_the_tests():
    chosen = {p.prompt for p in validation_problems("math", 40, asked=60)}
    assert len(chosen) == 40
    assert not chosen & {p.prompt for p in asked_problems("math", 60)}


def test_general_text_is_of_all_domains_and_mostly_easy():
    text = [row["text"] for row in general_text(64)]
    drawn = {
        hard: [
            {
                p.prompt + p.answer
                for p in problems(name, split="train", count=40, hard=hard, seed=GENERAL_SEED)
            }
            for name in ALL_DOMAINS
        ]
        for hard in (True, False)
    }
    assert [sum(row in own for row in text) for own in drawn[True]] == [3, 3, 3]
    assert sum(row in own for own in drawn[False] for row in text) == 64 - 9


def test_kinds_of_text(bench):
    for domain in DOMAINS:
        kinds = {
            kind: read_texts(bench.text(kind, domain), domain)
            for kind in ("correct", "answers", "truth", "prompts", "unrelated")
        }
        assert {len(rows) for rows in kinds.values()} == {SCALE.rows}
        assert [p.prompt for p in kinds["truth"]] == [p.prompt for p in kinds["answers"]]
        assert {p.answer for p in kinds["prompts"]} == {""}
        tested = {p.prompt for p in asked_problems(domain, 50)}
        assert not tested & {p.prompt for rows in kinds.values() for p in rows}


def test_a_table_is_measured_once_and_written_the_same_again(sets, tmp_path):
    request = request_for(sets, tmp_path, "hessian", "layers", "router-swap")
    result = run_tables(request, Silent(), figures=False)
    assert not result.failures
    hessian, layers, swap = result.summaries
    assert [row.label for row in hessian.rows] == ["none", "identity", "diagonal", "full"]
    assert layers.rows[0].label == "as merged"
    by = {row.label: row for row in swap.rows}
    assert by["specialists"].mismatch.value == 0.0
    assert by["merged, source routing forced"].mismatch is None
    full = hessian.row("Weight averaging", "full")
    assert full.kl.value < hessian.row("Weight averaging", "none").kl.value
    assert not (tmp_path / "work").exists()
    files = {path: path.read_bytes() for path in result.written}
    cells = (tmp_path / "cells.jsonl").read_bytes()
    assert run_tables(request, Silent(), figures=False).summaries == result.summaries
    assert (tmp_path / "cells.jsonl").read_bytes() == cells
    assert files == {path: path.read_bytes() for path in result.written}


@pytest.fixture(scope="module")
def hessian(sets, tmp_path_factory):
    """A small table, and what it was asked with."""
    request = request_for(sets, tmp_path_factory.mktemp("hessian"), methods=("average",))
    return request, run_tables(request, Silent(), figures=False)


def test_a_set_trained_anew_is_measured_anew_and_an_absent_one_is_not_missed(hessian, tmp_path):
    request, first = hessian
    shutil.copytree(request.sets, tmp_path / "sets")
    request = replace(request, sets=tmp_path / "sets")
    plan, journal = make_plan(request), CellJournal(request.out, asdict(SCALE))
    assert left_to_measure(plan, journal) == {}
    manifest = request.sets / "olmoe-tiny-soft-0" / "testbed.json"
    manifest.write_text(manifest.read_text() + " ")
    (left,) = left_to_measure(plan, journal).values()
    assert len(left) == 4
    # All is measured: the tables can be written without the models.
    shutil.rmtree(request.sets)
    assert run_tables(request, Silent(), figures=False).summaries == first.summaries


@pytest.mark.slow
def test_two_workers_find_what_one_finds(hessian, tmp_path):
    request, alone = hessian
    elsewhere = replace(request, out=tmp_path / "out", work=tmp_path / "work", jobs=2)
    pair = run_tables(elsewhere, Silent(), figures=False)
    assert not pair.failures
    assert list((tmp_path / "work").iterdir()) == []
    tasks = [
        json.loads(line) for line in (tmp_path / "out" / "tasks.jsonl").read_text().split("\n")[:-1]
    ]
    assert {"task", "seconds", "cpu_seconds"} == set(tasks[0])
    assert pair.summaries == alone.summaries


def test_what_fails_is_told_and_the_rest_is_kept(sets, tmp_path, monkeypatch):
    ablations = "moemerge.testbed.experiments.ablations"
    monkeypatch.setattr(f"{ablations}.ALPHAS", (0.9, 1.5))  # 1.5 is refused by the product
    request = request_for(sets, tmp_path, "alpha-gamma", methods=("average",))
    monkeypatch.setattr(f"{ablations}.GAMMAS", ())
    result = run_tables(request, Silent(), figures=False)
    assert [failure.what for failure in result.failures] == [
        "olmoe-tiny-soft-0: make average(math,code) calibrated[alpha=1.5]"
    ]
    (table,) = result.summaries
    assert table.missing == ("Weight averaging, α = 1.5",)
    assert [row.label for row in table.rows] == ["as merged", "α = 0.9"]


def test_figures_without_matplotlib_are_refused_before_any_work(sets, tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="matplotlib"):
        run_tables(request_for(sets, tmp_path / "x"), Silent())
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"steps_scale": 0.0}, "`steps_scale` is 0"),
        ({"seeds": (-1,)}, "`seeds` has -1"),
        ({"jobs": 0}, "`jobs` is 0"),
        ({"regimes": ("hard",)}, "soft, plain"),
    ],
)
def test_wrong_requests_leave_nothing(wrong, words, sets, tmp_path):
    request = replace(request_for(sets, tmp_path / "x"), **wrong)
    with pytest.raises(UsageError, match=words):
        run_tables(request, Silent(), figures=False)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("method", ["aim", "neuron", "sens"])
def test_methods_that_need_files_of_their_own_are_given_them(bench, method):
    model = Merged(method, DOMAINS)
    own, plain = zoo.tensors(bench.make(model)), zoo.tensors(bench.make(Merged("sum", DOMAINS)))
    assert own.keys() == plain.keys()
    assert any(not torch.equal(own[name], plain[name]) for name in own)


def test_the_bundled_set_is_taken_where_it_is_the_one_that_is_asked_for(tmp_path):
    request = TableRequest(("methods",), tmp_path, preset="demo", seeds=(0, 1))
    keys = make_plan(request).tables[0].sets
    assert set_folder(request, keys[0]) == bundled_set().folder
    assert set_folder(request, keys[1]) == tmp_path / "sets" / "olmoe-demo-soft-1"
    shorter = replace(request, steps_scale=0.5)
    assert set_folder(shorter, keys[0]) == tmp_path / "sets" / "olmoe-demo-soft-0"
