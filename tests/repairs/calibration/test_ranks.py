"""Several processes calibrate together (torchrun, gloo)."""

import pytest
import torch

from moemerge.errors import DataError
from moemerge.runtime.ranks import LostRankError
from moemerge.text.batches import divided, make_batches
from moemerge.text.domains import Domain
from together import job, off, together

# Tight, so that what is left is rounding and not where CG happened to stop.
EXACT = {"rtol": 1e-11, "device": "cpu", "dtype": "float64"}

# In rank 1 the job ends before the second layer.
DIES = """
import os
from moemerge.repairs.layer import Layer
routers, layers = Layer.routers, []
def ends(self):
    layers.append(self.number)
    if len(layers) == 2:
        os._exit(9)
    return routers(self)
if os.environ["RANK"] == "1":
    Layer.routers = ends
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
