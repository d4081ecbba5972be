"""A whole distillation: the written weights, the report, refusals and resumed runs."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

import moemerge
import zoo
from moemerge.checkpoint import CheckpointPatch
from moemerge.errors import ArchitectureError, ConfigError, ResourceError, UsageError
from moemerge.repairs import distill as distilling
from repairs.calibration import cases

FAST = {
    "device": "cpu",
    "dtype": "float32",
    "steps": 10,
    "learning_rate": 1e-3,
    "holdout": 0.2,
    "measure": False,
    "batch": 8,
}


@pytest.fixture(scope="module")
def case(case_of):
    return case_of("olmoe", num_hidden_layers=2, rows=30)


def distill(case, out, **options):
    given = {"sources": case.sources, "data": case.data, **FAST, **options}
    return moemerge.distill(case.merged, out, **given)


@pytest.fixture(scope="module")
def distilled(case, tmp_path_factory):
    out = tmp_path_factory.mktemp("distilled") / "out"
    return out, distill(case, out)


def test_the_divergence_falls_and_the_model_loads(case, distilled):
    out, report = distilled

    for name in case.sources:
        assert report.held_out[report.kept_step][name] < report.held_out[0][name]
    assert report.kept_step > 0
    assert cases.changed_tensors(case.merged, out)
    assert cases.leftovers(out) == []
    assert moemerge.inspect(out) is not None


def test_the_written_weights_have_the_reported_divergence(case, distilled, tmp_path):
    """The divergence of OUT before another training is that of the step that was kept."""
    out, report = distilled
    again = moemerge.distill(
        out, tmp_path / "again", sources=case.sources, data=case.data, **{**FAST, "steps": 1}
    )

    for name, value in report.held_out[report.kept_step].items():
        assert again.held_out[0][name] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    "own", [{}, {"lora": 4, "learning_rate": 1e-2}, {"optimiser": "adafactor"}]
)
def test_figures_describe_the_written_bfloat16_weights(case_of, tmp_path, own):
    """The forward dtype is wider than the stored one, as by default on a CPU."""
    case = case_of("olmoe", num_hidden_layers=2, rows=30, dtype=torch.bfloat16)
    report = distill(case, tmp_path / "out", **{"learning_rate": 1e-4, **own})
    again = distill(replace(case, merged=tmp_path / "out"), tmp_path / "again", steps=1)

    assert report.kept_step > 0
    for name, value in report.held_out[report.kept_step].items():
        assert again.held_out[0][name] == pytest.approx(value, rel=1e-6)


def test_the_loss_that_is_trained_chooses_the_step(case, tmp_path):
    """With the next-token loss alone, OUT has the weights with the lowest next-token loss."""
    alone = {"next_token": 1.0, "steps": 20}
    report = distill(case, tmp_path / "out", **alone)
    again = distill(
        replace(case, merged=tmp_path / "out"), tmp_path / "again", **{**alone, "steps": 1}
    )

    means = {step: sum(loss.values()) for step, loss in report.held_out_losses.items()}
    assert report.kept_step == min(means, key=means.get) > 0
    assert report.losses[-1] < report.losses[0]
    for name, value in report.held_out_losses[report.kept_step].items():
        assert again.held_out_losses[0][name] == pytest.approx(value, rel=1e-4)
    (row,) = (r for r in report.to_json()["held_out"] if r["step"] == report.kept_step)
    assert row["loss"] == report.held_out_losses[report.kept_step] != row["divergence"]


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        ({"only": "routers"}, "mlp.gate."),
        ({"only": "experts"}, ".experts."),
        ({"only": "attention"}, "self_attn"),
        ({"layers": "1"}, ".layers.1."),
    ],
)
def test_only_a_part_is_trained(case, tmp_path, chosen, part):
    distill(case, tmp_path / "out", steps=2, **chosen)

    changed = cases.changed_tensors(case.merged, tmp_path / "out")
    assert changed
    assert all(part in name for name in changed)


def test_a_config_refits_and_distils(case, tmp_path):
    """One file gives what three commands give."""
    short = {**FAST, "steps": 3}
    fitted = {"device": "cpu", "dtype": "float32", "measure": False}
    given = {"sources": case.sources, "data": case.data}
    data = {name: str(path) for name, path in case.data.items()}
    config = zoo.linear(case.sources, data=data)
    cases.zoo.tiny_tokenizer(case.sources["math"])  # a merge copies that of its first model
    report = moemerge.run({**config, "distill": short, "refit": fitted}, tmp_path / "chain")

    moemerge.merge(config, tmp_path / "merged")
    moemerge.refit(tmp_path / "merged", tmp_path / "refit", **given, **fitted)
    moemerge.distill(tmp_path / "refit", tmp_path / "distill", **given, **short)
    assert cases.weights(tmp_path / "chain") == cases.weights(tmp_path / "distill")
    assert [one.repair.key for one in report.repairs] == ["refit", "distill"]
    written = json.loads((tmp_path / "chain" / "moemerge_report.json").read_text())
    assert {"merge", "refit", "distill"} <= set(written)
    assert "refitted" in (tmp_path / "chain" / "README.md").read_text()
    assert cases.leftovers(tmp_path / "chain") == []


def test_a_hopeless_rate_keeps_the_merged_weights(case, tmp_path):
    report = distill(case, tmp_path / "out", learning_rate=10.0, steps=4)

    assert report.kept_step == 0
    assert cases.changed_tensors(case.merged, tmp_path / "out") == set()
    assert "merged weights are kept" in report.notices[-1]


def test_a_step_reads_no_row_twice(case, tmp_path):
    reports = [distill(case, tmp_path / f"{n}", batch=n, steps=1) for n in (1000, 2**64)]
    losses = [report.to_json()["held_out"] for report in reports]
    assert losses[0] == losses[1] != distill(case, tmp_path / "8", steps=1).to_json()["held_out"]


def test_held_out_rows_choose_the_rate(case, tmp_path):
    report = distill(case, tmp_path / "out", learning_rate="auto", steps=8)

    tried = report.tried_rates
    assert len(tried) >= 3
    assert tried[report.learning_rate] == min(tried.values()) < max(tried.values())


@pytest.mark.parametrize(
    ("own", "killed"),
    [
        ({}, 7),
        ({"lora": 4}, 3),
        pytest.param({"optimiser": "adafactor"}, 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    case, distilled, tmp_path, monkeypatch, own, killed
):
    class KilledError(Exception):
        pass

    step = distilling.Trainer.step

    def step_until_killed(self, number, optimiser):
        if number == killed:
            raise KilledError
        return step(self, number, optimiser)

    out, whole = distilled
    if own:
        out = tmp_path / "whole"
        own = {**own, "dtype": "bfloat16", "learning_rate": 1e-2, "steps": 4, "batch": 4}
        whole = distill(case, out, **own)
    with monkeypatch.context() as patch:
        patch.setattr(distilling.Trainer, "step", step_until_killed)
        with pytest.raises(KilledError):
            distill(case, tmp_path / "out", **own)
    assert not (tmp_path / "out").exists()

    def no_teacher(*_, **__):
        raise AssertionError("the stored distributions should be used")

    monkeypatch.setattr("moemerge.repairs.distill_teachers._fill", no_teacher)
    report = distill(case, tmp_path / "out", **own)

    assert cases.weights(tmp_path / "out") == cases.weights(out)
    assert report.losses == whole.losses
    assert 0 < report.resumed <= killed
    assert report.kept_step > 0
    assert cases.leftovers(tmp_path / "out") == []


def test_a_run_killed_while_it_writes_starts_from_its_last_state(
    case, distilled, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.delattr(CheckpointPatch, "commit")
        with pytest.raises(AttributeError):
            distill(case, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    steps, step = [], distilling.Trainer.step
    monkeypatch.setattr(
        distilling.Trainer, "step", lambda self, n, own: steps.append(n) or step(self, n, own)
    )
    report = distill(case, tmp_path / "out")

    assert 0 < len(steps) < report.steps
    assert cases.weights(tmp_path / "out") == cases.weights(distilled[0])
    assert cases.leftovers(tmp_path / "out") == []


def test_the_resolved_config_repeats_the_run(case, distilled, tmp_path):
    moemerge.run(distilled[0] / "moemerge_config.yml", tmp_path / "again")

    assert cases.changed_tensors(distilled[0], tmp_path / "again") == set()


def test_what_is_refused(case, tmp_path):
    with pytest.raises(ConfigError, match="held-out rows choose the learning rate"):
        distill(case, tmp_path / "out", holdout=0, learning_rate="auto")
    for rate in (1e300, 10**400):
        with pytest.raises(ConfigError, match=r"learning_rate: expected auto, or .* at most 1e"):
            distill(case, tmp_path / "out", learning_rate=rate)
    with pytest.raises(ConfigError, match="steps"):
        distill(case, tmp_path / "out", steps=0)
    with pytest.raises(UsageError, match="no data"):
        distill(case, tmp_path / "out", data={"math": case.data["math"]})
    assert list(tmp_path.iterdir()) == []


def test_a_class_without_a_head_is_refused(case, tmp_path):
    headless = shutil.copytree(case.merged, tmp_path / "headless")
    zoo.edit_config(headless, architectures=["OlmoeModel"])
    for models in ({"merged": headless}, {"sources": {**case.sources, "code": headless}}):
        with pytest.raises(ArchitectureError, match="OlmoeModel, which computes no logits"):
            distill(replace(case, **models), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [headless]


def test_too_little_memory_is_refused(case, tmp_path, monkeypatch):
    monkeypatch.setattr(distilling, "available_memory", lambda device: 1000)

    with pytest.raises(ResourceError, match="distillation needs about"):
        distill(case, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory_names_what_to_do(case, tmp_path, monkeypatch):
    def divergence(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(distilling, "divergence", divergence)
    with pytest.raises(ResourceError, match="distillation: out of memory on cpu") as raised:
        distill(case, tmp_path / "out")
    assert "lora=16" in raised.value.hint
    assert not (tmp_path / "out").exists()


def test_bfloat16_weights_are_trained_in_float32(case, tmp_path):
    """Steps far below the spacing of bfloat16 add up."""
    report = distill(case, tmp_path / "out", dtype="bfloat16", learning_rate=1e-4, steps=4)

    assert report.kept_step > 0
    assert all(
        torch.isfinite(value).all() for value in cases.zoo.tensors(tmp_path / "out").values()
    )
