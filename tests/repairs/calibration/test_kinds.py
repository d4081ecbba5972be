"""What models have besides a plain softmax router: biases, extra layers, tied heads, adapters."""

import shutil
from dataclasses import replace

import pytest
import torch

import moemerge
import multimodal_zoo
import quantised_zoo as qz
import zoo
from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError, CheckpointError
from moemerge.families.architecture import Architecture
from moemerge.forward.stream import ModelStream
from moemerge.text.batches import make_batches
from moemerge.text.domains import Domain
from repairs.calibration import cases, dense


def test_selection_biases_stay_and_are_used_to_measure(case_of, tmp_path):
    """A bias that rules an expert out must show in the agreement, and never in the router."""
    case = case_of("deepseek_v3", n_group=1, topk_group=1)
    moved, shifted = tmp_path / "math", []
    with zoo.edited(case.sources["math"], moved) as tensors:
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name][: zoo.EXPERTS // 2] -= 100.0  # the source chooses the others alone
                shifted.append(name)
    plain = case.calibrate(tmp_path / "plain")
    biased = case.calibrate(tmp_path / "biased", sources={**case.sources, "math": moved})
    assert shifted
    for a, b in zip(plain.layers, biased.layers, strict=True):
        assert a["kl_after"]["math"] == b["kl_after"]["math"]
        assert b["mismatch_after"]["math"] > a["mismatch_after"]["math"] + 0.1
        assert a["mismatch_after"]["code"] == b["mismatch_after"]["code"]
    assert cases.weights(tmp_path / "plain") == cases.weights(tmp_path / "biased")
    changed = cases.changed_tensors(case.merged, tmp_path / "plain")
    assert not any("e_score_correction_bias" in name for name in changed)


@pytest.mark.parametrize("mixed", [False, True])
def test_router_biases_are_solved_for(mixed, case_of, tmp_path):
    """gpt_oss: [W b] on x with a 1; judged on the written model by a forward of its own.

    Mixed: weights in bfloat16 and biases in float32, each rounded to its own dtype.
    """
    case = case_of("gpt_oss", dtype=torch.bfloat16 if mixed else torch.float32)
    if mixed:
        widen_router_biases(case.merged, tmp_path / "merged")
        case = replace(case, merged=tmp_path / "merged")
    report = case.calibrate(tmp_path / "out", dtype="float32")
    changed = cases.changed_tensors(case.merged, tmp_path / "out")
    assert {name.rsplit(".", 1)[1] for name in changed} == {"weight", "bias"}
    model = dense.load(tmp_path / "out")
    row = report.layers[-1]
    gate = model.get_submodule(f"model.layers.{row['layer']}.mlp.router")
    name = row["router"].removesuffix("weight")
    x = dense.router_inputs(model, gate, case.rows()["code"])
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)

    def whole(folder):
        stored = zoo.tensors(folder)
        return torch.cat([stored[name + "weight"], stored[name + "bias"][:, None]], dim=1)

    kl = dense.mean_kl(ones, whole(case.sources["code"]), whole(tmp_path / "out"))
    assert row["kl_after"]["code"] == pytest.approx(kl, rel=1e-3)


def test_the_model_goes_on_with_the_bias_that_is_stored(case_of, tmp_path):
    """Weight and bias may have dtypes of their own: each is rounded to its own, not more."""
    widen_router_biases(case_of("gpt_oss", dtype=torch.bfloat16).merged, tmp_path / "merged")
    rows = (torch.arange(3, 15),)
    with ModelStream(
        Checkpoint.open(tmp_path / "merged"), make_batches([Domain("a", rows)])
    ) as stream:
        stream.begin_layer()
        stop = stream.run_to([stream.anatomy.routers[0].path])
        weight, bias = stop.weight + 0.1234567, torch.full((zoo.EXPERTS,), 0.1234567)
        bias_name = stop.weight_name.replace("weight", "bias")
        stream.put({stop.weight_name: weight, bias_name: bias})
        assert stop.bias is not None
        assert torch.equal(stop.bias, bias)
        assert torch.equal(stop.weight, weight.bfloat16().float())


