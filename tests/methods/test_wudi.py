import math

import pytest
import torch

from moemerge.methods.wudi import Interference


def task_vectors(n, out, columns, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [0.01 * torch.randn(out, columns, generator=g, dtype=dtype) for _ in range(n)]


def objective(merged, vectors):
    return sum(((merged - t) @ t.T).square().sum() / t.square().sum() for t in vectors)


def value(problem, x):
    """The objective at the start + x."""
    return float(torch.linalg.vector_norm(x @ problem.S.T + problem.K) ** 2)


def gradient(problem, x):
    return 2 * (x @ problem.S.T + problem.K) @ problem.S


SHAPES = [(2, 6, 5), (2, 3, 20), (3, 8, 8), (2, 1, 4), (1, 4, 4)]


@pytest.mark.parametrize(("n", "out", "columns"), SHAPES)
def test_adam_is_torchs_adam_on_the_stated_objective(merge, n, out, columns):
    vectors = task_vectors(n, out, columns)
    parameter = sum(vectors).clone().requires_grad_(True)
    optimizer = torch.optim.Adam([parameter], lr=1e-4)
    for _ in range(60):
        optimizer.zero_grad()
        objective(parameter, vectors).backward()
        optimizer.step()
    base = torch.randn(out, columns, dtype=torch.float64)
    merged = merge("wudi", [base + t for t in vectors], base=base, lr=1e-4, steps=60)
    if n == 1:  # the start is the minimum: the exact gradient is nought, autograd's is rounding
        torch.testing.assert_close(merged - base, vectors[0])
    else:
        torch.testing.assert_close(merged - base, parameter.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("n", "out", "columns"), SHAPES)
def test_exact_is_a_minimum_nearest_to_the_start(merge, n, out, columns):
    vectors = task_vectors(n, out, columns)
    problem = Interference.of(vectors)
    correction = problem.filtered(lambda values, count: torch.ones_like(values))
    start = sum(vectors)
    scale = gradient(problem, torch.zeros_like(start)).norm() + 1e-12
    assert gradient(problem, correction).norm() < 1e-9 * scale + 1e-15
    best = value(problem, correction)
    assert best == pytest.approx(float(objective(start + correction, vectors)), rel=1e-6, abs=1e-18)
    for steps in (1, 50, 400):
        for lr in (1e-5, 1e-3):
            assert best <= value(problem, problem.adam(lr, steps)) * (1 + 1e-9) + 1e-18
    # any other minimum differs by something that no S_i sees, and is farther away
    basis = torch.linalg.svd(problem.S).Vh
    rank = int(torch.linalg.matrix_rank(problem.S))
    unseen = basis[rank:]
    assert (correction @ unseen.T).abs().max() < 1e-9 if len(unseen) else True


def test_exact_by_hand(merge):
    # Two rank-one task vectors on the same input direction e = (1, 0), with outputs a and b:
    # τ e is asked to be a (weight |a|²/|a|²) and b (weight 1): the mean of both; elsewhere Σ τ_i.
    a, b = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    out = merge("wudi", [a, b], base=torch.zeros(2, 2), solver="exact")
    torch.testing.assert_close(out, torch.tensor([[1.0, 0.0], [2.0, 0.0]]))


def test_exact_keeps_float32s_digits_in_weak_directions(merge):
    """Of sums in float32 no more than five digits were left here."""
    vectors = task_vectors(2, 12, 24)
    vectors[0] *= torch.logspace(0, -5, 24, dtype=torch.float64)
    vectors = [v.float().double() for v in vectors]
    S = torch.cat([v / v.norm() for v in vectors])
    K = torch.cat([vectors[1] @ S[:12].T, vectors[0] @ S[12:].T], dim=1)
    expected = sum(vectors) - K @ torch.linalg.pinv(S).T
    merged = merge("wudi", [v.float() for v in vectors], base=torch.zeros(12, 24), solver="exact")
    assert merged.dtype == torch.float32
    assert (merged - expected).norm() < 1e-7 * expected.norm()


@pytest.mark.parametrize(("n", "out", "columns"), SHAPES)
def test_spectral_is_gradient_flow_in_the_leading_directions(merge, n, out, columns):
    vectors = task_vectors(n, out, columns)
    C = sum(t.T @ t / t.square().sum() for t in vectors)
    D = sum(t @ t.T @ t / t.square().sum() for t in vectors)
    start = sum(vectors)
    values, V = torch.linalg.eigh(C)
    values, V = values.flip(0).clamp_min(0), V.flip(1)
    for time, keep in ((300.0, 1.0), (2.0, 0.5)):
        shares = torch.where(values > 1e-12, -torch.expm1(-time * values), 0.0)
        shares[-(-int(keep * columns * 2) // 2) if keep < 1 else columns :] = 0
        inverse = torch.where(values > 1e-12, shares / values.clamp_min(1e-12), 0.0)
        expected = start + (D - start @ C) @ (V * inverse) @ V.T
        base = torch.randn(out, columns, dtype=torch.float64)
        merged = merge(
            "wudi", [base + t for t in vectors], base=base, solver="spectral", time=time, keep=keep
        )
        if keep == 1.0 or columns % 2 == 0:
            torch.testing.assert_close(merged - base, expected, rtol=1e-6, atol=1e-10)


def test_spectral_and_adaptive_lie_between_the_start_and_the_minimum(merge):
    base = torch.zeros(6, 10, dtype=torch.float64)
    vectors = task_vectors(3, 6, 10)
    value = {
        solver: objective(merge("wudi", vectors, base=base, solver=solver), vectors)
        for solver in ("exact", "spectral", "adaptive")
    }
    assert value["exact"] <= value["spectral"] <= objective(sum(vectors), vectors)
    assert value["exact"] <= value["adaptive"] <= objective(sum(vectors), vectors)
    everything = merge("wudi", vectors, base=base, solver="spectral", time=1e9, keep=1.0)
    exact = merge("wudi", vectors, base=base, solver="exact")
    torch.testing.assert_close(everything, exact)


def test_adaptive_corrects_the_leading_directions_wholly(merge):
    sizes = torch.linspace(0.1, 1, 10, dtype=torch.float64)
    vectors = [t * sizes for t in task_vectors(3, 6, 10)]
    C = sum(t.T @ t / t.square().sum() for t in vectors)
    D = sum(t @ t.T @ t / t.square().sum() for t in vectors)
    values, V = torch.linalg.eigh(C)
    values, V = values.flip(0), V.flip(1)
    rank = math.ceil(values.sqrt().sum() ** 2 / values.sum())
    assert 1 < rank < 10
    start, leading = sum(vectors), V[:, :rank] / values[:rank]
    expected = start + (D - start @ C) @ leading @ V[:, :rank].T
    zero = torch.zeros(6, 10, dtype=torch.float64)
    merged = merge("wudi", vectors, base=zero, solver="adaptive")
    torch.testing.assert_close(merged, expected, rtol=1e-8, atol=1e-12)
    others = {"time": 1.0, "keep": 0.1, "lr": 0.1, "steps": 1}
    assert torch.equal(merge("wudi", vectors, base=zero, solver="adaptive", **others), merged)


def top(matrix, count):
    """The leading singular directions: their part of the matrix, and diag(s) Vᵀ."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    inputs = s[:count, None] * vh[:count]
    return u[:, :count] @ inputs, inputs


def optmerge(vectors, targets):
    """OptMerge's start and objective, written out."""
    share = min(vectors[0].shape) // len(vectors)
    mean = sum(vectors) / len(vectors)
    aims = [
        mean + top(t - mean, share)[0] if targets == "centred" else top(t, share)[0]
        for t in vectors
    ]
    inputs = [top(t, share)[1] for t in vectors]

    def loss(merged):
        return sum(
            ((merged - aim) @ x.T).square().sum() / t.square().sum()
            for aim, x, t in zip(aims, inputs, vectors, strict=True)
        )

    return (mean if targets == "leading" else sum(vectors)), loss


@pytest.mark.parametrize("targets", ["centred", "leading"])
@pytest.mark.parametrize(("n", "out", "columns"), [(2, 6, 5), (2, 4, 20), (3, 8, 8), (3, 20, 7)])
def test_optmerges_targets_against_the_objective_written_out(merge, targets, n, out, columns):
    vectors = task_vectors(n, out, columns)
    base = torch.randn(out, columns, dtype=torch.float64)
    models = [base + t for t in vectors]
    start, loss = optmerge(vectors, targets)
    parameter = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([parameter], lr=1e-4)
    for _ in range(60):
        optimizer.zero_grad()
        loss(parameter).backward()
        optimizer.step()
    stepped = merge("wudi", models, base=base, targets=targets, lr=1e-4, steps=60)
    torch.testing.assert_close(stepped - base, parameter.detach(), rtol=1e-6, atol=1e-8)
    exact = (merge("wudi", models, base=base, targets=targets, solver="exact") - base).clone()
    exact.requires_grad_(True)
    least = loss(exact)
    least.backward()
    assert exact.grad.norm() < 1e-9
    assert least <= loss(parameter) + 1e-15


@pytest.mark.parametrize("targets", ["centred", "leading"])
@pytest.mark.parametrize("solver", ["adam", "exact", "spectral", "adaptive"])
def test_optmerges_targets_of_hard_units(merge, targets, solver):
    options = {"targets": targets, "solver": solver}
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    a, b = (base + t.float() for t in task_vectors(2, 6, 8))
    alone = merge("wudi", [a, base], base=base, **options)
    torch.testing.assert_close(alone, a)
    pair = merge("wudi", [a, b], base=base, **options)
    assert torch.equal(merge("wudi", [a, base, b], base=base, **options), pair)
    assert torch.equal(merge("wudi", [base, base], base=base, **options), base)
    column, row = torch.ones(6, 1), torch.arange(8.0)[None]
    low = merge("wudi", [base + 0.01 * column @ row, b], base=base, **options)
    assert low.isfinite().all()
    for shape in ((1, 7), (7, 1), (1, 1)):
        start = torch.ones(shape)
        thin = merge("wudi", [start + 0.01, start - 0.02], base=start, **options)
        assert thin.isfinite().all()


def test_two_equal_models_stay_what_they_are_from_their_mean_on(merge):
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    model = base + task_vectors(1, 6, 8)[0].float()
    for solver in ("adam", "exact", "spectral", "adaptive"):
        out = merge("wudi", [model, model], base=base, targets="leading", solver=solver)
        torch.testing.assert_close(out, model)


def test_optmerges_targets_by_hand(merge):
    # Each model's one leading direction: e1 → 4 and e2 → 2 for a, e1 → 3 and e2 → 6 for b. The mean
    # keeps what no leading direction sees, and gets 4 on e1 (from a), 6 on e2 (from b).
    a, b = torch.diag(torch.tensor([4.0, 2.0])), torch.diag(torch.tensor([3.0, 6.0]))
    out = merge("wudi", [a, b], base=torch.zeros(2, 2), targets="leading", solver="exact")
    torch.testing.assert_close(out, torch.diag(torch.tensor([4.0, 6.0])))
