"""Methods that decide element by element: consensus_ta, consensus_ties, ram, ramplus_tl, pcb, awd,
arcee_fusion, magmax."""

import math

import pytest
import torch

from moemerge.errors import ConfigError
from moemerge.methods.awd import common_part


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_consensus_by_hand(merge):
    # Elements: all agree; one model alone; two against one; nobody.
    deltas = [[1.0, 3.0, 2.0, 0.0], [1.0, 0.0, 2.0, 0.0], [1.0, 0.0, -1.0, 0.0]]
    base = [10.0] * 4
    tensors = [[b + d for b, d in zip(base, delta, strict=True)] for delta in deltas]
    merged = merge("consensus_ta", tensors, base=base, params={"threshold": 0.4}, k=2)
    # Δ = (3, 3, 3, 0): |1| > .4·2 for all; |3| > 0 for one, 0 > 1.2 for none of the others;
    # |2| > .4·1 twice and |-1| > .4·4 not; 0 > 0 never.
    assert merged.tolist() == [13.0, 10.0, 13.0, 10.0]
    alone = merge("consensus_ta", tensors, base=base, params={"threshold": 0.4}, k=1)
    assert alone.tolist() == [13.0, 13.0, 13.0, 10.0]


def test_consensus_ties_masks_the_elected_sum(merge):
    base = [0.0, 0.0, 0.0]
    tensors = [[3.0, 1.0, 0.1], [2.0, -2.0, 0.1], [1.0, -2.0, 0.0]]
    merged = merge("consensus_ties", tensors, base=base, params={"density": 0.67}, k=2)
    # Trimmed to two of three: (3, 1, 0), (2, -2, 0), (1, -2, 0); elected and summed: (6, -4, 0).
    # |3| > .4·3, |2| > .4·4, |1| < .4·5; |1| < .4·5, |-2| > .4·2 twice.
    assert merged.tolist() == [6.0, -4.0, 0.0]


def test_ram_by_hand(merge):
    base = torch.ones(5)
    a = base + torch.tensor([0.4, 0.0, 0.2, 1e-6, 0.0])
    b = base + torch.tensor([0.0, 0.6, 0.4, 0.0, 0.0])
    merged = merge("ram", [a, b], base=base)
    torch.testing.assert_close(merged, torch.tensor([1.4, 1.6, 1.3, 1.0, 1.0]))


def test_ramplus_raises_what_a_model_alone_changed(merge):
    base = torch.zeros(4)
    a, b = torch.tensor([1.0, 0.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 4.0, 0.0])
    merged = merge("ramplus_tl", [a, b], base=base, r=0.5, alpha=0.6)
    # a: one shared to two alone, 1 + .5·.5; b: one to one, cut at .6: 1 + .5·.6.
    torch.testing.assert_close(merged, torch.tensor([1.25, 1.3, 3.0, 3.75]))


def test_pcb_against_the_formula(merge):
    base, a, b = normal(60, seed=5), normal(60), normal(60, seed=1)
    weights = []
    for tau in (a, b):
        size = tau.abs()
        share = ((size - size.min()) / (size.max() - size.min())) ** 2
        score = torch.exp(2 * share) * torch.tanh(tau * (a + b))
        low = score.sort(descending=True).values[11]
        score = score.clamp_min(low)
        weights.append((score - score.min()) / (score.max() - score.min()))
    merged = (weights[0] * a + weights[1] * b) / (weights[0] + weights[1]).clamp_min(1e-12)
    result = merge("pcb", [base + a, base + b], base=base, density=0.2, clip=0.0)
    torch.testing.assert_close(result, base + 1.2 * merged)


def test_awd_follows_the_gradient_of_its_objective(merge):
    vectors = [normal(30, seed=i) + 0.5 * normal(30, seed=9) for i in range(3)]
    scale = sum(float(t.norm()) for t in vectors) / 3
    delta = torch.zeros(30, dtype=torch.float64)
    for _ in range(25):
        delta.requires_grad_(True)
        rest = [t / scale - delta for t in vectors]
        loss = (
            sum(
                torch.cosine_similarity(rest[i], rest[j], dim=0).abs()
                for i in range(3)
                for j in range(3)
                if i != j
            )
            / 6
        )
        if bool(delta.detach().any()):  # the norm has no gradient at 0
            loss = loss + 0.1 * delta.norm()
        (gradient,) = torch.autograd.grad(loss, delta)
        delta = (delta - 0.05 * gradient).detach()
    g = torch.stack(vectors) @ torch.stack(vectors).T
    c = common_part(g, alpha=0.1, lr=0.05, steps=25)
    torch.testing.assert_close(sum(x * t for x, t in zip(c, vectors, strict=True)), scale * delta)
    base = normal(30, seed=20)
    merged = merge("awd", [base + t for t in vectors], base=base, lr=0.05, steps=25)
    torch.testing.assert_close(merged, base + sum(vectors) - 3 * scale * delta)


