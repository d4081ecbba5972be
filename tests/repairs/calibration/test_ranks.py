"""Several processes calibrate together (torchrun, gloo)."""

import json

import pytest
import torch

from moemerge.errors import CheckpointError, DataError, ResourceError
from moemerge.runtime.ranks import LostRankError
from moemerge.text.batches import divided, make_batches
from moemerge.text.domains import Domain
from together import job, off, together

# Tight, so that what is left is rounding and not where CG happened to stop.
EXACT = {"rtol": 1e-11, "device": "cpu", "dtype": "float64"}

# In rank 1 the job ends before the second router.
DIES = """
import os
from moemerge.repairs.calibration.routers import RouterCalibrator
visit, visits = RouterCalibrator.visit, []
def ends(self, pair, stops):
    visits.append(pair)
    if len(visits) == 2:
        os._exit(9)
    return visit(self, pair, stops)
if os.environ["RANK"] == "1":
    RouterCalibrator.visit = ends
"""


@pytest.fixture
def small(case_of):
    return case_of("olmoe", rows=8)


def calibration(case, folder, **options):
    options |= {"sources": case.sources, "data": case.data, **EXACT}
    return job("calibrate", case.merged, folder / "out", report=folder / "report", **options)


def test_a_process_that_dies_ends_the_others_and_one_resumes(small, tmp_path):
    (code, words), _ = together({2: [calibration(small, tmp_path)]}, before=DIES)
    assert code == LostRankError.exit_code
    assert "rank 0 of 2: another rank ended or could not be reached" in words
    assert "Traceback" not in words
    assert not (tmp_path / "out").exists()
    report = small.calibrate(tmp_path / "out", resume=True, **EXACT)
    assert report.resumed == 1
    small.calibrate(tmp_path / "alone", **EXACT)
    assert off(tmp_path / "alone", tmp_path / "out", small.merged) < 1e-5


# Rank 1 cannot read some of the weights that it reads for both.
CANNOT_READ = """
import os
from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import CheckpointError
read = Checkpoint.read
def fails(self, name, *how):
    if "layers.1." in name and "experts" in name:
        raise CheckpointError("the disk fails")
    return read(self, name, *how)
if os.environ["RANK"] == "1":
    Checkpoint.read = fails
"""


def test_weights_that_one_process_cannot_read_end_all(small, tmp_path):
    one = calibration(small, tmp_path)
    (code, words), (own_code, own_words) = together({2: [one]}, before=CANNOT_READ)
    assert (code, own_code) == (ResourceError.exit_code, CheckpointError.exit_code)
    assert f"{small.merged} cannot be read by rank 1, which reads parts of it for rank 0" in words
    assert own_words.startswith("the disk fails")


# Rank 1 is on a machine that has no journal.
ELSEWHERE = """
import os, pathlib
if os.environ["RANK"] == "1":
    isdir, opened = os.path.isdir, pathlib.Path.open
    def seen(path):
        return ".journal" not in str(path) and isdir(path)
    def read(self, *how, **more):
        if ".journal" in str(self):
            raise FileNotFoundError(self)
        return opened(self, *how, **more)
    os.path.isdir, pathlib.Path.open = seen, read
"""


@pytest.mark.slow
def test_a_journal_that_others_do_not_see_is_sent_to_them(small, tmp_path):
    one = calibration(small, tmp_path, resume=True)
    together({2: [one]}, before=DIES)
    assert (tmp_path / ".out.journal").is_dir()
    for code, words in together({2: [one]}, before=ELSEWHERE):
        assert code == 0, words
    assert json.loads((tmp_path / "report.1").read_text())["resumed"] == 1
    small.calibrate(tmp_path / "alone", **EXACT)
    assert off(tmp_path / "alone", tmp_path / "out", small.merged) < 1e-5


def test_few_batches_are_divided_among_processes():
    rows = tuple(torch.arange(n, n + 5) for n in range(7))
    domain = Domain("math", rows, held_out=Domain("math", rows[:4]))
    groups = divided(make_batches([domain]), 3)
    assert [len(group) for group in groups] == [3, 3]
    assert sorted(place for batch in groups[0] for place in batch.places) == list(range(7))
    for batch in groups[0]:
        for place, ids in zip(batch.places, batch.input_ids, strict=True):
            assert torch.equal(ids, rows[place])
    with pytest.raises(DataError, match="'math' has 4 rows held out for 5 processes"):
        divided(make_batches([domain]), 5)
