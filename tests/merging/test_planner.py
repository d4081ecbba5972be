"""What goes into which output tensor, and what is refused before a tensor is read."""

import json
import shutil

import pytest
import torch

import moemerge
import zoo
from moemerge import api
from moemerge.config.settings import MergeSettings
from moemerge.errors import ArchitectureError, CheckpointError, ConfigError
from moemerge.merging.matching import PlannedKinds
from moemerge.merging.planner import Planner
from moemerge.merging.run import plan_merge
from zoo import linear, stacked


def edit(folder, change):
    """Rewrite a single-file checkpoint's tensors."""
    with zoo.edited(folder) as tensors:
        change(tensors)


@pytest.fixture
def dense(tmp_path):
    """A base and two fine-tunes of a dense model with four layers."""
    base = zoo.dense_llama(tmp_path / "base")
    return [base, *(zoo.perturb(base, tmp_path / f"m{seed}", seed) for seed in (1, 2))]


@pytest.fixture
def olmoe(tmp_path, zoo_folder):
    base = tmp_path / "base"
    shutil.copytree(zoo_folder("olmoe"), base)
    return [base, *(zoo.perturb(base, tmp_path / f"m{seed}", seed) for seed in (1, 2))]


def ties(base, models, **extra):
    return {**linear(models), "merge_method": "ties", "base_model": str(base), **extra}


def side_by_side(*parts, **extra):
    """A slice of layers: the mean of some layers of each model."""
    weight = {"parameters": {"weight": 1.0}}
    sources = [{"model": str(m), "layer_range": layers, **weight} for m, layers in parts]
    return {"merge_method": "linear", "slices": [{"sources": sources}], **extra}


def test_gradient_runs_over_the_layers_and_starts_outside_them(dense, tmp_path):
    _, a, b = dense
    config = linear([a, b])
    for entry, weight in zip(config["models"], ([0, 1], [1, 0]), strict=True):
        entry["parameters"] = {"weight": weight}
    moemerge.merge(config, tmp_path / "out")
    merged, ta, tb = zoo.tensors(tmp_path / "out"), zoo.tensors(a), zoo.tensors(b)
    for name, value in merged.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        t = layer / 3 if ".layers." in name else 0.0
        torch.testing.assert_close(value, t * ta[name] + (1 - t) * tb[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_tensors_of_one_kind_are_planned_as_if_alone(olmoe, method, monkeypatch):
    base, *tuned = olmoe
    config = linear(tuned) if method == "linear" else ties(base, tuned)
    config["parameters"] = {"weight": [0.2, 0.7]}  # other values in each layer
    for entry in config["models"]:
        del entry["parameters"]

    def plan():
        return plan_merge(api.load_config(config), MergeSettings()).plan

    together, planned = plan(), []
    one = Planner._tensor
    monkeypatch.setattr(Planner, "_tensor", lambda *a: planned.append(a) or one(*a))
    assert plan().blocks == together.blocks
    assert len(planned) < len(together.tensors) / 2
    monkeypatch.setattr(PlannedKinds, "kind", lambda *_: None)
    alone = plan()
    assert [(b.tensor, b.shape, b.merges) for b in together.blocks] == [
        (b.tensor, b.shape, b.merges) for b in alone.blocks
    ]
    assert together.tensors == alone.tensors
    assert together.accounts == alone.accounts


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("self_atn", "'self_atn' matches no tensor, did you mean 'self_attn'?"),
        ("experts.99.", "'experts.99.' matches no tensor; a filter is part of a tensor's name"),
        ("role:shared_expert", "'role:shared_expert' matches no tensor; the merged tensors have"),
        ("layers.0.mlp.gate", "'layers.0.mlp.gate' has no effect: all its tensors get their"),
    ],
)
def test_a_filter_that_decides_nothing_is_refused(olmoe, wanted, said):
    _, a, b = olmoe
    config = linear([a, b])
    config["models"][1]["parameters"]["weight"] = [
        {"filter": "role:router", "value": 0.3},
        {"filter": wanted, "value": 0.5},
        {"value": 1.0},
    ]
    with pytest.raises(ConfigError) as caught:
        moemerge.validate(config)
    assert f"models[1].parameters.weight[1].filter: {said}" in str(caught.value)
    assert "1 problem" in str(caught.value)
    (notice,) = moemerge.validate(config, lenient=True).notices
    assert said in notice