def test_awd_leaves_orthogonal_and_single_task_vectors_alone(merge):
    base = torch.zeros(4)
    a, b = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0, 2.0, 0, 0])
    torch.testing.assert_close(merge("awd", [a, b], base=base), a + b)
    torch.testing.assert_close(merge("awd", [a], base=base), a)
    assert torch.isfinite(merge("awd", [a, base], base=base)).all()
    assert torch.isfinite(merge("awd", [a, a], base=base)).all()


def test_arcee_fusion_takes_outliers_alone(merge):
    base = torch.zeros(3, 40)
    tensor = base + 1e-3 * normal(3, 40).float()
    tensor[1, 7] = 2.0
    merged = merge("arcee_fusion", [tensor], base=base)
    assert merged[1, 7] == 2.0
    assert 0 < int((merged != base).sum()) < 60
    assert ((merged == base) | (merged == tensor)).all()
    torch.testing.assert_close(merge("arcee_fusion", [base], base=base), base)


def test_magmax_by_hand(merge):
    """The largest change wins with its sign, whatever the others agree on; the first of equals."""
    base = [1.0, 1.0, 1.0, 1.0]
    tensors = [[1.5, 0.0, 1.0, 3.0], [1.5, 3.0, 1.0, -1.0], [-1.0, 2.0, 1.0, 1.0]]
    assert merge("magmax", tensors, base=base).tolist() == [-1.0, 3.0, 1.0, 3.0]
    halved = merge("magmax", tensors, base=base, **{"lambda": 0.5})
    assert halved.tolist() == [0.0, 2.0, 1.0, 2.0]


def test_linear_by_hand(merge):
    params = [{"weight": 1.0}, {"weight": 3.0}]
    out = merge("linear", [[1.0, 2.0], [5.0, -2.0]], params=params)
    assert out.tolist() == [4.0, -1.0]
    out = merge("linear", [[1.0, 2.0], [5.0, -2.0]], params=params, normalize=False)
    assert out.tolist() == [16.0, -4.0]


def test_linear_weights_that_sum_to_nought_are_refused_not_infinite(merge):
    params = [{"weight": 1.0}, {"weight": -1.0}]
    with pytest.raises(ConfigError, match="1, -1 sum to 0"):
        merge("linear", [[1.0], [2.0]], params=params)
    assert merge("linear", [[1.0], [3.0]], params=params, normalize=False).tolist() == [-2.0]


def test_task_arithmetic_by_hand(merge):
    # deltas: [1, 2] and [-1, 4]
    args = ("task_arithmetic", [[2.0, 3.0], [0.0, 5.0]])
    params = [{"weight": 0.5}, {"weight": 1.5}]
    out = merge(*args, base=[1.0, 1.0], params=params)
    assert out.tolist() == [1 + 0.5 - 1.5, 1 + 1 + 6]
    out = merge(*args, base=[1.0, 1.0], params=params, normalize=True, **{"lambda": 2.0})
    assert out.tolist() == [1 - 1.0, 1 + 7.0]


def test_task_arithmetic_weights_that_cancel_are_not_divided_by(merge):
    params = [{"weight": 1.0}, {"weight": -1.0}]
    out = merge("task_arithmetic", [[2.0], [5.0]], base=[1.0], params=params, normalize=True)
    assert out.tolist() == [1 + 1 - 4]


def test_nearswap_by_hand(merge):
    # distances 0, 0.5, 1, 4 at t = 1: shares 1, 1, 1, 1/4
    out = merge("nearswap", [[1.0, 1.5, 0.0, 5.0]], base=[1.0, 1.0, 1.0, 1.0], t=1.0)
    torch.testing.assert_close(out, torch.tensor([1.0, 1.5, 0.0, 2.0]))


def test_passthrough_as_it_is_or_scaled(merge):
    x = torch.randn(3, 2)
    assert torch.equal(merge("passthrough", [x]), x)
    assert merge("passthrough", [[2.0, -4.0]], params={"scale": 0.5}).tolist() == [1.0, -2.0]
    assert merge("passthrough", [[2.0]], params={"scale": 0.0}).tolist() == [0.0]


