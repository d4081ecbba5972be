"""Quantised inputs merge as their dequantised copies do."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import moemerge
import quantised_zoo as qz
import zoo
from moemerge.checkpoint.quantised.tensor import QuantisedInfo, Rounding
from moemerge.errors import NumericalError, UsageError
from repairs.calibration.cases import changed_tensors


@pytest.fixture(scope="session")
def published(zoo_folder, tmp_path_factory):
    """`published(kind)`: a base and two fine-tunes, plain and as they are published; read only."""
    made = {}

    def models(name):
        if name not in made:
            kind, folder = qz.KINDS[name], tmp_path_factory.mktemp("published")
            sizes = {"num_hidden_layers": 2} | kind.sizes
            base = zoo_folder(kind.family, dtype=torch.bfloat16, **sizes)
            plain = [base, *(zoo.perturb(base, folder / f"m{i}", i) for i in (1, 2))]
            made[name] = [
                (one, kind.publish(one, folder / f"q{i}", shards=1 + i))
                for i, one in enumerate(plain)
            ]
        return made[name]

    return models


def linear(*models, **extra):
    entries = [{"model": str(m), "parameters": {"weight": 1.0 + i}} for i, m in enumerate(models)]
    return {"merge_method": "linear", "models": entries, **extra}


def ties(base, *models):
    return {**linear(*models), "merge_method": "ties", "base_model": str(base)}


@pytest.mark.parametrize("kind", qz.KINDS)
def test_merges_as_the_dequantised_copies_do(published, tmp_path, kind):
    folders = [quantised for _, quantised in published(kind)]
    plain = [qz.plain_copy(f, tmp_path / f"plain{i}") for i, f in enumerate(folders)]
    moemerge.merge(ties(*folders), tmp_path / "ties")
    moemerge.merge(ties(*plain), tmp_path / "plain")
    zoo.assert_same(tmp_path / "ties", tmp_path / "plain")
    assert zoo.read_config(tmp_path / "ties") == zoo.read_config(tmp_path / "plain")
    assert "quantization_config" not in zoo.read_config(tmp_path / "ties")
    with zoo._quiet():
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ties")


def test_quantised_and_plain_models_mix(published, tmp_path):
    (base, fp8_base), (math, fp8_math), (code, _) = published("qwen fp8")
    copies = {
        f: qz.plain_copy(f, tmp_path / f"plain{i}") for i, f in enumerate((fp8_base, fp8_math))
    }
    for i, mixed in enumerate(((fp8_base, math, code), (base, fp8_math, code))):
        moemerge.merge(ties(*mixed), tmp_path / f"mixed{i}")
        moemerge.merge(ties(*(copies.get(f, f) for f in mixed)), tmp_path / f"same{i}")
        zoo.assert_same(tmp_path / f"mixed{i}", tmp_path / f"same{i}")


def test_every_input_tensor_is_accounted_for(published, tmp_path):
    folders = [quantised for _, quantised in published("kimi int4")]
    moemerge.merge(linear(*folders), tmp_path / "out")
    report = json.loads((tmp_path / "out" / "moemerge_report.json").read_text())["merge"]
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for account in report["inputs"].values():
        assert account["merged"] == account["tensors"] == len(merged)


def same(*models, out, base=None):
    config = linear(*models) | ({} if base is None else {"base_model": str(base)})
    moemerge.merge(config, out, requantize="same")
    return json.loads((out / "moemerge_report.json").read_text())["merge"]


@pytest.mark.parametrize("kind", qz.KINDS)
def test_one_model_alone_comes_back_byte_for_byte(published, tmp_path, kind):
    (_, folder), *_ = published(kind)
    report = same(folder, out=tmp_path / "out")
    assert changed_tensors(folder, tmp_path / "out") == set()
    assert all(one["relative_error"] == 0.0 for one in report["requantised"].values())
    ours, theirs = zoo.read_config(tmp_path / "out"), zoo.read_config(folder)
    assert ours["quantization_config"] == theirs["quantization_config"]


# Relative errors that rounding may cost: what each format makes in normal weights, and a little.
MOST = {"fp8": 0.03, "mxfp4": 0.13, "nvfp4": 0.12, "int4": 0.10, "int8": 0.012}


@pytest.mark.parametrize("kind", qz.KINDS)
def test_a_merge_is_written_as_its_inputs_were(published, tmp_path, kind):
    folders = [quantised for _, quantised in published(kind)]
    report = same(*folders, out=tmp_path / "out")
    moemerge.merge(linear(*folders, out_dtype="float32"), tmp_path / "wide")
    wide, stored = zoo.tensors(tmp_path / "wide"), zoo.tensors(tmp_path / "out")
    assert {n: (t.shape, t.dtype) for n, t in stored.items()} == {
        n: (t.shape, t.dtype) for n, t in zoo.tensors(folders[0]).items()
    }
    most = next(value for word, value in MOST.items() if word in kind)
    error = size = 0.0
    with moemerge.Checkpoint.open(tmp_path / "out") as written:
        assert written.quantisation is not None
        for name in written.quantisation.units:
            difference = written[name].double() - wide[name].double()
            assert difference.norm() <= most * wide[name].double().norm(), name
            error += float(difference.square().sum())
            size += float(wide[name].double().square().sum())
    (told,) = report["requantised"].values()
    assert told["relative_error"] == pytest.approx((error / size) ** 0.5, rel=1e-4)
    assert told["tensors"] == len(written.quantisation.units)


def test_the_error_of_weights_whose_squares_overflow(published, tmp_path):
    folders = [shutil.copytree(q, tmp_path / q.name) for _, q in published("fp8 a row")]
    with zoo.edited(folders[0]) as tensors:
        next(t for name, t in tensors.items() if name.endswith("weight_scale")).mul_(1e25)
    (told,) = same(*folders, out=tmp_path / "out")["requantised"].values()
    assert 0 < told["relative_error"] < MOST["fp8"]


@pytest.mark.parametrize(
    "kind",
    ["deepseek fp8", "qwen fp8", "gpt-oss mxfp4", "kimi int4", "fp8 a row", "llama4 fp8 a row"],
)
def test_the_output_loads_and_speaks_as_the_dequantised_model(published, tmp_path, kind):
    if qz.KINDS[kind].section["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    folders = [quantised for _, quantised in published(kind)]
    same(*folders, out=tmp_path / "out")
    plain = qz.plain_copy(tmp_path / "out", tmp_path / "plain")
    tokens = torch.arange(3, 40)[None]
    with zoo._quiet(), torch.no_grad():
        logits = [
            transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16)(
                tokens
            ).logits
            for f in (tmp_path / "out", plain)
        ]
    assert torch.equal(*logits)


def test_the_scales_are_those_of_the_formats_tools(tmp_path):
    """Where the model's own scales do not fit, they are what transformers' quantiser computes."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    rng = torch.Generator().manual_seed(2)
    wanted = torch.randn(24, 32, generator=rng)
    parts = qz.block_fp8(8, 8)("a.weight", torch.full((24, 32), 1e9))  # all would be zero
    info, fetch = unit_of(tmp_path, qz.fp8_config(8, 8), parts)
    ours = {w.name: w.tensor for w in info.encode(fetch, wanted, 0, Rounding())}
    config = FineGrainedFP8Config(weight_block_size=(8, 8))
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": wanted})
    assert torch.equal(ours["a.weight_scale_inv"], theirs["a.weight_scale_inv"])
    assert torch.equal(ours["a.weight"].float(), theirs["a.weight"].float())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_scales_are_those_of_compressed_tensors(tmp_path, bits, symmetric):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    rng = torch.Generator().manual_seed(2)
    wanted = torch.randn(16, 32, generator=rng)
    section = qz.weights(bits, "int", "group", group_size=8, symmetric=symmetric)
    far = torch.linspace(1e4, 2e4, 512).view(16, 32)
    quantise = qz.packed(bits, 8, zeros=not symmetric, scale_dtype=torch.float32)
    info, fetch = unit_of(tmp_path, section, quantise("a.weight", far))
    ours = {w.name.removeprefix("a."): w.tensor for w in info.encode(fetch, wanted, 0, Rounding())}
    scheme = QuantizationScheme(**section["config_groups"]["group_0"])
    groups = wanted.view(16, 4, 8)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state = {"weight": wanted, "weight_scale": scale, "weight_zero_point": zero}
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").compress(state, scheme)
    assert set(ours) == set(theirs) - {"weight_shape"}
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def unit_of(folder, section, parts):
    qz.save(parts, folder)
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    checkpoint = moemerge.Checkpoint.open(folder)
    info = checkpoint.tensors["a.weight"]
    assert isinstance(info, QuantisedInfo)
    return info, checkpoint.stored


