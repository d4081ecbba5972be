"""The words follow from the figures."""

from dataclasses import replace

import pytest

from moemerge.diagnosis.advice import Measurements, advise, concentrated
from moemerge.diagnosis.results import DomainTotal, LayerDiagnosis, Swap
from moemerge.diagnosis.verdict import overall_totals, recommended, theory, verdict_of
from moemerge.routing.figures import FIGURES
from moemerge.runtime.formatting import percent


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


MUCH = 0.6  # a routing KL at which calibration is recommended


def advice(rows, **values):
    swaps, routed = values.pop("swaps", ()), values.pop("routed", ())
    repairs = [values.pop(name, None) for name in ("calibration", "refit")]
    repairs = [{} if one is None else {"model": one} for one in repairs]
    found = Measurements(rows, [total(rows, **values)], swaps, *repairs, routed=routed)
    return "\n".join(advise(found))


def test_a_run_of_layers_is_found_where_the_sum_is():
    assert concentrated([0.0, 0.0, 0.0, 1.0]) == (3, 3)
    assert concentrated([0.1] * 12 + [0.5] * 4) == (12, 15)
    assert concentrated([0.5, 0.5, 0.1, 0.1, 0.1, 0.1]) == (0, 1)
    assert concentrated([0.2] * 8) is None
    assert concentrated([0.2, 0.25, 0.3, 0.35]) is None
    assert concentrated([0.3]) is None
    assert concentrated([0.0, 0.0]) is None


def test_layers_to_calibrate_are_named():
    late = [row(n, 0.05 if n < 12 else 0.5, kl=MUCH) for n in range(16)]
    assert "concentrated in layers 12-15: calibrate with --layers last:4" in advice(late)
    early = [row(n, 0.5 if n < 2 else 0.05, kl=MUCH) for n in range(8)]
    assert "concentrated in layers 0-1: calibrate with --layers 0-1" in advice(early)
    spread = [row(n, 0.3, kl=MUCH) for n in range(8)]
    text = advice(spread)
    assert text.startswith("Calibrate the routers (moemerge calibrate).")
    assert "--layers" not in text  # all layers are the default


def test_what_is_calibrated_already_is_not_advised_again():
    late = [row(n, 0.05 if n < 12 else 0.5, kl=MUCH) for n in range(16)]
    done = {"layers": [{"layer": n} for n in range(16)], "settings": {}}
    assert "which are calibrated already" in advice(late, calibration=done)
    spread = [row(n, 0.3, kl=MUCH) for n in range(8)]
    text = advice(spread, calibration=done)
    assert "The routers themselves still disagree" in text
    assert text.startswith(
        "The routers are calibrated already; more or other calibration text, --targets "
        "source-features or"
    )
    done["settings"] = {"targets": "source-features", "objective": "exact"}
    assert "--" not in advice(spread, calibration=done).replace("--swaps", "")


def test_layers_that_were_not_measured_are_not_meant():
    routed = range(16)
    early = [row(n, 0.1 if n < 2 else 0.5, kl=MUCH) for n in range(4)]
    assert "concentrated in layers 2-3: calibrate with --layers 2-3." in advice(
        early, routed=routed
    )
    spread = [row(n, 0.3, kl=MUCH) for n in range(14, 16)]
    assert "layers measured: calibrate them all (--layers last:2)" in advice(spread, routed=routed)
    apart = [row(n, 0.05 if n < 9 else 0.5, kl=MUCH) for n in (0, 4, 9, 15)]
    assert "layers 9,15: calibrate with --layers 9,15." in advice(apart, routed=routed)
    # A range may pass over layers without a router.
    assert "layers 9-12: calibrate with --layers 9-12." in advice(
        [row(n, 0.5 if 4 < n < 14 else 0.05, kl=MUCH) for n in (0, 3, 9, 12, 15)],
        routed=(0, 3, 9, 12, 15),
    )