def test_model_stock_by_hand(merge):
    # deltas (1, 0) and (1, 1): cos = 1/√2, t = 2c / (1 + c), mean (1, 0.5)
    c = 0.5**0.5
    t = 2 * c / (1 + c)
    out = merge("model_stock", [[4.0, 2.0], [4.0, 3.0]], base=[3.0, 2.0])
    torch.testing.assert_close(out, torch.tensor([3 + t, 2 + t / 2]))


def test_model_stock_opposite_and_zero_task_vectors_give_the_base(merge):
    for pair in ([[4.0, 2.0], [2.0, 2.0]], [[4.0, 2.0], [3.0, 2.0]], [[3.0, 2.0]] * 2):
        assert merge("model_stock", pair, base=[3.0, 2.0]).tolist() == [3.0, 2.0]


def test_model_stock_filter_wise_is_model_stock_of_each_row(merge):
    g = torch.Generator().manual_seed(0)
    base = torch.randn(5, 8, generator=g)
    models = [base + torch.randn(5, 8, generator=g) for _ in range(3)]
    models[1][2] = base[2]  # one zero row
    out = merge("model_stock", models, base=base, filter_wise=True)
    rows = [merge("model_stock", [m[i] for m in models], base=base[i]) for i in range(5)]
    torch.testing.assert_close(out, torch.stack(rows))


# sce: deltas against zero
A = [3.0, 1.0, -1.0, 2.0]
B = [1.0, 1.0, 2.0, -1.0]


def test_sce_by_hand_without_selection(merge):
    # sizes 15 and 7; sums 4 2 1 1 elect plus everywhere
    w1, w2 = 15 / 22, 7 / 22
    out = merge("sce", [A, B], base=[0.0] * 4)
    expected = torch.tensor([w1 * 3 + w2 * 1, 1.0, 2.0, 2.0])
    torch.testing.assert_close(out, expected)


def test_sce_by_hand_with_selection(merge):
    # variances 1 0 2.25 2.25: int(3 · 0.7) = 2 are kept, elements 2 and 3
    out = merge("sce", [A, B], base=[0.0] * 4, select_topk=0.7)
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 2.0, 2.0]))


def test_sce_models_that_agree_have_no_varying_element(merge):
    theta = torch.tensor([0.1, 0.2, 0.3, 0.7])
    out = merge("sce", [theta, theta, theta], base=torch.zeros(4), select_topk=0.5)
    assert out.shape == (4,)
    assert not out.any()
    torch.testing.assert_close(merge("sce", [theta] * 3, base=torch.zeros(4)), theta)


EAST, NORTH = [1.0, 0.0], [0.0, 1.0]


def at(degrees, length=1.0):
    angle = math.radians(degrees)
    return [length * math.cos(angle), length * math.sin(angle)]


def close(out, expected, **kw):
    torch.testing.assert_close(out, torch.tensor(expected), **kw)


def test_slerp_by_hand(merge):
    close(merge("slerp", [NORTH], base=EAST, t=1 / 3), at(30))
    assert merge("slerp", [NORTH], base=EAST, t=0.0).tolist() == EAST
    close(merge("slerp", [NORTH], base=EAST, t=1.0), NORTH)
    close(merge("slerp", [NORTH], base=EAST, t=4 / 3), at(120))


def test_slerp_is_linear_between_parallels(merge):
    close(merge("slerp", [[3.0, 0.0]], base=EAST, t=0.25), [1.5, 0.0])
    close(merge("slerp", [[-1.0, 0.0]], base=EAST, t=0.25), [0.5, 0.0])
    close(merge("slerp", [torch.tensor(4.0)], base=torch.tensor(2.0), t=0.5), 3.0)


def test_nuslerp_by_hand(merge):
    p = [{"weight": 2.0}, {"weight": 1.0}]
    close(merge("nuslerp", [EAST, NORTH], params=p), at(30))
    base = [5.0, -2.0]
    moved = [[6.0, -2.0], [5.0, -1.0]]
    x, y = at(30)
    close(merge("nuslerp", moved, base=base, params=p), [5 + x, -2 + y])


