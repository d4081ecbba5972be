"""LoRA: merged into the base's own layout, or kept as an adapter."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.tuning.cases import make_base, tune
from moemerge import Checkpoint
from moemerge.errors import ArchitectureError, UsageError
from repairs.calibration.cases import changed_tensors


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[4, 50, 23, 10, 7]])).logits


@pytest.mark.parametrize("family", [pytest.param("olmoe", marks=pytest.mark.slow), "qwen3_moe"])
def test_merged_and_kept_are_the_same_model(family, zoo_folder, tmp_path):
    """peft reads the adapter and runs it; we have merged it. Qwen3's first layer is dense."""
    base = make_base(zoo_folder(family), tmp_path / "base")
    report = tune(base, tmp_path / "merged", lora=4)
    tune(base, tmp_path / "adapter", lora=4, adapter=True)
    names = changed_tensors(base, tmp_path / "merged")
    for part in ("experts.0.gate_proj", "experts.7.down_proj", "mlp.gate.", "q_proj"):
        assert any(part in name for name in names), part
    assert not [name for name in names if "embed" in name or "lm_head" in name or "norm" in name]
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(logits(ours), logits(plain), atol=1e-2)
    torch.testing.assert_close(logits(ours), logits(adapted), atol=1e-4, rtol=1e-4)
    with Checkpoint.open(f"{base}+{tmp_path / 'adapter'}") as read:
        assert read.notices == ()
        merged = Checkpoint.open(tmp_path / "merged")
        assert all(torch.equal(read[name], merged[name]) for name in read)
    assert report.parameters < 60_000


def test_an_adapter_of_routers_changes_routers_alone(base, tmp_path):
    tune(base, tmp_path / "out", lora=2, only="routers")
    routers = {f"model.layers.{n}.mlp.gate.weight" for n in range(2)}
    assert changed_tensors(base, tmp_path / "out") == routers


def test_an_adapter_folder_holds_no_model(base, tmp_path):
    report = tune(base, tmp_path / "out", lora=2, adapter=True, steps=1)
    assert report.kind == "adapter"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "moemerge_config.yml",
        "moemerge_report.json",
    }
    assert "An adapter for" in (tmp_path / "out/README.md").read_text()


def test_what_cannot_be_is_refused_before_training(base, zoo_folder, tmp_path):
    with pytest.raises(UsageError, match="no rank"):
        tune(base, tmp_path / "out", adapter=True)
    tune(base, tmp_path / "adapter", lora=2, adapter=True, steps=1)
    with pytest.raises(UsageError, match="has an adapter already"):
        tune(f"{base}+{tmp_path / 'adapter'}", tmp_path / "out", lora=2)
    granite = make_base(zoo_folder("granitemoe"), tmp_path / "granite")
    with pytest.raises(ArchitectureError, match="cannot be merged into it"):
        tune(granite, tmp_path / "out", lora=2)
    assert {p.name for p in tmp_path.iterdir()} == {"base", "adapter", "granite"}


@pytest.mark.slow
def test_a_model_with_an_adapter_is_tuned_as_a_whole(base, tmp_path):
    tune(base, tmp_path / "adapter", lora=2, adapter=True)
    tune(f"{base}+{tmp_path / 'adapter'}", tmp_path / "out", only="routers")
    tune(base, tmp_path / "merged", lora=2)
    routers = {f"model.layers.{n}.mlp.gate.weight" for n in range(2)}
    assert changed_tensors(tmp_path / "merged", tmp_path / "out") == routers