def test_routers_and_features_are_told_apart():
    routers = [row(n, 0.3, kl=MUCH, mismatch_on_features=0.28) for n in range(4)]
    assert "The routers themselves disagree (28.0% mismatch on the same features" in advice(routers)
    features = [row(n, 0.3, kl=MUCH, mismatch_on_features=0.01, drift=0.4) for n in range(4)]
    text = advice(features)
    assert "agree on the same features, but the features drifted by 40.0%" in text
    assert "calibrate with --targets source-features" in text
    done = {"layers": [], "settings": {"targets": "source-features"}}
    assert "the weights are at fault more than the routers" in advice(features, calibration=done)
    both = [row(n, 0.3, kl=MUCH, mismatch_on_features=0.15) for n in range(4)]
    assert "share the blame" in advice(both)


def test_experts_without_tokens_and_with_too_many():
    load = (0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.0)
    rows = [row(0, 0.2), row(1, 0.2, load=load, dead=(3, 7), overloaded=(0,)), row(2, 0.2)]
    text = advice(rows)
    assert "Layer 1 on math: experts 3, 7 receive hardly any token" in text
    assert "expert 0 takes 40.0% of the choices, with its source 12.5%" in text


def swapped(repaired, merged=2.0):
    """Routers of the source win back `merged` − `repaired` of what the merge lost."""
    return (
        Swap("math", "model", "model", 0.3, merged),
        Swap("math", "model", "math", 0.1, repaired),
        Swap("math", "math", "math", 0.0, 1.8),
    )


def test_swaps_say_how_much_is_routing():
    rows = [row(0, 0.3)]
    text = advice(rows, swaps=swapped(1.9))
    assert "win back 50.0% of what the merge lost there (0.200 nats)" in text
    assert "do not help" in advice(rows, swaps=swapped(2.1))
    assert "nats" not in advice(rows, swaps=swapped(2.1, merged=1.801))


REFIT = "Refit the weights (moemerge refit --solver gradient)."


def test_measured_merges_tell_what_to_expect():
    little = advice([row(n, 0.3, kl=0.1) for n in range(8)])
    assert little.startswith(REFIT)
    assert "such a routing KL (0.100), calibration closed 4% (-2% to 11%)" in little
    assert "on natural text, calibration closed at most 14 %" in little
    much = advice([row(n, 0.3, kl=0.6) for n in range(8)])
    assert much.startswith("Calibrate the routers")
    assert "calibration closed 55% (39% to 78%)" in much
    assert "moemerge refit" not in much


@pytest.mark.parametrize("drift", [{}, {"mismatch_on_features": 0.01}])
def test_how_to_calibrate_is_stated_only_if_it_is_recommended(drift):
    figures = {"kl": 0.1, "shift_small": 0.1, "kl_on_features": 0.2, "quadratic": 0.4, **drift}
    late = [row(n, 0.05 if n < 12 else 0.5, **figures) for n in range(16)]
    text = advice(late)
    assert text.startswith(REFIT)
    assert "concentrated in layers 12-15." in text
    flags = ("--layers", "--targets", "--objective")
    assert not any(words in text.lower() for words in ("calibrate", *flags))
    text = advice([replace(one, figures={**one.figures, "kl": MUCH}) for one in late])
    assert "calibrate with --layers last:4" in text
    assert "--objective exact" in text


def test_a_refitted_merge_is_not_advised_the_same_again():
    rows = [row(n, 0.3, kl=0.1) for n in range(8)]
    text = advice(rows, refit={"settings": {"solver": "closed-form"}})
    assert text.startswith("The weights are refitted already; moemerge refit --solver gradient or")
    assert "In merges" not in text  # those were not repaired
    text = advice(rows, refit={"settings": {"solver": "gradient"}})
    assert text.startswith("The weights are refitted already; more text or moemerge distill")
    assert "--solver" not in text


def test_nothing_is_recommended_if_nothing_is_lost():
    rows = [row(n, 0.3) for n in range(8)]
    text = advice(rows, loss=1.7)
    assert text.startswith("No repair is recommended: the model predicts this text better")
    assert "better than its sources (-0.100 nats), so the mismatch may cost nothing." in text
    assert "as well as its sources (+0.005 nats)" in advice(rows, loss=1.805)
    assert "alibrat" not in text
    assert "efit" not in text
    # What is gained on one domain does not outweigh what is lost on another.
    totals = [total(rows, loss=1.5), total([row(0, 0.3, domain="code")])]
    assert advise(Measurements(rows, totals))[0] == REFIT


