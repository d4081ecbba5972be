"""Every family that can be served calibrates; what cannot be is refused or passed over."""

import pytest

import multimodal_zoo
import zoo
from calibration import cases
from moemerge.architectures.architecture import Architecture
from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError

REFUSED = ("zaya", "doge")
EVERY = (*zoo.FAMILIES, *multimodal_zoo.FAMILIES)
SERVED = zoo.by_kind(name for name in EVERY if name not in REFUSED)


@pytest.mark.parametrize("family", SERVED)
def test_a_family_calibrates(family, case_of, tmp_path):
    case = case_of(family)
    out = tmp_path / "out"
    report = case.calibrate(out, measure=False)
    checkpoint = Checkpoint.open(case.merged)
    places = Architecture.of(checkpoint.config, checkpoint.tensors).routers()
    served = [place for place in places if place.served]
    assert [row["router"] for row in report.layers] == [place.weight for place in served]
    assert {s.router for s in report.skipped} == {p.weight for p in places if not p.served}
    for row in report.layers:
        assert row["status"] == "converged", row
        before, after = (sum(row[key].values()) for key in ("kl_before", "kl_after"))
        assert after < before, row
    changed = {place.weight for place in served} | {p.bias for p in served if p.bias}
    assert cases.changed_tensors(case.merged, out) == changed
    zoo.assert_loads(out)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_served_is_refused(family, case_of, tmp_path):
    with pytest.raises(ArchitectureError, match=f"routers of {family} cannot be calibrated"):
        case_of(family).calibrate(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_dense_model_is_refused(tmp_path):
    dense = zoo.dense_llama(tmp_path / "dense")
    case = cases.make_case(dense, tmp_path)
    with pytest.raises(ArchitectureError, match="no experts"):
        case.calibrate(tmp_path / "out")
    assert not (tmp_path / "out").exists()
