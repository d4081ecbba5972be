"""Gradient steps: one by hand, then whole runs that are compared with transformers."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import zoo
from moemerge.errors import ConfigError, UsageError
from moemerge.repairs.descent import RATES, Descent
from moemerge.runtime.ranks import Ranks
from moemerge.text.batches import Batch
from repairs.calibration import cases as calibrating
from repairs.refitting.cases import Killed, kill_after, make_case

FAST = {"solver": "gradient", "steps": 12, "holdout": 0.2, "measure": False}


@pytest.fixture(scope="module")
def trained(case, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "out"
    return out, case.refit(out, **FAST)


def batch(domain, *, holdout=False):
    return Batch(domain, holdout, torch.ones(1, 2).long(), torch.ones(1, 2).bool(), (0,))


def descent(weight, loss, *batches):
    given = {weight: torch.float32}, loss, batches, "here"
    return Descent(*given, weights={"math": 1.0}, ranks=Ranks(), steps=1, seed=0)


def test_one_step_moves_a_weight_by_the_rate():
    """Two tokens with the error (w - 3)²: the first step of Adam has the length of the rate."""
    weight = nn.Parameter(torch.zeros(()))
    fit, rate = descent(weight, lambda _: 2 * (weight - 3.0) ** 2, batch("math")).run()
    assert rate == RATES[-1]  # the highest comes closest
    assert float(weight.detach()) == pytest.approx(rate)
    assert (fit.before, fit.after) == pytest.approx((9.0, (3.0 - rate) ** 2))
    assert (fit.tokens, fit.held_tokens, fit.held_before) == (2, 0, None)
    assert not fit.kept
    assert not weight.requires_grad


def test_a_step_that_held_out_rows_reject_is_taken_back():
    weight = nn.Parameter(torch.zeros(()))
    wanted = {False: 3.0, True: -3.0}
    both = batch("math"), batch("math", holdout=True)
    fit, rate = descent(weight, lambda b: (weight - wanted[b.holdout]) ** 2, *both).run()
    assert rate == RATES[0]
    assert fit.kept
    assert float(weight) == 0.0
    assert fit.held_before == fit.held_after == 4.5


def test_hidden_states_come_closer_to_those_of_the_sources(case, trained):
    out, report = trained
    layers = [row for row in report.layers if row["layer"] is not None]
    assert [row["layer"] for row in report.layers] == [0, 1, None]
    assert "12 gradient steps each" in (out / "README.md").read_text()
    for row in layers:
        (fit,) = row["maps"]
        assert fit["held_out"]["error_after"] < fit["held_out"]["error_before"]
        assert fit["error_after"] < fit["error_before"]
    before, after = (
        sum(gap for name in case.sources for gap in gaps(case, model, name))
        for model in (case.merged, out)
    )
    assert after < before


def gaps(case, model, name):
    """Yield the squared distance of the last hidden states, row by row, from transformers."""
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (model, case.sources[name])
    )
    for row in case.rows()[name]:
        with torch.no_grad():
            states = [m.model(input_ids=row[None]).last_hidden_state for m in (ours, theirs)]
        yield float((states[0] - states[1]).square().sum())


def test_maps_and_routers_move_and_nothing_else_does(case, trained, tmp_path):
    changed = calibrating.changed_tensors(case.merged, trained[0])
    assert {name.split(".")[-2] for name in changed} >= {"q_proj", "gate", "lm_head"}
    assert all(
        any(part in name for part in ("_proj.", "mlp.gate.weight", "lm_head")) for name in changed
    )
    case.refit(tmp_path / "routers", **FAST, parts="router")
    only = calibrating.changed_tensors(case.merged, tmp_path / "routers")
    assert {name.split(".")[-2] for name in only} == {"gate"}


def test_a_killed_run_ends_with_the_same_bytes(case, trained, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(Killed):
            case.refit(tmp_path / "out", **FAST)
    report = case.refit(tmp_path / "out", **FAST)
    assert report.resumed
    assert calibrating.changed_tensors(trained[0], tmp_path / "out") == set()


def test_a_model_that_is_its_own_source_keeps_its_bytes(case, tmp_path):
    own = replace(case, sources=dict.fromkeys(case.sources, case.merged))
    report = own.refit(tmp_path / "out", **FAST)
    assert calibrating.changed_tensors(case.merged, tmp_path / "out") == set()
    assert report.totals["complete"] == len(report.layers)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"])
def test_families(family, zoo_folder, tmp_path):
    case = make_case(zoo_folder(family), tmp_path / "case", rows=12, scale=0.1)
    report = case.refit(tmp_path / "out", **{**FAST, "steps": 4, "holdout": 0.0})
    fits = [row["maps"][0] for row in report.layers]
    assert all(fit["error_after"] < fit["error_before"] for fit in fits)
    zoo.assert_loads(tmp_path / "out")


def test_what_does_not_go_together_is_refused(case, tmp_path):
    with pytest.raises(ConfigError, match="trains floats"):
        case.refit(tmp_path / "out", **FAST, requantize="same")
    with pytest.raises(UsageError, match="again and again"):
        case.refit(tmp_path / "out", **FAST, offload="disk")
    assert not (tmp_path / "out").exists()
