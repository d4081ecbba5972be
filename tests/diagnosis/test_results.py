"""The document, the table, the data frame."""

import json
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import zoo
from moemerge.checkpoint import Checkpoint
from moemerge.errors import UsageError

DOCUMENT = {
    "kind", "version", "command", "created", "model", "models", "sources", "domains", "figures",
    "layers", "totals", "swaps", "calibration", "calibration_of", "verdict", "advice", "settings",
    "check", "device", "dtype", "notices", "refit", "refit_of", "seconds",
}  # fmt: skip
ROW = {
    "model", "domain", "layer", "router", "tokens", "mismatch", "any_mismatch", "top1_agreement",
    "weighted_overlap", "kl", "kl_on_features", "mismatch_on_features", "quadratic", "logit_shift",
    "shift_small", "shift_moderate", "load_source", "load", "entropy_source", "entropy", "dead",
    "overloaded", "drift", "flow",
}  # fmt: skip


@pytest.fixture(scope="module")
def found(case):
    return case.diagnose(against=[case.sources["math"]], swaps=True)


def test_the_document_is_json_with_the_names_that_pages_read(found):
    document = found.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document.keys() == DOCUMENT
    assert document["kind"] == "diagnosis"
    assert document["models"][0]["name"] == "model"
    other = document["models"][1]["name"]
    assert document["sources"].keys() == document["domains"].keys() == {"math", "code"}
    assert {(r["model"], r["domain"], r["layer"]) for r in document["layers"]} == {
        (m, d, n) for m in ("model", other) for d in ("math", "code") for n in range(3)
    }
    for row in document["layers"]:
        assert row.keys() >= ROW
        assert len(row["load"]) == len(row["load_source"]) == zoo.EXPERTS
        assert row["flow"] == sorted(row["flow"], key=lambda entry: -entry[2])
        assert sum(share for *_, share in row["flow"]) <= row["mismatch"] * (1 + 1e-6)
    assert {"loss", "loss_source", "mismatched_per_token"} <= document["totals"][0].keys()
    assert document["model"] == {
        "label": found.model.label,
        "architecture": "olmoe",
        "layers": 3,
        "experts": zoo.EXPERTS,
        "top_k": zoo.TOP_K,
        "gate": "softmax over all experts, top 2",
        "routers": 3,
    }
    assert len(document["verdict"]["numbers"]) == 3
    assert document["calibration"] is None


def test_a_source_against_itself_is_at_zero_in_its_domain(found):
    name = found.models[1].name
    assert found.total("math", name).mismatch == 0
    assert found.total("code", name).mismatch > 0
    with pytest.raises(UsageError, match="no figures of 'model' on 'chat'"):
        found.total("chat")


def test_a_data_frame_needs_pandas(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert found.to_dataframe() == found.rows()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="needs pandas"):
        found.to_dataframe()


def test_the_report_of_a_calibrated_folder_is_part_of_it(case, tmp_path):
    case.calibrate(tmp_path / "out", layers="last:2")
    own = replace(case, merged=tmp_path / "out").diagnose()
    assert own.calibration_of == "model"
    assert [row["layer"] for row in (own.calibration or {})["layers"]] == [1, 2]
    beside = case.diagnose(against=tmp_path / "out")
    assert beside.calibration_of == str(tmp_path / "out")
    after = beside.total("math", beside.models[1].name)
    assert after.kl_on_features < beside.total("math").kl_on_features


def test_bfloat16_shards_and_padding(case_of):
    """In the model's own dtype; figures are near those of the same weights in float32."""
    case = case_of("olmoe", dtype=torch.bfloat16, shard_size="20KB")
    half, full = (case.diagnose(dtype=dtype) for dtype in ("bfloat16", "auto"))
    assert (half.dtype, full.dtype) == ("bfloat16", "float32")
    for domain in case.sources:
        assert half.total(domain).kl == pytest.approx(full.total(domain).kl, rel=0.1)
        assert half.total(domain).loss == pytest.approx(full.total(domain).loss, rel=0.02)


def test_everything_is_read_once(case, monkeypatch):
    read = Counter()
    plain = Checkpoint.read

    def counting(self, name, rows=None, *rest):
        read[self.path, name, rows] += 1
        return plain(self, name, rows, *rest)

    monkeypatch.setattr(Checkpoint, "read", counting)
    case.diagnose()
    for folder in (case.merged, *case.sources.values()):
        times = {name: n for (path, name, _), n in read.items() if path == folder}
        assert set(times.values()) == {1}
        assert times.keys() == zoo.tensors(folder).keys()
