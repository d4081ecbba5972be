"""Damaged or lying quantised checkpoints are refused in our words, and nothing is written."""

import json

import pytest
import torch

import moemerge
import quantised_zoo as qz
from moemerge.checkpoint import Checkpoint
from moemerge.errors import CheckpointError, MoeMergeError, NumericalError

W = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
INT4 = qz.weights(4, "int", "group", group_size=8)
ASYMMETRIC = qz.weights(4, "int", "group", group_size=8, symmetric=False)


def fp8():
    return qz.fp8_config(8, 8), qz.block_fp8(8, 8)("a.weight", W)


def mxfp4():
    return {"quant_method": "mxfp4"}, qz.mxfp4("m.experts.down_proj", W.view(1, 32, 16))


def row():
    return qz.weights(8, "float", "channel"), qz.fp8_scaled("channel")("a.weight", W)


def modelopt():
    return qz.MODELOPT, qz.nvfp4(compressed=False)("a.weight", W)


def int4():
    return json.loads(json.dumps(INT4)), qz.packed(4, 8)("a.weight", W)


def asymmetric():
    parts = qz.packed(4, 8, zeros=True, shuffled=True)("a.weight", W)
    return json.loads(json.dumps(ASYMMETRIC)), parts


def channel():
    return qz.weights(4, "int", "channel"), qz.packed(4)("a.weight", W)


def drop(name):
    def change(section, parts):
        del parts[name]

    return change


def cut(name, rows=1):
    return lambda section, parts: parts.update({name: parts[name][:rows].clone()})


def cast(name, dtype):
    return lambda section, parts: parts.update({name: parts[name].to(dtype)})


def fill(name, value):
    def change(section, parts):
        parts[name].view(-1)[1] = value

    return change


def state(**values):
    return lambda section, parts: section.update(values)


def state_weights(**values):
    def change(section, parts):
        section["config_groups"]["group_0"]["weights"].update(values)

    return change


HEADERS = [
    (fp8, drop("a.weight_scale_inv"), "no a.weight_scale_inv"),
    (fp8, drop("a.weight"), "no quantised weight|none of them is"),
    (fp8, cut("a.weight_scale_inv"), r"needs scales \[2, 4\]"),
    (fp8, cast("a.weight_scale_inv", torch.int32), "int32.*needs scales"),
    (fp8, cast("a.weight", torch.bfloat16), "but is stored as bfloat16"),
    (fp8, cast("a.weight", torch.int8), "FP4 in bytes is not read"),
    (fp8, state(weight_block_size=[16, 16]), r"needs scales \[1, 2\]"),
    (fp8, state(weight_block_size=[0, 8]), "two whole numbers"),
    (fp8, state(weight_block_size="128"), "two whole numbers"),
    (fp8, state(weight_block_size=None), "with one scale needs scales"),
    (fp8, state(quant_method="mxfp4"), "none of them is|no quantised weight"),
    (mxfp4, drop("m.experts.down_proj_scales"), "no m.experts.down_proj_scales"),
    (mxfp4, drop("m.experts.down_proj_blocks"), "no m.experts.down_proj_blocks"),
    (mxfp4, cast("m.experts.down_proj_blocks", torch.int32), "int32, expected"),
    (mxfp4, state(quant_method="fp8"), "none of them is"),
    (row, drop("a.weight_scale"), "no a.weight_scale"),
    (row, cut("a.weight_scale", 3), r"needs scales \[16, 1\]"),
    (row, state_weights(strategy="tensor"), "with one scale needs scales"),
    (row, state_weights(type="int"), "states int of 8 bits"),
    (row, state_weights(num_bits=4), "states float of 4 bits"),
    (row, state_weights(strategy="token"), "strategy 'token'"),
    (row, state(config_groups=[]), "config_groups is"),
    (row, state(config_groups={"a": 3}), "config_groups is"),
    (row, state(config_groups={}), "no group"),
    (
        row,
        state(config_groups={"a": {"targets": ["re:("], "weights": {"strategy": "tensor"}}}),
        "an invalid pattern",
    ),
    (int4, drop("a.weight_scale"), "no a.weight_scale"),
    (int4, drop("a.weight_packed"), "no quantised weight|none of them is"),
    (int4, cut("a.weight_packed", 3), "is not 3 x 32|needs scales"),
    (int4, state_weights(num_bits=8), "is not 16 x 32 numbers of 8 bits"),
    (int4, state_weights(num_bits=3), "readable packs"),
    (int4, state_weights(group_size=16), "is not 16 x 64"),
    (int4, state_weights(group_size=0), "group_size 0"),
    (int4, state_weights(symmetric=False), "weight_zero_point is none"),
    (int4, cast("a.weight_packed", torch.int64), "stored as int64"),
    (modelopt, drop("a.weight_scale_2"), "no a.weight_scale_2"),
    (modelopt, cut("a.weight_scale", 3), r"needs scales \[16, 2\]"),
    (modelopt, cast("a.weight_scale", torch.float32), "NVFP4 has a matrix of uint8"),
    (asymmetric, cut("a.weight_zero_point"), r"weight_zero_point is \[1, 4\]"),
    (asymmetric, cut("a.weight_g_idx", 5), "each of 32 columns"),
    (channel, fill("a.weight_shape", -3), "two whole numbers"),
    (channel, fill("a.weight_shape", 77), "is not 16 x 77"),
    (channel, cut("a.weight_shape"), "two whole numbers"),
]


