"""Whatever is wrong ends in a message of ours, and nothing is written."""

import json
import shutil

import pytest
import torch

import zoo
from moemerge.errors import (
    ArchitectureError,
    NumericalError,
    ResourceError,
    TokenizerError,
    UsageError,
)
from moemerge.families.opened import open_model
from moemerge.forward import settings as streaming
from moemerge.forward import walk
from moemerge.forward.settings import forward_dtype
from repairs.calibration import cases


def refused(case, tmp_path, kind, match, **options):
    out = tmp_path / "result" / "out"
    with pytest.raises(kind, match=match):
        case.calibrate(out, **options)
    assert not out.parent.exists()


def test_names_must_match_on_both_sides(case, tmp_path):
    math, code = case.data.values()
    refused(
        case,
        tmp_path,
        UsageError,
        r"data 'maths' has no source of that name, did you mean 'math'\?; source 'math' has no dat",
        data={"maths": math, "code": code},
    )
    refused(case, tmp_path, UsageError, "source 'code' has no data", data={"math": math})
    refused(case, tmp_path, UsageError, "no source given", sources={}, data={})
    taken = {"merged": case.sources["math"]}  # it would run in place of the model to repair
    refused(case, tmp_path, UsageError, "the name 'merged'", sources=taken, data={"merged": math})


def test_a_source_with_a_router_of_another_shape(case, tmp_path, zoo_folder):
    for overrides, match in (
        (
            {"num_experts": 4},
            r"layer 0: the router of source 'math' .* is \[4, 32\] with 4 e",
        ),
        ({"hidden_size": 16}, r"is \[8, 16\] with 8 experts, that of .* is \[8, 32\]"),
    ):
        other = zoo_folder("olmoe", **overrides)
        sources = {**case.sources, "math": other}
        refused(case, tmp_path, ArchitectureError, match, sources=sources)


def test_a_source_of_another_family_or_depth(case, tmp_path, zoo_folder):
    other = {**case.sources, "math": zoo_folder("mixtral")}
    refused(case, tmp_path, ArchitectureError, "is 'mixtral', but .* is 'olmoe'", sources=other)
    short = {**case.sources, "math": zoo_folder("olmoe", num_hidden_layers=2)}
    refused(case, tmp_path, ArchitectureError, "has no router in layer 2", sources=short)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.mlp.experts.3.up_proj.weight",  # which is stacked in memory
        "model.layers.2.mlp.experts.7.down_proj.weight",  # not run, as those below
        "model.norm.weight",
        "model.embed_tokens.weight",  # a token that no text has
    ],
)
def test_nan_is_named_as_it_is_stored(name, case, tmp_path):
    bad = zoo.spoilt(case.merged, tmp_path / "bad", name)
    broken = cases.Case(bad, case.sources, case.data)
    said = rf"bad: {name} holds NaN or infinity, in model\.safetensors"
    refused(broken, tmp_path, NumericalError, said)


def test_a_merge_that_transformers_would_build_deeper_is_refused(case, tmp_path):
    """Without a number of layers it takes its own, whose weights nobody has."""
    folder = shutil.copytree(case.merged, tmp_path / "deeper")
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    broken = cases.Case(folder, case.sources, case.data)
    refused(broken, tmp_path, ArchitectureError, r"needs model\.layers\.3\..* which is missing")


@pytest.mark.parametrize("which", ["merged", "math"])
def test_nan_in_a_router_names_it(which, case, tmp_path):
    name = "model.layers.2.mlp.gate.weight"
    models = {"merged": case.merged, **case.sources}
    models[which] = zoo.spoilt(models[which], tmp_path / "bad", name, float("inf"))
    broken = cases.Case(models.pop("merged"), models, case.data)
    refused(broken, tmp_path, NumericalError, rf"{name} \(layer 2\) holds NaN or infinity")