def test_a_filter_of_a_wrapper_that_decides_nothing_is_refused(olmoe):
    base, a, b = olmoe
    alpha = [{"filter": "self_atn", "value": 0.5}, {"value": 1.0}]
    wrap = [{"wrapper": "svc", "parameters": {"alpha": alpha}}]
    config = linear([a, b], merge_method="task_arithmetic", base_model=str(base), wrap=wrap)
    with pytest.raises(ConfigError, match=r"wrap\[0\]\.parameters\.alpha\[0\].*matches no tensor"):
        moemerge.validate(config)
    alpha[0]["filter"] = "self_attn"
    assert moemerge.validate(config).notices == ()


def test_a_filter_of_routers_that_a_router_section_overrides(olmoe):
    _, a, b = olmoe
    config = linear([a, b], router={"merge_method": "linear", "parameters": {"weight": 1}})
    config["models"][0]["parameters"]["weight"] = [
        {"filter": "role:router", "value": 0.3},
        {"value": 1.0},
    ]
    with pytest.raises(ConfigError, match="'role:router' has no effect"):
        moemerge.validate(config)
    config["router"] = {"merge_method": "linear"}  # which takes each model's weight from the models
    assert moemerge.validate(config).notices == ()


@pytest.mark.parametrize("method", ["linear", "multislerp"])
def test_weights_that_sum_to_zero_are_refused_before_a_tensor_is_read(olmoe, method):
    _, a, b = olmoe
    config = {**linear([a, b]), "merge_method": method}
    config["models"][1]["parameters"]["weight"] = [
        {"filter": "mlp.gate", "value": -1.0},
        {"value": 1},
    ]
    with pytest.raises(ConfigError, match=r"mlp\.gate.*the weights 1, -1 sum to 0"):
        moemerge.validate(config)


@pytest.mark.parametrize("fused", [False, True])
def test_filters_name_experts_and_roles(zoo_folder, tmp_path, fused):
    a, b = (zoo_folder("olmoe", seed=seed, fused=fused) for seed in (1, 2))
    weight = [
        {"filter": "role:router", "value": 0.0},
        {"filter": "experts.3.", "value": 0.25},
        {"value": 1.0},
    ]
    config = linear([a, b])
    config["models"][0]["parameters"]["weight"] = weight
    moemerge.merge(config, tmp_path / "out")
    merged, ta, tb = zoo.tensors(tmp_path / "out"), zoo.tensors(a), zoo.tensors(b)
    for name, value in merged.items():
        w = 0.0 if name.endswith("mlp.gate.weight") else 0.25 if ".experts.3." in name else 1.0
        if fused and ".experts." in name:  # a stack, whose expert 3 goes by a name of its own
            w = torch.ones(zoo.EXPERTS, 1, 1).index_fill_(0, torch.tensor(3), 0.25)
        torch.testing.assert_close(value, (w * ta[name] + tb[name]) / (w + 1), msg=name)


def test_slices_stack_layers_and_the_config_follows(dense, tmp_path):
    _, a, b = dense
    report = moemerge.merge(stacked((a, (0, 3)), (b, (1, 4))), tmp_path / "out")
    merged, ta, tb = zoo.tensors(tmp_path / "out"), zoo.tensors(a), zoo.tensors(b)
    assert zoo.read_config(tmp_path / "out")["num_hidden_layers"] == 6
    for n, (source, layer) in enumerate([(ta, 0), (ta, 1), (ta, 2), (tb, 1), (tb, 2), (tb, 3)]):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(merged[name.format(n)], source[name.format(layer)])
    assert torch.equal(merged["model.embed_tokens.weight"], ta["model.embed_tokens.weight"])
    assert torch.equal(merged["model.norm.weight"], tb["model.norm.weight"])
    assert torch.equal(merged["lm_head.weight"], tb["lm_head.weight"])
    dropped = {m.name: m.dropped for m in report.models}
    assert set(dropped["m1"]) == {"layer 3 is in no slice", "outside every slice"}
    document = json.loads((tmp_path / "out" / "moemerge_report.json").read_text())
    for folder, account in zip((a, b), document["merge"]["inputs"].values(), strict=True):
        reasons = [*account["copied"].values(), *account["dropped"].values()]
        named = [name for names in reasons for name in names]
        assert account["merged"] + len(named) == account["tensors"] == len(zoo.tensors(folder))
        assert len(set(named)) == len(named)
        assert set(named) <= zoo.tensors(folder).keys()