def test_swaps_bound_what_is_advised():
    rows = [row(n, 0.3) for n in range(8)]
    text = advice(rows, swaps=swapped(1.996))  # 2 %
    assert text.startswith(
        f"{REFIT} Do not calibrate: the weights cost the loss, not the routers.\nOn natural text,"
    )
    assert "--layers" not in text
    assert "--swaps" not in text
    words = verdict_of([total(rows)], swaps=swapped(1.996)).words
    assert "The routers are not the problem: the sources' own routers win back 2.0%" in words
    text = advice(rows, swaps=swapped(1.9))
    assert text.startswith("Calibrate the routers")
    assert "--swaps" not in text
    assert "The routers cost loss" in verdict_of([total(rows)], swaps=swapped(1.9)).words
    assert "--swaps bounds what any repair of routers can gain" in advice(rows)


def test_a_model_that_routes_no_better_is_recommended_for_its_loss_alone():
    mine = total([row(0, 0.3)])
    same = changed(mine, model="ties", mismatch=0.29999, loss=1.9)
    verdict = verdict_of([mine, same])
    assert verdict.recommended == ("ties",)
    assert "ties routes alike (30.0%) and predicts the text better." in verdict.words
    assert "no better" not in verdict.words
    # If the routers are not the problem, less mismatch recommends nothing.
    routes = changed(mine, model="calibrated", mismatch=0.1, loss=2.05)
    assert verdict_of([mine, routes], swaps=swapped(1.996)).recommended == ("model",)
    predicts = changed(mine, model="refitted", mismatch=0.4, loss=1.85)
    verdict = verdict_of([mine, predicts], swaps=swapped(1.996))
    assert verdict.recommended == ("refitted",)
    assert "refitted predicts the text better, with a mismatch of 40.0%." in verdict.words


def test_the_quadratic_model_is_doubted_only_where_it_is_wrong():
    far = [row(0, 0.3, kl=MUCH, shift_small=0.1, kl_on_features=0.2, quadratic=0.2)]
    assert "Lemma 1" not in advice(far)
    rough = [row(0, 0.3, kl=MUCH, shift_small=0.1, kl_on_features=0.2, quadratic=0.4)]
    assert "Only 10.0% of the tokens are within Lemma 1's neighbourhood" in advice(rough)
    assert "yields 2.0 times the true KL. --objective exact" in advice(rough)


@pytest.mark.parametrize(
    ("figures", "answer"),
    [
        ({"shift_small": 0.9, "quadratic": 0.4}, "Yes: 90.0% of the tokens"),
        (
            {"shift_small": 0.1, "quadratic": 0.22},
            "Near enough: the quadratic model yields 1.1 times the true KL, although only 10.0%",
        ),
        ({"shift_small": 0.1, "quadratic": 0.1}, "No: only 10.0%"),
        ({"kl_on_features": 0.0, "quadratic": 0.0}, "There is nothing to model"),
    ],
)
def test_whether_the_theory_applies_is_answered(figures, answer):
    rows = [row(0, 0.3, **{"kl_on_features": 0.2, **figures})]
    verdict = verdict_of([total(rows)])
    assert verdict.theory.startswith(answer)
    assert verdict.theory == theory(overall_totals([total(rows)])["model"])


def test_few_tokens_are_told():
    assert "Few tokens (math)" in advice([row(0, 0.3, tokens=40)])
    assert "Few tokens" not in advice([row(0, 0.3)])


@pytest.mark.parametrize(
    ("mismatch", "words"),
    [
        (0.0, "routes exactly as its sources do"),
        (0.01, "is intact: 1.0%"),
        (0.05, "shifted a little"),
        (0.2, "is damaged"),
        (0.5, "has broken down: 50.0% of the sources' expert choices are not made"),
    ],
)
def test_the_verdict(mismatch, words):
    verdict = verdict_of([total([row(0, mismatch)])])
    assert words in verdict.words
    assert [f.text for f in verdict.numbers] == [
        percent(mismatch),
        percent(mismatch),
        "+0.200 nats",
    ]
    assert verdict.numbers[0].value == mismatch


