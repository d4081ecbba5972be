"""Models that vanish or change while a job reads them: a clear error and no output."""

import os
from collections.abc import Callable

import pytest

import moemerge
import zoo
from moemerge.errors import CheckpointError
from moemerge.runtime.progress import Silent
from repairs.calibration import cases


def unlink(model):
    (model / "model.safetensors").unlink()


def rename(model):
    model.rename(model.with_name("elsewhere"))


def touch(model):
    os.utime(model / "model.safetensors")


HOW = (unlink, rename, touch)


class Meanwhile(Silent):
    """A progress bar that calls a function once, after the work has started."""

    def __init__(self, what):
        self._what: Callable[[], None] | None = what

    def advance(self, amount):
        what, self._what = self._what, None
        if what is not None:
            what()


@pytest.fixture
def case(zoo_folder, tmp_path):
    return cases.make_case(zoo_folder("olmoe", num_hidden_layers=2), tmp_path, rows=6)


def jobs(case, out):
    config = zoo.linear(case.sources)
    text = {"sources": case.sources, "data": case.data}
    return {
        "merge": lambda bar: moemerge.merge(config, out, progress=bar),
        "calibrate": lambda bar: moemerge.calibrate(case.merged, out, progress=bar, **text),
        "refit": lambda bar: moemerge.refit(case.merged, out, progress=bar, **text),
        "diagnose": lambda bar: moemerge.diagnose(case.merged, progress=bar, **text),
        "stats": lambda bar: moemerge.collect_statistics(
            case.sources["math"], out, data=case.data["math"], progress=bar
        ),
    }


@pytest.mark.parametrize(
    ("job", "how"),
    [
        *(("merge", how) for how in HOW),
        *(("calibrate", how) for how in HOW),
        ("refit", rename),
        ("diagnose", touch),
        ("stats", unlink),
    ],
)
def test_no_output_is_made_of_a_source_that_vanishes(job, how, case, tmp_path):
    out = tmp_path / "out"
    zoo.tiny_tokenizer(case.sources["math"])
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="was changed or replaced while it was read"):
        jobs(case, out)[job](Meanwhile(lambda: how(case.sources["math"])))
    left = {path.name for path in tmp_path.iterdir()} - before - {"elsewhere"}
    assert left <= {".out.journal"}  # its key rejects other weights


@pytest.mark.parametrize("how", [unlink, rename])
def test_a_merge_that_vanishes_is_not_calibrated(how, case, tmp_path):
    job = jobs(case, tmp_path / "out")["calibrate"]
    with pytest.raises(CheckpointError, match=r"was changed or replaced|cannot be read|is missing"):
        job(Meanwhile(lambda: how(case.merged)))
    assert not (tmp_path / "out").exists()
