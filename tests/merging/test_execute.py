"""Running a plan: the same bytes however it is run, and nothing left when it cannot be."""

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moemerge
import zoo
from moemerge import api
from moemerge.checkpoint import CheckpointWriter
from moemerge.config.settings import MergeSettings
from moemerge.errors import (
    CheckpointError,
    ConfigError,
    MoeMergeError,
    NumericalError,
    ResourceError,
    UsageError,
)
from moemerge.merging import METHODS
from moemerge.merging import plan as plan_module
from moemerge.merging.execute import MemoryBudget, execute
from moemerge.merging.run import plan_merge
from moemerge.runtime.progress import Silent
from repairs.calibration.cases import weights

CPU = torch.device("cpu")


def config(method, models, **parameters):
    base, *tuned = models
    return {
        "merge_method": method,
        "base_model": str(base),
        "models": [{"model": str(m), "parameters": {"weight": 0.5, **parameters}} for m in tuned],
    }


def run(settings, out, **execution):
    plan = plan_merge(api.load_config(settings), MergeSettings()).plan
    with CheckpointWriter(out, plan.tensors, shard_bytes=10**9, overwrite=False) as writer:
        execute(plan, writer, Silent(), device=CPU, **execution)
        writer.add_bytes("config.json", b"{}")
        writer.commit()


@pytest.mark.parametrize("method", ["dare_ties", "della_linear", "ties"])
def test_workers_and_sharding_do_not_change_a_bit(models, tmp_path, method):
    settings = config(method, models, density=0.4)
    run(settings, tmp_path / "one", workers=1)
    run(settings, tmp_path / "many", workers=5, memory_budget=1)
    moemerge.merge(settings, tmp_path / "shards", out_shard_size="20kB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    for other in ("many", "shards"):
        zoo.assert_same(tmp_path / "one", tmp_path / other)


def test_its_own_config_makes_a_merge_again_from_anywhere(models, tmp_path, monkeypatch):
    """Same bytes, though the method draws at random, and no absolute path is published."""
    here = models[1].parent
    monkeypatch.chdir(here)
    settings = config("dare_ties", [os.path.relpath(models[0]), "m1", "m2"], density=0.4)
    moemerge.merge(settings, "out", seed=7)
    out = here / "out"
    written = (out / "moemerge_config.yml").read_text()
    assert "seed: 7" in written
    assert "../m1" in written
    assert written in (out / "README.md").read_text()
    report = json.loads((out / "moemerge_report.json").read_text())["merge"]
    assert {"../m1", "../m2"} < {one["model"] for one in report["inputs"].values()}
    moemerge.convert("out", tmp_path / "fused", layout="fused")
    again = (tmp_path / "fused" / "moemerge_config.yml").read_text()
    assert again in (tmp_path / "fused" / "README.md").read_text()
    assert str(here) not in again
    assert str(here) not in (out / "README.md").read_text()
    monkeypatch.chdir(tmp_path / "fused")
    moemerge.merge(out / "moemerge_config.yml", tmp_path / "again")
    assert weights(out) == weights(tmp_path / "again")
    moemerge.merge("moemerge_config.yml", tmp_path / "converted")
    assert weights(out) == weights(tmp_path / "converted")
    moemerge.merge(out / "moemerge_config.yml", tmp_path / "other", seed=8)  # a flag wins
    assert weights(out) != weights(tmp_path / "other")


def test_runs_of_rows_equal_the_whole(models, tmp_path, monkeypatch):
    """Elementwise methods may cut a large tensor; the cut must not show."""
    settings = config("task_arithmetic", models)
    run(settings, tmp_path / "whole")
    monkeypatch.setattr(plan_module, "RUN_ELEMENTS", 100)
    run(settings, tmp_path / "cut")
    zoo.assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("method", "parameters", "dtype"),
    [
        ("ties", {"density": 0.3}, "bfloat16"),
        ("breadcrumbs_ties", {"density": 0.4, "gamma": 0.2}, None),
        ("dare_ties", {"density": 0.4}, None),
        ("della", {"density": 0.4}, None),
    ],
)
def test_large_units_in_runs_equal_the_whole(
    models, tmp_path, monkeypatch, method, parameters, dtype
):
    """The cut's magnitude, its ties and the L1 norm are those of the whole task vector."""
    settings = {**config(method, models, **parameters), "dtype": dtype}
    settings["parameters"] = {"rescale": True}
    run(settings, tmp_path / "whole")
    monkeypatch.setattr(plan_module, "LARGE_ELEMENTS", 2400)
    monkeypatch.setattr(plan_module, "RUN_ELEMENTS", 1200)
    plan = plan_merge(api.load_config(settings), MergeSettings()).plan
    assert sum(block.tensor == "model.embed_tokens.weight" for block in plan.blocks) > 2
    run(settings, tmp_path / "cut")
    whole, cut = zoo.tensors(tmp_path / "whole"), zoo.tensors(tmp_path / "cut")
    for name, tensor in whole.items():  # L1 norms are added in another order
        torch.testing.assert_close(cut[name], tensor, rtol=1e-6, atol=1e-8)


