"""Quantised checkpoints read as transformers and compressed-tensors dequantise them."""

import json

import pytest
import torch
import transformers

import quantised_zoo as qz
import zoo
from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.quantised import scheme as kinds
from moemerge.checkpoint.quantised.tensor import QuantisedInfo, Rounding
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import Dtype


@pytest.fixture
def bf16(zoo_folder):
    def folder(model_type, **options):
        return zoo_folder(model_type, dtype=torch.bfloat16, **options)

    return folder


def dequantised(folder):
    """transformers' own model in bfloat16."""
    with zoo._quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def as_saved(model, folder):
    """A model's tensors under their names on disk."""
    model.config.quantization_config = None
    model.hf_quantizer = None
    with zoo._quiet():
        plain = transformers.AutoModelForCausalLM.from_config(model.config)
        plain.to(torch.bfloat16).load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
    return zoo.tensors(folder)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe", "glm4_moe", "minimax_m2"])
@pytest.mark.parametrize("scales", ["float32", "powers of two", "exponents"])
def test_block_fp8_is_what_transformers_loads(bf16, tmp_path, model_type, scales):
    quantise = {
        "float32": qz.block_fp8(8, 8),
        "powers of two": qz.block_fp8(8, 8, powers=True),
        "exponents": qz.block_fp8(8, 8, torch.float8_e8m0fnu, powers=True),
    }[scales]
    section = qz.fp8_config(8, 8) | ({} if scales == "float32" else {"scale_fmt": "ue8m0"})
    folder = qz.convert(bf16(model_type), tmp_path / "fp8", section, quantise, shards=3)
    checkpoint = Checkpoint.open(folder)
    units = [i for i in checkpoint.tensors.values() if isinstance(i, QuantisedInfo)]
    assert len(units) > 40
    theirs = as_saved(dequantised(folder), tmp_path / "plain")
    assert set(checkpoint) == set(theirs)  # scales have no entry of their own
    assert "quantization_config" not in checkpoint.config
    for name in checkpoint:
        assert torch.equal(checkpoint[name], theirs[name]), name


def test_mxfp4_is_what_transformers_loads(bf16, tmp_path):
    plain = bf16("gpt_oss", intermediate_size=64, hidden_size=96)
    folder = qz.convert(plain, tmp_path / "mx", {"quant_method": "mxfp4"}, qz.mxfp4, qz.is_stack)
    checkpoint = Checkpoint.open(folder)
    theirs = as_saved(dequantised(folder), tmp_path / "plain")
    assert set(checkpoint) == set(theirs)
    for name in checkpoint:
        assert torch.equal(checkpoint[name], theirs[name]), name
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert checkpoint.tensors[name].shape == (8, 96, 128)
    assert torch.equal(checkpoint.read(name, (2, 5)), theirs[name][2:5])
    stored = checkpoint.tensors[name].stored_bytes
    assert stored == 8 * 96 * 128 // 2 + 8 * 128 * 3  # half a byte each, and a byte for 32


