"""A quantised model is refitted as its dequantised copy is, and written in floats or as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import moemerge
import quantised_zoo as qz
import zoo
from calibration.cases import changed_tensors
from moemerge.cli.app import app
from moemerge.errors import UsageError
from refitting.cases import Case, make_case

SETTINGS: dict[str, Any] = {"ridge": 0.01, "holdout": 0.2, "router": "keep"}


@pytest.fixture(scope="module")
def plain(zoo_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Case:
    base = zoo_folder("qwen3_moe", num_hidden_layers=2, dtype=torch.bfloat16)
    return make_case(base, tmp_path_factory.mktemp("case"), scale=0.3)


@pytest.fixture(scope="module")
def case(plain: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The merged model in FP8, one of its sources in INT4."""
    folder = tmp_path_factory.mktemp("quantised")
    merged = qz.KINDS["qwen fp8"].publish(plain.merged, folder / "merged", shards=2)
    math = qz.convert(plain.sources["math"], folder / "math", qz.INT4, qz.packed(4, 8))
    return Case(merged, {**plain.sources, "math": math}, plain.data)


def test_floats_by_default(case: Case, tmp_path: Path) -> None:
    case.refit(tmp_path / "out", **SETTINGS)
    copy = qz.plain_copy(case.merged, tmp_path / "plain")
    Case(copy, case.sources, case.data).refit(tmp_path / "expected", **SETTINGS)
    ours, theirs = zoo.tensors(tmp_path / "out"), zoo.tensors(tmp_path / "expected")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "quantization_config" not in zoo.read_config(tmp_path / "out")


def test_written_back_as_it_was(case: Case, tmp_path: Path) -> None:
    report = case.refit(tmp_path / "out", requantize="same", **SETTINGS)
    case.refit(tmp_path / "floats", **SETTINGS)
    assert zoo.read_config(tmp_path / "out") == zoo.read_config(case.merged)
    stored = {name: (t.shape, t.dtype) for name, t in zoo.tensors(tmp_path / "out").items()}
    assert stored == {n: (t.shape, t.dtype) for n, t in zoo.tensors(case.merged).items()}
    floats = zoo.tensors(tmp_path / "floats")
    error = size = 0.0
    with moemerge.Checkpoint.open(tmp_path / "out") as written:
        assert written.quantisation is not None
        for name, tensor in floats.items():
            if name not in written.quantisation.units:
                assert torch.equal(written[name], tensor), name
            else:
                error += float((written[name].double() - tensor.double()).square().sum())
                size += float(tensor.double().square().sum())
    (told,) = report.to_json()["requantised"].values()
    assert told["tensors"] == len(written.quantisation.units)
    assert told["relative_error"] == pytest.approx((error / size) ** 0.5, rel=1e-4)
    assert 0.0 < told["relative_error"] < 0.03


def test_a_plain_model_cannot_be_written_back(plain: Case, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not quantised"):
        plain.refit(tmp_path / "out", requantize="same", **SETTINGS)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def rounded_merge(plain: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Merged from FP8 models by moemerge, and rounded to FP8 again."""
    folder = tmp_path_factory.mktemp("rounded")
    publish = qz.KINDS["qwen fp8"].publish
    fp8 = {name: publish(path, folder / name) for name, path in plain.sources.items()}
    for path in fp8.values():
        zoo.tiny_tokenizer(path)
    models = [{"model": str(path), "parameters": {"weight": 1}} for path in fp8.values()]
    config = {"merge_method": "linear", "models": models}
    moemerge.merge(config, folder / "merged", requantize="same")
    return Case(folder / "merged", fp8, plain.data)


@pytest.mark.parametrize(
    ("job", "settings", "needed"),
    [
        ("calibrate", {}, " (with `--requantize same`)"),
        ("refit", {**SETTINGS, "requantize": "same"}, " (with `--requantize same`)"),
        ("refit", SETTINGS, ""),  # floats: the merge is taken as it is
    ],
)
def test_the_card_names_what_makes_it_again(
    rounded_merge: Case, tmp_path: Path, job: str, settings: dict[str, Any], needed: str
) -> None:
    made = tmp_path / "made"
    sources, data = rounded_merge.sources, rounded_merge.data
    repair = getattr(moemerge, job)
    repair(rounded_merge.merged, made, sources=sources, data=data, measure=False, **settings)
    assert f"which makes this model again{needed}:" in (made / "README.md").read_text()
    flags = ["--requantize", "same"] if needed else []
    again = [str(made / "moemerge_config.yml"), str(tmp_path / "again"), "--no-measure"]
    result = CliRunner().invoke(app, ["run", *again, *flags])
    assert result.exit_code == 0, result.output
    assert changed_tensors(made, tmp_path / "again") == set()
    if job == "calibrate":  # calibrated again, it is no merge of ours: taken as it is
        repair(made, tmp_path / "twice", sources=sources, data=data, measure=False)
        card = (tmp_path / "twice" / "README.md").read_text()
        assert "again (with `--requantize same`):" in card
        assert "passthrough" in card
