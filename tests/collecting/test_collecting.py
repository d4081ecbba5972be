"""Statistics are those of the whole model in plain transformers, on the rows one by one."""

import pytest
import torch

from collecting import direct
from collecting.cases import token_rows
from moemerge.families.opened import open_model
from moemerge.forward.input_hooks import (
    LinearHook,
    UnitMap,
    find_input_hooks,
    projections,
)
from moemerge.forward.loading import map_names
from moemerge.forward.routers import anatomy
from moemerge.statistics import Statistics
from moemerge.text.domains import TextSettings, load_domain
from moemerge.text.tokens import load_tokenizer

FAMILIES = ("olmoe", "qwen3_moe", "mixtral")
TOLERANCE = 1e-5  # of the largest value in a matrix


def difference(got, wanted):
    return float((got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))


OF_INPUTS = [(kind, family) for kind in ("gram", "activation") for family in FAMILIES]


@pytest.mark.parametrize(("kind", "family"), [*OF_INPUTS, ("power", "olmoe")])
def test_statistics_of_inputs_are_those_of_the_whole_model(
    kind, family, model_folder, collect, text, tmp_path
):
    folder = model_folder(family)
    report = collect(folder, tmp_path / "a.stats", kind=kind)
    compute = direct.activations if kind == "activation" else direct.grams
    wanted = compute(folder, token_rows(folder, text))
    if kind == "activation":
        assert report.nbytes < 400_000  # a vector for every input, and the names of the units
    with Statistics.open(tmp_path / "a.stats") as found:
        assert set(found.units) == set(wanted)
        for key, (values, tokens) in wanted.items():
            statistics = found.read(kind, key)
            assert statistics.tokens == tokens == found.tokens(key), key
            got = statistics.values
            assert got.dtype == torch.float32
            expected = values.diagonal() if kind == "power" else values
            assert difference(got, expected) < TOLERANCE, key


@pytest.mark.parametrize("family", FAMILIES)
def test_fisher_values_are_those_of_the_whole_model(family, model_folder, collect, text, tmp_path):
    folder = model_folder(family)
    collect(folder, tmp_path / "a.stats", kind="fisher")
    rows = token_rows(folder, text)
    wanted = direct.fishers(folder, rows)
    passed = direct.grams(folder, rows)
    with Statistics.open(tmp_path / "a.stats") as found:
        assert found.sequences == sum(len(row) > 1 for row in rows)
        assert set(found.units) == set(passed)
        for key, (_, tokens) in passed.items():
            fisher = found.read("fisher", key)
            assert fisher.tokens == tokens, key
            assert difference(fisher.values, wanted[key]) < TOLERANCE, key


@pytest.mark.parametrize("family", FAMILIES)
def test_sensitivities_are_those_of_the_whole_model(family, model_folder, collect, text, tmp_path):
    folder = model_folder(family)
    collect(folder, tmp_path / "a.stats", kind="sensitivity")
    wanted = direct.sensitivities(folder, token_rows(folder, text))
    with Statistics.open(tmp_path / "a.stats") as found:
        assert len(found.units) > 50
        for key in found.units:
            value = float(found.read("sensitivity", key).values)
            assert value == pytest.approx(wanted[key], rel=1e-4, abs=1e-9), key


# Transposed and interleaved experts with biases; latent attention and shared experts; experts
# without a gate; a router inside a router; attention by an indexer.
OTHERS = ("gpt_oss", "deepseek_v3", "nemotron_h", "hunyuan_v1_moe", "glm_moe_dsa")


@pytest.mark.parametrize("family", OTHERS)
def test_fisher_values_of_other_kinds_of_experts(family, model_folder, collect, text, tmp_path):
    """By the parameters in memory, which only `UnitMap` can tell from the units on disk."""
    folder = model_folder(family)
    report = collect(folder, tmp_path / "a.stats", kind="fisher", limit=4)
    rows = load_domain("text", text, load_tokenizer(folder), TextSettings(limit=4)).rows
    total = direct.squared_gradients(folder, rows)
    model = direct.whole_model(folder)
    hooks = find_input_hooks(model, anatomy(model))
    opened = open_model("model", folder)
    names = map_names(model, opened.checkpoint)
    units = UnitMap(opened.checkpoint, opened.architecture, names)
    compared = 0
    with Statistics.open(tmp_path / "a.stats") as found:
        for hook in (hook for layer in hooks.layers for hook in layer):
            for key, wanted in expected(hook, model, units, total).items():
                fisher = found.read("fisher", key)
                assert difference(fisher.values, wanted) < TOLERANCE, key
                compared += 1
    assert compared in (report.units, report.units - 1)  # the head is no hook of a layer


def expected(hook, model, units, total):
    """Unit key -> squared gradients."""
    if isinstance(hook, LinearHook):
        return {p.unit.key: p.take(total[hook.weight]) for p in units.linear(hook)}
    module = model.get_submodule(hook.path)
    found = {}
    for (expert, projection), unit in units.experts(hook).items():
        up, down = total[hook.up][expert], total[hook.down][expert]
        if module.is_transposed:
            up, down = up.T, down.T
        parts = {**projections(module, up), "down": down}
        assert projection is not None
        found[unit.key] = parts[projection]
    return found