def test_a_solve_that_does_not_converge(case, tmp_path):
    match = r"layer 0: .*gate.weight did not converge \(max_steps"
    refused(case, tmp_path, NumericalError, match, max_steps=2, strict=True)
    report = case.calibrate(tmp_path / "out", max_steps=2)
    assert {row["status"] for row in report.layers} == {"max_steps"}
    assert sum("did not converge" in notice for notice in report.notices) == 3


def test_layers_that_do_not_exist(case_of, tmp_path):
    case = case_of("qwen3_moe")  # layer 0 is dense
    refused(case, tmp_path, UsageError, "the model has 3 layers", layers="2-7")
    refused(case, tmp_path, UsageError, "none of these layers has a router", layers="0")
    refused(case, tmp_path, UsageError, "the model has 2 layers", layers="last:3")


def test_too_little_memory_is_told_before_the_work(case, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "available_memory", lambda device: 100_000)
    match = r"(?s)calibrate needs about .* MB on cpu.*usable.*lower `max_tokens`"
    refused(case, tmp_path, ResourceError, match, device="cpu")


def test_activations_go_to_disk_where_memory_is_short(case, tmp_path, monkeypatch):
    plain = case.calibrate(tmp_path / "plain", device="cpu")
    parked = plain.memory - walk.PROCESS_BYTES  # which is there already
    monkeypatch.setattr(streaming, "available_memory", lambda device: parked)  # HEADROOM cuts it
    spilled = case.calibrate(tmp_path / "spilled", device="cpu")
    assert (plain.offload, spilled.offload) == ("device", "disk")
    assert cases.weights(tmp_path / "plain") == cases.weights(tmp_path / "spilled")


def test_too_little_disk_is_told_before_the_work(case, tmp_path, monkeypatch):
    from moemerge.checkpoint import output

    monkeypatch.setattr(output, "free_disk", lambda folder: 1000)
    refused(case, tmp_path, ResourceError, "only 1.0 kB are free")


def test_a_source_that_reads_other_tokens_is_not_streamed(case, tmp_path):
    other = shutil.copytree(case.sources["math"], tmp_path / "math")
    zoo.tiny_tokenizer(other, words=tuple(reversed(cases.WORDS)))
    sources = {**case.sources, "math": other}
    refused(
        case,
        tmp_path,
        TokenizerError,
        r"token \d+ is '\w+' in the merged model and '\w+' in source 'math'",
        sources=sources,
        targets="source-features",
    )
    case.calibrate(tmp_path / "out", sources=sources)  # its routers alone say nothing of tokens


def test_a_quantised_model_is_refused(case, tmp_path):
    folder = shutil.copytree(case.merged, tmp_path / "quantised")
    zoo.edit_config(folder, quantization_config={"quant_method": "gptq"})
    broken = cases.Case(folder, case.sources, case.data)
    refused(broken, tmp_path, ArchitectureError, "is quantised")
    # A source is only asked for its routers, and those are plain.
    sources = {**case.sources, "math": folder}
    case.calibrate(tmp_path / "out", sources=sources)
    refused(
        case,
        tmp_path,
        ArchitectureError,
        "source 'math' .* is quantised",
        sources=sources,
        targets="source-features",
    )


def test_auto_dtype_is_the_checkpoint_s_on_a_gpu_and_float32_on_a_cpu(case_of):
    model = open_model("merged", case_of("olmoe", dtype=torch.bfloat16).merged)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert forward_dtype("auto", model, cpu) == torch.float32
    assert forward_dtype("auto", model, gpu) == torch.bfloat16
    assert forward_dtype("bfloat16", model, cpu) == torch.bfloat16
    double = open_model("merged", case_of("olmoe", dtype=torch.float64).merged)
    assert forward_dtype("auto", double, cpu) == torch.float64


def test_a_gamma_beyond_all_numbers_is_an_error(case, tmp_path):
    refused(case, tmp_path, NumericalError, "not finite", gamma=1e300)
