from __future__ import annotations

import torch


def test_as_it_is_or_scaled(merge):
    x = torch.randn(3, 2)
    assert torch.equal(merge("passthrough", [x]), x)
    assert merge("passthrough", [[2.0, -4.0]], params={"scale": 0.5}).tolist() == [1.0, -2.0]
    assert merge("passthrough", [[2.0]], params={"scale": 0.0}).tolist() == [0.0]
