"""Linear operators and conjugate gradients."""

import pytest
import torch

from moemerge.errors import NumericalError
from moemerge.routing.cg import (
    Identity,
    Jacobi,
    LinearOperator,
    Status,
    cg,
)

SHAPE = (5, 8)
SIZE = 40


class Dense(LinearOperator):
    """A matrix, applied in a chosen precision; counts its uses."""

    def __init__(self, matrix, dtype=torch.float64):
        super().__init__(SHAPE, matrix.device)
        self.matrix = matrix.to(dtype)
        self.uses = 0

    def mv(self, vector):
        self.uses += 1
        out = self.matrix @ vector.reshape(-1).to(self.matrix.dtype)
        return out.reshape(SHAPE).double()


def spd(condition, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))
    spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)), SIZE, dtype=torch.float64)
    return (q * spectrum) @ q.T


def vector(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def true_residual(matrix, w, b):
    return float((b.reshape(-1) - matrix @ w.reshape(-1)).norm() / b.norm())


@pytest.mark.parametrize("check_every", [1, 4, 7])
def test_solves_as_the_dense_solver_does(check_every):
    matrix, b = spd(1e3), vector()
    result = cg(Dense(matrix), b, rtol=1e-10, check_every=check_every)
    expected = torch.linalg.solve(matrix, b.reshape(-1)).reshape(SHAPE)
    assert result.status is Status.CONVERGED
    torch.testing.assert_close(result.weight, expected, rtol=1e-6, atol=1e-8)
    assert result.true_residual == pytest.approx(true_residual(matrix, result.weight, b))
    assert len(result.residuals) == result.steps + 1


def test_steps_do_not_run_past_convergence_by_more_than_a_look():
    matrix, b = spd(1e3), vector()
    eager = cg(Dense(matrix), b, rtol=1e-8)
    lazy = cg(Dense(matrix), b, rtol=1e-8, check_every=6)
    assert eager.steps <= lazy.steps < eager.steps + 6


def test_exact_convergence_between_two_looks_stays_finite():
    matrix = torch.eye(SIZE, dtype=torch.float64) * 2.0
    result = cg(Dense(matrix), vector(), check_every=10)
    assert result.status is Status.CONVERGED
    torch.testing.assert_close(result.weight, vector() / 2.0)


def test_zero_right_hand_side():
    result = cg(Dense(spd(10.0)), torch.zeros(SHAPE), start=vector())
    assert (result.status, result.steps, result.true_residual) == (Status.CONVERGED, 0, 0.0)
    assert not result.weight.any()


def test_start_at_the_solution_takes_no_step():
    matrix, b = spd(10.0), vector()
    start = torch.linalg.solve(matrix, b.reshape(-1)).reshape(SHAPE)
    operator = Dense(matrix)
    result = cg(operator, b, start=start)
    assert (result.status, result.steps, operator.uses) == (Status.CONVERGED, 0, 1)
    assert torch.equal(result.weight, start)


def test_a_coarse_operator_is_refined_to_the_true_residual():
    matrix, b = spd(50.0), vector()
    coarse = Dense(matrix, torch.bfloat16)  # relative error near 1e-2: useless on its own
    alone = cg(coarse, b, accurate=None, rtol=1e-9)
    assert true_residual(matrix, alone.weight, b) > 1e-4
    refined = cg(coarse, b, accurate=Dense(matrix), rtol=1e-9, max_steps=2000)
    assert refined.status is Status.CONVERGED
    assert refined.refinements > 1
    assert true_residual(matrix, refined.weight, b) <= 1e-9


def test_float32_inside_reaches_beyond_float32():
    matrix, b = spd(1e4), vector()
    result = cg(Dense(matrix, torch.float32), b, accurate=Dense(matrix), rtol=1e-11)
    assert result.status is Status.CONVERGED
    assert true_residual(matrix, result.weight, b) <= 1e-11


def test_max_steps_is_said():
    result = cg(Dense(spd(1e6)), vector(), rtol=1e-12, max_steps=5)
    assert (result.status, result.steps) == (Status.MAX_STEPS, 5)
    assert "5 steps" in result.message
    assert result.true_residual <= 1.0


def test_negative_curvature_is_said_and_the_last_good_iterate_kept():
    matrix = spd(10.0)
    matrix -= 0.5 * torch.eye(SIZE)
    result = cg(Dense(matrix), vector(), check_every=3)
    assert result.status is Status.NON_POSITIVE_CURVATURE
    assert torch.isfinite(result.weight).all()


def test_indefinite_preconditioner_is_said():
    class Negative(Identity):
        def direction(self, operator, r):
            return super().direction(operator, -r)

    result = cg(Dense(spd(10.0)), vector(), preconditioner=Negative())
    assert result.status is Status.NON_POSITIVE_CURVATURE


@pytest.mark.parametrize("check_every", [1, 3])
def test_non_finite_operator_is_said(check_every):
    class Breaks(Dense):
        def mv(self, vector):
            out = super().mv(vector)
            return out * float("nan") if self.uses > 4 else out

    result = cg(
        Breaks(spd(1e3)),
        vector(),
        accurate=Dense(spd(1e3)),
        check_every=check_every,
    )
    assert result.status is Status.NON_FINITE
    assert torch.isfinite(result.weight).all()


def test_non_finite_right_hand_side_is_said():
    b = vector()
    b[0, 0] = float("nan")
    assert cg(Dense(spd(10.0)), b).status is Status.NON_FINITE


def test_an_inconsistent_singular_system_is_not_called_converged():
    matrix = torch.diag(torch.cat([torch.ones(SIZE - 1), torch.zeros(1)])).double()
    result = cg(Dense(matrix), torch.ones(SHAPE))
    assert not result.converged


def test_jacobi_helps_a_badly_scaled_system():
    scale = torch.logspace(-2, 2, SIZE, dtype=torch.float64)
    matrix = scale[:, None] * spd(10.0) * scale
    b = vector()
    plain = cg(Dense(matrix), b, rtol=1e-8, max_steps=4000)
    jacobi = cg(
        Dense(matrix),
        b,
        preconditioner=Jacobi(matrix.diagonal().reshape(SHAPE)),
        rtol=1e-8,
    )
    assert jacobi.converged
    assert jacobi.steps < plain.steps / 2


def test_a_wrong_shape_is_refused():
    with pytest.raises(NumericalError, match=r"\(3, 3\)"):
        cg(Dense(spd(10.0)), torch.ones(3, 3))


class Rounding(Dense):
    """Sees its input in bf16, and says so or not."""

    def __init__(self, matrix, *, says_so):
        super().__init__(matrix)
        self.says_so = says_so

    def mv(self, vector):
        return super().mv(vector.bfloat16().double())

    def representable(self, vector):
        return vector.bfloat16().double() if self.says_so else vector


def test_directions_that_the_operator_sees_whole_need_no_refinement():
    matrix, b = spd(30.0), vector()
    blind, seeing = (
        cg(Rounding(matrix, says_so=says_so), b, accurate=Dense(matrix), rtol=1e-8)
        for says_so in (False, True)
    )
    for result in (blind, seeing):
        assert result.converged
        assert true_residual(matrix, result.weight, b) <= 1e-8
    assert blind.refinements >= 2
    assert seeing.refinements == 0
    assert seeing.steps < blind.steps


def test_an_unfinished_solve_is_kept_by_its_energy():
    matrix, b = spd(1e6), vector()

    def energy(w):
        flat = w.reshape(-1)
        return float(0.5 * flat @ matrix @ flat - b.reshape(-1) @ flat)

    kept = cg(Dense(matrix), b, max_steps=12, at_rest=lambda gains: False)
    left = cg(Dense(matrix), b, max_steps=12)
    assert kept.status is left.status is Status.MAX_STEPS
    assert kept.true_residual == pytest.approx(true_residual(matrix, kept.weight, b))
    assert left.true_residual <= 1.0 < kept.true_residual
    assert energy(kept.weight) < energy(left.weight) <= 0.0


def test_jacobi_leaves_empty_entries_alone():
    inverse = Jacobi(torch.tensor([[4.0, 0.0], [0.5, 1e-30]])).inverse
    expected = torch.tensor([[0.25, 1.0], [2.0, 1e30]], dtype=torch.float64)
    torch.testing.assert_close(inverse, expected, rtol=1e-6, atol=0.0)
