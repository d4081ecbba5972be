"""One router: tensors in, a rounded router and honest numbers out."""

from dataclasses import replace

import pytest
import torch

from moemerge.errors import NumericalError
from moemerge.families.rules import Gate, Score
from moemerge.repairs.calibration.layer import calibrate_layer
from moemerge.repairs.calibration.report import layer_row, totals
from moemerge.routing import Curvature, DomainFeatures, Preconditioner, RouterProblem, SolveSettings
from moemerge.routing.cg import Status
from repairs.calibration import dense

EXPERTS, WIDTH, TOKENS = 6, 5, 80
GATE = Gate(Score.SOFTMAX, top_k=2)


def problem(dtype=torch.float32, *, bias=False, scale=1.0, **more):
    """Two domains; features in blocks of unequal length."""
    generator = torch.Generator().manual_seed(3)
    columns = WIDTH + bias
    routers = [torch.randn(EXPERTS, columns, generator=generator) * scale for _ in range(2)]
    features = [torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2)]
    domains = [
        DomainFeatures(name, [x[:30], x[30:]], w.double())
        for name, x, w in zip(("a", "b"), features, routers, strict=True)
    ]
    merged = torch.stack(routers).mean(0).double()
    found = RouterProblem(
        gate=GATE,
        merged=merged,
        domains=domains,
        holdout=[],
        dtypes=(dtype, dtype if bias else None),
        **more,
    )
    return found, features


@pytest.mark.parametrize("bias", [False, True])
def test_the_solution_is_the_dense_one(bias):
    found, features = problem(bias=bias)
    result = calibrate_layer(found, SolveSettings(), start=found.merged)
    if bias:
        features = [torch.cat([x, torch.ones(TOKENS, 1)], dim=1) for x in features]
    expected = dense.algorithm_one(features, [domain.router for domain in found.domains])
    torch.testing.assert_close(result.weight.double(), expected[:, :WIDTH], atol=1e-4, rtol=1e-4)
    assert (result.bias is not None) == bias
    if result.bias is not None:
        torch.testing.assert_close(result.bias.double(), expected[:, WIDTH], atol=1e-4, rtol=1e-4)


def test_what_is_measured_is_the_rounded_router():
    found, features = problem(torch.bfloat16)
    result = calibrate_layer(found, SolveSettings(), start=found.merged)
    assert result.weight.dtype == torch.bfloat16
    for domain, x in zip(found.domains, features, strict=True):
        after = result.agreement.after[domain.name]
        kl = dense.mean_kl(x.double(), domain.router, result.weight)
        assert after.kl == pytest.approx(kl, rel=1e-5)
        unrounded = dense.mean_kl(x.double(), domain.router, result.solution.weight)
        assert abs(kl - unrounded) > 1e-5 * kl


def test_a_router_that_does_not_fit_its_dtype_is_refused():
    found, _ = problem(torch.float16, scale=1e6)
    with pytest.raises(NumericalError, match=r"does not fit into torch\.float16"):
        calibrate_layer(found, SolveSettings(curvature=Curvature.IDENTITY), start=found.merged)


def test_a_router_without_any_curvature_stays():
    """Every token is routed with certainty: nothing can be learnt, and nothing may be lost."""
    found, _ = problem(scale=1e6)
    result = calibrate_layer(found, SolveSettings(), start=found.merged)
    assert torch.equal(result.weight, found.merged.float())


def test_exact_ends_alike_whatever_the_damping_of_its_start():
    found, _ = problem(scale=0.5)
    ends = [
        calibrate_layer(found, SolveSettings(alpha=alpha), start=found.merged, exact=True).exact
        for alpha in (0.1, 1.0)
    ]
    (damped, free) = [end.kl for end in ends if end is not None]
    assert damped[0] > 1.01 * free[0]
    assert damped[-1] == pytest.approx(free[-1], rel=2e-3)


def test_preconditioners_that_were_given_up_are_listed():
    found, _ = problem()
    result = calibrate_layer(found, SolveSettings(), start=found.merged)
    (last,) = result.solution.trials
    assert "trials" not in layer_row(0, "gate", result, 0.1)
    stalled = replace(last, preconditioner=Preconditioner.TWO_LEVEL, status=Status.STALLED)
    tried = replace(result.solution, trials=(stalled, last))
    row = layer_row(0, "gate", replace(result, solution=tried), 0.1)
    assert [(trial["preconditioner"], trial["status"]) for trial in row["trials"]] == [
        ("two-level", "stalled"),
        (str(last.preconditioner), "converged"),
    ]


def test_a_newton_iteration_that_ends_early_is_told_as_such():
    found, _ = problem(scale=2.0)
    result = calibrate_layer(found, SolveSettings(), start=found.merged, exact=True)
    assert result.exact is not None
    assert result.message.startswith("converged: the true residual")
    cut = replace(result, exact=replace(result.exact, status=Status.MAX_STEPS))
    assert cut.status is Status.MAX_STEPS
    assert cut.message.startswith("max_steps: Newton's method ended after")
    assert layer_row(0, "gate", cut, 0.1)["notices"][0].startswith("layer 0: gate did not converge")


def test_a_rise_of_the_divergence_says_where_it_comes_from():
    """Two ways to lose: the damping of a merge that is optimal, and a gap that is no small one."""
    found, _ = problem(scale=0.2)
    result = calibrate_layer(found, SolveSettings(), start=found.merged)
    assert result.rise is None
    best = calibrate_layer(found, SolveSettings(alpha=1.0), start=found.merged).solution.weight
    damped = calibrate_layer(
        replace(found, merged=best), SolveSettings(alpha=0.2), start=found.merged
    )
    assert damped.rise is not None
    assert "damping outweighs" in damped.rise
    far, _ = problem(scale=4.0)
    least = calibrate_layer(far, SolveSettings(), start=far.merged, exact=True).exact
    left = calibrate_layer(
        replace(far, merged=least.weight), SolveSettings(alpha=1.0), start=far.merged
    )
    assert left.rise is not None
    assert "quadratic model" in left.rise


def test_a_row_holds_no_number_that_json_lacks():
    found, _ = problem()
    result = calibrate_layer(found, SolveSettings(), start=found.merged)
    broken = result.solution.cg.__class__(
        result.solution.weight, Status.NON_FINITE, 3, (1.0,), float("nan")
    )
    object.__setattr__(result.solution, "cg", broken)
    row = layer_row(4, "gate", result, 0.5)
    assert row["residual"] is None
    assert row["status"] == "non_finite"


def test_totals_are_means_over_routers():
    def row(kl, status):
        per_domain = {key: {"a": kl} for key in ("kl_before", "kl_after")}
        per_domain |= {key: {"a": 2 * kl} for key in ("mismatch_before", "mismatch_after")}
        return {"status": status, "iterations": 10, "tokens": {"a": 7}, **per_domain}

    found = totals([row(0.1, "converged"), row(0.3, "max_steps")])
    assert found["routers"] == 2
    assert found["converged"] == 1
    assert found["iterations"] == 20
    assert found["tokens"] == {"a": 7}
    assert found["kl_after"]["a"] == pytest.approx(0.2)
    assert found["mismatch_before"]["a"] == pytest.approx(0.4)
    assert totals([])["kl_after"] == {}