def widen_router_biases(folder, out):
    with zoo.edited(folder, out) as tensors:
        for name in [name for name in tensors if name.endswith("router.bias")]:
            tensors[name] = tensors[name].float()


def test_dense_layers_in_between_are_no_layers_with_routers(case_of, tmp_path):
    case = case_of("mellum")  # sparse, dense, sparse
    report = case.calibrate(tmp_path / "all")
    assert [row["layer"] for row in report.layers] == [0, 2]
    last = case.calibrate(tmp_path / "last", layers="last:1")
    assert [row["layer"] for row in last.layers] == [2]
    assert [(s.layer, s.reason) for s in last.skipped] == [(0, "not chosen by `layers`")]
    named = case.calibrate(tmp_path / "named", layers="1-2")
    assert [row["layer"] for row in named.layers] == [2]
    assert cases.weights(tmp_path / "last") == cases.weights(tmp_path / "named")


def test_mtp_layers_are_kept_and_passed_over(case_of, tmp_path):
    """A fourth layer on disk, of which the config's three know nothing."""
    case = case_of("glm4_moe")
    models = {"merged": case.merged, **case.sources}
    for name, folder in models.items():
        zoo.add_layer(folder, tmp_path / name)
    sources = {name: tmp_path / name for name in case.sources}
    grown = cases.Case(tmp_path / "merged", sources, case.data)
    report = grown.calibrate(tmp_path / "out")
    beyond = [s for s in report.skipped if s.layer == 3]
    assert [s.router for s in beyond] == ["model.layers.3.mlp.gate.weight"]
    assert "multi-token prediction" in beyond[0].reason
    changed = cases.changed_tensors(grown.merged, tmp_path / "out")
    assert changed == {row["router"] for row in report.layers}
    plain = case.calibrate(tmp_path / "plain")
    assert [row["kl_after"] for row in plain.layers] == [row["kl_after"] for row in report.layers]