def test_what_cannot_be_written_back_is_refused(published, tmp_path):
    (plain, _), (_, quantised), _ = published("qwen fp8")
    with pytest.raises(UsageError, match="is not quantised"):
        same(plain, quantised, out=tmp_path / "out")
    slices = [{"sources": [{"model": str(quantised), "layer_range": [0, 2]}]}]
    config = {"merge_method": "passthrough", "slices": slices}
    with pytest.raises(UsageError, match="cannot move layers"):
        moemerge.merge(config, tmp_path / "out", requantize="same")
    assert not (tmp_path / "out").exists()


def test_it_is_written_as_the_base_stores_it(published, tmp_path):
    (_, base), (math, _), (_, code) = published("fp8 a row")
    config = {**ties(base, math, code), "out_dtype": "bfloat16"}
    moemerge.merge(config, tmp_path / "out", requantize="same")
    stored, wanted = zoo.tensors(tmp_path / "out"), zoo.tensors(base)
    assert {n: (t.shape, t.dtype) for n, t in stored.items()} == {
        n: (t.shape, t.dtype) for n, t in wanted.items()
    }


def test_a_notice_says_how_coarse_the_inputs_are(published):
    (plain, quantised), *_ = published("gpt-oss mxfp4")
    notices = moemerge.validate(linear(plain, quantised)).notices
    (notice,) = [n for n in notices if "quantised" in n]
    error = float(re.search(r"groups of 32 \(([\d.]+)%\)", notice)[1])
    assert 10.0 < error < 13.0
    assert not any("quantised" in n for n in moemerge.validate(linear(plain)).notices)