def test_nuslerp_by_row_and_column(merge):
    p = [{"weight": 1.0}, {"weight": 1.0}]
    first, second = [[1.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [0.0, 4.0]]
    rows = merge("nuslerp", [first, second], params=p, nuslerp_flatten=False)
    close(rows, [at(45), [0.0, 3.0]])
    turned = [torch.tensor(first).T, torch.tensor(second).T]
    columns = merge("nuslerp", turned, params=p, nuslerp_flatten=False, nuslerp_row_wise=True)
    assert torch.equal(columns, rows.T)


@pytest.mark.parametrize("weights", [(0.0, 0.0), (1.0, -1.0)])
def test_nuslerp_goes_half_way_where_weights_cancel(merge, weights):
    p = [{"weight": w} for w in weights]
    close(merge("nuslerp", [EAST, NORTH], params=p), at(45))


@pytest.mark.parametrize("flatten", [True, False])
def test_nuslerp_between_opposites_is_the_chord(merge, flatten):
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    p = [{"weight": 0.25}, {"weight": 0.75}]
    out = merge("nuslerp", [x, -x], params=p, nuslerp_flatten=flatten)
    torch.testing.assert_close(out, -0.5 * x)


def test_multislerp_by_hand(merge):
    p = [{"weight": 1.0}, {"weight": 1.0}]
    # directions meet at 45°, mean length (1 + 3) / 2
    close(merge("multislerp", [EAST, [0.0, 3.0]], params=p), at(45, 2.0))
    close(merge("multislerp", [EAST, [0.0, 3.0]], params=p, normalize_weights=False), at(45, 4.0))
    p = [{"weight": 1.0}, {"weight": math.sqrt(3)}]
    mean = (1 + 3 * math.sqrt(3)) / (1 + math.sqrt(3))
    close(merge("multislerp", [EAST, [0.0, 3.0]], params=p), at(60, mean))
    x, y = at(60, mean)
    moved = [[3.0, 7.0], [2.0, 10.0]]
    close(merge("multislerp", moved, base=[2.0, 7.0], params=p), [2 + x, 7 + y])


def test_multislerp_of_opposites_and_zeros(merge):
    p = [{"weight": 1.0}, {"weight": 1.0}]
    close(merge("multislerp", [EAST, [-3.0, 0.0]], params=p), [-1.0, 0.0])
    close(merge("multislerp", [EAST, [0.0, 0.0]], params=p), [0.5, 0.0])
    close(merge("multislerp", [[0.0, 0.0]] * 2, params=p), [0.0, 0.0])
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    base = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    out = merge("multislerp", [base + x, base - x], base=base, params=p)
    torch.testing.assert_close(out, base)
    with pytest.raises(ConfigError, match="sum to 0"):
        merge("multislerp", [EAST, NORTH], params=[{"weight": 1.0}, {"weight": -1.0}])


def test_karcher_by_hand(merge):
    close(merge("karcher", [EAST, [0.0, 3.0]]), at(45, 2.0))
    # on a circle the mean is the mean angle: (0 + 30 + 90) / 3, not the chord's 38.8°
    three = [at(0), at(30), at(90)]
    close(merge("karcher", three, max_iter=50, tol=1e-12), at(40), rtol=0, atol=1e-6)


def test_karcher_of_zeros_and_opposites(merge):
    close(merge("karcher", [EAST, [0.0, 0.0]]), [0.5, 0.0])
    close(merge("karcher", [EAST, [0.0, 1e-44]]), [0.5, 0.0])  # its inverse is no float32
    close(merge("karcher", [[0.0, 0.0]] * 2), [0.0, 0.0])
    close(merge("karcher", [EAST, [-3.0, 0.0]]), [-1.0, 0.0])
    close(merge("karcher", [EAST, [-1.0, 0.0], NORTH]), at(90))


def test_karcher_has_no_mean_tangent(merge):
    """At the mean, the sum of the logarithms vanishes: checked without the Gram matrix."""
    g = torch.Generator().manual_seed(3)
    models = [torch.randn(6, 7, generator=g, dtype=torch.float64) for _ in range(4)]
    models = [m + 2 for m in models]
    out = merge("karcher", models, max_iter=100, tol=1e-14)
    lengths = [m.norm() for m in models]
    torch.testing.assert_close(out.norm(), sum(lengths) / 4)
    mean = out / out.norm()
    total = torch.zeros_like(mean)
    for m, length in zip(models, lengths, strict=True):
        cos = (m / length * mean).sum()
        theta = torch.arccos(cos)
        total += theta / torch.sin(theta) * (m / length - cos * mean)
    assert total.norm() < 1e-10
