"""Adapters: their arithmetic, the written model, and the memory of a large one."""

import dataclasses

import pytest
import torch

import moemerge
from moemerge.families.opened import open_model
from moemerge.forward.trainable import TrainedLayout
from moemerge.repairs.distill_memory import TrainingSize
from moemerge.repairs.distill_student import SCALE, Student, adapter_numel, factor_shapes
from repairs.calibration import cases
from repairs.distilling.test_run import FAST

CPU = torch.device("cpu")
GB = 1e9


@pytest.fixture(scope="module")
def case(case_of):
    return case_of("olmoe", num_hidden_layers=2, rows=30)


def student(model, rank, *, recompute=False):
    opened = open_model("merged", model)
    layout = TrainedLayout(opened, None, adapted=rank is not None)
    how = {"optimiser": "adamw", "recompute": recompute, "lora": rank, "seed": 0}
    return Student(opened, layout, CPU, torch.float32, **how)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_the_factors_follow_from_the_weights(case, recompute):
    """With W' = W + 2 B A and B = 0: dL/dB = 2 dL/dW' Aᵀ, and dL/dA = 0."""
    ids = torch.arange(2, 14).view(2, 6)
    whole, low = student(case.merged, None), student(case.merged, 4, recompute=recompute)
    for one in (whole, low):
        one.logits(ids).square().mean().backward()

    assert any(value.dim() == 3 for value in low.trained.values())
    for name in {name.rpartition(".")[0] for name in low.trained}:
        up, down = low.trained[f"{name}.lora_B"], low.trained[f"{name}.lora_A"]
        gradient = whole.trained[name].grad
        torch.testing.assert_close(
            up.grad, SCALE * gradient @ down.mT, rtol=1e-3, atol=1e-6 * float(gradient.abs().max())
        )
        assert down.grad is not None
        assert not down.grad.any()


def test_adapters_are_merged_into_the_weights(case, tmp_path):
    given = {"sources": case.sources, "data": case.data, **FAST, "lora": 4, "learning_rate": 1e-2}
    report = moemerge.distill(case.merged, tmp_path / "out", **given)

    changed = cases.changed_tensors(case.merged, tmp_path / "out")
    before, after = (cases.zoo.tensors(folder) for folder in (case.merged, tmp_path / "out"))
    for part in (".experts.", "self_attn.q_proj", "mlp.gate."):
        assert any(part in name for name in changed)
    for name in changed:
        assert min(before[name].shape) > 1
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 4
    for name in case.sources:
        assert report.held_out[report.kept_step][name] < report.held_out[0][name]
    again = moemerge.distill(tmp_path / "out", tmp_path / "again", **{**given, "steps": 1})
    for name, value in report.held_out[report.kept_step].items():
        assert again.held_out[0][name] == pytest.approx(value, rel=1e-4)


def test_biases_of_stacked_experts_have_no_adapters(zoo_folder):
    """They are (experts, outputs), and look like matrices."""
    layout = TrainedLayout(open_model("merged", zoo_folder("gpt_oss")), None, adapted=True)

    assert any(name.endswith("experts.down_proj") for name in layout.shapes)
    assert not any(name.endswith("bias") for name in layout.shapes)


def test_shapes_of_factors():
    assert factor_shapes((64, 2048, 1024), 16) == ((64, 2048, 16), (64, 16, 1024))
    assert factor_shapes((3, 8), 16) == ((3, 3), (3, 8))


# OLMoE-1B-7B: 16 layers of width 2048 with 64 experts of width 1024, eight per token.
LAYER = {
    **{f"{name}_proj": (2048, 2048) for name in "qkvo"},
    "gate": (64, 2048),
    "gate_up_proj": (64, 2048, 2048),
    "down_proj": (64, 2048, 1024),
}
OLMOE = TrainingSize(
    dtype=torch.bfloat16,
    total=6_919_161_856,
    matrices=6_919_161_856,
    largest=64 * 2048 * 2048,
    adapters=None,
    active=1_282_000_000,
    layers=16,
    width=2048,
    vocabulary=50304,
    recompute=True,
    micro_tokens=8_538,
)


def test_memory_of_a_large_model():
    """By hand, in GB: weights 13.8 and logits 8.6 in every case.

    AdamW: gradients 13.8, float32 copies and gradients 2 x 27.7, moments 55.4. Adafactor: gradients
    13.8. Adapters of 122 M: 16 bytes each, 1.9; a layer's matrices with gradients, 2 x 0.83.
    """
    factors = 16 * adapter_numel(LAYER, 16)
    assert factors == 16 * 16 * (4 * 4096 + 64 + 2048 + 64 * (4096 + 3072))
    low = dataclasses.replace(OLMOE, matrices=16 * 419_561_472, adapters=factors)
    activations = 8_538 * 2 * (16 * 2048 + 1.5 * (24 * 2048 + 3 * 1_282e6 / 16 / 2048)) / GB

    adamw, adafactor = OLMOE.needed_bytes("adamw") / GB, OLMOE.needed_bytes("adafactor") / GB
    lora = low.needed_bytes("adamw") / GB

    assert activations == pytest.approx(4.83, abs=0.01)
    assert adamw == pytest.approx(13.84 * 2 + 27.68 * 2 + 55.35 + 8.59 + 4.83, abs=0.1)
    assert adafactor == pytest.approx(13.84 * 2 + 5 * 4 * 2**26 / GB + 8.59 + 4.83, abs=0.1)
    assert lora == pytest.approx(13.84 + 1.90 + 2 * 0.839 + 8.59 + 4.83, abs=0.1)
    assert adafactor < 120
    assert lora < 60
