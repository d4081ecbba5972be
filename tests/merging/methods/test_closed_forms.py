"""linear, task_arithmetic, nearswap, passthrough, model_stock and sce, each by hand."""

from __future__ import annotations

import pytest
import torch

from moemerge.errors import ConfigError


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
    out = merge(*args, base=[1.0, 1.0], params=params, normalize=True, lambda_=2.0)
    assert out.tolist() == [1 - 1.0, 1 + 7.0]


def test_task_arithmetic_weights_that_cancel_are_not_divided_by(merge):
    params = [{"weight": 1.0}, {"weight": -1.0}]
    out = merge("task_arithmetic", [[2.0], [5.0]], base=[1.0], params=params, normalize=True)
    assert out.tolist() == [1 + 1 - 4]


def test_task_arithmetic_density_and_rescale_have_no_effect(merge):
    params = [{"weight": 1.0, "density": 0.1}]
    out = merge("task_arithmetic", [[2.0, 5.0]], base=[1.0, 1.0], params=params, rescale=True)
    assert out.tolist() == [2.0, 5.0]


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


def test_model_stock_agreement_goes_all_the_way_and_independence_nowhere(merge):
    same = merge("model_stock", [[4.0, 2.0]] * 3, base=[3.0, 2.0])
    torch.testing.assert_close(same, torch.tensor([4.0, 2.0]))
    apart = merge("model_stock", [[4.0, 2.0], [3.0, 5.0]], base=[3.0, 2.0])
    assert apart.tolist() == [3.0, 2.0]


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


def test_sce_nothing_selected_gives_the_base(merge):
    out = merge("sce", [A, B], base=[1.0] * 4, select_topk=0.0)
    assert out.tolist() == [1.0] * 4