def test_only_elementwise_methods_without_wrappers_are_cut_into_runs(models, monkeypatch):
    monkeypatch.setattr(plan_module, "RUN_ELEMENTS", 100)

    def blocks(method, **more):
        settings = {**config(method, models), **more}
        plan = plan_merge(api.load_config(settings), MergeSettings()).plan
        return sum(block.tensor == "model.embed_tokens.weight" for block in plan.blocks)

    assert blocks("task_arithmetic") > 10
    assert blocks("multislerp") == blocks("task_arithmetic", wrap=["svc"]) == 1


@pytest.mark.parametrize("method", ["sce", "pcb", "ramplus_tl"])
def test_a_method_that_needs_a_whole_matrix_warns_first(models, method):
    inputs = {**config(method, models), "models": [{"model": str(m)} for m in models[1:]]}

    def notices(**settings):
        job = plan_merge(api.load_config(inputs), MergeSettings(**settings))
        return [n for n in job.plan.notices if "at once" in n]

    assert notices() == []
    (warning,) = notices(memory="10kB")
    assert "model.embed_tokens.weight is merged at once by" in warning
    assert "of memory; `memory` is 10.0 kB" in warning


@pytest.mark.parametrize("method", ["linear", "ties"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_input_is_named_and_stops_whatever_its_weight(models, tmp_path, bad, method):
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    with zoo.edited(models[1]) as tensors:
        tensors[name][0, :3] = bad
    settings = config(method, models)
    if method == "linear":
        settings["models"][0]["parameters"] = {"weight": 0.0}
        settings["parameters"] = {"weight": 1.0}
    with pytest.raises(NumericalError, match=rf"m1: tensor {name} holds 3 non-finite values"):
        moemerge.merge(settings, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    report = moemerge.merge(settings, tmp_path / "out", allow_nonfinite=True)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "which makes this model again (with `--allow-nonfinite`):" in card
    assert f"{models[1]}: 1 tensor holds NaN or infinity ({name})" in report.notices


def test_a_model_that_is_cut_short_while_it_is_merged_is_named(models, tmp_path):
    plan = plan_merge(api.load_config(zoo.linear(models)), MergeSettings()).plan
    file = models[1] / "model.safetensors"
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)
    out = tmp_path / "out"
    with (
        CheckpointWriter(out, plan.tensors, shard_bytes=10**9, overwrite=False) as writer,
        pytest.raises(CheckpointError, match="the file was cut short after it was opened"),
    ):
        execute(plan, writer, Silent(), device=CPU)
    assert not list(tmp_path.glob("*out*"))


def test_huge_but_finite_values_are_no_fault(models, tmp_path):
    """The quick check is a sum, which may overflow though every term is finite."""
    with zoo.edited(models[1]) as tensors:
        tensors["model.norm.weight"][:] = 3e38
    moemerge.merge(config("task_arithmetic", models), tmp_path / "out")


def test_integer_tensors_must_agree(tmp_path, zoo_folder):
    base = zoo_folder("deepseek_v4")
    other = zoo.perturb(base, tmp_path / "other", 1)
    settings = zoo.linear([base, other])
    report = moemerge.merge(settings, tmp_path / "out")
    (reason,) = report.models[0].copied
    assert reason == "integers, equal in all models"
    with zoo.edited(other) as tensors:
        name = next(n for n in tensors if n.endswith("tid2eid"))
        tensors[name] = (tensors[name] + 1) % 8
    with pytest.raises(CheckpointError, match=r"integer tensor .*tid2eid differs between"):
        moemerge.merge(settings, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_an_interrupt_leaves_nothing(models, tmp_path):
    class Interrupting(Silent):
        def advance(self, amount):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moemerge.merge(config("ties", models), tmp_path / "out", progress=Interrupting())
    assert not list(tmp_path.glob("*out*"))


def test_a_full_disk_is_found_before_the_work(models, tmp_path, monkeypatch):
    monkeypatch.setattr("moemerge.checkpoint.output.free_disk", lambda folder: 1000)
    with pytest.raises(ResourceError, match=r"only 1\.0 kB are free"):
        moemerge.merge(config("ties", models), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("check", [moemerge.merge, moemerge.validate])
def test_options_are_refused_before_a_model_is_opened(tmp_path, check):
    settings = config("ties", ["no/base", "no/a", "no/b"])
    (tmp_path / "config.json").touch()
    for wrong, said in (
        ({"device": "tpu"}, "tpu"),
        ({"out_shard_size": "much"}, "is not a size"),
        ({}, "exists"),
    ):
        with pytest.raises((ConfigError, UsageError, CheckpointError), match=said):
            check(settings, tmp_path, **wrong)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")]
)
def test_a_device_without_memory_is_named(error, models, tmp_path, monkeypatch):
    def full(**_):
        raise error

    settings = config("linear", models)
    method = METHODS.get("linear")
    monkeypatch.setitem(METHODS._entries, "linear", replace(method, function=full))
    with pytest.raises(ResourceError, match=r"cpu has too little free memory to merge .*weight"):
        moemerge.merge({**settings, "parameters": {"weight": 1}}, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_memory_budget_lets_a_large_piece_run_alone():
    budget = MemoryBudget(100)
    running = []
    peak = []

    def work(amount):
        with budget.hold(amount):
            running.append(amount)
            peak.append(sum(running))
            running.remove(amount)

    threads = [threading.Thread(target=work, args=(n,)) for n in (60, 60, 500, 30, 30) * 20]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(total <= 100 or total == 500 for total in peak)


def evict(path):
    """Remove a file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux evicts files from its cache")
def test_files_that_models_share_are_read_once(models, tmp_path):
    base, other, _ = models
    linked = tmp_path / "linked"
    shutil.copytree(base, linked, copy_function=os.link)
    settings = config("ties", [base, linked, other], density=0.5)
    files = [path for model in (base, other) for path in model.glob("*.safetensors")]
    size = sum(path.stat().st_size for path in files)
    for attempt in range(4):  # the first one reads other files, too; pages may be in use
        for path in files:
            evict(path)
        report = moemerge.merge(settings, tmp_path / "out", overwrite=attempt > 0)
        if attempt and (report.disk_bytes_read or 0) >= size:
            break
    else:
        pytest.skip("this file system does not count what is read")
    assert report.bytes_read == size
    assert report.disk_bytes_read < 1.4 * size  # one and a half, if the base is read twice
    written = json.loads((tmp_path / "out" / "moemerge_report.json").read_text())
    assert written["merge"]["bytes_read"] == {"files": size, "disk": report.disk_bytes_read}


@pytest.fixture
def file(zoo_folder, tmp_path):
    a, b, c = (zoo_folder("olmoe", seed=seed) for seed in range(3))
    path = tmp_path / "stages.yml"
    path.write_text(
        f"""
name: half
merge_method: linear
models: [{{model: {a}, parameters: {{weight: 1}}}}, {{model: {b}, parameters: {{weight: 1}}}}]
---
merge_method: task_arithmetic
base_model: half
models: [{{model: {c}, parameters: {{weight: 0.5}}}}]
"""
    )
    return path


def test_stages_are_the_merges_one_by_one(file, zoo_folder, tmp_path):
    planned = moemerge.validate(file)
    assert [model.reference for model in planned.models if model.base] == ["half"]
    assert [p.name for p in tmp_path.iterdir()] == ["stages.yml"]
    moemerge.merge(file, tmp_path / "out")
    a, b, c = (zoo.tensors(zoo_folder("olmoe", seed=seed)) for seed in range(3))
    for name, value in zoo.tensors(tmp_path / "out").items():
        half = (a[name] + b[name]) / 2
        torch.testing.assert_close(value, half + 0.5 * (c[name] - half), msg=name)
    assert {p.name for p in tmp_path.iterdir()} == {"stages.yml", "out"}
    for text in ("moemerge_config.yml", "README.md", "moemerge_report.json"):
        assert "partial" not in (tmp_path / "out" / text).read_text(), text
    moemerge.merge(tmp_path / "out" / "moemerge_config.yml", tmp_path / "again")
    zoo.assert_same(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("base_model: half", "base_model: hlaf", MoeMergeError, "half|hlaf"),
        ("task_arithmetic", "task_arithmetics", ConfigError, "line 6: .*did you mean"),
        ("merge_method: linear", "merge_method: linear\nrefit: {}", MoeMergeError, "refit"),
    ],
)
def test_a_fault_of_the_last_stage_stops_the_first(file, tmp_path, old, new, error, message):
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(error, match=message):
        moemerge.merge(file, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["stages.yml"]


def test_nothing_is_left_of_a_failed_run(file, tmp_path):
    """The last merge fails after the first is made: its model holds NaN."""
    bad = tmp_path / "bad"
    model = Path(file.read_text().split("models: [{model: ")[-1].split(",")[0])
    zoo.perturb(model, bad, seed=5)
    with zoo.edited(bad) as tensors:
        tensors["lm_head.weight"][0, 0] = torch.nan
    file.write_text(file.read_text().replace(str(model), str(bad)))
    with pytest.raises((CheckpointError, MoeMergeError), match="NaN"):
        moemerge.merge(file, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"stages.yml", "bad"}


def test_run_repairs_the_last_merge(tmp_path, zoo_folder):
    """A source may be an earlier merge. All files name it, not its temporary folder."""
    a, b, c = (
        zoo.tiny_tokenizer(zoo.perturb(zoo_folder("olmoe"), tmp_path / name, seed, scale=0.3))
        for seed, name in enumerate("abc")
    )
    words = zoo._WORDS.split()
    text, file, out = tmp_path / "text.jsonl", tmp_path / "run.yml", tmp_path / "out"
    text.write_text("".join(f'{{"text": "{" ".join(words[i : i + 9])}"}}\n' for i in range(12)))
    file.write_text(
        f"""
name: half
merge_method: linear
models: [{{model: {a}, parameters: {{weight: 1}}}}, {{model: {b}, parameters: {{weight: 1}}}}]
---
merge_method: linear
models:
- {{model: {c}, name: c, parameters: {{weight: 1}}}}
- {{model: half, name: half, parameters: {{weight: 1}}}}
data: {{c: {text}, half: {text}}}
calibration: {{sources: [c, half], device: cpu}}
"""
    )
    report = moemerge.run(file, out, report=tmp_path / "page.html")
    assert report.calibration is not None
    assert report.calibration.sources["half"] == "half"
    written = [out / n for n in ("moemerge_config.yml", "README.md", "moemerge_report.json")]
    for path in (*written, tmp_path / "page.html"):
        assert "partial" not in path.read_text(), path
    assert not list(tmp_path.glob(".*"))
    moemerge.run(out / "moemerge_config.yml", tmp_path / "again")
    zoo.assert_same(out, tmp_path / "again")
