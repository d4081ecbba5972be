"""Routers on their way into OUT, with the journal written in the background as beside a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zoo
from calibration import cases
from moemerge.calibration import CalibrationRequest
from moemerge.calibration.journal import Entry
from moemerge.calibration.output import OutputFolder
from moemerge.calibration.prepare import Prepared, prepare
from moemerge.config.calibration import CalibrationSettings
from moemerge.errors import CheckpointError, UsageError

CaseOf = Callable[..., cases.Case]


def prepared_for_a_gpu(case: cases.Case, out: Path, *, resume: bool = False) -> Prepared:
    """Only the kind of device is looked at here."""
    data = {name: [path] for name, path in case.data.items()}
    request = CalibrationRequest(
        case.merged, out, case.sources, data, CalibrationSettings(device="cpu"), resume=resume
    )
    return replace(prepare(request), device=torch.device("cuda"))


def add_and_raise(prepared: Prepared, entries: list[Entry], error: BaseException) -> None:
    with OutputFolder(prepared) as output:
        for entry in entries:
            output.add(entry)
        raise error


def test_what_is_added_later_is_written_all_the_same(case_of: CaseOf, tmp_path: Path) -> None:
    case, out = case_of("olmoe"), tmp_path / "out"
    report = case.calibrate(tmp_path / "whole")
    solved = zoo.tensors(tmp_path / "whole")
    rows = {row["router"]: row for row in report.layers}
    entries = [Entry(name, solved[name], None, row) for name, row in rows.items()]
    with pytest.raises(KeyboardInterrupt):
        add_and_raise(prepared_for_a_gpu(case, out), entries[:2], KeyboardInterrupt())
    assert cases.leftovers(out) == [".out.journal"]
    with OutputFolder(prepared_for_a_gpu(case, out, resume=True)) as output:
        assert [entry.router for entry in output.entries] == [e.router for e in entries[:2]]
        output.add(entries[2])
        output.check()
        assert len(output.entries) == 3
        output.finish(report)
    assert cases.weights(out) == cases.weights(tmp_path / "whole")
    assert not cases.leftovers(out)


def test_a_journal_that_cannot_be_written_is_told(case_of: CaseOf, tmp_path: Path) -> None:
    case, out = case_of("olmoe"), tmp_path / "out"
    (name,) = list(zoo.tensors(case.merged))[:1]
    entry = Entry(name, torch.zeros(2, 2), None, {})
    with OutputFolder(prepared_for_a_gpu(case, out)) as output:
        (tmp_path / ".out.journal").write_text("in the way")
        output.add(entry)
        with pytest.raises(CheckpointError, match="in use"):
            output.check()
    assert not out.exists()


def test_a_hopeless_error_leaves_nothing(case_of: CaseOf, tmp_path: Path) -> None:
    case, out = case_of("olmoe"), tmp_path / "deep" / "out"
    entry = Entry("r", torch.zeros(2, 2), None, {})
    with pytest.raises(UsageError):
        add_and_raise(prepared_for_a_gpu(case, out), [entry], UsageError("no"))
    assert not list(tmp_path.iterdir())