def test_a_base_in_no_slice_is_only_a_reference(dense, tmp_path):
    base, *merged = dense
    config = side_by_side(*((m, [0, 2]) for m in merged), base_model=str(base))
    report = moemerge.merge(config, tmp_path / "out")
    assert [m.base for m in report.models] == [False, False, True]
    assert report.models[0].dropped.keys() == {"layer 2 is in no slice", "layer 3 is in no slice"}
    assert {why: set(names) for why, names in report.models[2].dropped.items()} == {
        "reference only": zoo.tensors(base).keys()
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2 models merged with `linear`" in card
    assert f"- `{base}` (base, the base)" in card


def test_slices_past_the_last_layer_are_refused(dense, tmp_path):
    with pytest.raises(ConfigError, match=r"goes past its last layer: it has 4"):
        moemerge.merge(stacked((dense[1], (2, 9))), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_router_section_merges_or_keeps_routers(olmoe, tmp_path):
    base, a, b = olmoe
    ta, tb = zoo.tensors(a), zoo.tensors(b)
    name = "model.layers.1.mlp.gate.weight"
    moemerge.merge(ties(base, [a, b]), tmp_path / "plain")
    moemerge.merge(
        ties(base, [a, b], router={"merge_method": "linear", "parameters": {"weight": 1.0}}),
        tmp_path / "linear",
    )
    report = moemerge.merge(ties(base, [a, b], router={"keep": "m2"}), tmp_path / "keep")
    plain, average, keep = (zoo.tensors(tmp_path / x) for x in ("plain", "linear", "keep"))
    torch.testing.assert_close(average[name], (ta[name] + tb[name]) / 2)
    assert torch.equal(keep[name], tb[name])
    assert not torch.equal(plain[name], average[name])
    for other in plain:
        if not other.endswith("mlp.gate.weight"):
            assert torch.equal(plain[other], average[other])
            assert torch.equal(plain[other], keep[other])
    accounts = {m.name: m for m in report.models}
    assert len(accounts["m1"].dropped["the routers are those of m2"]) == 3
    assert len(accounts["m2"].copied["router: keep"]) == 3


def test_kept_routers_follow_the_layers_of_their_slice(olmoe, tmp_path):
    _, a, b = olmoe
    config = side_by_side((a, [0, 2]), (b, [1, 3]), router={"keep": "m2"})
    report = moemerge.merge(config, tmp_path / "out")
    merged, tb = zoo.tensors(tmp_path / "out"), zoo.tensors(b)
    gate = "model.layers.{}.mlp.gate.weight"
    for n in range(2):
        assert torch.equal(merged[gate.format(n)], tb[gate.format(n + 1)])
    dropped = next(m for m in report.models if m.name == "m1").dropped
    assert dropped["the routers are those of m2"] == [gate.format(0), gate.format(1)]


def test_a_kept_router_must_be_there_and_fit(olmoe, tmp_path):
    base, a, b = olmoe
    gate = "model.layers.0.mlp.gate.weight"
    edit(b, lambda t: t.update({gate: t[gate][:4].clone()}))
    with pytest.raises(CheckpointError, match=r"counts 8 experts, .*gate\.weight 4"):
        moemerge.merge(ties(base, [a, b], router={"keep": "m2"}), tmp_path / "out")
    edit(b, lambda t: t.pop(gate))
    with pytest.raises(CheckpointError, match=r"m2 lacks 1 tensor that .*base has"):
        moemerge.merge(ties(base, [a, b], router={"keep": "m2"}), tmp_path / "out")


def test_routers_may_need_a_base_where_the_rest_takes_it_as_a_member(olmoe, tmp_path):
    base, a, b = olmoe
    router = {"merge_method": "task_arithmetic", "parameters": {"weight": 0.5}}
    config = linear([a, b, base], base_model=str(base), router=router)
    moemerge.merge(config, tmp_path / "out")
    merged, t0, ta, tb = (zoo.tensors(f) for f in (tmp_path / "out", base, a, b))
    for name, value in merged.items():
        mean = (ta[name] + tb[name] + t0[name]) / 3
        arithmetic = t0[name] + 0.5 * (ta[name] - t0[name]) + 0.5 * (tb[name] - t0[name])
        expected = arithmetic if name.endswith("mlp.gate.weight") else mean
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_stacked_slices_take_each_layers_entry_from_its_own_model(tmp_path):
    kinds = ["full_attention", "sliding_attention"]
    short = zoo.dense_llama(tmp_path / "short", layers=2, qwen=True, layer_types=kinds)
    long = zoo.dense_llama(
        tmp_path / "long", layers=4, qwen=True, seed=1, layer_types=[*kinds, *kinds]
    )
    moemerge.merge(stacked((short, (0, 2)), (long, (3, 4))), tmp_path / "out")
    merged = zoo.read_config(tmp_path / "out")
    assert merged["num_hidden_layers"] == 3
    assert merged["layer_types"] == [*kinds, "sliding_attention"]


def test_stacked_slices_must_agree_on_tying(tmp_path):
    tied = zoo.dense_llama(tmp_path / "tied", tied=True)
    untied = zoo.dense_llama(tmp_path / "untied", seed=1)

    def stack(*models):
        return stacked(*zip(models, ((0, 2), (2, 4), (1, 2)), strict=False))

    for models in ((tied, untied), (untied, tied)):
        with pytest.raises(ArchitectureError, match="ties its output head to the embeddings"):
            moemerge.merge(stack(*models), tmp_path / "out")
    moemerge.merge(stack(tied, untied, tied), tmp_path / "out")
    assert "lm_head.weight" not in zoo.tensors(tmp_path / "out")
    moemerge.merge(stack(untied, tied, untied), tmp_path / "out2")
    assert "lm_head.weight" in zoo.tensors(tmp_path / "out2")


def test_prediction_layers_pair_by_their_place_after_the_last_layer(tmp_path):
    """Layer 4 of a model with four layers is not layer 4 of one with six."""
    short = zoo.dense_llama(tmp_path / "short", layers=4)
    long = zoo.dense_llama(tmp_path / "long", layers=6, seed=1)
    name = "model.layers.{}.input_layernorm.weight"
    for folder, layer, value in ((short, 4, 1.0), (long, 6, 3.0)):
        extra = torch.full((32,), value)
        edit(folder, lambda t, n=layer, x=extra: t.update({name.format(n): x}))
    moemerge.merge(side_by_side((short, [0, 4]), (long, [0, 4])), tmp_path / "out")
    assert torch.equal(zoo.tensors(tmp_path / "out")[name.format(4)], torch.full((32,), 2.0))


def test_prediction_layers_that_are_not_used_have_a_true_reason(olmoe, tmp_path):
    base, a, b = olmoe
    for folder in (a, b):
        edit(folder, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(3, 5)}))
    report = moemerge.merge(ties(base, [a, b]), tmp_path / "out")
    accounts = {m.name: m for m in report.models}
    why = "not in every model (base lacks it)"
    assert accounts["m1"].copied == {why: ["model.layers.3.eh_proj.weight"]}
    assert list(accounts["m2"].dropped) == [f"{why}; another model's is copied"]
    report = moemerge.merge(linear([a, base, b]), tmp_path / "out2")
    accounts = {m.name: m for m in report.models}
    why = "not in every model (base lack it)"
    assert list(accounts["m1"].copied) == [why]
    assert list(accounts["m2"].dropped) == [f"{why}; m1's is copied"]


