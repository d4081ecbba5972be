"""A source that gives what the merged model gives: nothing is learnt from rounding."""

import math

import pytest
import torch

import zoo
from moemerge.repairs.refit_states import (
    Activations,
    Record,
    ResidualWrite,
    RoundingCheck,
    Structure,
    of_output,
    unit,
)
from moemerge.runtime.ranks import SINGLE
from moemerge.text.batches import Batch
from repairs.calibration import cases as calibrating
from repairs.refitting.cases import make_case

DTYPES = (torch.float32, torch.bfloat16)
# qwen2_moe has a shared expert that a gate weighs, and a dense layer.
FAMILIES = ("olmoe", "qwen2_moe")
OPTIONS = {"ridge": 0.01, "holdout": 0.2, "measure": False}


@pytest.fixture
def case_of(zoo_folder, tmp_path):
    """A merge of two, stored in a dtype; one domain's rows are of unequal length."""

    def case(family, dtype):
        base = zoo_folder(family, dtype=dtype, num_hidden_layers=2)
        return make_case(base, tmp_path / "case", rows=12)

    return case


# --- whole models -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_is_its_own_source_stays_as_it_is(family, dtype, case_of, tmp_path):
    case, out = case_of(family, dtype), tmp_path / "out"
    sources = dict.fromkeys(case.sources, case.merged)
    report = case.refit(out, sources=sources, strict=True, **OPTIONS)
    assert calibrating.changed_tensors(case.merged, out) == set()
    total = report.totals
    assert total["kept"] == total["complete"] == total["maps"]
    assert all(drift == 0 for layer in report.layers for drift in layer["drift_after"].values())
    first = len(report.layers[0]["maps"])
    match = f"{first} of {first} maps match their sources within rounding"
    assert f"layer 0: {match} and keep their merged weights" in report.notices
    assert not any("would lose" in notice for notice in report.notices)
    card = (out / "README.md").read_text()
    kept = "0 maps kept their merged weights, since held-out rows would have lost"
    assert f"{kept}, and {total['maps']}" in card


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_of_two_sources_is_the_merged_model(dtype, case_of, tmp_path):
    """The other one is learnt from, and what it moves is missing to the first."""
    case, out = case_of("olmoe", dtype), tmp_path / "out"
    report = case.refit(out, sources={**case.sources, "math": case.merged}, **OPTIONS)
    moved = {f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkvo"}
    assert moved <= calibrating.changed_tensors(case.merged, out)
    for layer in report.layers[:-1]:
        assert layer["drift_before"]["math"] == 0 < layer["drift_after"]["math"]
        assert layer["drift_after"]["code"] < layer["drift_before"]["code"]
    assert not any("beyond rounding" in notice for notice in report.notices)


@pytest.mark.parametrize(("dtype", "moved"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_a_source_that_differs_a_little_is_learnt_from(dtype, moved, case_of, tmp_path):
    """A map that writes to the hidden state, and nothing else of the first layer, is another."""
    case, other = case_of("olmoe", dtype), tmp_path / "other"
    name = "model.layers.0.self_attn.o_proj.weight"
    with zoo.edited(case.merged, other) as tensors:
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(tensors[name].shape, generator=generator) * tensors[name].float().std()
        tensors[name] = (tensors[name].float() + moved * noise).to(dtype)
    sources = dict.fromkeys(case.sources, other)
    report = case.refit(tmp_path / "out", sources=sources, parts="attention", **OPTIONS)
    rows = {row["map"]: row for row in report.layers[0]["maps"]}
    assert rows[name]["error_before"] > 0
    assert not rows[name]["kept"]
    assert rows[name]["error_after"] < 0.5 * rows[name]["error_before"]
    others = [row for key, row in rows.items() if key != name]
    assert all(row["kept"] and row["error_before"] == 0 for row in others)


# --- the bound ----------------------------------------------------------------------------------


def test_an_outputs_rounding_by_hand():
    """(|3| + √12.5) · (2 · 2⁻⁸ + 4 · 3 · 2⁻²⁴) of a token that says 3 and 4, by nine terms."""
    assert unit(torch.bfloat16) == 2.0**-8
    says = torch.tensor([[3.0, -4.0]])
    share = 2 * 2.0**-8 + 12 * 2.0**-24
    wanted = torch.tensor([[3.0, 4.0]]) * share + math.sqrt(12.5) * share
    torch.testing.assert_close(of_output(says, torch.bfloat16, 9, 2.0), wanted)


def test_a_states_rounding_by_hand():
    """A state of 8 that 2 and then 1 are added to, bfloat16: rounded at 10 and 11 and, in front of
    that, 2 and 1 twice each; float32's own roundings come on top, of 8, 10 and 11."""
    batch = batch_of("math", 1)
    value = torch.full((1, 1), 8.0, dtype=torch.bfloat16)
    record = Record(entered=value, outputs={"o": torch.full((1, 1), 2.0, dtype=torch.bfloat16)})
    state = Activations({}, SINGLE)
    state.structure = Structure((ResidualWrite("o", 1.0), ResidualWrite("e", 1.0)))
    state.merged = {id(batch): record}
    own = 2 * 2.0**-24
    first = state.rounding(batch, 0, slice(None), torch.full((1, 1), 2.0))
    assert float(first) == pytest.approx(own * (8 + 10))
    last = state.rounding(batch, 1, slice(None), torch.full((1, 1), 1.0))
    assert float(last) == pytest.approx((8 + 10 + 11 + 2 * 2 + 2 * 1) * 2.0**-8 + own * 29)


def batch_of(domain, tokens):
    ids = torch.zeros(1, tokens, dtype=torch.long)
    return Batch(domain, False, ids, torch.ones(1, tokens, dtype=torch.bool), (0,))


@pytest.mark.parametrize(
    ("value", "alike"), [(0.5, True), (-1.0, True), (1.01, False), (float("nan"), False)]
)
def test_one_value_of_one_token_is_enough(value, alike):
    gap = torch.zeros(3000, 2)
    gap[2999, 1] = value
    check = RoundingCheck(["math", "code"])
    seen = []

    def compared(rows):
        seen.append(rows)
        return gap[rows], torch.ones_like(gap[rows])

    check.compare(batch_of("math", 3000), compared)
    assert ("math" in check.matching(SINGLE)) is alike
    assert "code" in check.matching(SINGLE)
    looks = len(seen)
    check.compare(batch_of("math", 3000), compared)  # once it differs, nothing is looked at
    assert len(seen) == (2 * looks if alike else looks)
