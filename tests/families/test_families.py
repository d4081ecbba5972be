"""The table against transformers' own routers: which module, which experts it chooses."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import multimodal_zoo
import zoo
from moemerge.errors import ArchitectureError
from moemerge.families import families_softmax
from moemerge.families.architecture import Architecture
from moemerge.families.families import FAMILIES, family_of
from moemerge.families.rules import Score
from moemerge.routing.gates import select

INSTALLED = tuple(f for f in (*zoo.FAMILIES, *multimodal_zoo.FAMILIES) if zoo.installed(f))
NOT_SERVED = ("zaya", "doge")

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])

# Routers that give no expert numbers back: the block around them chooses.
NO_INDICES = {"dbrx", "llama4_text", "jetmoe"}


def model_of(model_type, seed=0):
    rooms = multimodal_zoo if model_type in multimodal_zoo.FAMILIES else zoo
    return rooms.model(model_type, seed=seed)


def recorded_routers(model):
    """The modules that transformers itself declares to be routers."""
    found = {}
    for owner in model.modules():
        recorded = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits", ())
        for entry in recorded if isinstance(recorded, (list, tuple)) else (recorded,):
            kind = getattr(entry, "target_class", entry)
            within = getattr(entry, "layer_name", None) or ""
            for name, module in model.named_modules():
                if type(module) is kind and within in name:
                    found[name] = module
    if not found and RELEASE < (5, 22):
        pytest.skip("this release of transformers does not declare its routers")
    return found


def router_module(modules, place):
    """The innermost of them that holds a router's matrix."""
    return max((n for n in modules if place.weight.startswith(n + ".")), key=len)


def architecture_in_memory(model):
    return Architecture.of(model.config.to_dict(), model.state_dict())


