"""slerp, nuslerp, multislerp and karcher: on the plane, where arcs can be drawn by hand."""

from __future__ import annotations

import math

import pytest
import torch

from moemerge.errors import ConfigError

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


def test_slerp_takes_zero_as_orthogonal(merge):
    close(merge("slerp", [[0.0, 0.0]], base=EAST, t=1 / 3), [math.sin(math.radians(60)), 0.0])


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
