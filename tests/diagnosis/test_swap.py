"""Routers of one model in another: as a folder, and while it is diagnosed."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import moemerge
import quantised_zoo as qz
import zoo
from moemerge.errors import ArchitectureError, CheckpointError, NumericalError, UsageError
from moemerge.families.opened import open_model
from moemerge.families.roles import ROUTING_ROLES
from repairs.calibration import cases

# A plain one, one with a bias on the logits, one with selection biases, one with scales and tables.
FAMILIES = ("olmoe", "gpt_oss", "deepseek_v3", "gemma4_text", "deepseek_v4", "zaya")


def routing(folder):
    model = open_model("m", folder)
    names = model.checkpoint.tensors
    return {n for n in names if model.architecture.role(n) in ROUTING_ROLES}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_has_exactly_the_others_routers(family, zoo_folder, tmp_path):
    model = zoo_folder(family)
    other = zoo.perturb(model, tmp_path / "other", seed=1, scale=0.3)
    report = moemerge.swap_routers(model, other, tmp_path / "out")
    mine, theirs, out = (zoo.tensors(f) for f in (model, other, tmp_path / "out"))
    assert out.keys() == mine.keys()
    names = routing(model)
    assert names
    assert set(report.tensors) == names
    for name, tensor in out.items():
        assert torch.equal(tensor, (theirs if name in names else mine)[name]), name
    zoo.assert_loads(tmp_path / "out")


def test_some_layers_and_links(zoo_folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(zoo_folder("olmoe", shard_size="20KB"), model)
    (model / "README.md").write_text("# A merge\n\nMade by somebody.")
    (model / "moemerge_config.yml").write_text("merge_method: ties\n")
    other = zoo.perturb(model, tmp_path / "other", seed=1)
    report = moemerge.swap_routers(model, other, tmp_path / "out", layers="last:1", link=True)
    assert report.layers == (2,)
    changed = cases.changed_tensors(model, tmp_path / "out")
    assert changed == {"model.layers.2.mlp.gate.weight"} == set(report.tensors)
    shards = sorted(model.glob("*.safetensors"))
    linked = [s for s in shards if s.samefile(tmp_path / "out" / s.name)]
    assert len(linked) == len(shards) - 1
    told = json.loads((tmp_path / "out" / "moemerge_report.json").read_text())["swap"]
    assert told == report.to_json()
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("# A merge\n\nMade by somebody.\n\n## Swapped routers\n\n")
    assert f"The routers of layers 2 are those of `{other}`" in card
    config = (tmp_path / "out" / "moemerge_config.yml").read_text().splitlines()
    assert config[0].startswith("# The routers of layers 2")
    assert config[1] == "merge_method: ties"
    with pytest.raises(CheckpointError, match="exists"):
        moemerge.swap_routers(model, other, tmp_path / "out")
    moemerge.swap_routers(model, other, tmp_path / "out", overwrite=True)
    assert len(cases.changed_tensors(model, tmp_path / "out")) == 3


def test_layouts_and_dtypes_may_differ(zoo_folder, tmp_path):
    model = zoo.build("mixtral", tmp_path / "model", fused=True, dtype=torch.bfloat16)
    other = zoo_folder("mixtral", seed=4)
    report = moemerge.swap_routers(model, other, tmp_path / "out")
    out, theirs = zoo.tensors(tmp_path / "out"), zoo.tensors(other)
    for name, donor in zip(sorted(report.tensors), sorted(routing(other)), strict=True):
        assert name != donor
        assert torch.equal(out[name], theirs[donor].bfloat16())
    assert "rounded from float32 to bfloat16" in report.notices[0]


def test_what_does_not_fit_is_refused(zoo_folder, tmp_path):
    olmoe, out = zoo_folder("olmoe"), tmp_path / "out"
    for other, words in (
        (zoo_folder("mixtral"), "is 'mixtral', but"),
        (zoo_folder("olmoe", num_experts=4), r"is \[8, 32\] in .* and \[4, 32\] in"),
        (zoo_folder("olmoe", num_hidden_layers=2), "their routers differ in kind"),
    ):
        with pytest.raises(ArchitectureError, match=words):
            moemerge.swap_routers(olmoe, other, out)
    dense = zoo.dense_llama(tmp_path / "dense")
    with pytest.raises(ArchitectureError, match="no experts, so there is no router to swap"):
        moemerge.swap_routers(dense, dense, out)
    with pytest.raises(UsageError, match="the model has 3 layers"):
        moemerge.swap_routers(olmoe, zoo_folder("olmoe", seed=1), out, layers="7")
    with pytest.raises(CheckpointError, match="input"):
        moemerge.swap_routers(olmoe, olmoe, olmoe, overwrite=True)
    assert not out.exists()


def test_routers_that_are_not_finite_are_refused(zoo_folder, tmp_path):
    name = "model.layers.1.mlp.gate.weight"
    donor = zoo.spoilt(zoo_folder("olmoe"), tmp_path / "donor", name)
    with pytest.raises(NumericalError, match=r"layers\.1\.mlp\.gate\.weight holds NaN"):
        moemerge.swap_routers(zoo_folder("olmoe"), donor, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_swaps_in_a_diagnosis_are_those_of_swapped_folders(family, case_of, tmp_path):
    case = case_of(family)
    found = case.diagnose(swaps=True)
    assert [(s.domain, s.weights_of, s.routers_of) for s in found.swaps] == [
        (domain, *pair)
        for domain in case.sources
        for pair in (("model", "model"), ("model", domain), (domain, "model"), (domain, domain))
    ]
    folders = {"model": case.merged, **case.sources}
    for swap in (s for s in found.swaps if s.domain == "math"):
        total = found.total("math")
        if swap.weights_of != swap.routers_of:
            folder = tmp_path / swap.weights_of
            moemerge.swap_routers(folders[swap.weights_of], folders[swap.routers_of], folder)
            total = moemerge.diagnose(
                zoo.tiny_tokenizer(folder),
                sources={"math": case.sources["math"]},
                data={"math": case.data["math"]},
            ).total("math")
        own = swap.weights_of == swap.routers_of == "math"
        assert swap.mismatch == pytest.approx(0 if own else total.mismatch, abs=1e-12)
        assert swap.loss == pytest.approx(total.loss_source if own else total.loss, rel=1e-12)


@pytest.fixture
def quantised(case_of, tmp_path):
    """A case whose merged model is quantised."""
    kind = qz.KINDS["qwen fp8"]
    case = case_of(kind.family, dtype=torch.bfloat16)
    return replace(case, merged=kind.publish(case.merged, tmp_path / "quantised", shards=2))


def test_diagnosis_and_statistics(quantised, tmp_path):
    plain = qz.plain_copy(quantised.merged, tmp_path / "plain")
    rows = [case.diagnose().rows() for case in (quantised, replace(quantised, merged=plain))]
    assert figures(rows[0]) == figures(rows[1])
    files = []
    for folder in (quantised.merged, plain):
        files.append(tmp_path / f"{folder.name}.stats")
        moemerge.collect_statistics(folder, files[-1], data=quantised.data["math"])
    ours, theirs = (load_file(file) for file in files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def figures(rows):
    return [{k: v for k, v in row.items() if k != "model"} for row in rows]


def test_routers_are_swapped_and_all_else_is_copied(quantised, tmp_path):
    merged, math = quantised.merged, quantised.sources["math"]
    report = moemerge.swap_routers(merged, math, tmp_path / "out")
    before, after = zoo.tensors(merged), zoo.tensors(tmp_path / "out")
    routers = zoo.tensors(math)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        wanted = routers[name] if name in report.tensors else before[name]
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), name
    assert zoo.read_config(tmp_path / "out") == zoo.read_config(merged)