def test_an_adapter_on_a_quantised_base(published, tmp_path):
    (_, quantised), *_ = published("qwen fp8")
    plain = qz.plain_copy(quantised, tmp_path / "plain")
    adapter = zoo.lora(tmp_path / "lora", plain, "model.layers.1.self_attn.q_proj")
    for folder, out in ((quantised, "a"), (plain, "b")):
        moemerge.merge(linear(Path(f"{folder}+{adapter}"), folder), tmp_path / out)
    zoo.assert_same(tmp_path / "a", tmp_path / "b")
    same(Path(f"{quantised}+{adapter}"), out=tmp_path / "c")
    changed = changed_tensors(quantised, tmp_path / "c")
    weight = "model.layers.1.self_attn.q_proj.weight"
    assert changed == {weight, f"{weight}_scale_inv"}


@pytest.mark.parametrize("kind", ["nvfp4 modelopt", "nvfp4 compressed"])
def test_static_input_scales_cover_all_models(published, tmp_path, kind):
    """The second model's inputs are three times as large; compressed-tensors stores inverses."""
    (_, first), (_, second), _ = published(kind)
    larger = shutil.copytree(second, tmp_path / "larger")
    end, factor = (".input_scale", 3.0) if "modelopt" in kind else (".input_global_scale", 1 / 3)
    for file in larger.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({n: t * factor if n.endswith(end) else t for n, t in tensors.items()}, file)
    report = same(first, larger, out=tmp_path / "out")
    stored, wanted = zoo.tensors(tmp_path / "out"), zoo.tensors(larger)
    scales = [name for name in wanted if name.endswith(end)]
    assert len(scales) > 20
    assert all(torch.equal(stored[name], wanted[name]) for name in scales)
    assert any("the widest of all models" in notice for notice in report["notices"])


def test_an_input_scale_that_is_nan_is_refused(published, tmp_path):
    folders = []
    for i, (_, quantised) in enumerate(published("qwen fp8")[1:]):
        folder = Path(shutil.copytree(quantised, tmp_path / f"m{i}"))
        file = sorted(folder.glob("*.safetensors"))[0]
        tensors = load_file(file)
        weight = next(name for name in tensors if name.endswith(".weight_scale_inv"))
        scale = weight.replace(".weight_scale_inv", ".input_scale")
        tensors[scale] = torch.tensor(float("nan"))
        save_file(tensors, file, {"format": "pt"})
        index = folder / "model.safetensors.index.json"
        if index.exists():
            listed = json.loads(index.read_text())
            listed["weight_map"][scale] = file.name
            index.write_text(json.dumps(listed))
        folders.append(folder)
    with pytest.raises(NumericalError, match="input_scale holds non-finite values"):
        moemerge.merge(linear(*folders), tmp_path / "out", requantize="same")
    assert not (tmp_path / "out").exists()
