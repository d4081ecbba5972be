"""Methods by singular vectors: tsv, iso_c, iso_cts, opcm, lore, doge, polar factors."""

import pytest
import torch

from moemerge.families.roles import Role
from moemerge.methods._spectra import Spectrum, nearest_orthogonal
from moemerge.methods.lore import shrunk

SPECTRAL = ["tsv", "iso_c", "iso_cts", "opcm"]
SHAPES = [(12, 20), (20, 12), (16, 16)]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def task_vectors(n, shape, seed=0):
    return [normal(*shape, seed=seed + i) for i in range(n)]


def polar(matrix):
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("shape", SHAPES)
def test_the_spectrum_is_the_singular_value_decomposition(shape):
    matrix = normal(*shape)
    spectrum = Spectrum.of(matrix)
    torch.testing.assert_close(spectrum.values, torch.linalg.svdvals(matrix))
    torch.testing.assert_close((spectrum.left * spectrum.values) @ spectrum.right.T, matrix)
    low = normal(shape[0], 3) @ normal(3, shape[1], seed=1)
    assert len(Spectrum.of(low.float()).values) == 3
    assert len(Spectrum.of(torch.zeros(shape)).values) == 0


def test_the_polar_factor_has_orthonormal_columns_and_takes_doubled_ones_once():
    columns = normal(9, 4)
    columns = columns / columns.norm(dim=0)
    torch.testing.assert_close(nearest_orthogonal(columns), polar(columns))
    twice = nearest_orthogonal(torch.cat([columns, columns], dim=1))
    torch.testing.assert_close(twice @ twice.T, polar(columns) @ polar(columns).T)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [2, 3])
