"""`inspect`'s words and numbers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import quantised_zoo as qz
import zoo
from moemerge.checkpoint import Checkpoint
from moemerge.families.describe import describe, describe_gate
from moemerge.families.reading import find_quantised
from moemerge.families.rules import BiasPlace, Gate, Score
from moemerge.runtime.dtypes import Dtype


def described(folder):
    checkpoint = Checkpoint.open(folder)
    return describe(checkpoint.config, checkpoint.tensors)


@pytest.mark.parametrize("model_type", zoo.FAMILIES)
def test_numbers(zoo_folder, model_type):
    folder = zoo_folder(model_type)
    tensors = zoo.tensors(folder)
    found = described(folder)
    assert found.model_type == model_type
    assert found.parameters == sum(t.numel() for t in tensors.values())
    assert found.total_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert 0 < found.router_parameters < found.active_parameters < found.parameters
    assert found.layers == found.moe_layers + found.dense_layers
    assert found.extra_layers == 0
    assert found.top_k == (1 if model_type in ("llama4_text", "zaya") else 2)
    assert found.calibratable == (model_type not in ("zaya", "doge"))
    assert found.gate
    integers = {"int64"} if model_type == "deepseek_v4" else set()
    assert set(found.parameters_by_dtype) == {"float32"} | integers
    same = described(zoo_folder(model_type, fused=True))
    assert same.active_parameters == found.active_parameters
    assert same.bytes_by_role == found.bytes_by_role


@pytest.mark.parametrize(
    ("model_type", "fused", "words"),
    [
        ("olmoe", False, "per expert"),
        ("olmoe", True, "fused"),
        ("gpt_oss", False, "fused, transposed, interleaved"),
        ("llama4_text", False, "fused, transposed"),
        ("dbrx", False, "flat"),
        ("doge", False, "one tensor for all"),
        ("jetmoe", False, "fused"),
    ],
)
def test_layout(zoo_folder, model_type, fused, words):
    assert described(zoo_folder(model_type, fused=fused)).layout == words


def test_active_parameters_of_olmoe(zoo_folder):
    found = described(zoo_folder("olmoe"))
    experts = 3 * 8 * 3 * 48 * 32  # layers, experts, projections
    assert found.parameters - found.active_parameters == experts * 6 // 8
    assert found.router_parameters == 3 * 8 * 32


def test_dense_layers_and_shared_experts(zoo_folder):
    found = described(zoo_folder("deepseek_v3"))
    assert (found.moe_layers, found.dense_layers, found.shared_experts) == (2, 1, True)
    assert "best 1 of 2 groups" in str(found.gate)


def test_reasons(zoo_folder, tmp_path):
    assert "sparsemixer" in str(described(zoo_folder("phimoe")).reason)
    assert "layers passed over: 0" in str(described(zoo_folder("deepseek_v4")).reason)
    dense = described(zoo.dense_llama(tmp_path))
    assert (dense.layout, dense.experts, dense.calibratable) == ("dense", None, False)
    assert "no experts" in str(dense.reason)


def test_quantised_is_not_calibratable(zoo_folder):
    folder = zoo_folder("olmoe")
    config = {**zoo.read_config(folder), "quantization_config": {"quant_method": "gptq"}}
    found = describe(config, zoo.tensors(folder))
    assert not found.calibratable
    assert "gptq" in str(found.reason)


def test_gate_in_words():
    gate = Gate(Score.SIGMOID, 2, normalised=False, selection_bias=BiasPlace.LOGITS, soft_cap=5.0)
    gate = replace(gate, scale=0.25)
    assert describe_gate(gate) == (
        "sigmoid, not renormalised over the top 2, logits times 0.25, logits capped at 5, "
        "choice moved by a bias on the logits"
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gpt-oss mxfp4", "float4_e2m1 in groups of 32"),
        ("deepseek fp8", "float8_e4m3fn in 8 x 8 blocks"),
        ("kimi int4", "int4 in groups of 8"),
        ("fp8 a tensor", "float8_e4m3fn with one scale"),
        ("llama4 fp8 a row", "float8_e4m3fn with a scale a row"),
        ("int8 a row", "int8 with a scale a row"),
    ],
)
def test_quantised_models(zoo_folder, tmp_path, kind, words):
    form = qz.KINDS[kind]
    plain = zoo_folder(form.family, dtype=torch.bfloat16, **form.sizes)
    folder = form.publish(plain, tmp_path / "quantised")
    found, expected = described(folder), described(plain)
    assert found.quantised == f"{words}; read as bfloat16"
    assert found.calibratable
    for name in ("parameters", "active_parameters", "router_parameters", "layout", "gate"):
        assert getattr(found, name) == getattr(expected, name), name
    tensors = zoo.tensors(folder)
    assert found.total_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert words in found.stored_by_role["expert"]
    assert found.stored_by_role["router"] == ("bfloat16",)
    quantised = sum(t.numel() for n, t in zoo.tensors(plain).items() if form.wanted(n, t))
    assert found.parameters_by_dtype[words] == quantised


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", Dtype.UINT8, "MXFP4"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", Dtype.FLOAT32, "block-scaled"),
        ("model.layers.0.mlp.up_proj.weight", Dtype.FLOAT8_E4M3FN, "float8_e4m3fn"),
        ("model.layers.0.mlp.up_proj.weight", Dtype.FLOAT4_E2M1FN_X2, "float4_e2m1fn_x2"),
        ("model.layers.0.mlp.up_proj.scale", Dtype.FLOAT8_E8M0FNU, "float8_e8m0fnu"),
        ("model.layers.0.mlp.up_proj.qweight", Dtype.INT32, "GPTQ"),
        ("model.layers.0.mlp.up_proj.weight_packed", Dtype.INT32, "packed"),
    ],
)
def test_tensors(name, dtype, words):
    found = find_quantised([{}], {name: SimpleNamespace(shape=(2, 2), dtype=dtype)})
    assert words in str(found)


def test_config_and_plain():
    plain = {"model.norm.weight": SimpleNamespace(shape=(2,), dtype=Dtype.BFLOAT16)}
    section = {"quantization_config": {"quant_method": "mxfp4"}}
    assert "mxfp4" in str(find_quantised([section], plain))
    assert find_quantised([{}], plain) is None
