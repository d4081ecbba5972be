from __future__ import annotations


def test_by_hand(merge):
    # deltas: [1, 2] and [-1, 4]
    args = ("task_arithmetic", [[2.0, 3.0], [0.0, 5.0]])
    params = [{"weight": 0.5}, {"weight": 1.5}]
    out = merge(*args, base=[1.0, 1.0], params=params)
    assert out.tolist() == [1 + 0.5 - 1.5, 1 + 1 + 6]
    out = merge(*args, base=[1.0, 1.0], params=params, normalize=True, lambda_=2.0)
    assert out.tolist() == [1 - 1.0, 1 + 7.0]


def test_weights_that_cancel_are_not_divided_by(merge):
    params = [{"weight": 1.0}, {"weight": -1.0}]
    out = merge("task_arithmetic", [[2.0], [5.0]], base=[1.0], params=params, normalize=True)
    assert out.tolist() == [1 + 1 - 4]


def test_density_and_rescale_have_no_effect(merge):
    params = [{"weight": 1.0, "density": 0.1}]
    out = merge("task_arithmetic", [[2.0, 5.0]], base=[1.0, 1.0], params=params, rescale=True)
    assert out.tolist() == [2.0, 5.0]
