from __future__ import annotations

import torch

# deltas against zero
A = [3.0, 1.0, -1.0, 2.0]
B = [1.0, 1.0, 2.0, -1.0]


def test_by_hand_without_selection(merge):
    # sizes 15 and 7; sums 4 2 1 1 elect plus everywhere
    w1, w2 = 15 / 22, 7 / 22
    out = merge("sce", [A, B], base=[0.0] * 4)
    expected = torch.tensor([w1 * 3 + w2 * 1, 1.0, 2.0, 2.0])
    torch.testing.assert_close(out, expected)


def test_by_hand_with_selection(merge):
    # variances 1 0 2.25 2.25: int(3 · 0.7) = 2 are kept, elements 2 and 3
    out = merge("sce", [A, B], base=[0.0] * 4, select_topk=0.7)
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 2.0, 2.0]))


def test_models_that_agree_have_no_varying_element(merge):
    theta = torch.tensor([0.1, 0.2, 0.3, 0.7])
    out = merge("sce", [theta, theta, theta], base=torch.zeros(4), select_topk=0.5)
    assert out.shape == (4,)
    assert not out.any()
    torch.testing.assert_close(merge("sce", [theta] * 3, base=torch.zeros(4)), theta)


def test_nothing_selected_gives_the_base(merge):
    out = merge("sce", [A, B], base=[1.0] * 4, select_topk=0.0)
    assert out.tolist() == [1.0] * 4
