"""`moemerge extract-lora`: what peft and our own reader make of the adapter."""

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import moemerge
import zoo
from moemerge import Checkpoint
from moemerge.errors import ArchitectureError, CheckpointError, NumericalError


@pytest.fixture
def pair(zoo_folder, tmp_path):
    base = zoo_folder("olmoe")
    return zoo.perturb(base, tmp_path / "tuned", seed=7), base


def merged_by_peft(base, adapter):
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        merged = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return dict(merged.state_dict())


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "gpt_oss", "qwen2_moe"])
def test_full_rank_is_the_fine_tune_for_us_and_for_peft(family, zoo_folder, tmp_path):
    base, out = zoo_folder(family), tmp_path / "lora"
    tuned = zoo.perturb(base, tmp_path / "tuned", seed=7)
    report = moemerge.extract_lora(tuned, base, out, rank=1000)
    left_out = {row.name for row in report.parameters if row.error == 1}
    assert all(name.endswith(("bias", "sinks")) for name in left_out), left_out
    wanted = zoo.tensors(tuned)
    with Checkpoint.open(f"{base}+{out}") as read:
        assert read.notices == ()  # the order of lora_B is stated
        for name, value in wanted.items():
            if name not in left_out:
                torch.testing.assert_close(read[name], value, atol=2e-6, rtol=0, msg=name)
    theirs = merged_by_peft(base, out)
    model = AutoModelForCausalLM.from_pretrained(tuned)
    for name, value in model.state_dict().items():
        if name not in left_out:
            torch.testing.assert_close(theirs[name], value, atol=2e-6, rtol=0, msg=name)


def test_error_is_that_of_the_truncated_svd(pair, tmp_path):
    """Experts are stored one by one, but PEFT's gate and up are one matrix."""
    tuned, base = pair
    report = moemerge.extract_lora(tuned, base, tmp_path / "lora", rank=4)
    change = {n: (v - zoo.tensors(base)[n]).double() for n, v in zoo.tensors(tuned).items()}
    layer = "model.layers.1.mlp.experts"
    errors = {row.name: row.error * row.norm for row in report.parameters}

    def lost(matrices):
        values = [torch.linalg.svdvals(m)[4:] for m in matrices]
        return float(torch.cat(values).norm())

    stacks = {
        f"{layer}.gate_up_proj": [
            torch.cat([change[f"{layer}.{e}.{p}_proj.weight"] for p in ("gate", "up")])
            for e in range(zoo.EXPERTS)
        ],
        "model.embed_tokens.weight": [change["model.embed_tokens.weight"]],
        "model.layers.0.mlp.gate.weight": [change["model.layers.0.mlp.gate.weight"]],
    }
    for name, matrices in stacks.items():
        assert errors[name] == pytest.approx(lost(matrices), rel=1e-5), name
    with Checkpoint.open(f"{base}+{tmp_path / 'lora'}") as read:
        missed = [(read[n] - v).double().norm() for n, v in zoo.tensors(tuned).items()]
    total = torch.stack([m.norm() for m in change.values()]).norm()
    assert report.error() == pytest.approx(float(torch.stack(missed).norm() / total), rel=1e-4)
    document = json.loads((tmp_path / "lora" / "moemerge_report.json").read_text())
    assert document["extract_lora"]["error"] == report.error()


def test_energy_chooses_the_rank(pair, tmp_path):
    tuned, base = pair
    report = moemerge.extract_lora(tuned, base, tmp_path / "lora", energy=0.6)
    name = "model.layers.0.self_attn.q_proj.weight"
    row = next(row for row in report.parameters if row.name == name)
    squares = torch.linalg.svdvals(zoo.tensors(tuned)[name] - zoo.tensors(base)[name]).square()
    share = squares.cumsum(0) / squares.sum()
    assert row.rank is not None
    assert share[row.rank - 1] >= 0.6 > share[row.rank - 2]
    assert row.error**2 == pytest.approx(1 - float(share[row.rank - 1]), rel=1e-4)
    theirs = merged_by_peft(base, tmp_path / "lora")  # ranks differ by parameter
    with Checkpoint.open(f"{base}+{tmp_path / 'lora'}") as ours:
        torch.testing.assert_close(theirs[name], ours[name])


