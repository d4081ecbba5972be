"""`moemerge convert`: the same model in another layout, and back to the same bytes."""

import pytest
import torch

import moemerge
import zoo
from moemerge.errors import ArchitectureError, NumericalError, UsageError

# Plain, other names, sigmoid with a selection bias, separate parts of one tensor, multimodal.
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "kimi_linear")


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family, zoo_folder, tmp_path):
    """The fused layout is what transformers saves; per-expert is the published one."""
    published = zoo_folder(family, dtype=torch.bfloat16)
    fused = zoo_folder(family, dtype=torch.bfloat16, fused=True)
    report = moemerge.convert(published, tmp_path / "fused", layout="fused")
    assert report.tensors_after < report.tensors_before
    zoo.assert_same(tmp_path / "fused", fused)
    moemerge.convert(tmp_path / "fused", tmp_path / "back", layout="per-expert")
    zoo.assert_same(tmp_path / "back", published)
    assert (tmp_path / "back" / "config.json").is_file()


def test_refusals(zoo_folder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="has the per-expert layout already"):
        moemerge.convert(zoo_folder("olmoe"), out, layout="per-expert")
    with pytest.raises(ArchitectureError, match="would not load the per-expert layout"):
        moemerge.convert(zoo_folder("gpt_oss"), out, layout="per-expert")
    assert not out.exists()


def test_an_expert_too_many_is_refused(zoo_folder, tmp_path):
    with zoo.edited(zoo_folder("olmoe"), tmp_path / "model") as tensors:
        for part in ("gate", "up", "down"):
            name = f"model.layers.1.mlp.experts.{{}}.{part}_proj.weight"
            tensors[name.format(zoo.EXPERTS)] = tensors[name.format(0)].clone()
    with pytest.raises(ArchitectureError, match=r"no place for 3 stored tensors .*experts"):
        moemerge.convert(tmp_path / "model", tmp_path / "out", layout="fused")
    assert not (tmp_path / "out").exists()


def test_values_that_are_not_finite(zoo_folder, tmp_path):
    name = "model.layers.1.self_attn.q_norm.weight"
    model = zoo.spoilt(zoo_folder("olmoe"), tmp_path / "model", name, torch.inf)
    with pytest.raises(NumericalError, match=f"{name} has values"):
        moemerge.convert(model, tmp_path / "out", layout="fused")
    assert not (tmp_path / "out").exists()