def test_tied_embeddings_stay_tied(case_of, tmp_path):
    case = case_of("olmoe", tie_word_embeddings=True)
    report = case.calibrate(tmp_path / "out")
    assert "lm_head.weight" not in zoo.tensors(tmp_path / "out")
    assert len(report.layers) == 3
    model = dense.load(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_rows_that_are_no_routed_experts_stay(case_of, tmp_path):
    """Inkling's router has a row for each shared expert as well."""
    case = case_of("inkling_text")
    report = case.calibrate(tmp_path / "out")
    before, after = zoo.tensors(case.merged), zoo.tensors(tmp_path / "out")
    for row in report.layers:
        old, new = before[row["router"]], after[row["router"]]
        assert len(old) > zoo.EXPERTS
        assert torch.equal(old[zoo.EXPERTS :], new[zoo.EXPERTS :])
        assert not torch.equal(old[: zoo.EXPERTS], new[: zoo.EXPERTS])


def without_prefix(tensors):
    del tensors["lm_head.weight"]
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def only_routers(tensors):
    for name in [name for name in tensors if not name.endswith("mlp.gate.weight")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("family", "change"), [("mixtral", without_prefix), ("olmoe", only_routers)]
)
def test_sources_in_another_layout_give_the_same_routers(family, change, case_of, tmp_path):
    """Paired by what a tensor is; a source that holds its routers and nothing else will do."""
    case, bare = case_of(family), {}
    for name, folder in case.sources.items():
        bare[name] = tmp_path / name
        with zoo.edited(folder, bare[name]) as tensors:
            change(tensors)
    case.calibrate(tmp_path / "one")
    case.calibrate(tmp_path / "two", sources=bare)
    assert cases.weights(tmp_path / "one") == cases.weights(tmp_path / "two")


def test_shards_are_kept(case_of, tmp_path):
    case = case_of("olmoe", shard_size="60KB")
    case.calibrate(tmp_path / "out")
    names = {path.name for path in case.merged.iterdir()}
    assert len([n for n in names if n.endswith(".safetensors")]) > 1
    added = {"README.md", "moemerge_config.yml", "moemerge_report.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | added
    index = "model.safetensors.index.json"
    assert (tmp_path / "out" / index).read_bytes() == (case.merged / index).read_bytes()


RANK = 2


def adapter_of(folder, model):
    """A LoRA of every router and of the experts' last projections."""
    generator = torch.Generator().manual_seed(5)
    factors = {}
    for name, tensor in zoo.tensors(model).items():
        if name.endswith(("mlp.gate.weight", "down_proj.weight")):
            out, into = tensor.shape
            root = name.removesuffix(".weight")
            factors[f"{root}.lora_A.weight"] = torch.randn(RANK, into, generator=generator)
            factors[f"{root}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.02
    return zoo.adapter(folder, factors, lora_alpha=RANK)


def test_a_lora_on_another_fine_tune(case, tmp_path):
    """The sources are the fine-tune, and the model that the LoRA was trained on, with it."""
    base, math = case.merged, case.sources["math"]
    lora = adapter_of(tmp_path / "lora", base)
    zoo.tiny_tokenizer(lora)
    model = f"{math}+{lora}"
    options = {
        "sources": {"math": math, "code": f"{base}+{lora}"},
        "data": {name: case.data[name] for name in ("math", "code")},
        "device": "cpu",
    }
    diagnosis = moemerge.diagnose(model, **options)
    assert all(diagnosis.total(name).mismatch > 0 for name in options["sources"])
    report = moemerge.calibrate(model, tmp_path / "calibrated", holdout=0.0, **options)
    totals = report.totals
    assert sum(totals["kl_after"].values()) < sum(totals["kl_before"].values())
    refitted = moemerge.refit(model, tmp_path / "refitted", holdout=0.0, ridge=0.01, **options)
    last = refitted.layers[-2]
    assert sum(last["drift_after"].values()) < sum(last["drift_before"].values())
    zoo.assert_loads(tmp_path / "calibrated")
    zoo.assert_loads(tmp_path / "refitted")


GPU_SETTINGS = {
    "plain": {},
    "cpu": {"offload": "cpu"},
    "disk": {"offload": "disk"},
    "sources": {"targets": "source-features", "holdout": 0.2},
    "exact": {"objective": "exact"},
    "two-level": {"preconditioner": "two-level"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("settings", GPU_SETTINGS.values(), ids=GPU_SETTINGS)
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss", "jetmoe"])
def test_the_device_does_not_matter(family, settings, case_of, tmp_path):
    case = case_of(family)
    near, tight = (2e-2, {}) if "objective" in settings else (1e-4, {"rtol": 1e-9})
    cpu = case.calibrate(tmp_path / "cpu", device="cpu", **settings, **tight)
    gpu = case.calibrate(tmp_path / "gpu", device="cuda", **settings, **tight)
    before, one, two = (zoo.tensors(p) for p in (case.merged, tmp_path / "cpu", tmp_path / "gpu"))
    assert cases.changed_tensors(case.merged, tmp_path / "gpu")
    for a, b in zip(cpu.layers, gpu.layers, strict=True):
        assert b["status"] == "converged"
        for name in case.sources:
            assert b["kl_after"][name] == pytest.approx(a["kl_after"][name], rel=2e-2)
        move = (one[a["router"]] - before[a["router"]]).norm()
        assert (one[a["router"]] - two[a["router"]]).norm() <= near * move


@pytest.mark.parametrize("kind", ["deepseek fp8", "gpt-oss mxfp4", "kimi int4", "llama4 fp8 a row"])
def test_only_the_routers_change(case_of, tmp_path, kind):
    form = qz.KINDS[kind]
    case = case_of(form.family, dtype=torch.bfloat16, **form.sizes)
    merged = form.publish(case.merged, tmp_path / "quantised", shards=2)
    plain = qz.plain_copy(merged, tmp_path / "plain")
    sources = {"math": form.publish(case.sources["math"], tmp_path / "math")}
    sources = {**case.sources, **sources}
    for folder, out in ((merged, "out"), (plain, "out-plain")):
        cases.Case(folder, sources, case.data).calibrate(
            tmp_path / out, targets="source-features", objective="exact"
        )
    changed = cases.changed_tensors(merged, tmp_path / "out")
    assert changed
    assert all(
        name.endswith((".gate.weight", ".router.weight", ".router.bias")) for name in changed
    )
    after, expected = zoo.tensors(tmp_path / "out"), zoo.tensors(tmp_path / "out-plain")
    assert all(torch.equal(after[name], expected[name]) for name in changed)
    assert zoo.read_config(tmp_path / "out") == zoo.read_config(merged)


def test_routers_that_are_quantised_themselves(case_of, tmp_path):
    case = case_of("olmoe", dtype=torch.bfloat16)
    merged = qz.convert(
        case.merged,
        tmp_path / "quantised",
        qz.fp8_config(8, 8),
        qz.block_fp8(8, 8),
        lambda name, tensor: name.endswith("gate.weight"),
    )
    broken = cases.Case(merged, case.sources, case.data)
    with pytest.raises(CheckpointError, match="stored as float8_e4m3fn in 8 x 8 blocks"):
        broken.calibrate(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(merged)


def test_the_original_as_the_only_source(case_of, tmp_path):
    """Its router is the quantised model's own: only its routing on its own features repairs."""
    case = case_of("olmoe", dtype=torch.bfloat16)
    original = case.merged
    quantised = qz.KINDS["fp8 a tensor"].publish(original, tmp_path / "quantised")
    one = cases.Case(quantised, {"math": original}, {"math": case.data["math"]})
    report = one.calibrate(tmp_path / "out", holdout=0.0)
    assert report.settings["targets"] == "source-features"
    assert any("all sources have the same routers" in notice for notice in report.notices)
    assert "targets: source-features" in (tmp_path / "out" / "moemerge_config.yml").read_text()
    totals = report.totals
    assert totals["kl_after"]["math"] < totals["kl_before"]["math"]
    kept = one.calibrate(tmp_path / "kept", holdout=0.0, targets="merged-features")
    assert any("would repair their routing" in notice for notice in kept.notices)
    assert cases.changed_tensors(quantised, tmp_path / "kept") == set()


REFUSED = ("zaya", "doge")
EVERY = (*zoo.FAMILIES, *multimodal_zoo.FAMILIES)
SERVED = zoo.by_kind(name for name in EVERY if name not in REFUSED)


@pytest.mark.parametrize("family", SERVED)
def test_a_family_calibrates(family, case_of, tmp_path):
    case = case_of(family)
    out = tmp_path / "out"
    report = case.calibrate(out, measure=False)
    checkpoint = Checkpoint.open(case.merged)
    places = Architecture.of(checkpoint.config, checkpoint.tensors).routers()
    served = [place for place in places if place.served]
    assert [row["router"] for row in report.layers] == [place.weight for place in served]
    assert {s.router for s in report.skipped} == {p.weight for p in places if not p.served}
    for row in report.layers:
        assert row["status"] == "converged", row
        before, after = (sum(row[key].values()) for key in ("kl_before", "kl_after"))
        assert after < before, row
    changed = {place.weight for place in served} | {p.bias for p in served if p.bias}
    assert cases.changed_tensors(case.merged, out) == changed
    zoo.assert_loads(out)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_served_is_refused(family, case_of, tmp_path):
    with pytest.raises(ArchitectureError, match=f"routers of {family} cannot be calibrated"):
        case_of(family).calibrate(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_dense_model_is_refused(tmp_path):
    dense = zoo.dense_llama(tmp_path / "dense")
    case = cases.make_case(dense, tmp_path)
    with pytest.raises(ArchitectureError, match="no experts"):
        case.calibrate(tmp_path / "out")
    assert not (tmp_path / "out").exists()
