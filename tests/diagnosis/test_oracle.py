"""Every figure equals that of whole models in plain transformers, to float32 rounding."""

import pytest
import torch

import zoo
from diagnosis import oracle

FAMILIES = ("olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss")
NUMBERS = (
    "tokens",
    "mismatch",
    "any_mismatch",
    "mismatch_on_features",
    "top1_agreement",
    "weighted_overlap",
    "kl",
    "kl_on_features",
    "quadratic",
    "logit_shift",
    "shift_small",
    "shift_moderate",
    "drift",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_figures_are_those_of_whole_models(family, case_of, tmp_path):
    case = case_of(family)
    other = zoo.perturb(case.merged, tmp_path / "other", seed=5, scale=0.1)
    found = case.diagnose(against=[other], device="cpu")
    subjects = {"model": oracle.Whole(case.merged), str(other): oracle.Whole(other)}
    for domain, folder in case.sources.items():
        source = oracle.Whole(folder)
        rows = case.rows()[domain]
        theirs, loss_source = source.run(rows)
        for name, model in subjects.items():
            mine, loss = model.run(rows)
            expected = {n: oracle.figures(model, source, mine[n], theirs[n], n) for n in mine}
            measured = {row.layer: row for row in found.layers_of(name, domain)}
            assert measured.keys() == expected.keys()
            for layer, row in measured.items():
                check_row(row, expected[layer])
            total = found.total(domain, name)
            lost = torch.tensor([expected[n]["lost"] for n in expected])  # (layers, tokens)
            per_token = sum(e["mismatch"] for e in expected.values()) * zoo.TOP_K
            assert total.any_mismatch == pytest.approx(float(lost.any(0).double().mean()))
            assert total.mismatched_per_token == pytest.approx(per_token)
            assert total.choices_per_token == zoo.TOP_K * len(expected)
            assert total.mismatched_layers_per_token == pytest.approx(
                float(lost.double().sum(0).mean())
            )
            assert total.loss == pytest.approx(loss, rel=1e-5)
            assert total.loss_source == pytest.approx(loss_source, rel=1e-5)
            mean = sum(e["kl"] for e in expected.values()) / len(expected)
            assert total.kl == pytest.approx(mean, rel=1e-4)


def check_row(row, expected):
    for name in NUMBERS:
        assert getattr(row, name) == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
    for name in ("load_source", "load"):
        assert getattr(row, name) == pytest.approx(expected[name]), name
    flow = {(a, b): share for a, b, share in row.flow}
    everything = expected["flow"]
    assert flow.items() <= everything.items() or flow == pytest.approx(
        {pair: everything[pair] for pair in flow}, rel=1e-5
    )
    assert len(flow) == min(40, len(everything))
    smallest = min(flow.values(), default=0.0)
    left = [share for pair, share in everything.items() if pair not in flow]
    assert all(share <= smallest * (1 + 1e-5) for share in left)


def test_text_bounds_and_layers_are_honoured(case):
    found = case.diagnose(layers="last:1", limit=3, max_length=5, dtype="float32")
    assert {row.layer for row in found.layers} == {2}
    assert all(domain.rows == 3 and domain.tokens == 15 for domain in found.domains.values())
    assert found.settings["layers"] == "last:1"
    assert "--limit 3" in found.command


def test_held_out_rows_are_those_a_calibration_spares(case, tmp_path):
    report = case.calibrate(tmp_path / "out", holdout=0.3, device="cpu")
    held = case.diagnose(holdout=0.3)
    # On the first layer nothing was replaced yet, so both saw the same features.
    row, wanted = report.layers[0], {r.domain: r for r in held.layers_of() if r.layer == 0}
    assert {n: d.tokens for n, d in held.domains.items()} == row["holdout"]["tokens"]
    for name, kl in row["holdout"]["kl_before"].items():
        assert wanted[name].kl_on_features == pytest.approx(kl, rel=1e-5)
