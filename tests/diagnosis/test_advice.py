"""The words follow from the figures."""

from dataclasses import replace

from moemerge.diagnosis.advice import Measurements, advise
from moemerge.diagnosis.results import MODEL, DomainTotal, LayerDiagnosis, Swap
from moemerge.diagnosis.verdict import overall_totals, recommended, theory, verdict_of, won_back
from moemerge.routing.figures import FIGURES


def row(layer, mismatch, **values):
    load = tuple(0.125 for _ in range(8))
    figures = {
        **dict.fromkeys((name for name, figure in FIGURES.items() if figure.of_tokens), 0.0),
        "mismatch": mismatch,
        "any_mismatch": mismatch,
        "kl": mismatch,
        "kl_on_features": mismatch,
        "mismatch_on_features": mismatch,
        "top1_agreement": 1 - mismatch,
        "weighted_overlap": 1 - mismatch,
        "drift": 0.1,
        "logit_shift": 0.05,
        "shift_small": 0.95,
        "shift_moderate": 1.0,
        "quadratic": mismatch,
        "load_source": load,
        "load": load,
        "dead": (),
        "overloaded": (),
    }
    facts = {
        "model": "model",
        "domain": "math",
        "layer": layer,
        "router": f"model.layers.{layer}.mlp.gate.weight",
        "tokens": 10_000,
        "choices": 20_000,
    }
    figures |= {name: value for name, value in values.items() if name not in facts}
    facts |= {name: value for name, value in values.items() if name in facts}
    return LayerDiagnosis(**facts, figures=figures)


def total(rows, **figures):
    measured = {"any_mismatch": rows[0].any_mismatch, "loss": 2.0, "loss_source": 1.8}
    return changed(DomainTotal.of(rows, **measured), **figures)


def changed(total, **values):
    model = values.pop("model", total.model)
    return replace(total, model=model, figures={**total.figures, **values})


def advice(rows, **values):
    options = {name: values.pop(name) for name in ("swaps", "repaired") if name in values}
    return advise(Measurements(rows, [total(rows, **values)], **options))


def swaps(merged, repaired, source):
    pairs = {(MODEL, MODEL): merged, (MODEL, "math"): repaired, ("math", "math"): source}
    return [Swap("math", weights, routers, 0.2, loss) for (weights, routers), loss in pairs.items()]


def test_repairs_are_ranked_with_a_command():
    ranks = advice([row(0, 0.3, kl=0.6)])
    assert [text.split(":")[0] for text in ranks] == [
        "1. moemerge refit --solver gradient",
        "2. moemerge distill",
        "3. moemerge refit",
        "4. moemerge calibrate",
        "To repair",
    ]
    assert ranks[2] == (
        "3. moemerge refit: closes 77% (60% to 90%) in merges of synthetic specialists; -1% to 96% "
        "on natural text."
    )
    assert "closes 55% (39% to 78%) by the routing KL" in ranks[3]
    assert ranks[4] == "To repair: moemerge refit MODEL OUT --solver gradient"


def test_repairs_that_the_model_has_had_are_left_out():
    ranks = advice([row(0, 0.3, kl=0.6)], repaired=["calibrate", "refit"])
    assert [text.split(":")[0] for text in ranks[:2]] == [
        "1. moemerge refit --solver gradient",
        "2. moemerge distill",
    ]
    assert len(ranks) == 3


def test_swaps_forecast_what_calibration_closes():
    found = swaps(2.0, 1.88, 1.8)
    assert round(won_back(found), 3) == 0.6
    ranks = advice([row(0, 0.3, kl=0.1)], swaps=found)
    assert "calibrate: closes 51% (41% to 56%) by swapped routers" in ranks[3]
    assert won_back(swaps(1.805, 1.8, 1.8)) is None  # nothing noticeable was lost
    verdict = verdict_of([total([row(0, 0.3)])], swaps=swaps(2.0, 1.98, 1.8))
    assert "The routers are not the problem" in verdict.words


def test_a_model_that_loses_nothing_needs_no_repair():
    assert advice([row(0, 0.0)], kl=0.0) == (
        "Nothing to repair: no token is routed otherwise than by its source.",
    )
    (one,) = advice([row(0, 0.3)], loss=1.8)
    assert one.startswith("No repair is recommended: the model predicts this text better than its")


def test_texts_of_other_sources_are_named():
    (_, notice) = advice([row(0, 0.3)], loss=1.5)
    assert notice == (
        "Source 'math' predicts its text worse than the merge (1.80 against 1.50): are the names "
        "swapped?"
    )


def test_experts_without_tokens_and_with_too_many_are_named():
    load = (0.6, *(0.4 / 7 for _ in range(7)))
    found = "\n".join(
        advice([row(0, 0.3), row(2, 0.3, dead=(1, 3), overloaded=(0,), load=load, tokens=50)])
    )
    assert "Layer 2 on math: almost no token reaches expert 1, 3, though" in found
    assert "Layer 2 on math: expert 0 takes 60.0% of the choices, with its source 12.5%." in found
    assert "Few tokens (math)" in found


def test_text_without_a_source_states_what_it_costs():
    own = total([row(0, 0.3)])
    elsewhere = [changed(replace(own, domain="general"), loss=2.0, loss_source=1.5)]
    found = advise(Measurements([row(0, 0.3)], [own], elsewhere=elsewhere))
    assert (
        "On general, which has no source, the loss above the base's is model +0.500 nats"
        in (found[-1])
    )


def test_the_verdict_is_a_sentence_and_three_numbers():
    verdict = verdict_of([total([row(0, 0.3)])])
    assert verdict.words == (
        "The routing has broken down: 30.0% of the sources' expert choices are not made."
    )
    assert [number.text for number in verdict.numbers] == ["30.0%", "30.0%", "+0.200 nats"]
    assert verdict.recommended == (MODEL,)
    for share, state in ((0.01, "is intact"), (0.05, "has shifted a little"), (0.2, "is damaged")):
        assert state in verdict_of([total([row(0, share)])]).words


def test_the_model_with_the_least_loss_is_recommended():
    own = total([row(0, 0.3)])
    better = changed(own, model="other", loss=1.9, mismatch=0.4)
    models = overall_totals([own, better])
    assert recommended(models) == ("other",)
    verdict = verdict_of([own, better], {"other": "repaired"})
    assert "repaired is better: 40.0% mismatch, loss above the sources' +0.100" in verdict.words
    alike = changed(own, model="other", loss=1.999, mismatch=0.2)
    assert recommended(overall_totals([own, alike])) == ("other",)
    assert recommended(overall_totals([changed(own, loss=None), changed(alike, loss=None)])) == (
        "other",
    )


def test_the_theory_holds_if_most_shifts_are_small():
    def of(**values):
        return theory(overall_totals([total([row(0, 0.3, **values)])])[MODEL])

    assert of(shift_small=0.9).startswith("Yes: 90.0% of the tokens")
    assert of(shift_small=0.1).startswith("Near enough")
    assert of(shift_small=0.1, quadratic=0.9).startswith("No: only 10.0%")
    assert of(kl_on_features=0.0).startswith("There is nothing to model")