def observe(model, module, owner):
    """The input of the router's matrix and the output of the router, on sixty tokens."""
    seen = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.__setitem__("x", args[0])),
        owner.register_forward_pre_hook(lambda _, args: seen.__setitem__("x", args[0])),
        module.register_forward_hook(lambda _, args, out: seen.__setitem__("out", out)),
    ]
    with torch.no_grad():
        model(input_ids=torch.arange(3, 63)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    out = seen["out"] if isinstance(seen["out"], tuple) else (seen["out"],)
    return seen["x"].flatten(0, -2), out


@pytest.mark.parametrize("model_type", INSTALLED)
def test_routers_are_the_modules_transformers_records(model_type):
    model = model_of(model_type)
    places = architecture_in_memory(model).routers()
    modules = recorded_routers(model)
    assert modules
    for place in places:
        owners = [name for name in modules if place.weight.startswith(name + ".")]
        hashed = place.reason is not None and "hash-routed" in place.reason
        assert bool(owners) != hashed, place
    reached = {n for n in modules for place in places if place.weight.startswith(n + ".")}
    assert reached == set(modules)
    order = [place.layer for place in places]
    assert order == sorted(order)


@pytest.mark.parametrize(
    "model_type", [f for f in INSTALLED if f not in NO_INDICES | {*NOT_SERVED, "phimoe"}]
)
def test_gate_chooses_the_experts_that_transformers_chooses(model_type):
    model = model_of(model_type, seed=3)
    state = model.state_dict()
    places = [p for p in architecture_in_memory(model).routers() if p.served]
    modules = recorded_routers(model)
    for place in places:
        name = router_module(modules, place)
        x, out = observe(model, modules[name], model.get_submodule(place.weight.rpartition(".")[0]))
        logits = torch.nn.functional.linear(x.float(), state[place.weight].float())[:, : place.rows]
        if place.bias is not None:
            logits = logits + state[place.bias]
        bias = state[place.selection_bias].flatten() if place.selection_bias else None
        assert place.gate is not None
        indices = [o for o in out if isinstance(o, Tensor) and not o.is_floating_point()]
        if not indices and RELEASE < (5, 22):
            pytest.skip("in this release of transformers the block around the router chooses")
        (chosen,) = indices
        assert torch.equal(chosen.sort(-1).values, select(place.gate, logits, bias).sort(-1).values)
        check_normalisation(model_type, place, out)


def check_normalisation(model_type, place, out):
    """Renormalised weights add up to the same number for every token; others do not."""
    gate = place.gate
    if gate.score is Score.SOFTMAX or model_type == "inkling_text":  # shared experts take a part
        return
    weights = next(
        o for o in out if o.is_floating_point() and o.dim() == 2 and o.shape[-1] == gate.top_k
    )
    sums = weights.sum(-1)
    same = torch.allclose(sums, sums[:1].expand_as(sums), atol=1e-4)
    assert same == gate.normalised


@pytest.mark.parametrize("model_type", ["llama4_text", "jetmoe", "dbrx"])
def test_logits_of_routers_that_give_no_indices(model_type):
    model = zoo.model(model_type)
    place = architecture_in_memory(model).routers()[-1]
    modules = recorded_routers(model)
    name = router_module(modules, place)
    owner = model.get_submodule(place.weight.rpartition(".")[0])
    x, out = observe(model, modules[name], owner)
    logits = torch.nn.functional.linear(x, model.state_dict()[place.weight])
    assert any(
        isinstance(o, Tensor) and o.shape == logits.shape and torch.allclose(o, logits, atol=1e-6)
        for o in out
    )
    assert place.gate is not None
    assert place.gate.top_k == (1 if model_type == "llama4_text" else 2)


@pytest.mark.parametrize("model_type", INSTALLED)
def test_defaults_are_those_of_transformers(model_type):
    """A config.json may leave out what equals the class's default."""
    family = family_of(model_type)
    full = transformers.CONFIG_MAPPING[model_type]().to_dict()
    for biased in (False, True):
        named = family.gate.gate(full, 1, biased=biased)
        bare = family.gate.gate({}, 1, biased=biased)
        groups = {"groups", "top_groups", "group_score", "masked_score"}  # never left out
        kept = set(vars(bare)) - groups
        assert {k: vars(bare)[k] for k in kept} == {k: vars(named)[k] for k in kept}


def test_the_table():
    assert len(zoo.FAMILIES) >= 56  # no row got lost
    every = [name for family in FAMILIES for name in family.model_types]
    assert len(every) == len(set(every))
    assert [f.model_type for f in FAMILIES if not f.served] == [*NOT_SERVED]
    assert all(f.reason for f in FAMILIES if not f.served)


def test_the_row_of_the_page():
    """A family like OLMoE is one line."""
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (line,) = re.findall(r'^Family\(\("my_moe".*$', page, re.M)
    row = eval(line, dict(vars(families_softmax)))
    assert dataclasses.replace(row, model_types=("olmoe",), title="OLMoE") == family_of("olmoe")


@pytest.mark.parametrize("alias", ["llama4", "gemma4", "qwen3_5_moe", "qwen4_exp", "glm4v_moe"])
def test_aliases(alias):
    assert family_of(alias) is not None
    assert family_of("llama") is None


def test_gate_reads_lists_by_layer_and_both_scores():
    hunyuan, cohere = family_of("hunyuan_v1_moe"), family_of("cohere2_moe")
    assert hunyuan.gate.gate({"moe_topk": [1, 2, 4]}, 2, biased=False).top_k == 4
    sigmoid = {"expert_selection_fn": "sigmoid", "norm_topk_prob": False}
    gate = cohere.gate.gate(sigmoid, 0, biased=False)
    assert (gate.score, gate.normalised) == (Score.SIGMOID, False)


def test_a_factor_on_the_logits_is_above_zero():
    family = family_of("muse_spark")
    assert family.gate.gate({"output_multiplier": 0.5}, 0, biased=True).scale == 0.5
    for wrong in (0, -0.5, "x", True):
        with pytest.raises(ArchitectureError, match="output_multiplier is"):
            family.gate.gate({"output_multiplier": wrong}, 0, biased=True)


def test_group_limit_only_where_the_config_asks_for_it():
    family = family_of("deepseek_v2")
    config = {"n_group": 8, "topk_group": 3, "topk_method": "greedy"}
    assert family.gate.gate(config, 0, biased=False).groups == 1
    limited = family.gate.gate({**config, "topk_method": "group_limited_greedy"}, 0, biased=False)
    assert (limited.groups, limited.top_groups, limited.group_score) == (8, 3, "max")


def test_axk2_lets_a_masked_expert_win_over_a_negative_score():
    """Its experts outside the kept groups score 0; one inside with a bias below -1 scores less."""
    overrides = {"n_group": 2, "topk_group": 1}
    model = zoo.model("axk2", **overrides)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.tensor([3.0, -9, -9, -9, 0, 0, 0, 0]))
    place = architecture_in_memory(model).routers()[0]
    modules = recorded_routers(model)
    owner = modules[router_module(modules, place)]
    x, out = observe(model, owner, owner)
    state = model.state_dict()
    assert place.gate is not None
    assert place.selection_bias is not None
    logits = torch.nn.functional.linear(x, state[place.weight])
    chosen = out[-1].sort(-1).values
    assert (chosen >= 4).any()
    # the zeros are tied: only that an expert outside the groups comes in is defined
    ours = select(place.gate, logits, state[place.selection_bias]).sort(-1).values
    assert ((ours >= 4).sum(-1) == (chosen >= 4).sum(-1)).all()
