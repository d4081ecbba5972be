"""Every family is refitted, or refused with its reason; what can be of the refused ones is."""

import re

import pytest

import multimodal_zoo
import zoo
from moemerge.errors import ArchitectureError
from repairs.calibration import cases as calibrating
from repairs.refitting.cases import make_case

# Their routers are no linear maps, so nothing stops before them.
UNROUTED = ("zaya", "doge")
# Their experts cannot be read one by one.
REFUSED = ("dbrx", "jetmoe", "longcat_flash", "llama4_text", "step3p5")
# A norm behind the attention: no sum of outputs gives the hidden state.
NORMED = ("flex_olmo", "gemma4_text", "afmoe", "muse_spark_text")
# What stays as merged in every family.
UNTOUCHED = re.compile(r"norm|embed|bias|conv1d|conv\.(conv\.)?weight|shared_expert_gate")
SERVED = zoo.by_kind(
    name for name in (*zoo.FAMILIES, *multimodal_zoo.FAMILIES) if name not in (*REFUSED, *UNROUTED)
)
CHEAP = {"ridge": 0.1, "holdout": 0.0, "router": "keep"}


@pytest.mark.parametrize("family", SERVED)
def test_a_family_is_refitted(family, zoo_folder, tmp_path):
    case = make_case(zoo_folder(family), tmp_path / "case", rows=4)
    out = tmp_path / "out"
    report = case.refit(out, **CHEAP)
    rows = [row for layer in report.layers for row in layer["maps"]]
    experts = [row for row in rows if "experts" in row]
    assert experts
    assert {row["map"].rpartition(".")[0] for row in experts} == {
        row["map"].rpartition(".")[0] for row in rows if ".experts." in row["map"]
    }
    for kind, left in report.totals["error_left"]["calibration"].items():
        assert left is not None, kind
        assert left <= 1, kind
    changed = calibrating.changed_tensors(case.merged, out)
    assert changed
    assert [name for name in changed if UNTOUCHED.search(name)] == []
    assert family not in NORMED or {row["target"] for row in rows} == {"output"}


@pytest.mark.parametrize("family", REFUSED)
def test_one_that_is_refused_still_has_its_attention_and_routers(family, zoo_folder, tmp_path):
    case = make_case(zoo_folder(family), tmp_path / "case", rows=4)
    with pytest.raises(ArchitectureError, match="cannot be refitted"):
        case.refit(tmp_path / "out", **CHEAP)
    assert not (tmp_path / "out").exists()
    parts = {**CHEAP, "parts": "router,attention", "router": "exact"}
    report = case.refit(tmp_path / "out", **parts)
    assert report.totals["maps"] > 0
    assert report.totals["routers"] > 0
    changed = calibrating.changed_tensors(case.merged, tmp_path / "out")
    assert changed
    assert any("router" in name or ".gate." in name for name in changed)
    assert not any("expert" in name for name in changed if "router" not in name)


@pytest.mark.parametrize("family", UNROUTED)
def test_one_without_linear_routers_is_refused(family, zoo_folder, tmp_path):
    case = make_case(zoo_folder(family), tmp_path / "case", rows=4)
    with pytest.raises(ArchitectureError, match="not a single linear map of its input"):
        case.refit(tmp_path / "out", **CHEAP)
    assert not (tmp_path / "out").exists()