def test_tsv_against_svds(merge, shape, n):
    base, vectors = normal(*shape, seed=9), task_vectors(n, shape)
    k = min(shape) // n
    parts = [torch.linalg.svd(t, full_matrices=False) for t in vectors]
    u = polar(torch.cat([u[:, :k] for u, _, _ in parts], dim=1))
    v = polar(torch.cat([vh[:k].T for _, _, vh in parts], dim=1))
    s = torch.cat([s[:k] for _, s, _ in parts])
    expected = base + 0.7 * (u * s) @ v.T
    merged = merge("tsv", [base + t for t in vectors], base=base, **{"lambda": 0.7})
    torch.testing.assert_close(merged, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_iso_c_against_an_svd(merge, shape):
    base, vectors = normal(*shape, seed=9), task_vectors(3, shape)
    u, s, vh = torch.linalg.svd(sum(vectors), full_matrices=False)
    merged = merge("iso_c", [base + t for t in vectors], base=base)
    torch.testing.assert_close(merged, base + s.mean() * u @ vh, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_iso_cts_against_svds(merge, shape):
    base, vectors = normal(*shape, seed=9), task_vectors(2, shape)
    rank, own = min(shape), round(0.2 * min(shape) / 2)
    common = rank - 2 * own
    u, s, vh = torch.linalg.svd(sum(vectors), full_matrices=False)
    us, ss, vs = [u[:, :common]], [s[:common]], [vh[:common].T]
    for t in vectors:
        a, b, c = torch.linalg.svd(t - us[0] @ us[0].T @ t, full_matrices=False)
        us.append(a[:, :own])
        ss.append(b[:own])
        vs.append(c[:own].T)
    expected = torch.cat(ss).mean() * polar(torch.cat(us, 1)) @ polar(torch.cat(vs, 1)).T
    merged = merge("iso_cts", [base + t for t in vectors], base=base)
    torch.testing.assert_close(merged, base + expected, rtol=1e-8, atol=1e-8)


def test_iso_c_by_hand(merge):
    a, b = torch.tensor([[4.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    merged = merge("iso_c", [a, b], base=torch.zeros(2, 2))
    torch.testing.assert_close(merged, torch.tensor([[3.0, 0.0], [0.0, 3.0]]))


def test_opcm_by_hand(merge):
    """Singular values 4, 3, 1: at 50 % the first direction is protected, at 90 % the first two."""
    first = torch.diag(torch.tensor([4.0, 3.0, 1.0]))
    second = torch.tensor([[9.0, 5.0, 0.0], [0.0, 9.0, 7.0], [0.0, 0.0, 9.0]])
    base, size = torch.ones(3, 3), (26**0.5 + 317**0.5) / 2  # the mean length
    models = [base + first, base + second]
    total = torch.tensor([[4.0, 5.0, 0.0], [0.0, 3.0, 7.0], [0.0, 0.0, 1.0]])  # no diagonal
    merged = merge("opcm", models, base=base)
    torch.testing.assert_close(merged, base + size / 100**0.5 * total)
    total[0, 1] = 0.0  # couples the two protected directions
    merged = merge("opcm", models, base=base, alpha=0.9)
    torch.testing.assert_close(merged, base + size / 75**0.5 * total)


@pytest.mark.parametrize("shape", SHAPES)
def test_opcm_against_svds_step_by_step(merge, shape):
    """The paper's recursion, with its factor of each step, over three models."""
    base, vectors = normal(*shape, seed=9), task_vectors(3, shape)
    merged, factor = vectors[0], 1.0
    for count, tau in enumerate(vectors[1:], 2):
        u, s, vh = torch.linalg.svd(merged)
        inside = u.T @ tau @ vh.T
        leading = int(torch.searchsorted(s.cumsum(0) / s.sum(), 0.5))
        inside[:leading, :leading] = 0
        inside.fill_diagonal_(0)
        summed = factor * merged + u @ inside @ vh
        factor = summed.norm() / (sum(t.norm() for t in vectors[:count]) / count)
        merged = summed / factor
    found = merge("opcm", [base + t for t in vectors], base=base)
    torch.testing.assert_close(found, base + merged, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [*SPECTRAL, "doge", "wudi"])
def test_models_that_did_not_change_a_weight_are_left_out(merge, name):
    base = normal(8, 10, dtype=torch.float32).bfloat16().float()
    a, b = (base + 0.1 * t.float() for t in task_vectors(2, (8, 10)))
    short = {"steps": 5} if name in ("doge", "wudi") else {}
    merged = merge(name, [a, base, b], base=base, **short)
    assert torch.equal(merged, merge(name, [a, b], base=base, **short))
    assert torch.equal(merge(name, [base, base], base=base, **short), base)


@pytest.mark.parametrize("name", SPECTRAL)
def test_rounding_to_the_stored_dtype_is_no_change(merge, name):
    base = normal(8, 10, dtype=torch.float32)
    rounded = base.bfloat16().float()
    assert not torch.equal(base, rounded)
    a = base + 0.1 * normal(8, 10, seed=3).float()
    assert torch.equal(merge(name, [a, rounded], base=base), merge(name, [a], base=base))
    # A change below bfloat16's step between float32 weights is a change.
    small = base * (1 + 1e-4)
    assert not torch.equal(merge(name, [small], base=base), base)


def test_a_low_rank_update_is_not_filled_up_with_noise(merge):
    base = torch.zeros(16, 16)
    updates = [normal(16, 2, seed=i).float() @ normal(2, 16, seed=10 + i).float() for i in range(2)]
    for name in SPECTRAL:
        merged = merge(name, updates, base=base)
        assert len(Spectrum.of(merged).values) <= 4


@pytest.mark.parametrize("name", [*SPECTRAL, "doge", "wudi"])
def test_other_tensors_are_averaged_or_the_bases(merge, name):
    base, a, b = torch.zeros(2, 2), torch.ones(2, 2), torch.full((2, 2), 3.0)
    for role in (Role.NORM, Role.EMBEDDING, Role.HEAD):
        assert torch.equal(merge(name, [a, b], base=base, role=role), torch.full((2, 2), 2.0))
        assert torch.equal(merge(name, [a, b], base=base, role=role, others="base"), base)
    assert merge(name, [[1.0], [3.0]], base=[0.0], role=Role.ATTENTION).tolist() == [2.0]


@pytest.mark.parametrize("name", [*SPECTRAL, "doge", "wudi"])
def test_routers_are_linear_layers(merge, name):
    base, vectors = normal(8, 10, seed=9), task_vectors(2, (8, 10))
    models = [base + t for t in vectors]
    short = {"steps": 5} if name in ("doge", "wudi") else {}
    router = merge(name, models, base=base, role=Role.ROUTER, **short)
    assert torch.equal(router, merge(name, models, base=base, role=Role.EXPERT, **short))
    assert not torch.allclose(router, base + sum(vectors) / 2)


def by_bisection(matrix, mu):
    """argmin ‖matrix - δ‖² + mu ‖δ‖_*²: every value less mu·n, n the sum that is left."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    low, high = 0.0, float(s.sum())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if (s - mu * middle).clamp_min(0).sum() > middle else (low, middle)
        )
    return (u * (s - mu * low).clamp_min(0)) @ vh


def test_lore_of_three_models_is_base_and_changes_in_turn(merge):
    tensors = [normal(6, 5, seed=i) for i in range(3)]
    common = sum(tensors) / 3
    for _ in range(4):
        low_rank = [by_bisection(t - common, 0.3) for t in tensors]
        common = sum(t - d for t, d in zip(tensors, low_rank, strict=True)) / 3
    assert max(int(torch.linalg.matrix_rank(d, rtol=1e-9)) for d in low_rank) < 5
    merged = merge("lore", tensors, mu=0.3, iterations=4, **{"lambda": 0.7})
    torch.testing.assert_close(merged, common + 0.7 * sum(low_rank), rtol=1e-8, atol=1e-8)


def test_lore_minimises_its_objective(merge):
    tensors = [normal(6, 5, seed=i) for i in range(3)]
    mu = 0.05

    target = tensors[0]
    best = shrunk(target, mu)
    value = ((best - target) ** 2).sum() + mu * torch.linalg.svdvals(best).sum() ** 2
    for seed in range(20):
        other = best + 1e-3 * normal(6, 5, seed=100 + seed)
        assert value <= ((other - target) ** 2).sum() + mu * torch.linalg.svdvals(other).sum() ** 2
    two = merge("lore", tensors[:2], mu=mu)
    torch.testing.assert_close(two, (tensors[0] + tensors[1]) / 2)  # changes are opposite
    same = merge("lore", [target, target], mu=mu)
    torch.testing.assert_close(same, target)  # equal models: nothing is a change
    free = merge("lore", tensors, mu=0.0, iterations=1)
    torch.testing.assert_close(free, sum(tensors) / 3)  # Σ (θ_i - mean) vanishes


def test_doge_without_steps_is_masked_task_arithmetic(merge):
    base, (a, b) = normal(4, 6), task_vectors(2, (4, 6))
    merged = merge("doge", [base + a, base + b], base=base, steps=0, density=1.0)
    torch.testing.assert_close(merged, base + 0.07 * (a / a.norm() + b / b.norm()))


def test_doge_takes_torchs_adam_steps_on_the_stated_objective(merge):
    base, vectors = normal(8, 6), task_vectors(2, (8, 6))
    scales = [0.07 / t.norm() for t in vectors]
    merged_sum = sum(s * t for s, t in zip(scales, vectors, strict=True))
    leading = torch.cat([torch.linalg.svd(t).U[:, :3] for t in vectors], dim=1)
    shared = torch.linalg.svd(leading).U[:, :1]
    delta = torch.zeros(8, 6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([delta], lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        loss = sum(
            ((t - merged_sum - delta * sum(scales)) @ t.T).diagonal().square().sum()
            for t in vectors
        )
        loss.backward()
        delta.grad -= shared @ (shared.T @ delta.grad)
        optimizer.step()
    expected = base + sum(s * (t + delta.detach()) for s, t in zip(scales, vectors, strict=True))
    merged = merge("doge", [base + t for t in vectors], base=base, steps=20, lr=1e-3, density=1.0)
    torch.testing.assert_close(merged, expected, rtol=1e-8, atol=1e-10)


def test_doge_keeps_the_largest_elements_of_each_model(merge):
    a, b = torch.tensor([[3.0, 0.0], [4.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    merged = merge("doge", [a, b], base=torch.zeros(2, 2), steps=0, density=0.25)
    torch.testing.assert_close(merged, torch.tensor([[0.0, 0.07], [0.07 * 4 / 5, 0.0]]))
