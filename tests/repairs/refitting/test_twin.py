"""Every refitted map is that of a dense float64 computation with nothing of ours in it."""

import pytest
import torch

import zoo
from collecting.direct import whole_model
from repairs.refitting.cases import make_case
from repairs.refitting.dense import Twin

RIDGE = 0.003
# Plain; biases in experts (gpt_oss) and attention (qwen2_moe); a shared expert with a gate and a
# dense layer (qwen2_moe); sigmoid gates, latent attention and shared experts (deepseek_v3).
FAMILIES = ("qwen3_moe", "gpt_oss", "qwen2_moe", "deepseek_v3")


def worst(twin, out):
    """The largest error of any map, as a share of its move; other tensors must be untouched."""
    found = (0.0, "")
    for name, new in whole_model(out).named_parameters():
        wanted, old = twin.model.get_parameter(name), twin.before[name]
        if torch.equal(wanted, old):
            assert torch.equal(new, old), name
            continue
        # Of a stack of experts each is a map of its own.
        flat = [t.unsqueeze(0) if t.dim() == 2 else t for t in (new, wanted, old)]
        for expert, (mine, theirs, before) in enumerate(zip(*flat, strict=True)):
            move = (theirs - before).norm()
            gap = (mine - theirs).norm()
            assert move > 0 or gap == 0, (name, expert)
            if move > 0:
                found = max(found, (float(gap / move), f"{name} {expert}"))
    return found


# The twin runs whole models for every map: layers and sources cost it most.
@pytest.mark.parametrize(
    ("family", "sources"), [*((family, 2) for family in FAMILIES), ("olmoe", 3)]
)
def test_every_map_is_the_dense_one(family, sources, zoo_folder, tmp_path):
    base = zoo_folder(family, num_hidden_layers=2)
    case = make_case(base, tmp_path / "case", sources=sources, rows=6)
    case.refit(tmp_path / "out", ridge=RIDGE, holdout=0.0, router="keep")
    twin = Twin(case.merged, case.sources, case.rows(), RIDGE).refit()
    error, where = worst(twin, tmp_path / "out")
    assert error < 1e-4, where


def test_weights_of_sources_and_a_tied_head(tmp_path):
    """A dense model, its head tied to its embedding; one source counts three times."""
    base = zoo.dense_llama(tmp_path / "base", tied=True, qwen=True, layers=2)
    case = make_case(base, tmp_path / "case", rows=6)
    report = case.refit(tmp_path / "out", ridge=RIDGE, holdout=0.0, weights={"code": 3.0})
    twin = Twin(case.merged, case.sources, case.rows(), RIDGE, code=3.0).refit(head=False)
    error, where = worst(twin, tmp_path / "out")
    assert error < 1e-4, where
    assert any("shares its matrix with the embedding" in notice for notice in report.notices)


def test_another_layout_in_float64_is_right_to_the_last_digit_stored(zoo_folder, tmp_path):
    """Experts stored as stacks; what is left is rounding to float32."""
    case = make_case(zoo_folder("olmoe", fused=True), tmp_path / "case", rows=6)
    case.refit(tmp_path / "out", ridge=RIDGE, holdout=0.0, router="keep", dtype="float64")
    twin = Twin(case.merged, case.sources, case.rows(), RIDGE).refit()
    error, where = worst(twin, tmp_path / "out")
    assert error < 5e-6, where
