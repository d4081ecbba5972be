"""Sources with more experts than the model: how they are mapped, and what is refused."""

import json

import pytest
import torch

import moemerge
import zoo
from moemerge.errors import ArchitectureError, DataError, UsageError
from moemerge.families.opened import open_model
from moemerge.families.rules import Gate, Score
from moemerge.repairs.experts import ExpertMap, find_maps
from moemerge.routing.gates import probabilities
from repairs.pruning.cases import keep_of, slice_experts, text_for

LAYOUTS = [("olmoe", False), ("olmoe", True), ("mixtral", False), ("gpt_oss", False)]
LAYOUTS += [("deepseek_v3", False), ("granitemoe", False), ("ernie4_5_moe", False)]


def found(pruned, base, **files):
    maps = find_maps(open_model("merged", pruned), [open_model("o", base)], files)
    return {layer: one.to_json() for layer, one in maps["o"].items()}


@pytest.mark.parametrize(("family", "fused"), LAYOUTS)
def test_kept_experts_are_found_by_their_rows(family, fused, zoo_folder, tmp_path):
    base = zoo_folder(family, fused=fused)
    kept = {layer: ids[::-1] for layer, ids in keep_of(base, 6).items()}
    pruned = slice_experts(base, tmp_path / "pruned", kept)
    assert found(pruned, base) == kept


def test_another_dtype_is_no_change(zoo_folder, tmp_path):
    base = zoo_folder("olmoe")
    kept = keep_of(base, 5)
    pruned = slice_experts(base, tmp_path / "pruned", kept)
    with zoo.edited(pruned) as tensors:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert found(pruned, base) == kept


def test_changed_and_repeated_rows_are_refused(zoo_folder, tmp_path):
    base, name = zoo_folder("olmoe"), "model.layers.1.mlp.gate.weight"
    pruned = slice_experts(base, tmp_path / "pruned", keep_of(base, 5))
    with zoo.edited(pruned) as tensors:
        tensors[name][2, 3] += 1e-3
    with pytest.raises(ArchitectureError, match=r"layer 1: .*row 2 equals no row"):
        found(pruned, base)
    with zoo.edited(pruned) as tensors:
        tensors[name][2] = tensors[name][1]
    with pytest.raises(ArchitectureError, match=r"layer 1: .*two rows equal row"):
        found(pruned, base)


def test_equal_rows_of_the_source_are_refused(zoo_folder, tmp_path):
    base = tmp_path / "base"
    with zoo.edited(zoo_folder("olmoe"), base) as tensors:
        tensors["model.layers.0.mlp.gate.weight"][4] = tensors["model.layers.0.mlp.gate.weight"][1]
    pruned = slice_experts(base, tmp_path / "pruned", {layer: [0, 1, 2] for layer in range(3)})
    with pytest.raises(ArchitectureError, match=r"layer 0: .*row 1 equals 2 rows"):
        found(pruned, base)
    with pytest.raises(UsageError, match="which is not a source"):
        found(pruned, base, other=tmp_path / "map.json")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (None, "layer 1 is missing"),
        ([0, 1], "2 experts, but the model has 3"),
        ([0, 1, 8], "8 is not an expert"),
        ([0, 1, True], "True is not an expert"),
        ([0, 1, 1], "expert 1 of the source appears twice"),
        ([0, 1, []], "no expert of the source behind"),
        ("012", "no list"),
    ],
)
def test_a_wrong_file_is_refused(layer, words, zoo_folder, tmp_path):
    base, file = zoo_folder("olmoe"), tmp_path / "map.json"
    pruned = slice_experts(base, tmp_path / "pruned", {layer: [0, 1, 2] for layer in range(3)})
    layers = {"0": [0, 1, 2], "1": layer, "2": [0, 1, 2]}
    file.write_text(json.dumps({n: ids for n, ids in layers.items() if ids is not None}))
    with pytest.raises(DataError, match=f"layer 1.*{words}|{words}"):
        found(pruned, base, o=file)


@pytest.mark.parametrize("score", list(Score))
def test_several_experts_behind_one_have_their_sum(score):
    gate = Gate(score, 2, scale=1.5)
    z = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    groups = ((0, 3), (2,), (5, 1, 4))
    p = probabilities(gate, z)
    expected = torch.stack([p[:, list(group)].sum(dim=1) for group in groups], dim=1)
    torch.testing.assert_close(probabilities(gate, ExpertMap(groups).combine(gate, z)), expected)


def test_merged_experts_are_repaired_and_diagnosed(zoo_folder, tmp_path):
    """Two experts of the source behind one: gate and up of it stay, everything else is fitted."""
    base = zoo_folder("olmoe", num_hidden_layers=2, tokenizer=True)
    pruned = slice_experts(base, tmp_path / "pruned", {layer: [0, 1, 2, 3] for layer in (0, 1)})
    data, file = {"o": text_for(pruned)}, tmp_path / "map.json"
    groups = {str(layer): [[0, 4], 1, [2, 5, 6], 3] for layer in (0, 1)}
    file.write_text(json.dumps(groups))
    options = {"sources": {"o": base}, "data": data, "experts": {"o": file}, "device": "cpu"}
    out = tmp_path / "out"
    report = moemerge.refit(pruned, out, **options, ridge=0.01, holdout=0.0)
    assert report.to_json()["experts"] == {"o": groups}
    before, after = zoo.tensors(pruned), zoo.tensors(out)
    name = "model.layers.1.mlp.experts.{}.{}_proj.weight"  # whose inputs have changed
    same = {e: torch.equal(before[n], after[n]) for e in range(4) for n in [name.format(e, "up")]}
    assert same == {0: True, 1: False, 2: True, 3: False}
    # The report of OUT has the map: its rows have changed.
    diagnosis = moemerge.diagnose(out, sources={"o": base}, data=data, device="cpu")
    assert diagnosis.total("o").tokens > 0
    calibrated = moemerge.calibrate(pruned, tmp_path / "calibrated", **options, holdout=0.2)
    assert calibrated.totals["kl_after"]["o"] < calibrated.totals["kl_before"]["o"]
