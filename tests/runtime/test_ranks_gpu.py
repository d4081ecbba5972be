"""Two processes on one card, which talk by gloo, give what one process gives there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import moemerge
import zoo
from repairs.calibration import cases
from together import job, off, together

ON_GPU = {"device": "cuda:0", "dtype": "float64"}


@pytest.mark.gpu
def test_two_ranks_on_one_card(zoo_folder, tmp_path):
    case = cases.make_case(zoo_folder("olmoe"), tmp_path, rows=8)
    for source in case.sources.values():
        zoo.tiny_tokenizer(source)
    given = {"sources": case.sources, "data": case.data, **ON_GPU}
    both = {}
    for out in (tmp_path / "alone", tmp_path / "both"):
        out.mkdir()
        both[out.name] = [
            job("calibrate", case.merged, out / "routers", report=out / "routers.json",
                rtol=1e-11, **given),
            job("diagnose", case.merged, report=out / "figures.json", **given),
            job("collect_statistics", case.sources["math"], out / "gram", report=out / "gram.json",
                data=str(case.data["math"]), kind="gram", **ON_GPU),
            job("collect_statistics", case.sources["math"], out / "fisher",
                report=out / "fisher.json", data=str(case.data["math"]), kind="fisher", **ON_GPU),
            job("refit", case.merged, out / "maps", report=out / "maps.json", holdout=0.4, **given),
        ]  # fmt: skip
    for one in both["alone"]:
        done = getattr(moemerge, one["name"])(*one["words"], **one["options"])
        Path(f"{one['report']}.0").write_text(json.dumps(done.to_json()))
    for code, words in together({2: both["both"]}):
        assert code == 0, words
    for name, close in (("routers", 1e-5), ("maps", 1e-4)):
        folders = (tmp_path / where / name for where in ("alone", "both"))
        assert off(*folders, case.merged) < close, name
    for name in ("gram", "fisher"):
        ours, theirs = (load_file(tmp_path / where / name) for where in ("alone", "both"))
        for key, value in ours.items():
            close = 1e-6 * float(value.abs().max())
            assert torch.allclose(value, theirs[key], rtol=1e-5, atol=close), key
    figures = [
        json.loads((tmp_path / where / "figures.json.0").read_text())["layers"]
        for where in ("alone", "both")
    ]
    for one, other in zip(*figures, strict=True):
        assert one["mismatch"] == pytest.approx(other["mismatch"], rel=1e-9)
