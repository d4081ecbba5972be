"""One router: tensors in, a rounded router and honest numbers out."""

from dataclasses import replace

import pytest
import torch

from moemerge.config.repair_settings import CalibrationSettings
from moemerge.errors import NumericalError
from moemerge.families.rules import Gate, Score
from moemerge.repairs.harc import solve_router
from moemerge.repairs.harc_report import measure, router_row, totals
from moemerge.routing import DomainFeatures, RouterProblem, Status
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


def calibrated(problem, **settings):
    return solve_router(problem, CalibrationSettings.model_validate(settings))


def row_of(problem, solved):
    return router_row(0, "gate", problem, solved, measure(problem, solved.weight), 0.1)


@pytest.mark.parametrize("bias", [False, True])
def test_the_solution_is_the_dense_one(bias):
    found, features = problem(bias=bias)
    if bias:
        features = [torch.cat([x, torch.ones(TOKENS, 1)], dim=1) for x in features]
    expected = dense.algorithm_one(features, [domain.router for domain in found.domains])
    torch.testing.assert_close(calibrated(found).weight, expected, atol=1e-4, rtol=1e-4)


def test_what_is_measured_is_the_rounded_router():
    found, features = problem(torch.bfloat16)
    solved = calibrated(found)
    assert torch.equal(solved.weight, solved.weight.bfloat16().double())
    after = measure(found, solved.weight).fitted.after
    for domain, x in zip(found.domains, features, strict=True):
        kl = dense.mean_kl(x.double(), domain.router, solved.weight)
        assert after[domain.name].kl == pytest.approx(kl, rel=1e-5)
        unrounded = dense.mean_kl(x.double(), domain.router, solved.solution.weight)
        assert abs(kl - unrounded) > 1e-5 * kl


def test_a_router_that_does_not_fit_its_dtype_is_refused():
    found, _ = problem(torch.float16, scale=1e6)
    with pytest.raises(NumericalError, match=r"does not fit into torch\.float16"):
        calibrated(found, curvature="identity")


def test_a_router_without_any_curvature_stays():
    """Every token is routed with certainty: nothing can be learnt, and nothing may be lost."""
    found, _ = problem(scale=1e6)
    assert torch.equal(calibrated(found).weight, found.merged.float().double())


def test_exact_ends_alike_whatever_the_damping_of_its_start():
    found, _ = problem(scale=0.5)
    ends = [calibrated(found, alpha=alpha, objective="exact").newton for alpha in (0.1, 1.0)]
    (damped, free) = [end.kl for end in ends if end is not None]
    assert damped[0] > 1.01 * free[0]
    assert damped[-1] == pytest.approx(free[-1], rel=2e-3)


def test_preconditioners_that_were_given_up_are_listed():
    found, _ = problem()
    solved = calibrated(found)
    (last,) = solved.solution.trials
    assert "trials" not in row_of(found, solved)
    stalled = replace(last, status=Status.STAGNATED)
    tried = replace(solved.solution, trials=(stalled, last))
    row = row_of(found, replace(solved, solution=tried))
    assert [(trial["preconditioner"], trial["status"]) for trial in row["trials"]] == [
        ("two-level", "stagnated"),
        ("two-level", "converged"),
    ]


def test_a_newton_iteration_that_ends_early_is_reported_as_such():
    found, _ = problem(scale=2.0)
    solved = calibrated(found, objective="exact")
    assert solved.newton is not None
    cut = replace(solved, newton=replace(solved.newton, status=Status.MAX_STEPS))
    assert cut.status is Status.MAX_STEPS
    (notice, *_) = row_of(found, cut)["notices"]
    assert notice.startswith(
        "layer 0: gate did not converge (max_steps: Newton's method ended after"
    )


def test_a_rise_of_the_divergence_names_its_cause():
    """Two ways to lose: the damping of a merge that is optimal, and a gap that is no small one."""
    found, _ = problem(scale=0.2)
    assert row_of(found, calibrated(found))["notices"] == []
    best = replace(found, merged=calibrated(found, alpha=1.0).solution.weight)
    (notice,) = row_of(best, calibrated(best, alpha=0.2))["notices"]
    assert "damping outweighs" in notice
    far, _ = problem(scale=4.0)
    least = replace(far, merged=calibrated(far, objective="exact").newton.weight)
    *_, notice = row_of(least, calibrated(least, alpha=1.0))["notices"]
    assert "quadratic model" in notice


def test_a_row_holds_no_number_that_json_lacks():
    found, _ = problem()
    solved = calibrated(found)
    broken = replace(solved.solution, status=Status.NON_FINITE, true_residual=float("nan"))
    solved = replace(solved, solution=broken)
    row = row_of(found, solved)
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