CASES = {
    "fp8 tensor": (qz.weights(8, "float", "tensor"), qz.fp8_scaled("tensor")),
    "fp8 channel": (qz.weights(8, "float", "channel"), qz.fp8_scaled("channel")),
    "fp8 channel float32": (
        qz.weights(8, "float", "channel"),
        qz.fp8_scaled("channel", torch.float32),
    ),
    "int4 group": (qz.weights(4, "int", "group", group_size=8), qz.packed(4, 8)),
    "int4 group zeros": (
        qz.weights(4, "int", "group", group_size=8, symmetric=False),
        qz.packed(4, 8, zeros=True),
    ),
    "int4 channel zeros": (
        qz.weights(4, "int", "channel", symmetric=False),
        qz.packed(4, zeros=True),
    ),
    "int8 group": (qz.weights(8, "int", "group", group_size=4), qz.packed(8, 4)),
    "int8 channel": (qz.weights(8, "int", "channel"), qz.packed(8)),
    "int8 group zeros": (
        qz.weights(8, "int", "group", group_size=4, symmetric=False),
        qz.packed(8, 4, zeros=True),
    ),
}
# Rows that do not fill the words of zero points; compressed-tensors cannot read less than two.
SHAPES = [(13, 24), (24, 40), (9, 8), (33, 16), (17, 56)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compressed_tensors_agrees(case, shape, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    section, quantise = CASES[case]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    checkpoint = single(tmp_path, section, quantise("a.weight", tensor))
    scheme = QuantizationScheme(**section["config_groups"]["group_0"])
    state = {k.removeprefix("a."): v for k, v in zoo.tensors(tmp_path).items()}
    theirs = BaseCompressor.get_value_from_registry(section["format"]).decompress(state, scheme)
    expected = theirs["weight"].to(torch.bfloat16)
    assert checkpoint.tensors["a.weight"].shape == shape
    assert torch.equal(checkpoint["a.weight"], expected)
    assert torch.equal(checkpoint.read("a.weight", (2, 4)), expected[2:4])
    spread = float((checkpoint["a.weight"] - tensor).norm() / tensor.norm())
    assert spread < (0.15 if "int4" in case else 0.04)  # and it is the tensor that went in


@pytest.mark.parametrize("compressed", [False, True])
def test_nvfp4_is_the_product_of_code_scale_and_factor(tmp_path, compressed):
    """NVIDIA's description: e2m1 * e4m3 * float32, the even column in the lower half of a byte."""
    tensor = torch.randn(5, 48, generator=torch.Generator().manual_seed(3))
    tensor[1, 16:32] = 0  # a scale of zero
    parts = qz.nvfp4(compressed=compressed)("a.weight", tensor)
    stored = parts["a.weight_packed" if compressed else "a.weight"]
    codes = torch.stack([stored & 15, stored >> 4], dim=-1).view(5, 48).long()
    values = torch.tensor(qz.FP4)[codes & 7] * (1 - 2 * (codes >> 3))
    scales = parts["a.weight_scale"].float()
    if compressed:
        scales = scales / parts["a.weight_global_scale"]
    else:
        scales = scales * parts["a.weight_scale_2"]
    expected = (values * scales.repeat_interleave(16, 1)).bfloat16()
    checkpoint = single(tmp_path / "a", qz.NVFP4 if compressed else qz.MODELOPT, parts)
    assert list(checkpoint) == ["a.weight"]
    assert torch.equal(checkpoint["a.weight"], expected)
    assert torch.equal(checkpoint.read("a.weight", (1, 3)), expected[1:3])
    assert (expected - tensor).norm() < 0.12 * tensor.norm()
    if not compressed:  # the same without a section in config.json, as older versions write it
        single(tmp_path / "b", None, parts)
        (tmp_path / "b" / "hf_quant_config.json").write_text(
            '{"quantization": {"quant_algo": "NVFP4"}}'
        )
        assert torch.equal(Checkpoint.open(tmp_path / "b")["a.weight"], expected)
        return
    ct = pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(**qz.NVFP4["config_groups"]["group_0"])
    state = {name.removeprefix("a."): part for name, part in parts.items()}
    theirs = ct.compressors.BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    assert torch.equal(theirs.decompress(state, scheme)["weight"].bfloat16(), expected)


def test_fp8_of_modelopt_has_one_scale_for_a_tensor(tmp_path):
    tensor = torch.randn(6, 16, generator=torch.Generator().manual_seed(3))
    scale = tensor.abs().max() / 448
    codes = (tensor / scale).to(torch.float8_e4m3fn)
    parts = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": torch.tensor(0.5)}
    section = {**qz.MODELOPT, "quant_algo": "FP8"}
    expected = (codes.float() * scale).bfloat16()
    assert torch.equal(single(tmp_path / "a", section, parts)["a.weight"], expected)
    del parts["a.weight_scale"]
    with pytest.raises(CheckpointError, match=r"no a\.weight_scale"):
        single(tmp_path / "b", section, parts)


def test_one_zero_point_for_a_tensor(tmp_path):
    tensor = torch.rand(6, 8, generator=torch.Generator().manual_seed(3))
    scale = (tensor.max() / 255).view(1)
    codes = (tensor / scale - 128).round().to(torch.int8)
    zero = torch.tensor([-128], dtype=torch.int8)
    section = qz.weights(8, "int", "tensor", symmetric=False) | {"format": "int-quantized"}
    parts = {"a.weight": codes, "a.weight_scale": scale, "a.weight_zero_point": zero}
    checkpoint = single(tmp_path, section, parts)
    expected = (codes.float() + 128) * scale
    assert torch.equal(checkpoint["a.weight"], expected.bfloat16())
    info = checkpoint.tensors["a.weight"]
    assert isinstance(info, QuantisedInfo)
    written = {w.name: w.tensor for w in info.encode(checkpoint.stored, expected, 0, Rounding())}
    assert all(torch.equal(written[name], parts[name]) for name in parts)


@pytest.mark.parametrize("shape", [(13, 24), (300, 200), (128, 129), (1, 1)], ids=str)
def test_ragged_blocks(shape, tmp_path):
    """transformers takes its block size from the scales' shape and refuses or misreads such
    tensors (DeepSeek-V3's kv_a_proj has 576 rows in blocks of 128); compressed-tensors does not."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    parts = qz.block_fp8(16, 128)("a.weight", tensor)
    checkpoint = single(tmp_path, qz.fp8_config(16, 128), parts)
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[16, 128])
    theirs = dequantize(parts["a.weight"], parts["a.weight_scale_inv"], None, args)
    assert torch.equal(checkpoint["a.weight"], theirs.to(torch.bfloat16))
    middle = (shape[0] // 3, shape[0] // 3 + 1)
    assert torch.equal(checkpoint.read("a.weight", middle), theirs[slice(*middle)].bfloat16())


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_one_scale_for_a_tensor(shape, tmp_path):
    """`quant_method: fp8` without a block size."""
    tensor = torch.randn(13, 24, generator=torch.Generator().manual_seed(4))
    scale = tensor.abs().max() / 448
    codes = (tensor / scale).to(torch.float8_e4m3fn)
    parts = {"a.weight": codes, "a.weight_scale_inv": scale.reshape(shape)}
    checkpoint = single(tmp_path, {"quant_method": "fp8"}, parts)
    assert torch.equal(checkpoint["a.weight"], (codes.float() * scale).bfloat16())
    assert checkpoint.tensors["a.weight"].stored_bytes == 13 * 24 + 4


def test_scales_of_blocks_in_bfloat16(tmp_path):
    tensor = torch.randn(16, 24, generator=torch.Generator().manual_seed(4))
    parts = qz.block_fp8(8, 8, torch.bfloat16)("a.weight", tensor)
    scales = parts["a.weight_scale_inv"].float().repeat_interleave(8, 0).repeat_interleave(8, 1)
    expected = (parts["a.weight"].float() * scales).bfloat16()
    assert torch.equal(single(tmp_path, qz.fp8_config(8, 8), parts)["a.weight"], expected)


def test_scales_under_another_name(tmp_path):
    tensor = torch.randn(12, 24, generator=torch.Generator().manual_seed(4))
    parts = qz.block_fp8(8, 8)("a.weight", tensor)
    expected = single(tmp_path / "a", qz.fp8_config(8, 8), parts)["a.weight"]
    renamed = {"a.weight": parts["a.weight"], "a.scale": parts["a.weight_scale_inv"]}
    checkpoint = single(tmp_path / "b", qz.fp8_config(8, 8), renamed)
    assert list(checkpoint) == ["a.weight"]
    assert torch.equal(checkpoint["a.weight"], expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["int", "float"])
def test_eight_bits_as_they_are(kind, shape, tmp_path):
    """compressed-tensors: INT8 that is not packed, and FP8 in blocks."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    if kind == "int":
        section = qz.weights(8, "int", "channel") | {"format": "int-quantized"}
        scale = tensor.float().abs().amax(1, keepdim=True).div(127).bfloat16()
        codes = (tensor / scale).round().clamp(-128, 127).to(torch.int8)
    else:
        section = qz.weights(8, "float", "block", block_structure=[4, 8])
        blocks = qz.block_fp8(4, 8)("a.weight", tensor)
        codes, scale = blocks["a.weight"], blocks["a.weight_scale_inv"]
    args = QuantizationArgs(**section["config_groups"]["group_0"]["weights"])
    theirs = dequantize(codes, scale, None, args)
    checkpoint = single(tmp_path, section, {"a.weight": codes, "a.weight_scale": scale})
    assert torch.equal(checkpoint["a.weight"], theirs.bfloat16())
    assert float((checkpoint["a.weight"] - tensor).norm() / tensor.norm()) < 0.04


def test_groups_out_of_order(tmp_path):
    tensor = torch.randn(9, 32, generator=torch.Generator().manual_seed(5))
    section = qz.weights(4, "int", "group", group_size=8, actorder="group")
    parts = qz.packed(4, 8, shuffled=True)("a.weight", tensor)
    codes = torch.stack([(parts["a.weight_packed"] >> 4 * i) & 15 for i in range(8)], -1)
    scale = parts["a.weight_scale"][:, parts["a.weight_g_idx"].long()]
    expected = (codes.reshape(9, 32) - 8) * scale
    assert torch.equal(single(tmp_path, section, parts)["a.weight"], expected)
    # A place that was kept for the groups and not used.
    plain = qz.packed(4, 8)("a.weight", tensor)
    unused = {**plain, "a.weight_g_idx": torch.full((32,), -1, dtype=torch.int32)}
    values = single(tmp_path / "b", section, unused)["a.weight"]
    assert torch.equal(values, single(tmp_path / "c", section, plain)["a.weight"])


def test_llama4_reads_as_stacks(bf16, tmp_path):
    """Each expert has matrices of its own on disk, and in transformers' quantised model."""
    pytest.importorskip("compressed_tensors")
    kind = qz.KINDS["llama4 fp8 a row"]
    plain = bf16("llama4_text")
    folder = kind.publish(plain, tmp_path / "fp8", shards=2)
    checkpoint = Checkpoint.open(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in zoo.tensors(plain).items()}
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == shapes
    section = transformers.CompressedTensorsConfig(**kind.section, dequantize=True)
    with zoo._quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=section
        )
    weights = {f"{n}.weight": m.weight for n, m in model.named_modules() if hasattr(m, "weight")}
    stacks = 0
    for name in checkpoint:
        owner, _, stack = name.rpartition(".")
        if stack not in ("gate_up_proj", "down_proj"):
            assert torch.equal(checkpoint[name], weights[name]), name
            continue
        stacks += 1
        projections = ("down_proj",) if stack == "down_proj" else ("gate_proj", "up_proj")
        for expert, matrix in enumerate(checkpoint[name]):
            each = [weights[f"{owner}.{expert}.{projection}.weight"] for projection in projections]
            assert torch.equal(matrix, torch.cat(each).T), name
        assert torch.equal(checkpoint.read(name, (3, 5)), checkpoint[name][3:5])
    assert stacks >= 4


def test_groups_of_modules(tmp_path):
    """Kimi: experts in INT4, the rest in FP8; each module is stored as its group says."""
    section = qz.weights(8, "float", "channel") | {"format": "mixed-precision"}
    experts = qz.weights(4, "int", "group", group_size=8)["config_groups"]["group_0"]
    section["config_groups"]["group_1"] = experts | {"targets": [r"re:.*experts\.\d+\..*"]}
    tensor = torch.randn(6, 16, generator=torch.Generator().manual_seed(6))
    parts = qz.packed(4, 8)("m.experts.3.up_proj.weight", tensor)
    parts |= qz.fp8_scaled("channel")("m.q_proj.weight", tensor)
    checkpoint = single(tmp_path, section, parts)
    words = {name: info.stored_as for name, info in checkpoint.tensors.items()}
    assert words == {
        "m.experts.3.up_proj.weight": "int4 in groups of 8",
        "m.q_proj.weight": "float8_e4m3fn with a scale a row",
    }


def test_stacks_of_blocks(tmp_path):
    stack = torch.randn(3, 20, 24, generator=torch.Generator().manual_seed(7)).bfloat16()
    parts = qz.block_fp8(8, 16)("m.experts.down_proj", stack)
    checkpoint = single(tmp_path, qz.fp8_config(8, 16), parts)
    each = [
        single(tmp_path / str(i), qz.fp8_config(8, 16), qz.block_fp8(8, 16)("a.weight", matrix))
        for i, matrix in enumerate(stack)
    ]
    expected = torch.stack([one["a.weight"] for one in each])
    assert torch.equal(checkpoint["m.experts.down_proj"], expected)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)], ids=str)