@pytest.mark.parametrize(("make", "change", "words"), HEADERS)
def test_refused_from_headers(make, change, words, tmp_path):
    section, parts = make()
    section, names = json.loads(json.dumps(section)), list(parts)
    change(section, parts)
    write(tmp_path, section, parts)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint.open(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    if "quantization_config: " not in message and "but none of them is" not in message:
        assert any(name in message for name in [*names, "'a.weight'", "'a'"])


@pytest.mark.parametrize("value", [{}, ["llama4"]], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_a_model_type_that_is_no_name(nested, value, tmp_path):
    write(tmp_path, *fp8())
    config = json.loads((tmp_path / "config.json").read_text())
    (config.setdefault("text_config", {}) if nested else config)["model_type"] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoeMergeError, match=r"model_type is .*, expected a name"):
        moemerge.inspect(tmp_path)


NUMBERS = [
    (fp8, fill("a.weight_scale_inv", 0.0), "not above zero and finite, the first is 0.0"),
    (fp8, fill("a.weight_scale_inv", float("nan")), "the first is nan"),
    (fp8, fill("a.weight_scale_inv", float("inf")), "the first is inf"),
    (fp8, fill("a.weight_scale_inv", -1.0), "the first is -1.0"),
    (fp8, fill("a.weight", float("nan")), "non-finite"),
    (mxfp4, fill("m.experts.down_proj_scales", 255), "the first is nan"),
    (row, fill("a.weight_scale", 0.0), "not above zero"),
    (modelopt, fill("a.weight_scale", float("nan")), "the first is nan"),
    (modelopt, lambda _, parts: parts["a.weight_scale_2"].zero_(), "not above zero"),
    (int4, fill("a.weight_scale", float("nan")), "the first is nan"),
    (
        asymmetric,
        lambda _, parts: parts["a.weight_g_idx"][:9].zero_(),
        "8 columns of 'a.weight' to each of 4 groups",
    ),
    (asymmetric, fill("a.weight_g_idx", 9), "8 columns of 'a.weight' to each of 4 groups"),
]


@pytest.mark.parametrize("requantize", ["no", "same"])
@pytest.mark.parametrize(("make", "change", "words"), NUMBERS)
def test_refused_while_merging(make, change, words, requantize, tmp_path):
    section, parts = make()
    change(section, parts)
    write(tmp_path / "model", section, parts)
    config = {"merge_method": "linear", "models": [{"model": str(tmp_path / "model")}]}
    config["models"][0]["parameters"] = {"weight": 1.0}
    with pytest.raises((CheckpointError, NumericalError), match=words):
        moemerge.merge(config, tmp_path / "out", requantize=requantize)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "torchao"},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "modelopt", "quant_algo": ["FP8"]},
        {"quant_method": "compressed-tensors", "format": {}},
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        {**qz.weights(8, "float", "channel"), "sparsity_config": {"format": "sparse-bitmask"}},
        {},
    ],
)
def test_other_formats_are_refused_by_name(section, tmp_path):
    write(tmp_path / "model", section, {"a.weight": W})
    assert Checkpoint.open(tmp_path / "model").quantisation is None
    config = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "model")}]}
    with pytest.raises(MoeMergeError, match=section.get("quant_method", "unnamed")) as caught:
        moemerge.merge(config, tmp_path / "out")
    inner = section.get("sparsity_config", section).get("format", "")
    assert not isinstance(inner, str) or inner in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "found"),
    [("a.qweight", "GPTQ or AWQ"), ("a.SCB", "bitsandbytes, int8"), ("x.gguf", "GGUF files")],
)
def test_files_of_other_formats_are_refused_by_name(name, found, tmp_path):
    write(tmp_path, {}, {"a.weight": W, name: W[:1].clone()})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    if name.endswith(".gguf"):
        (tmp_path / "model.safetensors").rename(tmp_path / name)
    config = {"merge_method": "passthrough", "models": [{"model": str(tmp_path)}]}
    with pytest.raises(MoeMergeError, match=found) as caught:
        moemerge.validate(config)
    assert "unquantised original" in str(caught.value)


def write(folder, section, parts):
    folder.mkdir(exist_ok=True)
    qz.save(parts, folder)
    config = {"model_type": "of-tomorrow", "num_hidden_layers": 1, "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
