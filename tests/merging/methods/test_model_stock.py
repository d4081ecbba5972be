from __future__ import annotations

import torch


def test_by_hand(merge):
    # deltas (1, 0) and (1, 1): cos = 1/√2, t = 2c / (1 + c), mean (1, 0.5)
    c = 0.5**0.5
    t = 2 * c / (1 + c)
    out = merge("model_stock", [[4.0, 2.0], [4.0, 3.0]], base=[3.0, 2.0])
    torch.testing.assert_close(out, torch.tensor([3 + t, 2 + t / 2]))


def test_agreement_goes_all_the_way_and_independence_nowhere(merge):
    same = merge("model_stock", [[4.0, 2.0]] * 3, base=[3.0, 2.0])
    torch.testing.assert_close(same, torch.tensor([4.0, 2.0]))
    apart = merge("model_stock", [[4.0, 2.0], [3.0, 5.0]], base=[3.0, 2.0])
    assert apart.tolist() == [3.0, 2.0]


def test_opposite_and_zero_task_vectors_give_the_base(merge):
    for pair in ([[4.0, 2.0], [2.0, 2.0]], [[4.0, 2.0], [3.0, 2.0]], [[3.0, 2.0]] * 2):
        assert merge("model_stock", pair, base=[3.0, 2.0]).tolist() == [3.0, 2.0]


def test_filter_wise_is_model_stock_of_each_row(merge):
    g = torch.Generator().manual_seed(0)
    base = torch.randn(5, 8, generator=g)
    models = [base + torch.randn(5, 8, generator=g) for _ in range(3)]
    models[1][2] = base[2]  # one zero row
    out = merge("model_stock", models, base=base, filter_wise=True)
    rows = [merge("model_stock", [m[i] for m in models], base=base[i]) for i in range(5)]
    torch.testing.assert_close(out, torch.stack(rows))