def test_stacks_with_one_scale_for_each_matrix(shape, tmp_path):
    stack = torch.randn(3, 20, 24, generator=torch.Generator().manual_seed(7))
    scales = stack.abs().amax((1, 2)) / 448
    codes = (stack / scales[:, None, None]).to(torch.float8_e4m3fn)
    parts = {"m.experts.down_proj": codes}
    parts["m.experts.down_proj_scale_inv"] = scales.reshape(shape)
    checkpoint = single(tmp_path, {"quant_method": "fp8"}, parts)
    expected = (codes.float() * scales[:, None, None]).bfloat16()
    assert torch.equal(checkpoint["m.experts.down_proj"], expected)
    assert torch.equal(checkpoint.read("m.experts.down_proj", (1, 3)), expected[1:])


@pytest.mark.parametrize(("stated", "dtype"), [("float16", torch.float16), (None, torch.bfloat16)])
def test_read_in_the_dtype_that_the_config_states(tmp_path, stated, dtype):
    parts = qz.block_fp8(4, 8)("a.weight", torch.randn(8, 8))
    checkpoint = single(tmp_path, qz.fp8_config(4, 8), parts, dtype=stated)
    assert checkpoint["a.weight"].dtype == dtype


def single(folder, section, parts, **config):
    """A checkpoint of a few tensors."""
    folder.mkdir(exist_ok=True)
    qz.save(parts, folder)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return Checkpoint.open(folder)


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
BYTES = torch.arange(256, dtype=torch.uint8)
VALUES = {
    "e4m3": (kinds.E4M3, BYTES.view(torch.float8_e4m3fn).to(torch.float32)),
    "e5m2": (kinds.E5M2, BYTES.view(torch.float8_e5m2).to(torch.float32)),
    "int8": (kinds.INT8, BYTES.view(torch.int8).to(torch.float32)),
    "packed int8": (kinds.PACKED_INT8, torch.arange(-128.0, 128.0)),
    "fp4": (kinds.FP4, torch.tensor(FP4)),
    "packed int4": (kinds.PACKED_INT4, torch.arange(-8.0, 8.0)),
}