def test_integers_must_be_integers_everywhere(olmoe, tmp_path):
    _, a, b = olmoe
    name = "model.layers.0.self_attn.counts"
    edit(a, lambda t: t.update({name: torch.arange(4)}))
    edit(b, lambda t: t.update({name: torch.arange(4).float()}))
    for models in ([a, b], [b, a]):
        with pytest.raises(CheckpointError, match=rf"{name} (is|has another dtype)"):
            moemerge.merge(linear(models), tmp_path / "out")
    edit(b, lambda t: t.update({name: torch.arange(4)}))
    moemerge.merge(linear([a, b], dtype="bfloat16"), tmp_path / "out")
    assert torch.equal(zoo.tensors(tmp_path / "out")[name], torch.arange(4))


def test_missing_tensor_is_named(olmoe, tmp_path):
    base, a, b = olmoe
    edit(b, lambda t: t.pop("model.layers.0.mlp.experts.2.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"m2 lacks 1 tensor .*experts\.2\.up_proj\.weight"):
        moemerge.merge(ties(base, [a, b]), tmp_path / "out")


def test_extra_tensor_is_not_lost(olmoe, tmp_path):
    base, a, b = olmoe
    edit(b, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}))
    with pytest.raises(CheckpointError, match=r"base lacks 1 tensor .*q_proj\.bias"):
        moemerge.merge(ties(base, [a, b]), tmp_path / "out")


@pytest.mark.parametrize("owner", ["base", "m2"])
def test_prediction_layers_in_one_model_only_are_copied(olmoe, tmp_path, owner):
    base, a, b = olmoe
    extra = torch.randn(3, 5)
    edit(base.parent / owner, lambda t: t.update({"model.layers.3.eh_proj.weight": extra}))
    report = moemerge.merge(ties(base, [a, b]), tmp_path / "out")
    assert torch.equal(zoo.tensors(tmp_path / "out")["model.layers.3.eh_proj.weight"], extra)
    (reason,) = next(m for m in report.models if m.name == owner).copied
    assert reason.startswith("not in every model")


