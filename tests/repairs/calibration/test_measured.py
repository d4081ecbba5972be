"""What a calibration did to the routing on rows that it has not seen, in report, card and table."""

import json
import shutil

import pytest
from safetensors.torch import load_file

import moemerge
import zoo
from moemerge.cli.repair_tables import calibrate_report
from moemerge.diagnosis.page import loss_notices
from repairs.calibration import cases
from terminal import printed


@pytest.fixture(scope="module")
def case(case_of):
    return case_of("olmoe", num_hidden_layers=2, rows=110)


def test_it_is_what_diagnose_measures(case, tmp_path):
    out = tmp_path / "out"
    report = case.calibrate(out)
    figures = report.diagnosis
    assert figures is not None
    cases.assert_as_diagnosed(case, figures, out, holdout="auto")
    assert json.loads((out / "moemerge_report.json").read_text())["calibration"]["diagnosis"] == (
        figures
    )
    card = (out / "README.md").read_text()
    row = f"| math | {figures['tokens']['math']} | {figures['mismatch_before']['math']:.1%} | "
    assert row in card.partition("each model on its own features:")[2].partition("## Config")[0]
    assert not list(out.glob(".*"))
    shown = printed(calibrate_report(report, verbose=False))
    assert "(rows held out from the fit; each model on its own features)" in shown
    losses = figures["loss_before"]["math"], figures["loss_after"]["math"]
    assert f"math {losses[0]:.3f}→{losses[1]:.3f}" in shown


def test_a_loss_that_rises_is_told():
    figures = {
        "loss_before": {"math": 1.2, "code": 1.0, "chat": None},
        "loss_after": {"math": 1.25, "code": 1.009, "chat": 2.0},
    }
    (notice,) = loss_notices(figures)
    assert notice.startswith("math: on the rows held out the next-token loss rose from 1.200 to")


def test_routers_that_suit_no_expert_are_told(zoo_folder, tmp_path):
    """Sources whose routers send every token to the wrong experts."""
    case = cases.make_case(zoo_folder("olmoe", num_hidden_layers=2), tmp_path, rows=110)
    for folder in case.sources.values():
        with zoo.edited(folder) as tensors:
            for name in tensors:
                if name.endswith("mlp.gate.weight"):
                    tensors[name] = -3.0 * tensors[name]
                elif ".experts." in name:
                    tensors[name] = 4.0 * tensors[name]
    notes = zoo.Notes()
    report = case.calibrate(tmp_path / "out", progress=notes)
    assert report.diagnosis is not None
    rose = {
        name
        for name, before in report.diagnosis["loss_before"].items()
        if report.diagnosis["loss_after"][name] > before + 0.01
    }
    told = {note.partition(":")[0] for note in notes.said if "next-token loss rose" in note}
    assert rose
    assert told == rose


def test_it_can_be_left_out(case, tmp_path):
    assert case.calibrate(tmp_path / "a", measure=False).diagnosis is None
    assert case.calibrate(tmp_path / "b", limit=20).diagnosis is None  # too few rows to hold out
    assert "own features" not in (tmp_path / "a" / "README.md").read_text()
    routers = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    assert routers[0].keys() == routers[1].keys()


def test_rows_that_were_fitted_are_never_called_held_out(case, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(case.data["code"].read_text().splitlines(keepends=True)[:20]))
    out, notes = tmp_path / "out", zoo.Notes()
    report = case.calibrate(out, data={**case.data, "code": few}, progress=notes)
    figures = report.diagnosis
    assert list(figures["tokens"]) == list(figures["loss_after"]) == ["math"]
    assert figures["not_held_out"] == ["code"]
    assert report.not_held_out == ("code",)
    card = (out / "README.md").read_text()
    assert "No rows of code were held out, so nothing is measured there." in card
    measured = card.partition("each model on its own features:")[2]
    assert "| code |" not in measured.partition("## Config")[0]
    shown = printed(calibrate_report(report, verbose=False))
    assert "code: every figure is of rows that were fitted" in shown
    assert any(note.startswith("code: no rows are held out") for note in notes.said)


def test_a_source_that_cannot_be_run_still_gives_its_routers(case, tmp_path):
    broken = shutil.copytree(case.sources["math"], tmp_path / "math")
    with zoo.edited(broken) as tensors:
        del tensors["model.norm.weight"]
    notes = zoo.Notes()
    report = case.calibrate(
        tmp_path / "out", sources={**case.sources, "math": broken}, progress=notes
    )
    assert report.diagnosis is None
    assert (tmp_path / "out" / "config.json").exists()
    assert any("not measured" in note or "not be measured" in note for note in notes.said)


def test_text_that_cannot_be_read_is_one_error(case, tmp_path):
    broken, notes = tmp_path / "broken.jsonl", zoo.Notes()
    broken.write_text('{"conversations": [{"from": "human", "value": "one"}]}\n' * 120)
    with pytest.raises(moemerge.DataError, match="needs a chat template"):
        case.calibrate(tmp_path / "out", data={**case.data, "math": broken}, progress=notes)
    assert notes.said == []


def test_what_is_to_be_said_of_the_text_is_said_once(case, tmp_path):
    """It is read for the calibration, and again to measure what that did."""
    data = {}
    for name, file in case.data.items():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        data[name] = zoo.write_rows(tmp_path / f"{name}.jsonl", ({**row, "id": 1} for row in rows))
    notes = zoo.Notes()
    report = case.calibrate(tmp_path / "out", data=data, progress=notes)
    assert report.diagnosis is not None
    unread = [note for note in notes.said if "is used, not 'id'" in note]
    assert len(unread) == len(set(unread)) == len(data)