@pytest.fixture(params=VALUES)
def kind(request):
    return VALUES[request.param]


@pytest.mark.parametrize("columns", [1, 2, 7, 64])
def test_rows_of_codes(kind, columns):
    codes, values = kind
    rng = torch.Generator().manual_seed(columns)
    chosen = torch.randint(len(values), (5, columns), generator=rng)
    packed = codes.pack(chosen.to(torch.uint8))
    assert packed.shape == (5, -(-columns * codes.bits // 8))
    read = codes.decode(packed, columns)
    assert read.shape == (5, columns)
    expected = values[chosen]
    assert torch.equal(read.view(torch.int32), expected.view(torch.int32))  # signs of zero, NaN
    assert torch.equal(codes.values_of(chosen.to(torch.uint8)).nan_to_num(), expected.nan_to_num())


def test_rounds_to_the_nearest_and_ties_to_even(kind):
    codes, values = kind
    finite = values[values.isfinite()].unique().double()
    middles = (finite[1:] + finite[:-1]) / 2
    rng = torch.Generator().manual_seed(0)
    between = torch.rand(4000, generator=rng, dtype=torch.float64)
    between = finite[0] + (finite[-1] - finite[0]) * between
    small = 2.0 * torch.randn(4000, generator=rng, dtype=torch.float64)
    for given in (finite, middles, between, small, finite * 1.5):
        given = given.float().double()
        read = codes.values_of(codes.round(given.float())).double()
        best = (given[:, None] - finite).abs().amin(1)
        assert torch.equal((given - read).abs(), best)
    exact = middles[middles.float().double() == middles]
    chosen = codes.round(exact.float()).int() + codes.offset
    assert bool((chosen % 2 == 0).all())


@pytest.mark.parametrize("known", list(kinds._ERRORS))
def test_known_rounding_errors_are_the_measured_ones(known):
    scheme = kinds.Scheme(*known, Dtype.FLOAT32)
    assert kinds.relative_error(scheme) == pytest.approx(kinds._measured_error(scheme), abs=1e-4)