def test_prediction_layers_in_all_models_are_merged(olmoe, tmp_path):
    _, a, b = olmoe
    for value, folder in ((1.0, a), (3.0, b)):
        extra = torch.full((3, 5), value)
        edit(folder, lambda t, x=extra: t.update({"model.layers.3.eh_proj.weight": x}))
    moemerge.merge(linear([a, b]), tmp_path / "out")
    merged = zoo.tensors(tmp_path / "out")["model.layers.3.eh_proj.weight"]
    assert torch.equal(merged, torch.full((3, 5), 2.0))


def test_tied_head_pairs_with_an_untied_one(tmp_path):
    base = zoo.dense_llama(tmp_path / "base", tied=True)
    tuned = zoo.perturb(base, tmp_path / "tuned", 1)
    edit(tuned, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    report = moemerge.merge(linear([base, tuned]), tmp_path / "out")
    assert "lm_head.weight" not in zoo.tensors(tmp_path / "out")
    account = next(m for m in report.models if m.name == "tuned")
    assert account.dropped == {"a copy of the tied embeddings": ["lm_head.weight"]}
    untied = zoo.dense_llama(tmp_path / "untied", seed=3)
    with pytest.raises(ArchitectureError, match="ties it to the embeddings"):
        moemerge.merge(linear([base, untied]), tmp_path / "out2")
    moemerge.merge(linear([untied, tuned]), tmp_path / "out3")
    merged, t1, t2 = (zoo.tensors(tmp_path / x) for x in ("out3", "untied", "tuned"))
    expected = (t1["lm_head.weight"] + t2["lm_head.weight"]) / 2
    torch.testing.assert_close(merged["lm_head.weight"], expected)


def test_shapes_and_families_must_agree(olmoe, tmp_path):
    _, a, _ = olmoe
    other = zoo.dense_llama(tmp_path / "llama")
    with pytest.raises(ArchitectureError, match=r"'olmoe', but .*'llama'"):
        moemerge.merge(linear([a, other]), tmp_path / "out")
    narrow = zoo.build("olmoe", tmp_path / "narrow", intermediate_size=16)
    with pytest.raises(CheckpointError, match=r"has shape \[32, 16\], but .* has \[32, 48\]"):
        moemerge.merge(linear([a, narrow]), tmp_path / "out")
    deep = zoo.build("olmoe", tmp_path / "deep", num_hidden_layers=4)
    with pytest.raises(ArchitectureError, match=r"has 3 layers, but .* has 4"):
        moemerge.merge(linear([a, deep]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unlike_dtypes_need_a_word(olmoe, tmp_path):
    _, a, b = olmoe
    edit(b, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    with pytest.raises(CheckpointError, match=r"another dtype in each model \(m1: float32, m2"):
        moemerge.merge(linear([a, b]), tmp_path / "out")
    moemerge.merge(linear([a, b], out_dtype="bfloat16"), tmp_path / "out")
    assert {v.dtype for v in zoo.tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert zoo.read_config(tmp_path / "out")["dtype"] == "bfloat16"


def test_dtype_casts_inputs_before_the_arithmetic(olmoe, tmp_path):
    _, a, b = olmoe
    moemerge.merge(linear([a, b], dtype="bfloat16", out_dtype="float32"), tmp_path / "out")
    merged, ta, tb = zoo.tensors(tmp_path / "out"), zoo.tensors(a), zoo.tensors(b)
    for name, value in merged.items():
        expected = (ta[name].bfloat16().float() + tb[name].bfloat16().float()) / 2
        assert torch.equal(value, expected)
    moemerge.merge(linear([a, b], dtype="bfloat16"), tmp_path / "both")
    for name, value in zoo.tensors(tmp_path / "both").items():
        assert torch.equal(value, merged[name].bfloat16())
    moemerge.merge(linear([a, b], out_dtype="bfloat16"), tmp_path / "once")
    for name, value in zoo.tensors(tmp_path / "once").items():
        assert torch.equal(value, ((ta[name] + tb[name]) / 2).bfloat16())


def test_unknown_moe_merges_tensor_by_tensor_with_a_notice(tmp_path, zoo_folder):
    base = tmp_path / "base"
    shutil.copytree(zoo_folder("olmoe"), base)
    zoo.edit_config(base, model_type="brand_new_moe", architectures=["BrandNewForCausalLM"])
    other = zoo.perturb(base, tmp_path / "other", 1)
    report = moemerge.merge(linear([base, other]), tmp_path / "out")
    assert any("unknown MoE architecture 'brand_new_moe'" in n for n in report.notices)
    merged, t1, t2 = (zoo.tensors(f) for f in (tmp_path / "out", base, other))
    for name, value in merged.items():
        torch.testing.assert_close(value, (t1[name] + t2[name]) / 2)
