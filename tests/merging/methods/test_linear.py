from __future__ import annotations

import pytest
import torch

from moemerge.errors import ConfigError


def test_by_hand(merge):
    params = [{"weight": 1.0}, {"weight": 3.0}]
    out = merge("linear", [[1.0, 2.0], [5.0, -2.0]], params=params)
    assert out.tolist() == [4.0, -1.0]
    out = merge("linear", [[1.0, 2.0], [5.0, -2.0]], params=params, normalize=False)
    assert out.tolist() == [16.0, -4.0]


def test_weights_that_sum_to_nought_are_refused_not_infinite(merge):
    params = [{"weight": 1.0}, {"weight": -1.0}]
    with pytest.raises(ConfigError, match="1, -1 sum to 0"):
        merge("linear", [[1.0], [2.0]], params=params)
    assert merge("linear", [[1.0], [3.0]], params=params, normalize=False).tolist() == [-2.0]


def test_scaling_all_weights_changes_nothing(merge):
    x = [torch.randn(5, 3) for _ in range(3)]
    small = merge("linear", x, params=[{"weight": w} for w in (0.1, 0.2, 0.4)])
    large = merge("linear", x, params=[{"weight": w} for w in (1.0, 2.0, 4.0)])
    torch.testing.assert_close(small, large)