def test_the_verdict_compares():
    mine = total([row(0, 0.3)])
    worse = total([row(0, 0.4, domain="code")])
    assert "worst on code (40.0%)" in verdict_of([mine, worse]).words
    other = changed(mine, model="calibrated", mismatch=0.1)
    assert "calibrated routes better: 10.0%." in verdict_of([mine, other]).words
    names = {"calibrated": "short"}
    assert "short routes better: 10.0%." in verdict_of([mine, other], names).words
    same = changed(other, mismatch=0.30001)
    assert "calibrated routes no better: 30.0%." in verdict_of([mine, same]).words
    other = changed(other, mismatch=0.35)
    assert "calibrated routes worse: 35.0%." in verdict_of([mine, other]).words
    third = changed(mine, model="ties", mismatch=0.4)
    assert (
        "The others route worse; the best of them is calibrated: 35.0%."
        in verdict_of([mine, third, other]).words
    )
    silent = verdict_of([changed(mine, loss=None, loss_source=None)])
    assert silent.numbers[2].label == "KL of the routing"


def test_advice_is_about_the_best_of_the_models():
    mine = [row(n, 0.3) for n in range(8)]
    theirs = [row(n, 0.1, model="out/calibrated") for n in range(8)]
    done = {"layers": [{"layer": n} for n in range(8)], "settings": {}}
    found = Measurements(
        [*mine, *theirs],
        [total(mine), total(theirs, loss=1.85)],
        swapped(1.9),
        {"out/calibrated": done},
        names={"out/calibrated": "calibrated"},
    )
    first, repair, cause, routers = advise(found)
    assert first == (
        "Use calibrated: 10.0% mismatch instead of 30.0%, loss above the sources' "
        "+0.050 nats instead of +0.200."
    )
    assert cause.startswith("calibrated: the routers themselves still disagree (10.0%")
    assert repair.startswith("calibrated: the routers are calibrated already;")
    assert routers.startswith("With the routers of math the merged weights win back")
    unknown = [changed(t, loss=None) for t in found.totals]
    assert advise(replace(found, totals=unknown))[0].endswith("instead of 30.0%.")
    predicts_worse = [total(mine), total(theirs, loss=2.5)]
    text = "\n".join(advise(replace(found, totals=predicts_worse)))
    assert text.startswith(
        "calibrated routes best (10.0% mismatch instead of 30.0%), model predicts the text best "
        "(loss above the sources' +0.200 nats; calibrated +0.700). Neither number decides"
    )
    assert "calibrated: " not in text
    assert "\nCalibrate the routers (moemerge calibrate)." in text
    worse = [total(mine), total(theirs, mismatch=0.4)]
    assert "calibrated:" not in "\n".join(advise(replace(found, totals=worse)))


@pytest.mark.parametrize(
    ("others", "names"),
    [
        # (mismatch, loss) of the models compared with the diagnosed one, which has (0.3, 2.0)
        ([(0.1, 1.9)], ["b"]),
        ([(0.4, 2.1)], ["model"]),
        ([(0.1, 2.5)], ["b", "model"]),
        ([(0.1, 2.005)], ["b"]),  # a loss that is hardly worse
        ([(0.3001, 2.0)], ["model"]),  # the same to the digits shown
        ([(0.3001, 1.9)], ["b"]),
        ([(0.2, 1.9), (0.1, 1.95)], ["c", "b"]),  # as in the demo: averaged routers, calibrated
        ([(0.1, 1.9), (0.2, 1.95)], ["b"]),
        ([(0.1, None)], ["b"]),
    ],
)
def test_routing_and_loss_are_weighed(others, names):
    totals = [total([row(0, 0.3)])]
    for name, (mismatch, loss) in zip("bc", others, strict=False):
        totals.append(changed(totals[0], model=name, mismatch=mismatch, loss=loss))
    assert list(recommended(overall_totals(totals))) == names
    assert list(verdict_of(totals).recommended) == names


def test_nothing_to_repair():
    assert advice([row(0, 0.0)]).startswith("Nothing to repair")
    assert advice([row(0, 0.01)]).startswith("Little to repair")