@pytest.mark.parametrize(("layout", "fused"), [("in-out", True), ("per-expert", False)])
def test_layouts_of_older_readers(layout, fused, zoo_folder, tmp_path):
    base = zoo_folder("olmoe", fused=fused)
    tuned = zoo.perturb(base, tmp_path / "tuned", seed=7)
    moemerge.extract_lora(tuned, base, tmp_path / "lora", rank=1000, layout=layout)
    with Checkpoint.open(f"{base}+{tmp_path / 'lora'}") as read:
        for name, value in zoo.tensors(tuned).items():
            torch.testing.assert_close(read[name], value, atol=2e-6, rtol=0, msg=name)


def test_only_what_changed_is_in_the_adapter(zoo_folder, tmp_path):
    base = zoo_folder("olmoe")
    tuned, name = tmp_path / "tuned", "model.layers.1.mlp.experts.2.down_proj.weight"
    with zoo.edited(base, tuned) as values:
        values[name] += 0.02 * torch.randn(values[name].shape)
    report = moemerge.extract_lora(tuned, base, tmp_path / "lora", rank=2, dtype="bfloat16")
    assert [row.name for row in report.parameters] == ["model.layers.1.mlp.experts.down_proj"]
    theirs = merged_by_peft(base, tmp_path / "lora")
    with Checkpoint.open(f"{base}+{tmp_path / 'lora'}") as ours:
        torch.testing.assert_close(
            theirs["model.layers.1.mlp.experts.down_proj"][2], ours[name], atol=1e-6, rtol=0
        )


def test_relative_names_are_relative_to_the_adapter(pair, tmp_path, monkeypatch):
    _, base = pair
    (tmp_path / "base").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    moemerge.extract_lora("tuned", "base", "made/lora", rank=2)
    out = tmp_path / "made" / "lora"
    stated = json.loads((out / "adapter_config.json").read_text())
    assert stated["base_model_name_or_path"] == "../../base"
    for name in ("adapter_config.json", "README.md", "moemerge_config.yml", "moemerge_report.json"):
        assert str(tmp_path) not in (out / name).read_text(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms_keep_their_whole_change(dtype, zoo_folder, tmp_path):
    """Near 1, sixteen bits hold only large changes."""
    base, name = zoo_folder("olmoe"), "model.norm.weight"
    with zoo.edited(base, tmp_path / "tuned") as values:
        values[name] += 1e-4
        values["lm_head.weight"][0] += 0.1  # peft wants at least one pair of factors
    report = moemerge.extract_lora(tmp_path / "tuned", base, tmp_path / "lora", dtype=dtype)
    assert {row.name: row.error for row in report.parameters}[name] == 0
    with Checkpoint.open(f"{base}+{tmp_path / 'lora'}") as read:
        assert torch.equal(read[name], values[name])
    assert torch.equal(merged_by_peft(base, tmp_path / "lora")[name], values[name])


def test_factors_beyond_the_range_of_float16(zoo_folder, tmp_path):
    base, name = zoo_folder("olmoe"), "model.layers.0.self_attn.q_proj.weight"
    with zoo.edited(base, tmp_path / "tuned") as values:
        values[name] += 1e10
    with pytest.raises(NumericalError, match=rf"{name}: the factors .* do not fit into float16"):
        moemerge.extract_lora(tmp_path / "tuned", base, tmp_path / "lora", dtype="float16")
    assert not (tmp_path / "lora").exists()


def test_what_cannot_be_extracted_is_refused(pair, zoo_folder, tmp_path):
    tuned, base = pair
    out = tmp_path / "lora"
    for error, words, *models in (
        (CheckpointError, "do not differ", base, base),
        (ArchitectureError, "is 'mixtral'", zoo_folder("mixtral"), base),
        (CheckpointError, "expected", tuned, zoo_folder("olmoe", hidden_size=16)),
        (CheckpointError, "has 3 layers, but", tuned, zoo_folder("olmoe", num_hidden_layers=1)),
    ):
        with pytest.raises(error, match=words):
            moemerge.extract_lora(*models, out)
    with zoo.edited(tuned) as values:
        values["lm_head.weight"][0, 0] = torch.nan
    with pytest.raises(NumericalError, match="lm_head"):
        moemerge.extract_lora(tuned, base, out)
    assert [p.name for p in tmp_path.iterdir()] == ["tuned"]
